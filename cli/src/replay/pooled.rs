//! The pool, as the engine asks for it.

use std::ops::Range;
use std::sync::Arc;

use kvpool::error::{AllocError, SequenceError};
use kvpool::ids::SequenceId;
use kvpool::pool::{AllocRequest, Pool};
use kvpool::sequence::{Batch, BlockTable, Sequence};
use kvpool::storage::{Elements, ElementsMut, KvLayout, Storage};

use super::memory::{FreeSpace, Memory, Refusal};

/// A pool of host memory.
pub struct PoolMemory {
    pool: Pool,
    storage: Arc<dyn Storage>,
}

impl PoolMemory {
    /// A pool of this many blocks.
    ///
    /// # Errors
    /// What the pool says against it.
    pub fn new(layout: KvLayout, blocks: usize) -> Result<Self, String> {
        let pool = Pool::builder(layout).blocks(blocks).build().map_err(text)?;
        let storage = pool.storage().cloned().ok_or("the pool has no storage")?;
        Ok(Self { pool, storage })
    }
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
