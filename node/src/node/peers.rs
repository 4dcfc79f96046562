//! The peers of a node: their links, and the ways to them.

use std::collections::HashMap;
use std::sync::Arc;

use kvpool::transport::PeerId;
use tokio::sync::mpsc;

use super::message::{NodeMessage, Way};
use crate::admin::MigrationTransport;
use crate::protocol::{Incarnation, LinkId};
use crate::transport::tcp::{Link, SocketKind};

/// Messages that wait for a link. More are dropped; the protocol repeats them.
const QUEUE: usize = 256;

/// An established link.
pub(super) struct Line {
    pub(super) link: Arc<Link>,
    queue: mpsc::Sender<NodeMessage>,
}

impl Line {
    /// Starts the task that writes to a link.
    pub(super) fn new(link: Arc<Link>) -> Self {
        let (queue, mut queued) = mpsc::channel::<NodeMessage>(QUEUE);
        let writer = link.clone();
        tokio::spawn(async move {
            while let Some(message) = queued.recv().await {
                if writer.send(&message).await.is_err() {
                    break;
                }
            }
        });
        Self { link, queue }
    }

    fn is_alive(&self) -> bool {
        self.link.cause().is_none()
    }
}

/// A peer, as long as this node's process lives.
pub(super) struct Peer {
    pub(super) name: String,
    pub(super) incarnation: Option<Incarnation>,
    /// The newest last.
    lines: Vec<Line>,
    /// Its numbers at the transports.
    ways: HashMap<Way, PeerId>,
}

impl Peer {
    pub(super) fn is_up(&self) -> bool {
        self.lines.iter().any(Line::is_alive)
    }

    /// Queues a message at the newest live link. Returns false if it was dropped.
    pub(super) fn send(&self, message: NodeMessage) -> bool {
        let line = self.lines.iter().rev().find(|line| line.is_alive());
        line.is_some_and(|line| line.queue.try_send(message).is_ok())
    }

    /// Returns the best way to the peer.
    pub(super) fn way(&self) -> Option<(Way, PeerId)> {
        [Way::Nixl, Way::Tcp].into_iter().find_map(|way| Some((way, *self.ways.get(&way)?)))
    }

    /// Returns the transport that carries the bytes of a way.
    pub(super) fn transport(&self, way: Way) -> MigrationTransport {
        let newest = self.lines.last().map(|line| line.link.kind());
        match (way, newest) {
            (Way::Nixl, _) => MigrationTransport::Nixl,
            (Way::Tcp, Some(SocketKind::Tls)) => MigrationTransport::Tls,
            (Way::Tcp, Some(SocketKind::Unix)) => MigrationTransport::Unix,
            (Way::Tcp, _) => MigrationTransport::Tcp,
        }
    }

    pub(super) fn on(&self, way: Way) -> Option<PeerId> {
        self.ways.get(&way).copied()
    }

    pub(super) fn set_way(&mut self, way: Way, peer: PeerId) {
        self.ways.insert(way, peer);
    }

    /// Closes its links, which are then reported as lost.
    pub(super) fn cut(&self) {
        self.lines.iter().for_each(|line| line.link.close());
    }

    pub(super) fn close(&mut self) {
        self.lines.drain(..).for_each(|line| line.link.close());
    }
}

/// What a new link means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Joined {
    /// Of the process that is known, or the first one.
    Same(LinkId),
    /// Of another process: the former one has ended.
    Restarted(LinkId),
    /// Of another process, while the known one answers.
    Refused,
}

/// All peers.
#[derive(Default)]
pub(super) struct Peers {
    all: Vec<Peer>,
}

impl Peers {
    /// Adds a link.
    pub(super) fn join(&mut self, link: Arc<Link>) -> Joined {
        let incarnation = Incarnation(link.peer().incarnation);
        let name = &link.peer().name;
        let place = self.all.iter().position(|peer| peer.name == *name).unwrap_or_else(|| {
            let (lines, ways) = (Vec::new(), HashMap::new());
            self.all.push(Peer { name: name.clone(), incarnation: None, lines, ways });
            self.all.len() - 1
        });
        let (peer, id) = (&mut self.all[place], LinkId(place as u32));
        let before = peer.incarnation;
        if before.is_some_and(|before| before != incarnation) {
            if peer.is_up() {
                link.close();
                return Joined::Refused;
            }
            peer.lines.clear();
            peer.ways.clear();
        }
        peer.incarnation = Some(incarnation);
        peer.lines.push(Line::new(link));
        match before {
            Some(before) if before != incarnation => Joined::Restarted(id),
            _ => Joined::Same(id),
        }
    }

    /// Removes a link that was lost. Returns whether it was the peer's last one.
    pub(super) fn leave(&mut self, id: LinkId, link: &Arc<Link>) -> bool {
        let Some(peer) = self.all.get_mut(id.0 as usize) else { return false };
        let count = peer.lines.len();
        peer.lines.retain(|line| !Arc::ptr_eq(&line.link, link));
        count > 0 && peer.lines.is_empty()
    }

    pub(super) fn get(&self, id: LinkId) -> Option<&Peer> {
        self.all.get(id.0 as usize)
    }

    pub(super) fn get_mut(&mut self, id: LinkId) -> Option<&mut Peer> {
        self.all.get_mut(id.0 as usize)
    }

    pub(super) fn find(&self, name: &str) -> Option<LinkId> {
        self.all.iter().position(|peer| peer.name == name).map(|place| LinkId(place as u32))
    }

    pub(super) fn name(&self, id: LinkId) -> &str {
        self.get(id).map_or("unknown", |peer| &peer.name)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.all.iter()
    }

    pub(super) fn close(&mut self) {
        self.all.iter_mut().for_each(Peer::close);
    }
}
