//! Copies that are under way, and those among them that take too long.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use super::compactor::CompactionLock;
use super::report::OverdueCopy;

/// Of one pool: one at a time, and perhaps one that is overdue. See [`compactor`](super::compactor).
#[derive(Default, Debug)]
pub(super) struct Copies(Mutex<List>);

#[derive(Default, Debug)]
struct List {
    begun: u64,
    copies: Vec<Copy>,
}

#[derive(Debug)]
struct Copy {
    number: u64,
    blocks: usize,
    bytes: u64,
    since: Instant,
    /// `None`: it may take as long as it takes.
    deadline: Option<Instant>,
    /// Until it is overdue.
    lock: Option<CompactionLock>,
}

impl Copy {
    fn is_overdue(&self, now: Instant) -> bool {
        self.lock.is_none() || self.deadline.is_some_and(|deadline| deadline <= now)
    }
}

impl Copies {
    fn lock(&self) -> MutexGuard<'_, List> {
        // Nothing panics inside.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy begins, and has a share of the compaction lock.
    pub(super) fn begin(
        self: &Arc<Self>,
        blocks: usize,
        bytes: u64,
        deadline: Option<Instant>,
        lock: CompactionLock,
    ) -> UnderWay {
        let mut list = self.lock();
        list.begun += 1;
        let number = list.begun;
        list.copies.push(Copy { number, blocks, bytes, since: Instant::now(), deadline, lock: Some(lock) });
        UnderWay { copies: self.clone(), number }
    }

    /// Takes the compaction lock from copies that are overdue.
    pub(super) fn expire(&self) {
        let now = Instant::now();
        // Dropped without the lock: it wakes the next in turn.
        let _lanes: Vec<CompactionLock> = {
            let mut list = self.lock();
            list.copies
                .iter_mut()
                .filter(|copy| copy.is_overdue(now))
                .filter_map(|copy| copy.lock.take())
                .collect()
        };
    }

    /// When the next copy is overdue that is not yet.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.lock().copies.iter().filter(|copy| copy.lock.is_some()).filter_map(|copy| copy.deadline).min()
    }

    /// The copy that has been overdue the longest; it has the compaction lock no more.
    pub(super) fn overdue(&self) -> Option<OverdueCopy> {
        self.expire();
        let now = Instant::now();
        let list = self.lock();
        let copy = list.copies.iter().filter(|copy| copy.lock.is_none()).min_by_key(|copy| copy.since)?;
        let Copy { blocks, bytes, since, .. } = *copy;
        Some(OverdueCopy { blocks, bytes, waited: now.saturating_duration_since(since) })
    }
}

/// A copy that is under way, until this is dropped.
#[derive(Debug)]
pub(super) struct UnderWay {
    copies: Arc<Copies>,
    number: u64,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut list = self.copies.lock();
        let at = list.copies.iter().position(|copy| copy.number == self.number);
        // Dropped without the lock: it may wake the next in turn.
        let over = at.map(|at| list.copies.swap_remove(at));
        drop(list);
        drop(over);
    }
}
