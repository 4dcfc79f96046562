//! Peers that come and go, and their messages.

use std::sync::Arc;

use kvpool::transport::{PeerId, SourceState, Tag, TransportError};

use super::driver::{Driver, Quarantined};
use super::input::Input;
use crate::node::message::{NodeMessage, Way};
use crate::node::peers::Joined;
use crate::protocol::{Bytes, Incarnation, LinkId};
use crate::transport::tcp::Link;

impl Driver {
    pub(super) fn link_up(&mut self, link: Arc<Link>) {
        if self.is_draining {
            return link.close();
        }
        let joined = self.peers.join(link.clone());
        let (Joined::Same(id) | Joined::Restarted(id)) = joined else { return };
        if let Joined::Restarted(_) = joined {
            self.peer_is_gone(id);
        }
        if let (Ok(number), Some(peer)) = (self.tcp.attach(&link), self.peers.get_mut(id)) {
            peer.set_way(Way::Tcp, number);
        }
        self.introduce(id);
        self.read(id, link.clone());
        let incarnation = Incarnation(link.peer().incarnation);
        let actions = self.machines.link_up(self.now(), id, incarnation);
        self.act(actions);
    }

    /// Tells a peer how else this node can be reached.
    pub(super) fn introduce(&self, id: LinkId) {
        let (Some(carrier), Some(peer)) = (self.carriers.get(&Way::Nixl), self.peers.get(id)) else { return };
        if let Ok(metadata) = Bytes::new(carrier.transport.metadata()) {
            peer.send(NodeMessage::Reach { way: Way::Nixl, metadata });
        }
    }

    /// Starts the task that reads a link.
    pub(super) fn read(&self, id: LinkId, link: Arc<Link>) {
        let Some(inputs) = self.sender.upgrade() else { return };
        let inputs = inputs.downgrade();
        tokio::spawn(async move {
            while let Ok(message) = link.recv::<NodeMessage>().await {
                let Some(inputs) = inputs.upgrade() else { return };
                if inputs.send(Input::Message(id, message)).await.is_err() {
                    return;
                }
            }
            if let Some(inputs) = inputs.upgrade() {
                let _ = inputs.send(Input::LinkLost(id, link)).await;
            }
        });
    }

    pub(super) fn link_lost(&mut self, id: LinkId, link: &Arc<Link>) {
        if self.peers.leave(id, link) {
            let actions = self.machines.link_lost(self.now(), id);
            self.act(actions);
        }
    }

    /// The process of a peer has ended: it writes no more.
    pub(super) fn peer_is_gone(&mut self, id: LinkId) {
        let (gone, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.quarantined).into_iter().partition(|grant| grant.link == id);
        self.quarantined = rest;
        gone.iter().for_each(|grant| self.end_grant(grant.way, grant.tag, SourceState::Over));
    }

    pub(super) fn end_grant(&self, way: Way, tag: Tag, source: SourceState) {
        if let Some(carrier) = self.carriers.get(&way) {
            carrier.transport.revoke(tag, source);
        }
    }

    pub(super) fn message(&mut self, id: LinkId, message: NodeMessage) {
        match message {
            NodeMessage::Migration(envelope) => {
                let actions = self.machines.received(self.now(), id, envelope);
                self.act(actions);
            }
            NodeMessage::Reach { way: Way::Nixl, metadata } => self.reach(id, metadata.to_vec()),
            NodeMessage::Reach { .. } => {}
            NodeMessage::Over { way, tag } => {
                let of = |grant: &Quarantined| grant.link == id && grant.way == way && grant.tag.0 == tag;
                if let Some(place) = self.quarantined.iter().position(of) {
                    self.quarantined.swap_remove(place);
                    self.end_grant(way, Tag(tag), SourceState::Over);
                }
            }
        }
    }

    /// Adds a peer to NIXL on a blocking thread.
    pub(super) fn reach(&self, id: LinkId, metadata: Vec<u8>) {
        let (Some(carrier), Some(inputs)) = (self.carriers.get(&Way::Nixl).cloned(), self.sender.upgrade())
        else {
            return;
        };
        let Some(incarnation) = self.peers.get(id).and_then(|peer| peer.incarnation) else { return };
        tokio::task::spawn_blocking(move || {
            let reached = carrier.transport.add_peer(&metadata);
            let _ = inputs.blocking_send(Input::Reached(id, incarnation, reached));
        });
    }

    pub(super) fn reached(
        &mut self,
        id: LinkId,
        incarnation: Incarnation,
        reached: Result<PeerId, TransportError>,
    ) {
        let Some(peer) = self.peers.get_mut(id).filter(|peer| peer.incarnation == Some(incarnation)) else {
            return;
        };
        match reached {
            Ok(number) => peer.set_way(Way::Nixl, number),
            Err(error) => tracing::warn!(peer = peer.name, %error, "NIXL is not used"),
        }
    }
}
