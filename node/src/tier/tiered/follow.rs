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

/// Time from a block's event to reading its bytes: the event precedes the block's visibility.
const SETTLE: Duration = Duration::from_millis(1);

/// Shortest and longest pause after a batch without an answer.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Requests to be notified when nothing waits to be stored.
pub(super) type Flushes = mpsc::UnboundedSender<oneshot::Sender<()>>;

struct Waiting {
    hashes: VecDeque<BlockHash>,
    /// The same hashes: a block may be listed, and have an event too.
    known: HashSet<BlockHash>,
    max: usize,
}

impl Waiting {
    /// Adds a block. Returns false if the queue is full.
    fn push(&mut self, hash: BlockHash) -> bool {
        let has_room = self.hashes.len() < self.max;
        if has_room && self.known.insert(hash) {
            self.hashes.push_back(hash);
        }
        has_room
    }

    fn clear(&mut self) {
        self.hashes.clear();
        self.known.clear();
    }

    fn take(&mut self) -> Vec<BlockHash> {
        let next: Vec<BlockHash> = self.hashes.drain(..self.hashes.len().min(PUTS_AT_ONCE)).collect();
        next.iter().for_each(|hash| {
            self.known.remove(hash);
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
        Outcome::Stored | Outcome::Hit | Outcome::Miss => false,
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
        let mut waiting =
            Waiting { hashes: VecDeque::new(), known: HashSet::new(), max: self.settings.waiting_max };
        // Blocks from before.
        self.list(&mut waiting);
        let (mut pause, mut due) = (PAUSE.0, Instant::now());
        loop {
            let (is_idle, is_early) = (waiting.hashes.is_empty(), Instant::now() < due);
            let received = tokio::select! {
                biased;
                received = next(&mut events, is_early || is_idle && asked.is_empty()) => received,
                Some(flush) = flushes.recv(), if is_idle => {
                    // Answered below, once no event is left.
                    asked.push(flush);
                    continue;
                }
                () = tokio::time::sleep_until(due.into()), if is_early => Ok(None),
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
                // The caller may be gone.
                for flush in asked.drain(..) {
                    let _ = flush.send(());
                }
                continue;
            }
            tokio::time::sleep(SETTLE).await;
            let unanswered = self.store(waiting.take()).await;
            if unanswered.is_empty() {
                pause = PAUSE.0;
                continue;
            }
            for hash in unanswered {
                self.push(&mut waiting, hash);
            }
            due = Instant::now() + pause;
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    fn push(&self, waiting: &mut Waiting, hash: BlockHash) {
        let is_noted = waiting.push(hash);
        self.count(|counters| counters.dropped_blocks += u64::from(!is_noted));
    }

    fn note(&self, event: &KvEvent, waiting: &mut Waiting) {
        match event {
            KvEvent::Stored { hash, .. } => self.push(waiting, *hash),
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
        self.pool.cached_blocks().into_iter().for_each(|(_, hash)| self.push(waiting, hash));
    }

    /// Stores the blocks that the tier lacks. Returns those without an answer.
    async fn store(self: &Arc<Self>, hashes: Vec<BlockHash>) -> Vec<BlockHash> {
        let deadline = after(Instant::now(), self.settings.put_limit);
        let claimed = self.tier.exists(self.keys(&hashes), deadline).await;
        let present = claimed.iter().filter(|outcome| **outcome == Outcome::Hit).count();
        self.count(|counters| counters.present_blocks += present as u64);
        let is_missing =
            |(hash, claimed): (&BlockHash, &Outcome)| (*claimed == Outcome::Miss).then_some(*hash);
        let missing: Vec<BlockHash> = hashes.iter().zip(&claimed).filter_map(is_missing).collect();
        let unanswered = |(hash, outcome): (&BlockHash, &Outcome)| is_unanswered(outcome).then_some(*hash);
        let mut again: Vec<BlockHash> = hashes.iter().zip(&claimed).filter_map(unanswered).collect();
        if missing.is_empty() {
            return again;
        }
        let link = self.clone();
        let packed = tokio::task::spawn_blocking(move || {
            missing.into_iter().filter_map(|hash| link.cached_value(hash)).collect::<Vec<_>>()
        });
        let values = packed.await.unwrap_or_default();
        if !values.is_empty() {
            let hashes: Vec<BlockHash> = values.iter().map(|value| value.key().hash).collect();
            let outcomes = self.put(values, deadline).await;
            again.extend(hashes.iter().zip(&outcomes).filter_map(unanswered));
        }
        again
    }

    fn cached_value(&self, hash: BlockHash) -> Option<TierValue> {
        let export = self.pool.export_prefix(0, &[hash]).ok()?;
        if export.is_empty() {
            return None;
        }
        self.value(&export, 0, hash).ok()
    }
}
