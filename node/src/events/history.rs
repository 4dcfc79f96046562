use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

/// Sequence numbers and payloads of the newest batches, bounded in number and bytes, for
/// connections that read at their own pace. Invariant: the number of the oldest batch plus the
/// number of batches is the next number.
#[derive(Debug)]
pub(super) struct History {
    kept: Mutex<Kept>,
    next: watch::Sender<u64>,
    batches_max: usize,
    bytes_max: usize,
}

#[derive(Debug, Default)]
struct Kept {
    batches: VecDeque<Arc<[u8]>>,
    bytes: usize,
    oldest: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum At {
    Batch(Arc<[u8]>),
    /// The batch was dropped; the oldest one has this number.
    Gone {
        oldest: u64,
    },
    /// It is not there yet.
    Ahead,
}

impl History {
    /// Creates a history whose first batch has the number `first`.
    pub(super) fn new(first: u64, batches_max: usize, bytes_max: usize) -> Self {
        let kept = Kept { oldest: first, ..Kept::default() };
        let next = watch::Sender::new(first);
        Self { kept: kept.into(), next, batches_max: batches_max.max(1), bytes_max }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock()
    }

    pub(super) fn push(&self, payload: Vec<u8>) {
        let mut kept = self.kept();
        kept.bytes += payload.len();
        kept.batches.push_back(payload.into());
        while kept.batches.len() > self.batches_max || (kept.bytes > self.bytes_max && kept.batches.len() > 1)
        {
            kept.bytes -= kept.batches.pop_front().map_or(0, |batch| batch.len());
            kept.oldest += 1;
        }
        let next = kept.oldest + kept.batches.len() as u64;
        drop(kept);
        self.next.send_replace(next);
    }

    pub(super) fn at(&self, number: u64) -> At {
        let kept = self.kept();
        let Some(place) = number.checked_sub(kept.oldest) else { return At::Gone { oldest: kept.oldest } };
        let batch = usize::try_from(place).ok().and_then(|place| kept.batches.get(place));
        batch.map_or(At::Ahead, |batch| At::Batch(batch.clone()))
    }

    pub(super) fn range(&self) -> (u64, u64) {
        let kept = self.kept();
        (kept.oldest, kept.oldest + kept.batches.len() as u64)
    }

    pub(super) fn follow(&self) -> watch::Receiver<u64> {
        self.next.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_keeps_the_newest_within_its_bounds() {
        let history = History::new(0, 3, 100);
        assert_eq!((history.range(), history.at(0)), ((0, 0), At::Ahead));
        (0..5).for_each(|n| history.push(vec![n; 10]));
        assert_eq!(history.range(), (2, 5));
        assert_eq!(history.at(1), At::Gone { oldest: 2 });
        assert_eq!(history.at(2), At::Batch([2; 10].into()));
        assert_eq!((history.at(5), history.at(u64::MAX)), (At::Ahead, At::Ahead));
        history.push(vec![5; 85]);
        assert_eq!(history.range(), (4, 6), "95 bytes");
        history.push(vec![6; 1000]);
        assert_eq!(history.range(), (6, 7), "the newest stays, whatever its size");
        history.push(vec![7; 1]);
        assert_eq!(history.range(), (7, 8));
        assert_eq!(*history.follow().borrow(), 8);
        let later = History::new(1_000, 3, 100);
        assert_eq!((later.range(), later.at(8)), ((1_000, 1_000), At::Gone { oldest: 1_000 }));
    }
}
