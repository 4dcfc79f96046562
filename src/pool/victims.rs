use std::cmp::{Ordering, Reverse};

use crate::block::Priority;
use crate::error::SequenceError;
use crate::ids::{SequenceId, Ticket};
use crate::sequence::SequenceView;
use crate::sync::call;

use super::Pool;

/// Snapshot of an open sequence, and of the blocks that closing it would release: `blocks ==
/// freed_blocks + cached_blocks + shared_blocks`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Victim {
    /// Id of the sequence.
    pub id: SequenceId,
    /// Its priority.
    pub priority: Priority,
    /// Newest batch when it was opened in this pool; 0 before the first batch.
    pub opened: Ticket,
    /// Number of its tokens, including drafted ones.
    pub tokens: usize,
    /// Number of its blocks.
    pub blocks: usize,
    /// Blocks that would become free, after the batches in flight: they have no other owner.
    pub freed_blocks: usize,
    /// Blocks that would become evictable: they are cached and have no other owner.
    pub cached_blocks: usize,
    /// Blocks that have other owners.
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

    /// Returns the number of blocks that would become available.
    pub fn available_blocks(&self) -> usize {
        self.freed_blocks + self.cached_blocks
    }
}

/// Order in which sequences are preempted; functions of two victims implement it too. If it is not
/// total, the order of the list is unspecified, and [`Pool::victims`] may panic.
pub trait VictimOrder {
    /// Compares two candidates; the lesser is preempted first.
    fn compare(&self, one: &Victim, other: &Victim) -> Ordering;
}

impl<F: Fn(&Victim, &Victim) -> Ordering> VictimOrder for F {
    fn compare(&self, one: &Victim, other: &Victim) -> Ordering {
        self(one, other)
    }
}

/// The default order: lowest priority first, then youngest, then most available blocks. Sequences
/// that would make no block available come last.
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
    /// Lists the open sequences with the blocks that closing each would release, in this order. Any
    /// thread may call it while the owners continue; a sequence in the list may have been closed.
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

    /// Returns the blocks that closing a sequence would release now, or [`SequenceError::NotOpen`].
    pub fn victim(&self, id: SequenceId) -> Result<Victim, SequenceError> {
        let _call = call();
        let view = self.view(id).ok_or(SequenceError::NotOpen { id })?;
        Ok(Victim::of(&view))
    }
}
