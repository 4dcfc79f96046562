//! Candidates for preemption, and the order in which to preempt them.

use std::cmp::{Ordering, Reverse};

use crate::block::Priority;
use crate::error::SequenceError;
use crate::ids::{SequenceId, Ticket};
use crate::sequence::SequenceView;
use crate::sync::call;

use super::Pool;

/// An open sequence, and the blocks that its close would give back, as of some moment.
///
/// `blocks == freed_blocks + cached_blocks + shared_blocks`
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Victim {
    /// Its id.
    pub id: SequenceId,
    /// Its priority.
    pub priority: Priority,
    /// The newest batch when it was opened in this pool; 0 before the first batch.
    pub opened: Ticket,
    /// Number of its tokens, including drafted ones.
    pub tokens: usize,
    /// Number of its blocks.
    pub blocks: usize,
    /// Blocks that would become free, after the batches in flight: only this sequence references
    /// them.
    pub freed_blocks: usize,
    /// Blocks that would become evictable: only this sequence references them, and they are cached.
    pub cached_blocks: usize,
    /// Blocks that would stay, because others reference them.
    pub shared_blocks: usize,
}

impl Victim {
    fn of(view: &SequenceView) -> Self {
        let footprint = view.footprint();
        Self {
            id: view.id(),
            priority: view.priority(),
            opened: view.opened(),
            tokens: view.len(),
            blocks: footprint.blocks,
            freed_blocks: footprint.freed,
            cached_blocks: footprint.cached,
            shared_blocks: footprint.shared,
        }
    }

    /// Returns the number of blocks that would become available: those that no other owner
    /// references.
    pub fn available_blocks(&self) -> usize {
        self.freed_blocks + self.cached_blocks
    }
}

/// Decides which sequences are preempted before others.
///
/// Implemented by functions of two victims too. It must be a total order; otherwise the order of
/// the list is unspecified, and [`Pool::victims`] may panic.
pub trait VictimOrder {
    /// Compares two candidates: the smaller one is preempted first.
    fn compare(&self, one: &Victim, other: &Victim) -> Ordering;
}

impl<F: Fn(&Victim, &Victim) -> Ordering> VictimOrder for F {
    fn compare(&self, one: &Victim, other: &Victim) -> Ordering {
        self(one, other)
    }
}

/// The default order: low priorities first, and of each priority the youngest sequence first.
///
/// Of equally young sequences, the one that makes more blocks available comes first. Sequences that
/// would make no block available come last: their preemption costs work and gains nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LowestPriorityFirst;

impl VictimOrder for LowestPriorityFirst {
    fn compare(&self, one: &Victim, other: &Victim) -> Ordering {
        let key = |victim: &Victim| {
            let available = victim.available_blocks();
            (available == 0, victim.priority, Reverse(victim.opened), Reverse(available), victim.id)
        };
        key(one).cmp(&key(other))
    }
}

impl Pool {
    /// Lists the open sequences with the blocks that each would give back, in this order.
    ///
    /// May be called from any thread, while the owners of the sequences continue. A sequence that
    /// is closed meanwhile may be in the list: the task that owns it does not find it when it is to
    /// [preempt](Self::preempt) it.
    ///
    /// Visits every block of every open sequence; [`victim`](Self::victim) visits one sequence.
    ///
    /// ```
    /// # use kvpool::{LowestPriorityFirst, Pool, Priority, SequenceId, storage::KvLayout};
    /// # let pool = Pool::builder(KvLayout::named("tiny")?).blocks(100).build()?;
    /// let mut urgent = pool.sequence(SequenceId(1)).priority(Priority::Urgent).open()?;
    /// let mut normal = pool.sequence(SequenceId(2)).open()?;
    /// let mut batch = pool.begin_batch();
    /// batch.append(&mut urgent, 20)?;
    /// batch.append(&mut normal, 10)?;
    /// batch.finish();
    /// let victims = pool.victims(&LowestPriorityFirst);
    /// // This layout has blocks of 4 tokens.
    /// assert_eq!((victims[0].id, victims[0].available_blocks()), (SequenceId(2), 3));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn victims(&self, order: &dyn VictimOrder) -> Vec<Victim> {
        let _call = call();
        let mut victims: Vec<_> = self.0.sequences.views().iter().map(Victim::of).collect();
        victims.sort_by(|one, other| order.compare(one, other));
        victims
    }

    /// Returns the blocks that the close of a sequence would give back now.
    ///
    /// # Errors
    ///
    /// [`SequenceError::NotOpen`] if it was closed meanwhile.
    pub fn victim(&self, id: SequenceId) -> Result<Victim, SequenceError> {
        let _call = call();
        let view = self.view(id).ok_or(SequenceError::NotOpen { id })?;
        Ok(Victim::of(&view))
    }
}
