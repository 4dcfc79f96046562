//! The pool of a replay, its runtime for compaction and resizing, the streams of its device, and
//! the trace's time for the eviction policy.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use kvpool::compact::{DefragConfig, Defragmenter};
use kvpool::prefix::policy::Millis;
use kvpool::prefix::policy::PolicyKind;
use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::storage::{DeviceStream, Storage};
use kvpool::{AllocRequest, Batch, Pool};
use kvpool_load::{Rows, Shape};
use tokio::runtime::{self, Runtime};

use super::layers::{Group, Layers, Lists};
use crate::backend::Backend;

/// Streams of a device. Further scheduler threads share them.
const STREAMS: usize = 16;

/// Background compaction.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Compaction {
    /// The fragmentation, from 0 to 1, above which the pool is compacted.
    pub threshold: f64,
    /// Interval of checks of the fragmentation.
    pub interval: Duration,
}

/// Eviction of the prefix cache of a replayed pool.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Eviction {
    /// Policy.
    pub policy: PolicyKind,
    /// LRU's tolerance, if not the default.
    pub tolerance: Option<f64>,
}

/// A replayed pool, shared by the scheduler threads.
pub struct ReplayPool {
    pool: Pool,
    rows: Rows,
    lists: Lists,
    groups: Vec<Group>,
    block_bytes: u64,
    /// Runs compaction and resizing on one thread.
    runtime: Runtime,
    /// Milliseconds of the trace, for the eviction policy.
    now_ms: Arc<AtomicU64>,
    /// Streams of the device; empty on the host. All steps of a thread use the same stream.
    streams: Vec<DeviceStream>,
}

impl Deref for ReplayPool {
    type Target = Pool;

    fn deref(&self) -> &Pool {
        &self.pool
    }
}

impl ReplayPool {
    /// Builds a pool of `blocks` blocks that can grow to `blocks_max`, with a prefix cache if there
    /// is an `eviction`.
    ///
    /// # Errors
    /// The error of the memory, the pool or the runtime, as text.
    pub fn new(
        backend: &Backend,
        layers: &Layers,
        blocks: usize,
        blocks_max: usize,
        eviction: Option<Eviction>,
    ) -> Result<Self, String> {
        // One additional frame for the null block.
        // An engine's storage does not grow with the pool.
        let frames = if matches!(layers, Layers::Groups(_)) { blocks_max } else { blocks } + 1;
        let layout = layers.stored().map_err(text)?;
        let storage = backend.storage(layout, frames, blocks_max + 1).map_err(text)?;
        let streams = backend.streams(STREAMS).map_err(text)?;
        Self::on(storage, streams, layers, blocks, blocks_max, eviction)
    }

    pub(super) fn on(
        storage: Arc<dyn Storage>,
        streams: Vec<DeviceStream>,
        layers: &Layers,
        blocks: usize,
        blocks_max: usize,
        eviction: Option<Eviction>,
    ) -> Result<Self, String> {
        let mut builder = layers.builder().map_err(text)?.blocks(blocks).blocks_max(blocks_max);
        let now_ms = Arc::new(AtomicU64::new(0));
        if let Some(Eviction { policy, tolerance }) = eviction {
            let now = Arc::clone(&now_ms);
            // Relaxed, here and in `set_time`: nothing is published with the time.
            let clock = move || Millis(now.load(Relaxed));
            // Fixed, so that a replay on one thread is reproducible: collisions depend on the key.
            let config = PrefixConfig::new().key(HashKey::from_bytes([0; 32]));
            let config = config.policy(policy).clock(clock);
            builder = builder.prefix_cache(match tolerance {
                Some(share) => config.tolerance(share),
                None => config,
            });
        }
        let (pool, rows) = match layers {
            Layers::Alike(..) => {
                let pool = builder.storage(storage).build().map_err(text)?;
                let rows = Rows::of(&pool)?;
                (pool, rows)
            }
            Layers::Groups(_) => Rows::build(builder, storage).map_err(text)?,
        };
        let lists = Lists::of(layers).map_err(text)?;
        let (groups, block_bytes) = (layers.groups(), layers.block_bytes());
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kvpool-compact")
            .enable_time()
            .build()
            .map_err(|error| format!("no runtime for compaction: {error}"))?;
        Ok(Self { pool, rows, lists, groups, block_bytes, runtime, now_ms, streams })
    }

    /// Returns the size of a token and of a block.
    pub fn shape(&self) -> Shape {
        self.rows.shape()
    }

    /// Returns the rows of tokens.
    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    /// Returns the lists of blocks of a sequence.
    pub fn lists(&self) -> &Lists {
        &self.lists
    }

    /// Returns the bytes of a block, as the model has them.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Returns the groups of layers; none if sequences have one list that keeps all tokens.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Returns whether sequences are grouped.
    pub fn is_grouped(&self) -> bool {
        !self.groups.is_empty()
    }

    /// Returns whether sequences have states.
    pub fn has_states(&self) -> bool {
        self.lists.state_frames() > 0
    }

    /// Returns the number of blocks that belong to no sequence: free, cached, or retired until
    /// batches in flight have ended. Reads counters only.
    pub fn free_blocks(&self) -> usize {
        let stats = self.pool.stats();
        stats.available + stats.retired
    }

    /// Begins a step of a scheduler thread.
    pub fn begin_step(&self, thread: usize) -> Batch {
        match self.streams.get(thread % STREAMS) {
            None => self.pool.begin_batch(),
            // Fails only on a lost device; then the next store fails and reports it.
            Some(stream) => self.pool.begin_batch_on(stream).unwrap_or_else(|_| self.pool.begin_batch()),
        }
    }

    /// Sets the time of the trace for the eviction policy: the latest of all threads.
    pub fn set_time(&self, now: Duration) {
        let now_ms = now.as_millis() as u64;
        // Read first: many threads set nearly the same time, and every policy reads it.
        if self.now_ms.load(Relaxed) < now_ms {
            self.now_ms.fetch_max(now_ms, Relaxed);
        }
    }

    /// Runs a future of the pool to completion.
    pub fn wait<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    /// Starts background compaction.
    pub fn start_compaction(&self, compaction: Compaction) -> Result<Defragmenter, String> {
        let config = DefragConfig::new().threshold(compaction.threshold).interval(compaction.interval);
        let _entered = self.runtime.enter();
        self.pool.start_defragmenter(config).map_err(text)
    }

    /// Allocates every block in one request, and frees them. Succeeds when no sequence is left,
    /// also if blocks are cached.
    pub fn allocate_all(&self) -> Result<(), String> {
        let deadline = Instant::now() + Duration::from_secs(10);
        // Steps that ended here may still be in flight on the device.
        while !self.streams.is_empty() && self.pool.batches_in_flight() > 0 {
            if Instant::now() > deadline {
                return Err(format!(
                    "{} steps did not end on the device in time",
                    self.pool.batches_in_flight()
                ));
            }
            thread::sleep(Duration::from_micros(200));
        }
        self.pool.allocate(AllocRequest::new(self.pool.total_blocks())).map(drop).map_err(text)
    }
}

fn text(error: impl ToString) -> String {
    error.to_string()
}
