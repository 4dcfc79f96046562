//! The cache in a pool: blocks, shared prefixes, copy-on-write forks, and swaps to a host pool.
//!
//! The room of tokens that are not computed yet is *drafted*: the pool may take it back at any time,
//! and neither shares nor moves it. Once computed, tokens are committed: full blocks are sealed, so
//! that other sequences find them and compaction moves them. A step that fails therefore leaves
//! nothing in the prefix cache.
//!
//! This file is the only one that reads and writes K and V in the pool.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvpool::{Batch, Pool, Sequence, SequenceError, SequenceId};

use crate::admission;
use crate::cache::{Admission, CacheCounts, Candidate, KvCache, Room, Tile};
use crate::error::EngineError;
use crate::preempt::{self, Preempted, Swap};

/// A cache in a pool.
pub struct Paged {
    pool: Pool,
    swap: Option<Swap>,
    kv_row: usize,
    headroom: usize,
    hit_tokens: AtomicU64,
    swapped: AtomicU64,
    recomputed: AtomicU64,
    swaps_refused: AtomicU64,
}

/// The blocks of one sequence.
pub struct PagedSequence {
    /// The first [`committed`](Sequence::committed) tokens are computed; the rest is room.
    pub(crate) sequence: Sequence,
    /// Number of tokens whose room it keeps though they are not computed yet.
    pub(crate) reserved: usize,
}

/// A batch of the pool, and the K and V that the model reads.
pub struct PagedStep {
    batch: Batch,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Paged {
    /// Creates a cache in a pool whose layout has `kv_row` elements of K per token and layer.
    ///
    /// An admission takes room for `headroom` tokens to decode. Preempted sequences are computed
    /// again if there is no host pool to swap them to.
    pub fn new(pool: Pool, kv_row: usize, headroom: usize, swap: Option<Swap>) -> Self {
        let zero = || AtomicU64::new(0);
        let (hit_tokens, swapped, recomputed, swaps_refused) = (zero(), zero(), zero(), zero());
        Self { pool, swap, kv_row, headroom, hit_tokens, swapped, recomputed, swaps_refused }
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
}

/// Tells a lack of blocks, which passes, from an error.
pub(crate) fn room(outcome: Result<kvpool::Appended, SequenceError>) -> Result<Room, SequenceError> {
    match outcome {
        Ok(_) => Ok(Room::Taken),
        // Urgent requests may use the reserve, and a pool that shrinks grows again.
        Err(SequenceError::Alloc(
            kvpool::AllocError::Exhausted { .. }
            | kvpool::AllocError::Reserved { .. }
            | kvpool::AllocError::TooLarge { .. },
        )) => Ok(Room::Lacking),
        Err(error) => Err(error),
    }
}

impl KvCache for Paged {
    type Sequence = PagedSequence;
    type Parked = Sequence;
    type Step = PagedStep;

    fn admit(
        &self,
        candidate: Candidate<'_>,
        parked: Option<Sequence>,
    ) -> Result<Admission<PagedSequence, Sequence>, EngineError> {
        let parked = match (&self.swap, parked) {
            (Some(swap), Some(parked)) => match preempt::swap_in(&self.pool, swap, parked)? {
                Ok(sequence) => Some(sequence),
                Err(parked) => return Ok(Admission::Lacking(Some(parked))),
            },
            (_, parked) => parked,
        };
        let was_parked = parked.is_some();
        let admitted = admission::admit(&self.pool, candidate, parked, self.headroom)?;
        if let (Admission::Granted(granted), false) = (&admitted, was_parked) {
            self.hit_tokens.fetch_add(granted.sequence.committed() as u64, Relaxed);
        }
        Ok(admitted)
    }

    fn computed(&self, sequence: &PagedSequence) -> usize {
        sequence.sequence.committed()
    }

    fn begin(&self) -> PagedStep {
        PagedStep { batch: self.pool.begin_batch(), k: Vec::new(), v: Vec::new() }
    }

    fn grow(
        &self,
        step: &mut PagedStep,
        sequence: &mut PagedSequence,
        length: usize,
    ) -> Result<Room, EngineError> {
        let more = length.saturating_sub(sequence.sequence.len());
        if more == 0 {
            return Ok(Room::Taken);
        }
        Ok(room(step.batch.draft(&mut sequence.sequence, more))?)
    }

    fn attend(
        &self,
        step: &mut PagedStep,
        sequence: &mut PagedSequence,
        layer: usize,
        first: usize,
        k: &[f32],
        v: &[f32],
        read: impl FnOnce(&[Tile<'_>]),
    ) -> Result<(), EngineError> {
        let (PagedStep { batch, k: all_k, v: all_v }, sequence) = (step, &mut sequence.sequence);
        let end = first + k.len() / self.kv_row;
        batch.store(sequence, layer, first..end, k.into(), v.into())?;
        let elements = end * self.kv_row;
        if all_k.len() < elements {
            all_k.resize(elements, 0.0);
            all_v.resize(elements, 0.0);
        }
        let (k, v) = (&mut all_k[..elements], &mut all_v[..elements]);
        batch.load(sequence, layer, 0..end, (&mut *k).into(), (&mut *v).into())?;
        read(&[Tile { k, v }]);
        Ok(())
    }

    fn finish(&self, step: PagedStep) {
        step.batch.finish();
    }

    fn keep(&self, sequence: &mut PagedSequence, tokens: &[u32], computed: usize) -> Result<(), EngineError> {
        let PagedSequence { sequence, reserved } = sequence;
        announce(&self.pool, sequence, &tokens[..computed])?;
        sequence.commit(computed)?;
        let length = (*reserved).max(computed).min(sequence.len());
        Ok(sequence.truncate(length)?)
    }

    fn fork(&self, parent: &mut PagedSequence, id: SequenceId) -> Result<Option<PagedSequence>, EngineError> {
        // The room behind the computed tokens is the parent's: two writers must not share it.
        let computed = parent.sequence.committed();
        parent.sequence.truncate(computed)?;
        parent.reserved = computed;
        let sequence = parent.sequence.fork(id)?;
        Ok(Some(PagedSequence { sequence, reserved: computed }))
    }

    fn preempt(&self, preempted: PagedSequence) -> Result<Option<Sequence>, EngineError> {
        let (preempted, was_refused) = preempt::preempt(&self.pool, preempted.sequence, self.swap.as_ref())?;
        self.swaps_refused.fetch_add(u64::from(was_refused), Relaxed);
        match preempted {
            Preempted::Swapped(sequence) => {
                self.swapped.fetch_add(1, Relaxed);
                Ok(Some(sequence))
            }
            Preempted::Recompute => {
                self.recomputed.fetch_add(1, Relaxed);
                Ok(None)
            }
        }
    }

    fn counts(&self) -> CacheCounts {
        CacheCounts {
            hit_tokens: self.hit_tokens.load(Relaxed),
            swapped: self.swapped.load(Relaxed),
            recomputed: self.recomputed.load(Relaxed),
            swaps_refused: self.swaps_refused.load(Relaxed),
        }
    }
}

/// Announces the tokens that the pool does not know yet, for the prefix cache.
pub(crate) fn announce(pool: &Pool, sequence: &mut Sequence, tokens: &[u32]) -> Result<(), SequenceError> {
    match tokens.get(sequence.announced()..) {
        Some(new) if pool.prefix_cache().is_some() => sequence.announce(new),
        _ => Ok(()),
    }
}
