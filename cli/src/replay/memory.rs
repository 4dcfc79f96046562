//! What the engine asks of the memory that it runs on.
//!
//! The pool is one implementation ([`PoolMemory`](super::PoolMemory)); tests have others, which lose blocks or bytes
//! on purpose: a check that has never failed has not been shown to check.

use std::ops::Range;
use std::time::Duration;

/// Why tokens were not appended. The sequence is unchanged.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Too few blocks are free.
    Full {
        /// Blocks that are free now.
        free: usize,
        /// Blocks that will be once batches in flight end.
        retired: usize,
    },
    /// Anything else, which should not happen.
    Failed(String),
}

/// Free memory, at one moment.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FreeSpace {
    /// Blocks that belong to no sequence.
    pub blocks: usize,
    /// The share of the free frames that are in no free aligned run of the pool's order. Those that are kept for their
    /// prefixes are not among them.
    pub fragmentation: f64,
}

/// What a prefix cache found, and what became of its blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PrefixTotals {
    /// The policy's name.
    pub policy: String,
    /// Full blocks of prompts that were looked up.
    pub lookup_blocks: u64,
    /// Leading ones of each that were cached.
    pub hit_blocks: u64,
    /// Blocks that were evicted because their frames were needed.
    pub evicted_blocks: u64,
}

/// Compaction beside the replay.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Compaction {
    /// The fragmentation, from 0 to 1, from which on something is done about it.
    pub threshold: f64,
    /// Time between two looks at it.
    pub interval: Duration,
}

/// What compaction did in a replay.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CompactionTotals {
    /// Times that something was to be done.
    pub runs: u64,
    /// Blocks that have other frames now.
    pub moved_blocks: u64,
    /// Their bytes.
    pub moved_bytes: u64,
    /// Moves that gave way to whoever needed the block or the frame.
    pub given_up: u64,
    /// Time from the beginning to the end of each run, in all.
    pub time: Duration,
    /// Fragmentation before a run, on average.
    pub fragmentation_before: f64,
    /// Fragmentation after a run, on average.
    pub fragmentation_after: f64,
    /// What went wrong, in words.
    pub errors: Vec<String>,
}

/// Why the pool has not got the size that it was to have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ResizeRefusal {
    /// Something is in the way now, and will not be for ever.
    Blocked(String),
    /// Anything else, which should not happen.
    Failed(String),
}

/// A pool of blocks, as a scheduler thread sees it: all of it is called by many threads at once.
pub trait Memory: Sync {
    /// A sequence of tokens; dropping it frees its blocks.
    type Sequence;
    /// A step in flight.
    type Batch;
    /// A block table, in a buffer that is used again.
    type Table: Default;

    /// Blocks that it has at this moment.
    fn blocks(&self) -> usize;

    /// Blocks that belong to no sequence, cheaply: those that are free, those that are kept for their prefixes, and those
    /// that are retired until steps in flight have ended.
    fn free_blocks(&self) -> usize;

    /// Free memory and its fragmentation, by a walk over the pool that disturbs nobody.
    fn free_space(&self) -> FreeSpace;

    /// A new sequence. Where prefixes are cached it begins with what is of `prompt`, and the rest of the prompt is known to
    /// come; elsewhere the prompt is of no use. Returns how many tokens it has.
    ///
    /// # Errors
    /// [`Refusal::Full`] if the pool could not hold the prompt just now; else what was wrong.
    fn open(&self, id: u64, prompt: &[u32]) -> Result<(Self::Sequence, usize), Refusal>;

    /// Begins a step. It ends when it is dropped.
    fn begin(&self) -> Self::Batch;

    /// Appends tokens, all or none, taking blocks as needed. `said`: their ids, if the prompt did not tell them and prefixes
    /// are cached; else nothing.
    ///
    /// # Errors
    /// [`Refusal::Full`], and then the sequence is unchanged.
    fn append(
        &self,
        batch: &mut Self::Batch,
        sequence: &mut Self::Sequence,
        tokens: usize,
        said: &[u32],
    ) -> Result<(), Refusal>;

    /// Adds the slots of some tokens to `out`, as a kernel that writes them gets them.
    ///
    /// # Errors
    /// Why there are none.
    fn slots(
        &self,
        batch: &Self::Batch,
        sequence: &Self::Sequence,
        tokens: Range<usize>,
        out: &mut Vec<i64>,
    ) -> Result<(), String>;

    /// The frames of a sequence, as a kernel that reads it gets them.
    ///
    /// # Errors
    /// Why there are none.
    fn block_table<'t>(
        &self,
        batch: &Self::Batch,
        sequence: &Self::Sequence,
        table: &'t mut Self::Table,
    ) -> Result<&'t [i32], String>;

    /// Writes K and V of tokens in one layer, a row a slot.
    ///
    /// # Errors
    /// What was wrong with the rows or the slots.
    fn store(&self, layer: usize, k: &[u8], v: &[u8], slots: &[i64]) -> Result<(), String>;

    /// Reads them back.
    ///
    /// # Errors
    /// What was wrong with the rows or the slots.
    fn load(&self, layer: usize, slots: &[i64], k: &mut [u8], v: &mut [u8]) -> Result<(), String>;

    /// What the prefix cache found so far; `None` without one.
    fn prefix(&self) -> Option<PrefixTotals>;

    /// The time in the trace, by which the cache's policy goes. The latest that any thread says counts.
    fn set_time(&self, now: Duration);

    /// Gives up everything that is kept for its prefix.
    fn forget_prefixes(&self);

    /// Begins to compact in the background.
    ///
    /// # Errors
    /// Why that cannot be.
    fn start_compaction(&self, compaction: &Compaction) -> Result<(), String>;

    /// Ends what [`start_compaction`](Self::start_compaction) began, and says what it came to; `None` if nothing was begun.
    fn stop_compaction(&self) -> Option<CompactionTotals>;

    /// Gives the pool another size, while everybody goes on. Returns when that is done, or when it has got no further for a
    /// while.
    ///
    /// # Errors
    /// [`ResizeRefusal`], and then the size is what it was.
    fn resize(&self, blocks: usize) -> Result<(), ResizeRefusal>;

    /// The calling thread is done: what it keeps for itself goes back to all.
    fn leave(&self);

    /// Takes every block in one request, and gives them back: when nobody has any, all are to be had, wherever they are
    /// kept.
    ///
    /// # Errors
    /// Why they are not.
    fn take_all(&self) -> Result<(), String>;

    /// Recounts everything by a full walk, when nobody uses the pool.
    ///
    /// # Errors
    /// What does not add up.
    fn audit(&self) -> Result<(), String>;
}
