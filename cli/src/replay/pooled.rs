//! The pool, as the engine asks for it.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvpool::compact::{DefragConfig, DefragReport, Defragmenter, ResizeError, Snapshot};
use kvpool::error::{AllocError, SequenceError};
use kvpool::ids::SequenceId;
use kvpool::pool::{AllocRequest, Pool};
use kvpool::sequence::{Batch, BlockTable, Sequence};
use kvpool::storage::{Elements, ElementsMut, KvLayout, Storage};

use tokio::runtime::{self, Runtime};

use super::memory::{Compaction, CompactionTotals, FreeSpace, Memory, Refusal, ResizeRefusal};

/// A pool of host memory.
pub struct PoolMemory {
    pool: Pool,
    storage: Arc<dyn Storage>,
    /// Where compaction and changes of size run: one thread, beside those that only copy.
    runtime: Runtime,
    defragmenter: Mutex<Option<Defragmenter>>,
}

impl PoolMemory {
    /// A pool of this many blocks, that can grow to `blocks_max`.
    ///
    /// # Errors
    /// What the pool says against it.
    pub fn new(layout: KvLayout, blocks: usize, blocks_max: usize) -> Result<Self, String> {
        let pool = Pool::builder(layout).blocks(blocks).blocks_max(blocks_max).build().map_err(text)?;
        let storage = pool.storage().cloned().ok_or("the pool has no storage")?;
        let runtime = runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kvpool-compact")
            .enable_time()
            .build()
            .map_err(|error| format!("no runtime for compaction: {error}"))?;
        Ok(Self { pool, storage, runtime, defragmenter: Mutex::new(None) })
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
        let counts = self.pool.blocks().counts();
        counts.free() + counts.retired
    }

    fn free_space(&self) -> FreeSpace {
        let stats = self.pool.stats();
        FreeSpace { blocks: stats.free + stats.retired, fragmentation: stats.fragmentation }
    }

    fn open(&self, id: u64) -> Result<Sequence, String> {
        self.pool.sequence(SequenceId(id)).open().map_err(text)
    }

    fn begin(&self) -> Batch {
        self.pool.begin_batch()
    }

    fn append(&self, batch: &mut Batch, sequence: &mut Sequence, tokens: usize) -> Result<(), Refusal> {
        match batch.append(sequence, tokens) {
            Ok(_) => Ok(()),
            Err(SequenceError::Alloc(AllocError::Exhausted { free, retired, .. })) => {
                Err(Refusal::Full { free, retired })
            }
            Err(error) => Err(Refusal::Failed(error.to_string())),
        }
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
        // that is in flight, to sequences of its own that nobody has forked: their blocks have one owner, which is
        // what the pool promises and a replay puts to the test.
        unsafe { self.storage.store(layer, k, v, slots) }.map_err(text)
    }

    fn load(&self, layer: usize, slots: &[i64], k: &mut [u8], v: &mut [u8]) -> Result<(), String> {
        let dtype = self.storage.layout().dtype();
        let (k, v) = (ElementsMut::new(dtype, k).map_err(text)?, ElementsMut::new(dtype, v).map_err(text)?);
        // SAFETY: as for `store`: the calling thread owns the sequences that the slots belong to, so that nobody else
        // writes there.
        unsafe { self.storage.load(layer, slots, k, v) }.map_err(text)
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
        self.pool.allocate(AllocRequest::new(self.blocks())).map(drop).map_err(text)
    }

    fn audit(&self) -> Result<(), String> {
        self.pool.audit().map(drop).map_err(text)
    }
}

fn text(error: impl ToString) -> String {
    error.to_string()
}
