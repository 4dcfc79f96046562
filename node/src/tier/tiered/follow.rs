//! Stores blocks in the tier when they are computed.
//!
//! A task follows the events of the prefix cache, and keeps the hashes of new blocks. It takes them in
//! batches: one look-up, then the blocks that the tier lacks. A block that was evicted meanwhile is
//! skipped. Blocks that came from the tier are in it already.
//!
//! A flush is answered when no event and no hash is left: what the cache had when it was asked for was
//! then stored, or did not need to be, or failed.

use std::collections::{HashSet, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_core::Stream;
use kvpool::prefix::{BlockHash, KvEvent, KvEvents};
use tokio::sync::{mpsc, oneshot};

use super::super::outcome::Outcome;
use super::super::value::TierValue;
use super::link::{Link, PUTS_AT_ONCE, add};

/// Time between a block's event and the look-up of its bytes: the event comes shortly before the block
/// can be found.
const SETTLE: Duration = Duration::from_millis(1);

/// Requests for the news that nothing waits to be stored.
pub(super) type Flushes = mpsc::UnboundedSender<oneshot::Sender<()>>;

/// The hashes of blocks that wait to be stored.
struct Waiting {
    hashes: VecDeque<BlockHash>,
    /// The same ones: a block may be listed, and have an event too.
    known: HashSet<BlockHash>,
    max: usize,
}

impl Waiting {
    /// Adds a block. Returns false if there is no room.
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

/// Receives an event: waits for one, or returns `None` if there is none now. `Err` at the end.
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
        loop {
            let is_idle = waiting.hashes.is_empty();
            let found = tokio::select! {
                found = next(&mut events, is_idle && asked.is_empty()) => found,
                Some(flush) = flushes.recv(), if is_idle => {
                    // Answered below, once no event is left.
                    asked.push(flush);
                    continue;
                }
            };
            match found {
                Ok(Some(event)) => {
                    self.note(&event, &mut waiting);
                    // All that there are, before the store is asked.
                    continue;
                }
                Ok(None) => {}
                Err(()) => return,
            }
            if waiting.hashes.is_empty() {
                // The caller may have gone.
                for flush in asked.drain(..) {
                    let _ = flush.send(());
                }
                continue;
            }
            tokio::time::sleep(SETTLE).await;
            self.store(waiting.take()).await;
        }
    }

    fn note(&self, event: &KvEvent, waiting: &mut Waiting) {
        match event {
            KvEvent::Stored { hash, .. } => {
                let is_noted = waiting.push(*hash);
                add(&self.counters.dropped, usize::from(!is_noted));
            }
            KvEvent::Cleared => waiting.clear(),
            KvEvent::Resync { .. } => {
                add(&self.counters.resyncs, 1);
                self.list(waiting);
            }
            _ => {}
        }
    }

    /// Adds all cached blocks, as far as there is room.
    fn list(&self, waiting: &mut Waiting) {
        let refused = self.pool.cached_blocks().into_iter().filter(|(_, hash)| !waiting.push(*hash)).count();
        add(&self.counters.dropped, refused);
    }

    /// Stores the blocks that the tier does not have.
    async fn store(self: &Arc<Self>, hashes: Vec<BlockHash>) {
        let deadline = Instant::now() + self.settings.put_limit;
        let claimed = self.tier.exists(self.keys(&hashes), deadline).await;
        let present = claimed.iter().filter(|outcome| **outcome == Outcome::Hit).count();
        add(&self.counters.present, present);
        let is_missing =
            |(hash, claimed): (&BlockHash, &Outcome)| (*claimed == Outcome::Miss).then_some(*hash);
        let missing: Vec<BlockHash> = hashes.iter().zip(&claimed).filter_map(is_missing).collect();
        if missing.is_empty() {
            return;
        }
        let link = self.clone();
        let packed = tokio::task::spawn_blocking(move || {
            missing.into_iter().filter_map(|hash| link.cached_value(hash)).collect::<Vec<_>>()
        });
        let values = packed.await.unwrap_or_default();
        if !values.is_empty() {
            self.put(values, deadline).await;
        }
    }

    /// Returns a cached block as a value; `None` if it is not cached any more.
    fn cached_value(&self, hash: BlockHash) -> Option<TierValue> {
        let export = self.pool.export_prefix(0, &[hash]).ok()?;
        if export.is_empty() {
            return None;
        }
        self.value(&export, 0, hash).ok()
    }
}
