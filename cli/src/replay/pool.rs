//! The pool of a replay, with what belongs to it: the runtime that it is compacted on, the streams
//! of its device, and the trace's time for the eviction policy.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kvpool::compact::{DefragConfig, DefragReport, Defragmenter, ResizeError, Snapshot};
use kvpool::prefix::PrefixConfig;
use kvpool::prefix::policy::{Millis, PolicyKind};
use kvpool::storage::{DeviceStream, Elements, ElementsMut, KvLayout, Storage};
use kvpool::{AllocError, AllocRequest, Batch, Pool, Sequence, SequenceError, SequenceId};
use serde::Serialize;
use thiserror::Error;
use tokio::runtime::{self, Runtime};

use super::content::Shape;
use crate::backend::Backend;

/// Streams of a device. Scheduler threads beyond this number share them.
const STREAMS: usize = 16;

/// Why a sequence was not opened or appended to. The sequence is unchanged.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Too few blocks are free.
    Full {
        /// Free blocks.
        free: usize,
        /// Blocks that become free when the batches in flight end.
        retired: usize,
    },
    /// An error that a replay never expects.
    Failed(String),
}

/// Why the pool does not have the size that was asked for.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ResizeRefusal {
    /// Blocks in use are in the way. A later attempt may succeed.
    #[error("blocked: {0}")]
    Blocked(String),
    /// An error that a replay never expects.
    #[error("failed: {0}")]
    Failed(String),
}

/// Free memory, at one moment.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FreeSpace {
    /// Blocks that belong to no sequence.
    pub blocks: usize,
    /// The share of the free frames outside the free aligned runs of the pool's order. Frames of
    /// cached blocks do not count.
    pub fragmentation: f64,
}

/// Compaction in the background.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Compaction {
    /// The fragmentation, from 0 to 1, above which the pool is compacted.
    pub threshold: f64,
    /// Time between two checks of the fragmentation.
    pub interval: Duration,
}

/// What compaction did in a replay. The names are those of the JSON.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct CompactionTotals {
    /// Compaction runs that moved blocks.
    pub runs: u64,
    /// Blocks moved.
    pub moved_blocks: u64,
    /// Bytes of these blocks.
    pub moved_bytes: u64,
    /// Moves that were cancelled because the block or the frame was needed.
    pub given_up: u64,
    /// Milliseconds in runs.
    pub time_ms: f64,
    /// Mean fragmentation before a run.
    pub fragmentation_before: f64,
    /// Mean fragmentation after a run.
    pub fragmentation_after: f64,
    /// Errors, in words.
    pub errors: Vec<String>,
}

/// A pool that is replayed on. Scheduler threads share it.
pub struct ReplayPool {
    pool: Pool,
    storage: Arc<dyn Storage>,
    shape: Shape,
    /// Runs compaction and resizing, on one thread beside those of the schedulers.
    runtime: Runtime,
    defragmenter: Mutex<Option<Defragmenter>>,
    /// Milliseconds of the trace, for the eviction policy.
    now_ms: Arc<AtomicU64>,
    /// Streams of the device; empty on the host. The steps of one thread use one of them.
    streams: Vec<DeviceStream>,
}

impl ReplayPool {
    /// Builds a pool of `blocks` blocks that can grow to `blocks_max`, with a prefix cache if
    /// there is a policy.
    ///
    /// # Errors
    ///
    /// The error of the memory, the pool or the runtime, as text.
    pub fn new(
        backend: &Backend,
        layout: KvLayout,
        blocks: usize,
        blocks_max: usize,
        policy: Option<PolicyKind>,
    ) -> Result<Self, String> {
        // One frame more, for the null block.
        let storage = backend.storage(layout, blocks + 1, blocks_max + 1).map_err(text)?;
        let streams = backend.streams(STREAMS).map_err(text)?;
        Self::on(storage, streams, blocks, blocks_max, policy)
    }

    /// Builds the same pool on the given storage.
    pub(super) fn on(
        storage: Arc<dyn Storage>,
        streams: Vec<DeviceStream>,
        blocks: usize,
        blocks_max: usize,
        policy: Option<PolicyKind>,
    ) -> Result<Self, String> {
        let layout = storage.layout().clone();
        let shape = Shape::of(&layout);
        let mut builder = Pool::builder(layout).blocks(blocks).blocks_max(blocks_max).storage(storage);
        let now_ms = Arc::new(AtomicU64::new(0));
        if let Some(policy) = policy {
            let now = Arc::clone(&now_ms);
            // Relaxed, here and in `set_time`: nothing is published with the time.
            let clock = move || Millis(now.load(Relaxed));
            builder = builder.prefix_cache(PrefixConfig::new().policy(policy).clock(clock));
        }
        let pool = builder.build().map_err(text)?;
        let storage = pool.storage().cloned().ok_or("the pool has no storage")?;
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kvpool-compact")
            .enable_time()
            .build()
            .map_err(|error| format!("no runtime for compaction: {error}"))?;
        Ok(Self { pool, storage, shape, runtime, defragmenter: Mutex::new(None), now_ms, streams })
    }

    /// Returns the pool itself.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Returns the size of a token and of a block.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the number of blocks of the pool at this moment.
    pub fn blocks(&self) -> usize {
        self.pool.total_blocks()
    }

    /// Returns the number of blocks that belong to no sequence: free, cached, or retired until
    /// batches in flight have ended. Reads counters only.
    pub fn free_blocks(&self) -> usize {
        let counts = self.pool.counts();
        counts.available() + counts.retired
    }

    /// Returns the free memory and its fragmentation, by a walk over the pool.
    pub fn free_space(&self) -> FreeSpace {
        FreeSpace { blocks: self.free_blocks(), fragmentation: self.pool.fragmentation().rate }
    }

    /// Returns what every frame holds now.
    pub fn snapshot(&self) -> Snapshot {
        self.pool.snapshot()
    }

    /// Opens a sequence. With a prefix cache it begins with the cached part of `prompt`; without
    /// one `prompt` is empty.
    pub fn open(&self, id: u64, prompt: &[u32]) -> Result<Sequence, Refusal> {
        let builder = self.pool.sequence(SequenceId(id));
        if prompt.is_empty() { builder.open() } else { builder.tokens(prompt) }.map_err(refusal)
    }

    /// Begins a step of a scheduler thread.
    pub fn begin_batch(&self, thread: usize) -> Batch {
        match self.streams.get(thread % STREAMS) {
            None => self.pool.begin_batch(),
            // Only a lost device refuses; then the next store fails and reports it.
            Some(stream) => self.pool.begin_batch_on(stream).unwrap_or_else(|_| self.pool.begin_batch()),
        }
    }

    /// Appends tokens, all or none. `ids` are the ids of decoded tokens, where prefixes are cached.
    pub fn append(
        &self,
        batch: &mut Batch,
        sequence: &mut Sequence,
        tokens: usize,
        ids: &[u32],
    ) -> Result<(), Refusal> {
        let appended =
            if ids.is_empty() { batch.append(sequence, tokens) } else { batch.append_tokens(sequence, ids) };
        appended.map(drop).map_err(refusal)
    }

    /// Stores K and V of tokens in one layer, a row for each slot.
    pub fn store(&self, layer: usize, k: &[u8], v: &[u8], slots: &[i64]) -> Result<(), String> {
        let dtype = self.storage.layout().dtype();
        let (k, v) = (Elements::new(dtype, k).map_err(text)?, Elements::new(dtype, v).map_err(text)?);
        // SAFETY: the frame rule. The slots are of tokens that the calling thread has just appended
        // to its own sequences, under a batch in flight. The pool gives such blocks one owner until
        // the batch has ended, which is the promise that a replay checks.
        unsafe { self.storage.store(layer, k, v, slots) }.map_err(text)
    }

    /// Loads K and V of tokens in one layer, a row for each slot.
    pub fn load(&self, layer: usize, slots: &[i64], k: &mut [u8], v: &mut [u8]) -> Result<(), String> {
        let dtype = self.storage.layout().dtype();
        let (k, v) = (ElementsMut::new(dtype, k).map_err(text)?, ElementsMut::new(dtype, v).map_err(text)?);
        // SAFETY: as in `store`: the calling thread owns the sequences of these slots. Blocks that
        // they share with other sequences are full, and not written again.
        unsafe { self.storage.load(layer, slots, k, v) }.map_err(text)
    }

    /// Sets the time of the trace for the eviction policy. The latest time of all threads counts.
    pub fn set_time(&self, now: Duration) {
        let now_ms = now.as_millis() as u64;
        // Read first: many threads set nearly the same time, and every policy reads it.
        if self.now_ms.load(Relaxed) < now_ms {
            self.now_ms.fetch_max(now_ms, Relaxed);
        }
    }

    /// Starts compaction in the background.
    pub fn start_compaction(&self, compaction: &Compaction) -> Result<(), String> {
        let config = DefragConfig::new().threshold(compaction.threshold).interval(compaction.interval);
        let _entered = self.runtime.enter();
        let defragmenter = self.pool.start_defragmenter(config).map_err(text)?;
        *self.defragmenter.lock().unwrap_or_else(PoisonError::into_inner) = Some(defragmenter);
        Ok(())
    }

    /// Stops compaction and returns what it did; `None` if it was not started.
    pub fn stop_compaction(&self) -> Option<CompactionTotals> {
        let defragmenter = self.defragmenter.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        let totals = self.runtime.block_on(defragmenter.stop());
        let failed =
            (totals.failed > 0).then(|| format!("{} runs ended because a copy failed", totals.failed));
        Some(CompactionTotals {
            runs: totals.runs as u64,
            moved_blocks: totals.moved_blocks as u64,
            moved_bytes: totals.moved_bytes,
            given_up: totals.given_up.total() as u64,
            time_ms: totals.time.as_secs_f64() * 1e3,
            fragmentation_before: totals.fragmentation_before(),
            fragmentation_after: totals.fragmentation_after(),
            errors: failed.into_iter().collect(),
        })
    }

    /// Compacts once, as far as possible.
    pub fn defragment(&self) -> Result<DefragReport, String> {
        self.runtime.block_on(self.pool.defragment()).map_err(text)
    }

    /// Gives the pool another size while it is in use.
    pub fn resize(&self, blocks: usize) -> Result<(), ResizeRefusal> {
        match self.runtime.block_on(self.pool.resize(blocks)) {
            Ok(_) => Ok(()),
            Err(error @ (ResizeError::Blocked { .. } | ResizeError::NoRoom { .. })) => {
                Err(ResizeRefusal::Blocked(text(error)))
            }
            Err(error) => Err(ResizeRefusal::Failed(text(error))),
        }
    }

    /// Allocates every block in one request, and frees them: when no sequence is left, all blocks
    /// can be allocated, wherever they are cached.
    pub fn allocate_all(&self) -> Result<(), String> {
        self.settle()?;
        self.pool.allocate(AllocRequest::new(self.blocks())).map(drop).map_err(text)
    }

    /// Recounts the pool by a full walk, when it is not in use.
    pub fn audit(&self) -> Result<(), String> {
        self.pool.audit().map(drop).map_err(text)
    }

    /// Waits until the device has done the steps that ended here.
    fn settle(&self) -> Result<(), String> {
        let patience = Instant::now() + Duration::from_secs(10);
        while !self.streams.is_empty() && self.pool.batches_in_flight() > 0 {
            if Instant::now() > patience {
                return Err(format!("{} steps do not end on the device", self.pool.batches_in_flight()));
            }
            thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }
}

/// Exhaustion is waited out. A request larger than the pool fitted a moment ago: the pool has just
/// shrunk, and the request is rejected elsewhere. Evictable blocks are refused only while a batch
/// in flight may read them, and so count as retired.
fn refusal(error: SequenceError) -> Refusal {
    match error {
        SequenceError::Alloc(AllocError::Exhausted { free, retired, evictable, .. }) => {
            Refusal::Full { free, retired: retired + evictable }
        }
        SequenceError::Alloc(AllocError::TooLarge { .. }) => Refusal::Full { free: 0, retired: 0 },
        error => Refusal::Failed(error.to_string()),
    }
}

fn text(error: impl ToString) -> String {
    error.to_string()
}
