//! Stores blocks in the tier when they are computed.
//!
//! A task follows the events of the prefix cache, and queues the hashes of new blocks. Each batch
//! is one look-up, then the blocks that the tier lacks. Evicted blocks, and those that came from
//! the tier, are skipped.
//!
//! Blocks without an answer of the tier are queued again, with a growing pause, so a store gets
//! them after an outage. A value that the store refuses is dropped.
//!
//! A flush completes when no event and no hash is left: what was cached when it was requested is
//! then stored, skipped or refused. The caller bounds the time.

use std::collections::{HashSet, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_core::Stream;
use kvpool::prefix::{BlockHash, KvEvent, KvEvents};
use tokio::sync::{mpsc, oneshot};

use super::super::outcome::{Outcome, TierFailure};
use super::super::settings::after;
use super::super::store_error::StoreError;
use super::super::value::TierValue;
use super::link::{Link, PUTS_AT_ONCE};

/// Time from a block's event to reading its bytes: the event precedes the block's visibility. A
/// block that is not visible then is looked for once more, after a pause.
const SETTLE: Duration = Duration::from_millis(1);

/// Time until a block that was not visible is looked for once more.
const LATE: Duration = Duration::from_millis(50);

/// Shortest and longest pause after a batch without an answer.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Requests to be notified when nothing waits to be stored.
pub(super) type Flushes = mpsc::UnboundedSender<oneshot::Sender<()>>;

/// A block to be stored.
#[derive(Clone, Copy)]
struct Wanted {
    hash: BlockHash,
    /// It was looked for before, and was not cached, or not yet.
    is_late: bool,
}

struct Waiting {
    hashes: VecDeque<Wanted>,
    /// The same hashes: a block may be listed, and have an event too.
    known: HashSet<BlockHash>,
    /// Blocks to be looked for once more, and when. Most are evicted; they delay no others.
    late: VecDeque<(Instant, BlockHash)>,
    max: usize,
}

impl Waiting {
    fn new(max: usize) -> Self {
        Self { hashes: VecDeque::new(), known: HashSet::new(), late: VecDeque::new(), max }
    }

    /// Adds a block. Returns false if the queue is full.
    fn push(&mut self, wanted: Wanted) -> bool {
        let has_room = self.hashes.len() < self.max;
        if has_room && self.known.insert(wanted.hash) {
            self.hashes.push_back(wanted);
        }
        has_room
    }

    /// Adds the late blocks whose time has come.
    fn recall(&mut self, now: Instant) {
        while self.late.front().is_some_and(|late| late.0 <= now)
            && let Some((_, hash)) = self.late.pop_front()
        {
            self.push(Wanted { hash, is_late: true });
        }
    }

    fn clear(&mut self) {
        self.late.clear();
        self.hashes.clear();
        self.known.clear();
    }

    fn take(&mut self) -> Vec<Wanted> {
        let next: Vec<Wanted> = self.hashes.drain(..self.hashes.len().min(PUTS_AT_ONCE)).collect();
        next.iter().for_each(|wanted| {
            self.known.remove(&wanted.hash);
        });
        next
    }
}

/// Returns whether a retry may change the outcome: the store was not called, or did not answer.
fn is_unanswered(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::InFlight => true,
        Outcome::Failed(failure) => !matches!(
            failure,
            TierFailure::Closed | TierFailure::Value(_) | TierFailure::Store(StoreError::Refused { .. })
        ),
        Outcome::Stored | Outcome::Declined | Outcome::Hit | Outcome::Miss => false,
    }
}

/// Receives an event; with `waits` unset, returns `None` if there is none now. `Err` at the end.
async fn next(events: &mut KvEvents, waits: bool) -> Result<Option<KvEvent>, ()> {
    std::future::poll_fn(|context| match Pin::new(&mut *events).poll_next(context) {
        Poll::Ready(Some(numbered)) => Poll::Ready(Ok(Some(numbered.event))),
        Poll::Ready(None) => Poll::Ready(Err(())),
        Poll::Pending if waits => Poll::Pending,
        Poll::Pending => Poll::Ready(Ok(None)),
    })
    .await
}

impl Link {
    /// Follows the events to their end.
    pub(super) async fn write_through(
        self: Arc<Self>,
        mut events: KvEvents,
        mut flushes: mpsc::UnboundedReceiver<oneshot::Sender<()>>,
    ) {
        let mut asked: Vec<oneshot::Sender<()>> = Vec::new();
        let mut waiting = Waiting::new(self.settings.waiting_max);
        // Blocks from before.
        self.list(&mut waiting);
        let (mut pause, mut due) = (PAUSE.0, Instant::now());
        loop {
            waiting.recall(Instant::now());
            let next_late = waiting.late.front().map(|late| late.0);
            let is_idle = waiting.hashes.is_empty() && next_late.is_none();
            // A late block is waited for only while no other waits to be stored.
            let until = next_late.filter(|_| waiting.hashes.is_empty()).map_or(due, |at| due.max(at));
            let is_early = Instant::now() < until;
            let received = tokio::select! {
                biased;
                received = next(&mut events, is_early || is_idle && asked.is_empty()) => received,
                Some(flush) = flushes.recv(), if is_idle => {
                    // Answered below, once no event is left.
                    asked.push(flush);
                    continue;
                }
                () = tokio::time::sleep_until(until.into()), if is_early => Ok(None),
            };
            match received {
                Ok(Some(event)) => {
                    self.note(&event, &mut waiting);
                    // Drains all events before the store is called.
                    continue;
                }
                Ok(None) => {}
                Err(()) => return,
            }
            if waiting.hashes.is_empty() {
                if next_late.is_some() {
                    continue;
                }
                // The caller may be gone.
                for flush in asked.drain(..) {
                    let _ = flush.send(());
                }
                continue;
            }
            tokio::time::sleep(SETTLE).await;
            let unanswered = self.store(waiting.take(), &mut waiting.late).await;
            if unanswered.is_empty() {
                pause = PAUSE.0;
                continue;
            }
            for wanted in unanswered {
                self.push(&mut waiting, wanted);
            }
            due = Instant::now() + pause;
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    fn push(&self, waiting: &mut Waiting, wanted: Wanted) {
        let is_noted = waiting.push(wanted);
        self.count(|counters| counters.dropped_blocks += u64::from(!is_noted));
    }

    fn note(&self, event: &KvEvent, waiting: &mut Waiting) {
        match event {
            KvEvent::Stored { hash, .. } => self.push(waiting, Wanted { hash: *hash, is_late: false }),
            KvEvent::Cleared => waiting.clear(),
            KvEvent::Resync { .. } => {
                self.count(|counters| counters.resyncs += 1);
                self.list(waiting);
            }
            _ => {}
        }
    }

    /// Adds all cached blocks, as far as there is room.
    fn list(&self, waiting: &mut Waiting) {
        let cached = self.pool.cached_blocks().into_iter();
        cached.for_each(|(_, hash)| self.push(waiting, Wanted { hash, is_late: true }));
    }

    /// Stores the blocks that the tier lacks. Returns those without an answer, and adds those that
    /// are not visible, or not yet.
    async fn store(
        self: &Arc<Self>,
        wanted: Vec<Wanted>,
        late: &mut VecDeque<(Instant, BlockHash)>,
    ) -> Vec<Wanted> {
        let hashes: Vec<BlockHash> = wanted.iter().map(|wanted| wanted.hash).collect();
        let deadline = after(Instant::now(), self.settings.put_limit);
        let claimed = self.tier.exists(self.keys(&hashes), deadline).await;
        let present = claimed.iter().filter(|outcome| **outcome == Outcome::Hit).count();
        self.count(|counters| counters.present_blocks += present as u64);
        let is_missing =
            |(wanted, claimed): (&Wanted, &Outcome)| (*claimed == Outcome::Miss).then_some(*wanted);
        let missing: Vec<Wanted> = wanted.iter().zip(&claimed).filter_map(is_missing).collect();
        let unanswered = |(wanted, outcome): (&Wanted, &Outcome)| is_unanswered(outcome).then_some(*wanted);
        let mut again: Vec<Wanted> = wanted.iter().zip(&claimed).filter_map(unanswered).collect();
        if missing.is_empty() {
            return again;
        }
        let link = self.clone();
        let packed = tokio::task::spawn_blocking(move || {
            missing.into_iter().map(|wanted| (wanted, link.cached_value(wanted.hash))).collect::<Vec<_>>()
        });
        let (mut found, mut values) = (Vec::new(), Vec::new());
        for (wanted, value) in packed.await.unwrap_or_default() {
            match value {
                Some(value) => {
                    found.push(wanted);
                    values.push(value);
                }
                // Its thread may have been stopped between the event and the registration.
                None if !wanted.is_late => late.push_back((Instant::now() + LATE, wanted.hash)),
                None => {}
            }
        }
        if !values.is_empty() {
            let outcomes = self.put(values, deadline).await;
            again.extend(found.iter().zip(&outcomes).filter_map(unanswered));
        }
        again
    }

    fn cached_value(&self, hash: BlockHash) -> Option<TierValue> {
        let export = self.pool.export_prefix(&[hash]).ok()?;
        if export.is_empty() {
            return None;
        }
        self.value(&export, 0, hash).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A late block is looked for once more when its time has come, unless it waits already.
    #[test]
    fn late_blocks_come_back_in_time_and_once() {
        let (mut waiting, now) = (Waiting::new(3), Instant::now());
        let hashes: Vec<BlockHash> = (0..4).map(|number| BlockHash::new(number, 0)).collect();
        assert!(waiting.push(Wanted { hash: hashes[1], is_late: false }));
        waiting.late.extend([(now, hashes[0]), (now, hashes[1]), (now + LATE, hashes[2])]);
        waiting.recall(now);
        let taken = waiting.take();
        let taken: Vec<_> = taken.iter().map(|wanted| (wanted.hash, wanted.is_late)).collect();
        assert_eq!(taken, [(hashes[1], false), (hashes[0], true)]);
        waiting.recall(now);
        assert!(waiting.take().is_empty() && waiting.late.len() == 1);
        waiting.recall(now + LATE);
        assert_eq!((waiting.take().len(), waiting.late.len()), (1, 0));
        waiting.late.push_back((now, hashes[3]));
        waiting.clear();
        waiting.recall(now + LATE);
        assert!(waiting.take().is_empty());
    }
}
