use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::sync::runtime::now;

use super::report::OverdueCopy;
use super::turns::Share;

/// A pool's copies in progress: those of one run, and possibly overdue ones.
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
    deadline: Option<Instant>,
    /// The copy's share of the run's turn; `None` once the copy is overdue.
    share: Option<Share>,
}

impl Copy {
    fn is_overdue(&self, now: Instant) -> bool {
        self.share.is_none() || self.deadline.is_some_and(|deadline| deadline <= now)
    }
}

impl Copies {
    fn lock(&self) -> MutexGuard<'_, List> {
        // No code panics while this lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(
        self: &Arc<Self>,
        blocks: usize,
        bytes: u64,
        deadline: Option<Instant>,
        share: Share,
    ) -> UnderWay {
        let mut list = self.lock();
        list.begun += 1;
        let number = list.begun;
        list.copies.push(Copy { number, blocks, bytes, since: now(), deadline, share: Some(share) });
        UnderWay { copies: self.clone(), number }
    }

    pub(super) fn expire(&self) {
        let now = now();
        // Dropped after the list's lock: it wakes the next run in the queue.
        let _shares: Vec<Share> = {
            let mut list = self.lock();
            list.copies
                .iter_mut()
                .filter(|copy| copy.is_overdue(now))
                .filter_map(|copy| copy.share.take())
                .collect()
        };
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.lock().copies.iter().filter(|copy| copy.share.is_some()).filter_map(|copy| copy.deadline).min()
    }

    /// Returns the oldest overdue copy. Overdue copies no longer hold a turn.
    pub(super) fn overdue(&self) -> Option<OverdueCopy> {
        self.expire();
        let now = now();
        let list = self.lock();
        let copy = list.copies.iter().filter(|copy| copy.share.is_none()).min_by_key(|copy| copy.since)?;
        let Copy { blocks, bytes, since, .. } = *copy;
        Some(OverdueCopy { blocks, bytes, waited: now.saturating_duration_since(since) })
    }
}

#[derive(Debug)]
pub(super) struct UnderWay {
    copies: Arc<Copies>,
    number: u64,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut list = self.copies.lock();
        let at = list.copies.iter().position(|copy| copy.number == self.number);
        // As in `expire`.
        let over = at.map(|at| list.copies.swap_remove(at));
        drop(list);
        drop(over);
    }
}
