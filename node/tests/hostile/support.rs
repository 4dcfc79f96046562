//! Peers that send any message over a real link.

use std::time::Duration;

use kvpool::Pool;
use kvpool_node::protocol::{
    Attempt, Bytes, CacheAnswer, CacheQuestion, Envelope, Grant, Incarnation, Message, MigrationId, Places,
    Range, ReservationId, ToSource, ToTarget,
};
use kvpool_node::transport::tcp::{
    Address, Endpoint, Identity, Link, LinkError, ListenSettings, PeerSettings,
};
use kvpool_node::wire::{Denial, Limits};
use kvpool_node::{Arrivals, Node, NodeBuilder};
use serde::{Deserialize, Serialize};

pub const WAIT: Duration = Duration::from_secs(20);

/// Time in which nothing is expected to happen.
pub const QUIET: Duration = Duration::from_millis(400);

/// Version of the messages below.
const VERSION: u16 = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Way {
    Tcp,
    Nixl,
}

/// What nodes say to each other, as their crate encodes it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum NodeMessage {
    Migration(Envelope),
    Reach { way: Way, metadata: Bytes<{ 64 << 10 }> },
    Over { way: Way, tag: u64 },
    IsOver { way: Way, tag: u64 },
    AskCached(CacheQuestion),
    TellCached(CacheAnswer),
    Refused(Denial),
}

pub fn local() -> Address {
    Address::Tcp("127.0.0.1:0".parse().unwrap())
}

pub fn builder(name: &str, pool: Pool) -> NodeBuilder {
    Node::builder(pool).name(name).listen(local())
}

pub async fn start(name: &str, pool: Pool) -> (Node, Arrivals) {
    builder(name, pool).start().await.unwrap()
}

/// Starts a node that connects to others.
pub async fn start_beside(name: &str, pool: Pool, others: &[&Node]) -> (Node, Arrivals) {
    let peers = others.iter().map(|node| PeerSettings::new(node.name(), node.addresses()[0].clone()));
    let started = builder(name, pool).peers(peers.collect()).start().await.unwrap();
    for other in others {
        linked(&started.0, other.name(), true).await;
        linked(other, name, true).await;
    }
    started
}

pub async fn linked(node: &Node, peer: &str, is_up: bool) {
    let wanted = (peer.to_owned(), is_up);
    until("a link", async || node.peers().await.unwrap().contains(&wanted)).await;
}

/// Waits until a condition holds.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let held = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WAIT, held).await.unwrap_or_else(|_| panic!("not in time: {what}"));
}

pub async fn soon<T>(what: &str, part: impl Future<Output = T>) -> T {
    tokio::time::timeout(WAIT, part).await.unwrap_or_else(|_| panic!("not in time: {what}"))
}

/// What a peer says of its process.
#[derive(Clone)]
pub struct Process {
    pub name: String,
    pub incarnation: u64,
    pub began_ms: u64,
    pub lock: Option<[u8; 16]>,
    pub limits: Limits,
}

impl Process {
    pub fn new(name: &str, incarnation: u64) -> Self {
        let limits = Limits::default();
        Self { name: name.into(), incarnation, began_ms: incarnation, lock: None, limits }
    }

    pub fn lock(self, lock: u8) -> Self {
        Self { lock: Some([lock; 16]), ..self }
    }
}

/// A peer whose messages are written by a test.
pub struct Peer {
    pub link: Link,
    incarnation: Incarnation,
    _endpoint: Endpoint,
}

impl Peer {
    pub async fn connect(node: &Node, process: &Process) -> Result<Self, LinkError> {
        let identity = Identity::new(&process.name, VERSION)?
            .incarnation(process.incarnation)
            .began_ms(process.began_ms)
            .lock(process.lock);
        let endpoint = Endpoint::bind(ListenSettings::default(), identity, process.limits.clone()).await?;
        let link = endpoint.connect(&PeerSettings::new(node.name(), node.addresses()[0].clone())).await?;
        Ok(Self { link, incarnation: Incarnation(process.incarnation), _endpoint: endpoint })
    }

    pub fn envelope(&self, id: MigrationId, message: Message) -> NodeMessage {
        let to = Incarnation(self.link.peer().incarnation);
        NodeMessage::Migration(Envelope { id, from: self.incarnation, to, message })
    }

    pub async fn to_source(&self, id: MigrationId, message: ToSource) {
        self.link.send(&self.envelope(id, Message::ToSource(message))).await.unwrap();
    }

    pub async fn recv(&self) -> NodeMessage {
        soon("a message", self.link.recv()).await.unwrap()
    }

    /// Waits for a message that satisfies a condition.
    pub async fn wait_for<T>(&self, mut wanted: impl FnMut(NodeMessage) -> Option<T>) -> T {
        loop {
            if let Some(found) = wanted(self.recv().await) {
                return found;
            }
        }
    }

    /// Waits until it is asked to reserve blocks.
    pub async fn prepare(&self) -> MigrationId {
        self.wait_for(|message| match message {
            NodeMessage::Migration(Envelope {
                id,
                message: Message::ToTarget(ToTarget::Prepare { .. }),
                ..
            }) => Some(id),
            _ => None,
        })
        .await
    }

    /// Acts as a target that has all blocks of a sequence, up to the word to commit.
    pub async fn up_to_commit(&self, blocks: u32) -> (MigrationId, ReservationId) {
        let (id, reservation) = (self.prepare().await, ReservationId(7));
        let (accepted, missing, grant) = (places(0, blocks), Places::default(), Grant::default());
        self.to_source(id, ToSource::Prepared { reservation, accepted, missing, grant }).await;
        let attempt = Attempt::default();
        let sent = |message: NodeMessage| {
            matches!(
                message,
                NodeMessage::Migration(Envelope { message: Message::ToTarget(ToTarget::Sent { .. }), .. })
            )
            .then_some(())
        };
        self.wait_for(sent).await;
        let (bad, grant) = (Places::default(), Grant::default());
        self.to_source(id, ToSource::Verified { reservation, attempt, bad, grant }).await;
        let commit = |message: NodeMessage| {
            matches!(
                message,
                NodeMessage::Migration(Envelope { message: Message::ToTarget(ToTarget::Commit { .. }), .. })
            )
            .then_some(())
        };
        self.wait_for(commit).await;
        (id, reservation)
    }

    /// Waits until the node refuses it.
    pub async fn refused(&self) -> Denial {
        self.wait_for(|message| if let NodeMessage::Refused(denial) = message { Some(denial) } else { None })
            .await
    }
}

pub fn places(start: u32, len: u32) -> Places {
    Places::new(vec![Range { start, len }]).unwrap()
}
