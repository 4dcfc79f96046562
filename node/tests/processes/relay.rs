//! Passes on what two nodes send each other, and sees each message.
//!
//! ```text
//! source  ---->  relay  ---->  target      control streams: frame by frame
//!         <----         <----              data streams: head by head, bytes in two halves
//! ```
//!
//! The source connects to the relay, which connects to the target. When what the [fault](crate::fault)
//! names passes for the first time, the relay stops passing anything on in either direction and tells
//! the case, which acts and lets it [go on](Relay::go_on). A connection to a target that is down, or
//! made while the links are cut, waits, as if its packets were lost.

use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvpool_node::protocol::{Envelope, Message, MigrationId, ToSource, ToTarget};
use kvpool_node::wire::{FRAME_HEAD, FrameHead, HEADER, Header, ITEM_HEAD, PROOF, Role, StreamHead};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::fault::{Step, When};

/// Bytes of the longest frame.
const FRAME_MAX: usize = 64 << 20;

/// Time for which the end of a data stream is held back: of a process that dies, the messages arrive
/// first, as they would if the last item were longer.
const LAST: Duration = Duration::from_millis(30);

/// Names of the two ways.
const OUT: &str = "source -> target";
const BACK: &str = "target -> source";

/// What was delivered: a message of a migration, or the bytes of a data item.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Time since the relay began.
    pub at: Duration,
    /// From where to where; empty for a note.
    pub way: &'static str,
    pub id: Option<MigrationId>,
    pub name: String,
}

/// Connections of two nodes. Dropping it ends them.
pub struct Relay {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

struct Shared {
    began: Instant,
    /// Where the target listens; `None` while it is down.
    target: watch::Sender<Option<SocketAddr>>,
    /// Whether connections can be made.
    is_healed: watch::Sender<bool>,
    /// Number of cuts.
    cuts: watch::Sender<u64>,
    /// Whether anything is passed on.
    is_open: watch::Sender<bool>,
    /// The step that is waited for, and the case that is told; `None` once it has happened.
    awaited: Mutex<Option<(Step, When, Sender<()>)>>,
    seen: Mutex<Vec<Seen>>,
}

impl Relay {
    /// Starts a relay, which tells `hits` when this step happens for the first time.
    pub fn start(runtime: &Handle, step: Step, when: When, hits: Sender<()>) -> Self {
        let shared = Arc::new(Shared {
            began: Instant::now(),
            target: watch::Sender::new(None),
            is_healed: watch::Sender::new(true),
            cuts: watch::Sender::new(0),
            is_open: watch::Sender::new(true),
            awaited: Mutex::new(Some((step, when, hits))),
            seen: Mutex::default(),
        });
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let serving = shared.clone();
        let accepting = runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(serving.clone(), stream));
            }
        });
        Self { address, shared, accepting }
    }

    /// Sets where the target listens; `None` while it is down.
    pub fn lead_to(&self, target: Option<SocketAddr>) {
        self.shared.target.send_replace(target);
    }

    /// Passes on again what comes.
    pub fn go_on(&self) {
        self.shared.is_open.send_replace(true);
    }

    /// Cuts all connections; with `is_healed`, new ones can be made at once.
    pub fn cut(&self, is_healed: bool) {
        self.shared.is_healed.send_replace(is_healed);
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Permits connections again.
    pub fn heal(&self) {
        self.shared.is_healed.send_replace(true);
    }

    /// Returns what was delivered so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// Notes something else in the list of what was delivered.
    pub fn note(&self, what: &str) {
        self.shared.note("", None, what.to_owned());
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut(false);
    }
}

impl Shared {
    fn note(&self, way: &'static str, id: Option<MigrationId>, name: String) {
        let at = self.began.elapsed();
        self.seen.lock().unwrap().push(Seen { at, way, id, name });
    }

    /// Tells the case if this is the awaited step; waits until the relay is open.
    async fn pass(&self, step: Option<Step>, when: When) {
        {
            let mut awaited = self.awaited.lock().unwrap();
            if let Some((awaited_step, awaited_when, hits)) = &*awaited
                && (step, when) == (Some(*awaited_step), *awaited_when)
            {
                self.is_open.send_replace(false);
                let _ = hits.send(());
                *awaited = None;
            }
        }
        let _ = self.is_open.subscribe().wait_for(|is_open| *is_open).await;
    }
}

/// Connects to the target, and passes on until one side ends or the links are cut.
async fn serve(shared: Arc<Shared>, source: TcpStream) {
    let mut cuts = shared.cuts.subscribe();
    let passing = async {
        let target = connect(&shared).await;
        let (role, known) = watch::channel(None);
        for stream in [&source, &target] {
            stream.set_nodelay(true)?;
        }
        let ((from_source, to_source), (from_target, to_target)) = (source.into_split(), target.into_split());
        let mut out = Way { shared: &shared, from: from_source, to: to_target, name: OUT };
        let mut back = Way { shared: &shared, from: from_target, to: to_source, name: BACK };
        let both = (out.run_out(&role), back.run_back(known));
        let (out_ended, back_ended) = tokio::join!(both.0, both.1);
        out_ended.and(back_ended)
    };
    tokio::select! {
        biased;
        _ = cuts.changed() => {}
        // The nodes close connections whenever they end a link.
        _ = passing => {}
    }
}

/// Waits until a connection to the target can be made.
async fn connect(shared: &Shared) -> TcpStream {
    let (mut healed, mut target) = (shared.is_healed.subscribe(), shared.target.subscribe());
    loop {
        let _ = healed.wait_for(|is_healed| *is_healed).await;
        let address = *target.wait_for(Option::is_some).await.expect("the relay lives");
        match TcpStream::connect(address.expect("an address")).await {
            Ok(stream) => return stream,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

/// One direction of a connection.
struct Way<'a> {
    shared: &'a Shared,
    from: OwnedReadHalf,
    to: OwnedWriteHalf,
    name: &'static str,
}

type Passed = std::io::Result<()>;

impl Way<'_> {
    /// Passes on what the connector sends. Its header says what the connection is for.
    async fn run_out(&mut self, role: &watch::Sender<Option<Role>>) -> Passed {
        let header = self.pass::<HEADER>().await?;
        let header = Header::decode(&header).expect("a header of this version");
        role.send_replace(Some(header.role));
        self.pass::<PROOF>().await?;
        self.run(header.role).await
    }

    async fn run_back(&mut self, mut role: watch::Receiver<Option<Role>>) -> Passed {
        self.pass::<HEADER>().await?;
        self.pass::<{ 1 + PROOF }>().await?;
        let role = *role.wait_for(Option::is_some).await.map_err(std::io::Error::other)?;
        self.run(role.expect("a role")).await
    }

    /// Passes on until one side ends, and then the end.
    async fn run(&mut self, role: Role) -> Passed {
        // The first message of each side.
        let (head, body) = self.read_frame().await?;
        self.write(&[&head[..], &body].concat()).await?;
        let ended = match role {
            Role::Data => self.items().await,
            _ => self.messages().await,
        };
        if role == Role::Data {
            tokio::time::sleep(LAST).await;
        }
        self.to.shutdown().await?;
        ended
    }

    async fn messages(&mut self) -> Passed {
        loop {
            let (head, body) = self.read_frame().await?;
            let (id, step, name) = describe(&body);
            self.shared.pass(step, When::Before).await;
            self.write(&[&head[..], &body].concat()).await?;
            if !body.is_empty() {
                self.shared.note(self.name, id, name);
            }
            self.shared.pass(step, When::After).await;
        }
    }

    async fn items(&mut self) -> Passed {
        loop {
            let mut head = [0; ITEM_HEAD];
            self.from.read_exact(&mut head).await?;
            let StreamHead::Item(item) = StreamHead::decode(&head).expect("a head of this version") else {
                self.shared.pass(None, When::Before).await;
                self.write(&head).await?;
                continue;
            };
            let mut bytes = vec![0; item.bytes as usize];
            self.from.read_exact(&mut bytes).await?;
            self.shared.pass(Some(Step::Bytes), When::Before).await;
            let (first, rest) = bytes.split_at(bytes.len() / 2);
            self.write(&[&head[..], first].concat()).await?;
            self.shared.pass(Some(Step::Bytes), When::After).await;
            self.write(rest).await?;
            self.shared.note(self.name, None, format!("{} bytes", item.bytes));
        }
    }

    async fn read_frame(&mut self) -> std::io::Result<([u8; FRAME_HEAD], Vec<u8>)> {
        let mut head = [0; FRAME_HEAD];
        self.from.read_exact(&mut head).await?;
        let frame = FrameHead::decode(&head, FRAME_MAX).expect("a frame of this version");
        let mut body = vec![0; frame.length];
        self.from.read_exact(&mut body).await?;
        Ok((head, body))
    }

    /// Passes on a part of fixed size.
    async fn pass<const N: usize>(&mut self) -> std::io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.from.read_exact(&mut bytes).await?;
        self.shared.pass(None, When::Before).await;
        self.write(&bytes).await?;
        Ok(bytes)
    }

    async fn write(&mut self, bytes: &[u8]) -> Passed {
        self.to.write_all(bytes).await
    }
}

/// Returns what a frame of the control stream says, as far as a relay needs it.
///
/// A message of a migration is the first kind of a node's messages.
fn describe(body: &[u8]) -> (Option<MigrationId>, Option<Step>, String) {
    let envelope = match postcard::take_from_bytes::<u32>(body) {
        Ok((0, rest)) => postcard::take_from_bytes::<Envelope>(rest).ok().map(|(envelope, _)| envelope),
        _ => None,
    };
    let Some(Envelope { id, message, .. }) = envelope else { return (None, None, "other".into()) };
    let step = match &message {
        Message::ToTarget(ToTarget::Prepare { .. }) => Some(Step::Prepare),
        Message::ToTarget(ToTarget::Sent { .. }) => Some(Step::Sent),
        Message::ToTarget(ToTarget::Commit { .. }) => Some(Step::Commit),
        Message::ToTarget(ToTarget::Forget { .. }) => Some(Step::Forget),
        Message::ToSource(ToSource::Prepared { .. }) => Some(Step::Prepared),
        Message::ToSource(ToSource::Verified { .. }) => Some(Step::Verified),
        Message::ToSource(ToSource::Committed { .. }) => Some(Step::Committed),
        _ => None,
    };
    let text = match (&message, step) {
        (_, Some(step)) => format!("{step:?}"),
        (Message::ToTarget(message), _) => format!("{message:?}"),
        (Message::ToSource(message), _) => format!("{message:?}"),
    };
    (Some(id), step, text.chars().take(100).collect())
}
