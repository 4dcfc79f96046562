use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kvpool::prefix::{KvEvents, Numbered};
use kvpool::{DeviceId, Pool};
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, spawn_blocking};

use super::changes::Changes;
use super::history::History;
use super::payload::Writer;
use super::server::{Counts, Shared, Snapshot, listen};
use super::settings::{KvEventError, KvEventSettings};
use super::view::CacheView;
use super::zmtp::SocketType;
use crate::admin::Failures;

const BATCH_EVENTS: usize = 1024;

/// Time in which events are gathered into a batch.
const GATHER: Duration = Duration::from_millis(2);

/// Capacity of the queue of listing requests.
const REQUESTS: usize = 16;

const TOPIC_MAX: usize = 255;

/// Publishes the events of a pool's prefix cache until it is dropped. Keeps the pool open.
#[derive(Debug)]
pub struct KvEventPublisher {
    publication: Arc<Publication>,
    address: SocketAddr,
    replay: Option<SocketAddr>,
    /// To the task that follows the pool.
    flushes: mpsc::Sender<oneshot::Sender<()>>,
    following: JoinHandle<()>,
    listening: Vec<JoinHandle<()>>,
}

/// Counters of a publisher.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct KvEventCounters {
    /// Published batches.
    pub batches: u64,
    /// Number of the newest batch.
    pub newest: u64,
    /// Events in them.
    pub events: u64,
    /// Number of times that events were lost, and the cache was listed again.
    pub resyncs: u64,
    /// Connected subscribers.
    pub subscribers: u64,
    /// Batches skipped by slow subscribers, summed over subscribers.
    pub skipped_batches: u64,
    /// Replays requested.
    pub replays: u64,
    /// Listings of the whole cache in replays.
    pub snapshots: u64,
}

#[derive(Debug)]
pub(super) struct Publication {
    shared: Arc<Shared>,
    batches: AtomicU64,
    events: AtomicU64,
    resyncs: AtomicU64,
}

impl KvEventPublisher {
    /// Starts to publish on the current tokio runtime. The first batch lists the cache. After an
    /// error, nothing is left running.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub async fn start(pool: Pool, settings: KvEventSettings) -> Result<Self, KvEventError> {
        let KvEventSettings { topic, medium, hashes, rank, connections, patience, .. } = settings;
        if topic.len() > TOPIC_MAX {
            return Err(KvEventError::Topic { bytes: topic.len() });
        }
        let cache = pool.prefix_cache().ok_or(KvEventError::NoCache)?;
        let (listener, address) = bind(settings.listen).await?;
        let replay = match settings.replay {
            Some(address) => Some(bind(address).await?),
            None => None,
        };
        let events = cache.events().subscribe()?;
        let groups: Box<[_]> = pool.cache_groups().into();
        let is_on_host = pool.storage().is_some_and(|storage| storage.device() == DeviceId::Host);
        let medium = medium.unwrap_or_else(|| if is_on_host { "CPU".into() } else { "GPU".into() });
        let (snapshots, requests) = mpsc::channel(REQUESTS);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // Above all numbers of a former process, which made less than one batch per microsecond.
        let first = now.as_micros() as u64;
        let history = History::new(first, settings.history_batches, settings.history_bytes);
        let is_closing = watch::Sender::new(false);
        let (topic, counts) = (topic.into_bytes(), Counts::default());
        let failures = Failures::new("kv_events", "publisher");
        let shared = Arc::new(Shared { history, topic, patience, snapshots, counts, failures, is_closing });
        let zero = AtomicU64::default;
        let (batches, events_count, resyncs) = (zero(), zero(), zero());
        let publication =
            Arc::new(Publication { shared: shared.clone(), batches, events: events_count, resyncs });
        let mut publishing = Publishing {
            pool,
            block_tokens: groups.iter().map(|group| group.block_tokens).collect(),
            events,
            view: CacheView::default(),
            writer: Writer { hashes, medium, rank, groups },
            shared: shared.clone(),
            publication: publication.clone(),
            snapshot: None,
        };
        let mut changes = Changes::default();
        publishing.relist(&mut changes).await;
        publishing.publish(&changes);
        let (flushes, flushed) = mpsc::channel(1);
        let following = tokio::spawn(publishing.run(requests, flushed));
        let mut listening =
            vec![tokio::spawn(listen(listener, shared.clone(), SocketType::Pub, connections))];
        let replay = replay.map(|(listener, address)| {
            let answering = listen(listener, shared.clone(), SocketType::Router, connections);
            listening.push(tokio::spawn(answering));
            address
        });
        Ok(Self { publication, address, replay, flushes, following, listening })
    }

    /// Publishes the pending events, and ends when all subscribers have been sent the newest batch.
    /// Returns whether that happened by the deadline, at which the others are disconnected; then a
    /// warning names the number of the newest batch.
    pub async fn close(mut self, deadline: Instant) -> bool {
        let closed = async {
            let (done, is_done) = oneshot::channel();
            // The task ends with the pool.
            if self.flushes.send(done).await.is_ok() {
                let _ = is_done.await;
            }
            self.publication.shared.is_closing.send_replace(true);
            for listening in &mut self.listening {
                let _ = listening.await;
            }
        };
        let is_sent = tokio::time::timeout_at(deadline.into(), closed).await.is_ok();
        if !is_sent {
            let newest = self.counters().newest;
            tracing::warn!(newest, "the last events were not sent to every subscriber in time");
        }
        is_sent
    }

    /// Returns the address for subscribers, with the port that the system selected.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the address for replays.
    pub fn replay_address(&self) -> Option<SocketAddr> {
        self.replay
    }

    /// Returns counters since it began.
    pub fn counters(&self) -> KvEventCounters {
        self.publication.counters()
    }

    pub(super) fn downgrade(&self) -> Weak<Publication> {
        Arc::downgrade(&self.publication)
    }
}

impl Publication {
    pub(super) fn failures(&self) -> Failures {
        self.shared.failures.clone()
    }

    pub(super) fn counters(&self) -> KvEventCounters {
        let counts = &self.shared.counts;
        KvEventCounters {
            batches: self.batches.load(Relaxed),
            newest: self.shared.history.range().1.saturating_sub(1),
            events: self.events.load(Relaxed),
            resyncs: self.resyncs.load(Relaxed),
            subscribers: counts.subscribers.load(Relaxed),
            skipped_batches: counts.skipped.load(Relaxed),
            replays: counts.replays.load(Relaxed),
            snapshots: counts.snapshots.load(Relaxed),
        }
    }
}

impl Drop for KvEventPublisher {
    fn drop(&mut self) {
        self.following.abort();
        self.listening.iter().for_each(JoinHandle::abort);
    }
}

async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), KvEventError> {
    let refused = |error| KvEventError::Listen { address, error };
    let listener = TcpListener::bind(address).await.map_err(refused)?;
    let bound = listener.local_addr().map_err(refused)?;
    Ok((listener, bound))
}

struct Publishing {
    pool: Pool,
    /// By group.
    block_tokens: Box<[u32]>,
    events: KvEvents,
    view: CacheView,
    writer: Writer,
    shared: Arc<Shared>,
    publication: Arc<Publication>,
    /// The listing at the newest number, if one was requested.
    snapshot: Option<Snapshot>,
}

impl Publishing {
    async fn run(
        mut self,
        mut requests: mpsc::Receiver<oneshot::Sender<Snapshot>>,
        mut flushes: mpsc::Receiver<oneshot::Sender<()>>,
    ) {
        loop {
            tokio::select! {
                first = self.events.recv() => {
                    let Some(first) = first else { return };
                    let events = self.batch(first).await;
                    if events < BATCH_EVENTS / 4 {
                        tokio::time::sleep(GATHER).await;
                    }
                }
                Some(answer) = requests.recv() => {
                    // The connection may have ended meanwhile.
                    let _ = answer.send(self.snapshot());
                }
                Some(flushed) = flushes.recv() => {
                    while let Some(first) = self.events.try_recv() {
                        self.batch(first).await;
                    }
                    let _ = flushed.send(());
                }
            }
        }
    }

    /// Publishes an event and those queued after it. Returns their number.
    async fn batch(&mut self, first: Numbered) -> usize {
        let (mut next, mut events, mut changes) = (Some(first), 0, Changes::default());
        while let Some(Numbered { event, .. }) = next {
            events += 1;
            if !self.view.apply(event, &mut changes) {
                self.publication.resyncs.fetch_add(1, Relaxed);
                self.relist(&mut changes).await;
            }
            next = if events < BATCH_EVENTS { self.events.try_recv() } else { None };
        }
        self.publication.events.fetch_add(events as u64, Relaxed);
        if !changes.is_empty() {
            self.publish(&changes);
        }
        events
    }

    /// Lists the cached blocks of the pool. Later events may repeat blocks of the list.
    async fn relist(&mut self, changes: &mut Changes) {
        let pool = self.pool.clone();
        // It visits all blocks. Fails only at the end of the runtime.
        if let Ok(cached) = spawn_blocking(move || pool.cached_blocks_by_group()).await {
            self.view.relist(cached, &self.block_tokens, changes);
        }
    }

    fn publish(&mut self, changes: &Changes) {
        self.shared.history.push(self.writer.write(changes.as_slice()));
        self.publication.batches.fetch_add(1, Relaxed);
        self.snapshot = None;
    }

    fn snapshot(&mut self) -> Snapshot {
        let (_, next) = self.shared.history.range();
        let (view, writer) = (&self.view, &self.writer);
        let made = self.snapshot.get_or_insert_with(|| {
            let mut changes = Changes::default();
            view.list(&mut changes);
            (next.saturating_sub(1), writer.write(changes.as_slice()).into())
        });
        made.clone()
    }
}
