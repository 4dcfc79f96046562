//! A peer that is made by hand: it speaks the protocol to a node, and does what no node does.

use std::time::Duration;

use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::transfer::Manifest;
use kvpool::{Dtype, KvLayout, Pool, SequenceId};
use kvpool_node::protocol::{
    Attempt, Bytes, Envelope, Grant, Incarnation, Kind, ManifestBytes, Message, MigrationId, Places,
    ReservationId, ToSource, ToTarget,
};
use kvpool_node::settings;
use kvpool_node::transport::tcp::{
    Address, Endpoint, Identity, Link, LinkError, ListenSettings, PeerSettings, Token,
};
use kvpool_node::wire::{self, Limits};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::common::live::Node;

/// Text of the token of the cluster.
pub const TOKEN: &str = "one-token-of-the-tests";

/// The messages of nodes, of which this peer sends the first.
#[derive(Serialize, Deserialize)]
enum Said {
    Migration(Envelope),
    Reach { way: Way, metadata: Bytes<{ 64 << 10 }> },
    Over { way: Way, tag: u64 },
}

#[derive(Serialize, Deserialize)]
enum Way {
    Tcp,
    Nixl,
}

/// A link to a node.
pub struct Peer {
    runtime: Runtime,
    _endpoint: Endpoint,
    link: Link,
    incarnation: Incarnation,
}

/// Returns the address of a node for peers.
pub fn address(node: &Node) -> Address {
    Address::Tcp(node.listen.parse().unwrap())
}

/// Connects to the node `b` as `hand`, with some version of the messages.
async fn connect(to: &Node, messages: u16) -> Result<(Endpoint, Link), LinkError> {
    let identity = Identity::new("hand", messages)?.token(Token::new(TOKEN.as_bytes())?);
    let endpoint = Endpoint::bind(ListenSettings::default(), identity, Limits::default()).await?;
    let link = endpoint.connect(&PeerSettings::new("b", address(to))).await?;
    Ok((endpoint, link))
}

/// Returns the reason for which a node refuses a version of the messages.
pub fn refusal(to: &Node, messages: u16) -> LinkError {
    let runtime = Runtime::new().unwrap();
    runtime.block_on(connect(to, messages)).map(drop).expect_err("the version was accepted")
}

/// Returns the version of the messages that a node speaks.
pub fn version(of: &Node) -> u16 {
    match refusal(of, u16::MAX) {
        LinkError::Versions { theirs, .. } => theirs.max,
        error => panic!("{error}"),
    }
}

impl Peer {
    /// Links to the node `b`.
    pub fn link(to: &Node) -> Self {
        let version = version(to);
        let runtime = Runtime::new().unwrap();
        let (endpoint, link) = runtime.block_on(connect(to, version)).unwrap();
        let incarnation = Incarnation(endpoint.identity().incarnation_number());
        Self { runtime, _endpoint: endpoint, link, incarnation }
    }

    /// Sends a message of a migration.
    pub fn say(&self, id: u128, message: ToTarget) {
        let (from, to) = (self.incarnation, Incarnation(self.link.peer().incarnation));
        let message = Message::ToTarget(message);
        let envelope = Envelope { id: MigrationId(id), from, to, message };
        self.runtime.block_on(self.link.send(&Said::Migration(envelope))).unwrap();
    }

    /// Waits for the next answer to a migration; heartbeats have none.
    pub fn hear(&self, id: u128) -> ToSource {
        let next = async {
            loop {
                if let Said::Migration(Envelope { id: got, message: Message::ToSource(message), .. }) =
                    self.link.recv().await.unwrap()
                    && got.0 == id
                {
                    return message;
                }
            }
        };
        self.runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), next).await }).unwrap()
    }

    /// Acts as the target of the next migration that has all of its blocks, up to the word to
    /// commit.
    pub fn up_to_commit(&self) {
        let (none, grant, reservation) = (Places::default, Grant::default, ReservationId(7));
        let taken = async {
            loop {
                let Said::Migration(Envelope { id, message: Message::ToTarget(message), .. }) =
                    self.link.recv().await.unwrap()
                else {
                    continue;
                };
                let answer = match message {
                    ToTarget::Prepare { .. } => {
                        ToSource::Prepared { reservation, accepted: none(), missing: none(), grant: grant() }
                    }
                    ToTarget::Sent { attempt, .. } => {
                        ToSource::Verified { reservation, attempt, bad: none(), grant: grant() }
                    }
                    ToTarget::Commit { .. } => return,
                    _ => continue,
                };
                let (from, to) = (self.incarnation, Incarnation(self.link.peer().incarnation));
                let envelope = Envelope { id, from, to, message: Message::ToSource(answer) };
                self.link.send(&Said::Migration(envelope)).await.unwrap();
            }
        };
        self.runtime.block_on(async { tokio::time::timeout(Duration::from_secs(60), taken).await }).unwrap();
    }

    /// Asks for room for a manifest, and returns the answer.
    pub fn prepare(&self, id: u128, manifest: &Manifest) -> ToSource {
        let bytes = wire::encode(manifest, 4 << 20).unwrap();
        let manifest = ManifestBytes::new(bytes).unwrap();
        self.say(id, ToTarget::Prepare { kind: Kind::Migrate, part: None, manifest });
        self.hear(id)
    }

    /// Asks for room that must be given, and returns the reservation.
    pub fn prepared(&self, id: u128, manifest: &Manifest) -> ReservationId {
        match self.prepare(id, manifest) {
            ToSource::Prepared { reservation, .. } => reservation,
            answer => panic!("{answer:?}"),
        }
    }

    /// States that bytes were written, although none were, and returns the number of bad places.
    pub fn pretend(&self, id: u128, reservation: ReservationId, attempt: u8) -> u64 {
        let attempt = Attempt(attempt);
        self.say(id, ToTarget::Sent { reservation, attempt });
        loop {
            match self.hear(id) {
                ToSource::Verified { attempt: of, bad, .. } if of == attempt => return bad.count(),
                ToSource::Verified { .. } | ToSource::Prepared { .. } | ToSource::Status { .. } => {}
                answer => panic!("{answer:?}"),
            }
        }
    }
}

/// Returns the manifest of a sequence for a node of the cluster, with the default layout.
pub fn manifest(sequence: u64, tokens: u32) -> Manifest {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).dtype(Dtype::F16).block_tokens(16);
    let token = settings::Token::new(TOKEN).unwrap();
    let key = HashKey::from_bytes(token.key("kvpool 2026 hashes of cached blocks"));
    let pool = Pool::builder(layout.build().unwrap()).blocks(100);
    let pool = pool.prefix_cache(PrefixConfig::new().key(key)).build().unwrap();
    let ids: Vec<u32> = (0..tokens).collect();
    let builder = pool.sequence(SequenceId(sequence));
    let mut opened = if ids.is_empty() { builder.open() } else { builder.tokens(&ids) }.unwrap();
    let mut batch = pool.begin_batch();
    if !ids.is_empty() {
        batch.append(&mut opened, ids.len()).unwrap();
    }
    batch.finish();
    pool.export(opened).unwrap().manifest().unwrap()
}

/// Returns a manifest that was changed as JSON.
pub fn changed(manifest: &Manifest, change: impl FnOnce(&mut Value)) -> Manifest {
    let mut json = serde_json::to_value(manifest).unwrap();
    change(&mut json);
    serde_json::from_value(json).unwrap()
}
