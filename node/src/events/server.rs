use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;

use super::history::{At, History};
use super::zmtp::{self, Inbound, SocketType, ZmtpError};
use crate::admin::Failures;
use crate::transport::tcp::{Pending, Source};

const FILTERS_MAX: usize = 64;

/// Number of the message that ends a replay: -1.
const END: [u8; 8] = [0xff; 8];

/// Pause after a failed accept, for example without free descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time for a subscriber to subscribe, and for another connection to greet.
const SILENCE: Duration = Duration::from_secs(10);

/// Idle time after which TCP keep-alive probes the peer.
const KEEP_ALIVE: Duration = Duration::from_secs(60);

/// A listing of the whole cache, at the number of the newest batch.
pub(super) type Snapshot = (u64, Arc<[u8]>);

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) history: History,
    pub(super) topic: Vec<u8>,
    /// Time after which a connection is closed whose peer reads nothing.
    pub(super) patience: Duration,
    pub(super) snapshots: mpsc::Sender<oneshot::Sender<Snapshot>>,
    pub(super) counts: Counts,
    pub(super) failures: Failures,
    /// Whether no batch follows: connections end after the newest one.
    pub(super) is_closing: watch::Sender<bool>,
}

impl Shared {
    async fn closing(&self) {
        // `self` keeps the sender alive.
        let _ = self.is_closing.subscribe().wait_for(|is_closing| *is_closing).await;
    }
}

#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) subscribers: AtomicU64,
    pub(super) skipped: AtomicU64,
    pub(super) replays: AtomicU64,
    pub(super) snapshots: AtomicU64,
}

/// Accepts connections until dropped. Once the publisher closes, waits for the existing ones.
pub(super) async fn listen(
    listener: TcpListener,
    shared: Arc<Shared>,
    socket: SocketType,
    connections: usize,
) {
    let places = Arc::new(Semaphore::new(connections.min(Semaphore::MAX_PERMITS)));
    let pending = Pending::new(connections);
    let mut running = JoinSet::new();
    loop {
        while running.try_join_next().is_some() {}
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shared.closing() => break,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                shared.failures.note(format!("a connection was not accepted: {error}"));
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if let Err(error) = keep_alive(&stream) {
            tracing::debug!(%peer, %error, "a connection for events has no keepalive");
        }
        let (shared, places, entered) =
            (shared.clone(), places.clone(), pending.enter(Source::of(peer.ip())));
        running.spawn(async move {
            let (known, is_known) = oneshot::channel();
            let entry = Entry { places, known };
            let served = async {
                match socket {
                    SocketType::Pub => subscriber(stream, &shared, entry).await,
                    SocketType::Router => requests(stream, &shared, entry).await,
                }
            };
            let ended = tokio::select! {
                ended = served => ended,
                () = entered.displaced(is_known, SILENCE) => Err(ZmtpError::Silent),
            };
            match ended {
                // The peer has closed the connection.
                Err(ZmtpError::Io(_)) | Ok(()) => {}
                Err(ZmtpError::Full) => {
                    let text = format!("more than {connections} connections: {} was refused", peer.ip());
                    shared.failures.note(text);
                }
                Err(error) => {
                    shared.failures.note(format!("the connection of {} was closed: {error}", peer.ip()));
                }
            }
        });
    }
    drop(listener);
    while running.join_next().await.is_some() {}
}

/// Admission of a new connection to a permanent place.
struct Entry {
    places: Arc<Semaphore>,
    known: oneshot::Sender<()>,
}

impl Entry {
    /// Takes a place once the connection has subscribed or greeted.
    fn take(self) -> Result<OwnedSemaphorePermit, ZmtpError> {
        let place = self.places.try_acquire_owned().map_err(|_| ZmtpError::Full);
        let _ = self.known.send(());
        place
    }
}

/// Enables TCP keep-alive, so that a dead host's connection does not keep its place.
fn keep_alive(stream: &TcpStream) -> std::io::Result<()> {
    let probes = TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE / 4);
    SockRef::from(stream).set_tcp_keepalive(&probes)
}

async fn subscriber(mut stream: TcpStream, shared: &Shared, entry: Entry) -> Result<(), ZmtpError> {
    stream.set_nodelay(true)?;
    tokio::select! {
        ended = zmtp::handshake(&mut stream, SocketType::Pub) => ended?,
        () = shared.closing() => return Ok(()),
    }
    let _counted = Counted::new(&shared.counts.subscribers);
    let (from, to) = stream.into_split();
    let (subscribed, is_subscribed) = watch::channel(false);
    let (pings, pinged) = mpsc::channel(1);
    tokio::select! {
        ended = subscriptions(from, &shared.topic, entry, subscribed, pings) => ended,
        ended = publish(to, shared, is_subscribed, pinged) => ended,
    }
}

/// Reads the subscriptions of a peer: messages of ZMTP 3.0, or commands of 3.1.
async fn subscriptions(
    mut from: OwnedReadHalf,
    topic: &[u8],
    entry: Entry,
    subscribed: watch::Sender<bool>,
    pings: mpsc::Sender<Vec<u8>>,
) -> Result<(), ZmtpError> {
    let mut filters: Vec<Vec<u8>> = Vec::new();
    let (mut entry, mut _place) = (Some(entry), None);
    loop {
        let (is_added, filter) = match zmtp::read(&mut from).await? {
            Inbound::Message(frames) => match frames.first().and_then(|frame| frame.split_first()) {
                Some((1, filter)) => (true, filter.to_vec()),
                Some((0, filter)) => (false, filter.to_vec()),
                _ => continue,
            },
            Inbound::Command { name, body } => match &name[..] {
                b"SUBSCRIBE" => (true, body),
                b"CANCEL" => (false, body),
                b"PING" => {
                    // Before the first is answered, a second one needs no answer.
                    let _ = pings.try_send(body);
                    continue;
                }
                _ => continue,
            },
        };
        if is_added {
            if filters.len() == FILTERS_MAX {
                return Err(ZmtpError::TooLong("subscriptions", FILTERS_MAX));
            }
            filters.push(filter);
            if let Some(entry) = entry.take() {
                _place = Some(entry.take()?);
            }
        } else if let Some(place) = filters.iter().position(|other| *other == filter) {
            filters.remove(place);
        }
        subscribed.send_replace(filters.iter().any(|filter| topic.starts_with(filter)));
    }
}

/// Writes batches from the subscription on, at the pace of the peer.
async fn publish(
    mut to: OwnedWriteHalf,
    shared: &Shared,
    mut is_subscribed: watch::Receiver<bool>,
    mut pinged: mpsc::Receiver<Vec<u8>>,
) -> Result<(), ZmtpError> {
    let mut newest = shared.history.follow();
    let mut closing = shared.is_closing.subscribe();
    let mut cursor = None;
    loop {
        // First: the newest batch is there before the publisher closes.
        let is_closing = *closing.borrow_and_update();
        let at = if *is_subscribed.borrow_and_update() {
            let next = *newest.borrow_and_update();
            let number = *cursor.get_or_insert(next);
            (number, shared.history.at(number))
        } else {
            cursor = None;
            (0, At::Ahead)
        };
        match at {
            (number, At::Batch(payload)) => {
                let number_bytes = number.to_be_bytes();
                send(&mut to, shared, &[&shared.topic, &number_bytes], &payload).await?;
                cursor = Some(number + 1);
                if let Ok(ping) = pinged.try_recv() {
                    zmtp::write_pong(&mut to, &ping, shared.patience).await?;
                }
            }
            (number, At::Gone { oldest }) => {
                shared.counts.skipped.fetch_add(oldest - number, Relaxed);
                cursor = Some(oldest);
            }
            (_, At::Ahead) if is_closing => return Ok(to.shutdown().await?),
            (_, At::Ahead) => tokio::select! {
                _ = closing.changed() => {}
                changed = newest.changed() => if changed.is_err() { return Ok(()) },
                changed = is_subscribed.changed() => if changed.is_err() { return Ok(()) },
                Some(ping) = pinged.recv() => zmtp::write_pong(&mut to, &ping, shared.patience).await?,
            },
        }
    }
}

async fn requests(mut stream: TcpStream, shared: &Shared, entry: Entry) -> Result<(), ZmtpError> {
    stream.set_nodelay(true)?;
    tokio::select! {
        ended = zmtp::handshake(&mut stream, SocketType::Router) => ended?,
        () = shared.closing() => return Ok(()),
    }
    let _place = entry.take()?;
    loop {
        let read = tokio::select! {
            read = zmtp::read(&mut stream) => read?,
            () = shared.closing() => return Ok(stream.shutdown().await?),
        };
        let frames = match read {
            Inbound::Message(frames) => frames,
            Inbound::Command { name, body } => {
                if name == b"PING" {
                    zmtp::write_pong(&mut stream, &body, shared.patience).await?;
                }
                continue;
            }
        };
        let [delimiter, number] = &frames[..] else {
            return Err(ZmtpError::Malformed("a request is an empty frame and a number"));
        };
        if !delimiter.is_empty() || number.is_empty() || number.len() > 8 {
            return Err(ZmtpError::Malformed("a request is an empty frame and a number of 8 bytes"));
        }
        let begin = number.iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
        shared.counts.replays.fetch_add(1, Relaxed);
        replay(&mut stream, shared, begin).await?;
    }
}

/// Sends the batches from a number up to the newest, and the end.
async fn replay(to: &mut (impl AsyncWrite + Unpin), shared: &Shared, begin: u64) -> Result<(), ZmtpError> {
    let (oldest, end) = shared.history.range();
    let mut next = begin;
    // This process has never reached a number ahead.
    if begin < oldest || begin > end {
        next = snapshot(to, shared).await?;
    }
    while next < end {
        next = match shared.history.at(next) {
            At::Batch(payload) => {
                send(to, shared, &[b"", &next.to_be_bytes()], &payload).await?;
                next + 1
            }
            // The peer reads more slowly than batches are made.
            At::Gone { .. } => snapshot(to, shared).await?,
            At::Ahead => break,
        };
    }
    send(to, shared, &[b"", &END], b"").await
}

/// Sends a listing of the cache. Returns the next number.
async fn snapshot(to: &mut (impl AsyncWrite + Unpin), shared: &Shared) -> Result<u64, ZmtpError> {
    let (answer, answered) = oneshot::channel();
    let ended = || ZmtpError::Io(std::io::ErrorKind::BrokenPipe.into());
    shared.snapshots.send(answer).await.map_err(|_| ended())?;
    let (number, payload) = answered.await.map_err(|_| ended())?;
    shared.counts.snapshots.fetch_add(1, Relaxed);
    send(to, shared, &[b"", &number.to_be_bytes()], &payload).await?;
    Ok(number + 1)
}

async fn send(
    to: &mut (impl AsyncWrite + Unpin),
    shared: &Shared,
    first: &[&[u8]],
    payload: &[u8],
) -> Result<(), ZmtpError> {
    zmtp::write_all(to, &zmtp::multipart(first, payload.len()), shared.patience).await?;
    zmtp::write_all(to, payload, shared.patience).await
}

struct Counted<'a>(&'a AtomicU64);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicU64) -> Self {
        count.fetch_add(1, Relaxed);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}
