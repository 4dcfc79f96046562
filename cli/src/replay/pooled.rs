//! The pool, as the engine asks for it.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kvpool::compact::{DefragConfig, DefragReport, Defragmenter, ResizeError, Snapshot};
use kvpool::error::{AllocError, SequenceError};
use kvpool::ids::SequenceId;
use kvpool::pool::{AllocRequest, Pool};
use kvpool::prefix::PrefixConfig;
use kvpool::prefix::policy::{Millis, PolicyKind};
use kvpool::sequence::{Batch, BlockTable, Sequence};
use kvpool::storage::{DeviceStream, Elements, ElementsMut, KvLayout, Storage};

use tokio::runtime::{self, Runtime};

use crate::home::Home;

use super::memory::{Compaction, CompactionTotals, FreeSpace, Memory, PrefixTotals, Refusal, ResizeRefusal};

/// A pool.
pub struct PoolMemory {
    pool: Pool,
    storage: Arc<dyn Storage>,
    /// Where compaction and changes of size run: one thread, beside those that only copy.
    runtime: Runtime,
    defragmenter: Mutex<Option<Defragmenter>>,
    /// Milliseconds of the trace, for the cache's policy.
    now_ms: Arc<AtomicU64>,
    /// Of a device: each thread's steps are on one of them.
    streams: Vec<DeviceStream>,
}

/// Streams of a device; threads beyond share them.
const STREAMS: usize = 16;

/// Which of the streams is this thread's.
fn lane() -> usize {
    static LANES: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        // Relaxed: a number and nothing else.
        static LANE: usize = LANES.fetch_add(1, Relaxed);
    }
    LANE.with(|lane| *lane)
}

impl PoolMemory {
    /// A pool of this many blocks, that can grow to `blocks_max`; with a prefix cache by this policy, or without.
    ///
    /// # Errors
    /// What the pool says against it.
    pub fn new(
        home: &Home,
        layout: KvLayout,
        blocks: usize,
        blocks_max: usize,
        policy: Option<PolicyKind>,
    ) -> Result<Self, String> {
        // The null block's on top.
        let storage = home.storage(layout.clone(), blocks + 1, blocks_max + 1).map_err(text)?;
        let streams = home.streams(STREAMS).map_err(text)?;
        let mut builder = Pool::builder(layout).blocks(blocks).blocks_max(blocks_max).storage(storage);
        let now_ms = Arc::new(AtomicU64::new(0));
        if let Some(policy) = policy {
            let now = Arc::clone(&now_ms);
            // Relaxed, here and where it is set: a time and nothing else.
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
        Ok(Self { pool, storage, runtime, defragmenter: Mutex::new(None), now_ms, streams })
    }

    /// Waits until steps that have ended here have ended on the device.
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

    /// What every frame holds now.
    pub fn snapshot(&self) -> Snapshot {
        self.pool.snapshot()
    }

    /// Brings what threads keep for themselves back to all.
    pub fn trim(&self) {
        self.pool.trim();
    }

    /// Compacts once, as far as it goes.
    ///
    /// # Errors
    /// What the pool says.
    pub fn defragment(&self) -> Result<DefragReport, String> {
        self.runtime.block_on(self.pool.defragment()).map_err(text)
    }
}

/// A thread that panicked left nothing half done behind this lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory for PoolMemory {
    type Sequence = Sequence;
    type Batch = Batch;
    type Table = BlockTable;

    fn blocks(&self) -> usize {
        self.pool.total_blocks()
    }

    fn free_blocks(&self) -> usize {
        let counts = self.pool.counts();
        counts.available() + counts.retired
    }

    fn free_space(&self) -> FreeSpace {
        FreeSpace { blocks: self.free_blocks(), fragmentation: self.pool.fragmentation().rate }
    }

    fn open(&self, id: u64, prompt: &[u32]) -> Result<(Sequence, usize), Refusal> {
        let builder = self.pool.sequence(SequenceId(id));
        let opened = if prompt.is_empty() { builder.open() } else { builder.tokens(prompt) };
        let sequence = opened.map_err(refusal)?;
        let cached = sequence.len();
        Ok((sequence, cached))
    }

    fn begin(&self) -> Batch {
        match self.streams.get(lane() % STREAMS) {
            None => self.pool.begin_batch(),
            // Only a device that is lost refuses; what is stored next is refused, and said, too.
            Some(stream) => self.pool.begin_batch_on(stream).unwrap_or_else(|_| self.pool.begin_batch()),
        }
    }

    fn append(
        &self,
        batch: &mut Batch,
        sequence: &mut Sequence,
        tokens: usize,
        said: &[u32],
    ) -> Result<(), Refusal> {
        let appended = if said.is_empty() {
            batch.append(sequence, tokens)
        } else {
            batch.append_tokens(sequence, said)
        };
        appended.map(drop).map_err(refusal)
    }

    fn slots(
        &self,
        batch: &Batch,
        sequence: &Sequence,
        tokens: Range<usize>,
        out: &mut Vec<i64>,
    ) -> Result<(), String> {
        batch.slot_mapping(sequence, tokens, out).map_err(text)
    }

    fn block_table<'t>(
        &self,
        batch: &Batch,
        sequence: &Sequence,
        table: &'t mut BlockTable,
    ) -> Result<&'t [i32], String> {
        batch.block_table([sequence], table).map_err(text)?;
        Ok(table.row(0))
    }

    fn store(&self, layer: usize, k: &[u8], v: &[u8], slots: &[i64]) -> Result<(), String> {
        let dtype = self.storage.layout().dtype();
        let (k, v) = (Elements::new(dtype, k).map_err(text)?, Elements::new(dtype, v).map_err(text)?);
        // SAFETY: the frame rule. The slots are those of tokens that the calling thread has just appended, under a batch
        // that is in flight, to sequences of its own: blocks that it fills have one owner until the batch has ended, which
        // is what the pool promises and a replay puts to the test.
        unsafe { self.storage.store(layer, k, v, slots) }.map_err(text)
    }

    fn load(&self, layer: usize, slots: &[i64], k: &mut [u8], v: &mut [u8]) -> Result<(), String> {
        let dtype = self.storage.layout().dtype();
        let (k, v) = (ElementsMut::new(dtype, k).map_err(text)?, ElementsMut::new(dtype, v).map_err(text)?);
        // SAFETY: as for `store`: the calling thread owns the sequences that the slots belong to. What they share with others
        // was full before, and nobody writes there.
        unsafe { self.storage.load(layer, slots, k, v) }.map_err(text)
    }

    fn prefix(&self) -> Option<PrefixTotals> {
        let cache = self.pool.prefix_cache()?;
        let stats = cache.stats();
        Some(PrefixTotals {
            policy: cache.policy().name().to_owned(),
            lookup_blocks: stats.lookup_blocks,
            hit_blocks: stats.hit_blocks,
            evicted_blocks: stats.evicted_blocks,
        })
    }

    fn set_time(&self, now: Duration) {
        let now_ms = now.as_millis() as u64;
        // A look first: many threads say nearly the same time, and all policies read it.
        if self.now_ms.load(Relaxed) < now_ms {
            self.now_ms.fetch_max(now_ms, Relaxed);
        }
    }

    fn forget_prefixes(&self) {
        self.pool.clear_prefix_cache();
    }

    fn start_compaction(&self, compaction: &Compaction) -> Result<(), String> {
        let config = DefragConfig::new().threshold(compaction.threshold).interval(compaction.interval);
        let _entered = self.runtime.enter();
        let defragmenter = self.pool.start_defragmenter(config).map_err(text)?;
        *lock(&self.defragmenter) = Some(defragmenter);
        Ok(())
    }

    fn stop_compaction(&self) -> Option<CompactionTotals> {
        let defragmenter = lock(&self.defragmenter).take()?;
        let totals = self.runtime.block_on(defragmenter.stop());
        let failed =
            (totals.failed > 0).then(|| format!("{} runs ended because a copy failed", totals.failed));
        Some(CompactionTotals {
            runs: totals.runs as u64,
            moved_blocks: totals.moved_blocks as u64,
            moved_bytes: totals.moved_bytes,
            given_up: totals.given_up.total() as u64,
            time: totals.time,
            fragmentation_before: totals.fragmentation_before(),
            fragmentation_after: totals.fragmentation_after(),
            errors: failed.into_iter().collect(),
        })
    }

    fn resize(&self, blocks: usize) -> Result<(), ResizeRefusal> {
        match self.runtime.block_on(self.pool.resize(blocks)) {
            Ok(_) => Ok(()),
            Err(error @ (ResizeError::Blocked { .. } | ResizeError::NoRoom { .. })) => {
                Err(ResizeRefusal::Blocked(text(error)))
            }
            Err(error) => Err(ResizeRefusal::Failed(text(error))),
        }
    }

    fn leave(&self) {
        self.pool.trim();
    }

    fn take_all(&self) -> Result<(), String> {
        self.settle()?;
        self.pool.allocate(AllocRequest::new(self.blocks())).map(drop).map_err(text)
    }

    fn audit(&self) -> Result<(), String> {
        self.pool.audit().map(drop).map_err(text)
    }
}

/// What cannot be had is waited for. What the pool could not hold at all fitted a moment ago: it has just shrunk, and whoever
/// waits for more than there is is rejected elsewhere. Blocks that are kept are refused only as long as a batch in flight may
/// see them: as good as retired.
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
