//! Peers that connect and disconnect, and their messages.

use std::sync::Arc;

use kvpool::transport::{PeerId, SourceState, Tag, TransferState, TransportError};

use super::driver::{Driver, Quarantined};
use super::input::Input;
use crate::node::error::NodeError;
use crate::node::job::Job;
use crate::node::message::{NodeMessage, Way};
use crate::node::peers::{self, Joined, Peer};
use crate::protocol::{Bytes, Incarnation, LinkId};
use crate::transport::tcp::{Link, LinkError};

/// Most finished grants of peers that are remembered.
const SAID_OVER_MAX: usize = 1024;

impl Driver {
    pub(super) fn link_up(&mut self, link: Arc<Link>) {
        if link.cause().is_some() {
            return;
        }
        let known = self.peers.find(&link.peer().name);
        if self.is_draining && !known.is_some_and(|id| self.is_at_stake(id)) {
            return link.close();
        }
        self.forget();
        let mut peers = std::mem::take(&mut self.peers);
        let joined = peers.join(&link, self.setup.restarts, |id| self.is_at_stake(id));
        self.peers = peers;
        let (id, before) = match joined {
            Joined::Same(id) => (id, None),
            Joined::Restarted(id, before) => (id, Some(before)),
            Joined::Refused(denial) => return peers::refuse(link, denial),
        };
        let incarnation = Incarnation(link.peer().incarnation);
        if let Some(peer) = self.peers.get_mut(id) {
            tracing::info!(peer = peer.name, address = %link.address(), "linked");
            peer.say_layout(&self.setup.fingerprint, link.address());
            if let Ok(number) = self.setup.tcp.attach(&link) {
                peer.set_way(Way::Tcp, number);
            }
        }
        self.introduce(id);
        self.read(id, link);
        self.note_link(id, true);
        let actions = self.setup.machines.link_up(self.now(), id, incarnation);
        self.act(actions);
        if let Some(before) = before {
            self.process_has_ended(id, &before);
        }
        self.ask(Some(id));
    }

    /// Tells a peer how to reach this node by other transports.
    fn introduce(&self, id: LinkId) {
        let (Some(carrier), Some(peer)) = (self.setup.carriers.get(&Way::Nixl), self.peers.get(id)) else {
            return;
        };
        if let Ok(metadata) = Bytes::new(carrier.transport.metadata())
            && let Err(error) = peer.send(&NodeMessage::Reach { way: Way::Nixl, metadata })
        {
            tracing::warn!(peer = peer.name, %error, "NIXL is not used");
        }
    }

    fn read(&self, id: LinkId, link: Arc<Link>) {
        let inputs = self.setup.sender.clone();
        tokio::spawn(async move {
            while let Ok((message, room)) = link.recv_held::<NodeMessage>().await {
                let Some(inputs) = inputs.upgrade() else { return };
                if inputs.send(Input::Message(id, link.clone(), Box::new(message), room)).await.is_err() {
                    return;
                }
            }
            if let Some(inputs) = inputs.upgrade() {
                let _ = inputs.send(Input::LinkLost(id, link)).await;
            }
        });
    }

    pub(super) fn link_lost(&mut self, id: LinkId, link: &Arc<Link>) {
        self.lose_questions(id, link);
        let reason = link.cause().unwrap_or(LinkError::Closed);
        let (peer, address) = (&link.peer().name, link.address());
        let is_cut = !matches!(reason, LinkError::Closed | LinkError::Ended);
        if is_cut && self.peers.reports.is_new(format!("{reason} {peer}")) {
            tracing::warn!(peer, %address, %reason, "the link was cut");
        } else {
            tracing::info!(peer, %address, %reason, "link lost");
        }
        if self.peers.leave(id, link) {
            self.note_link(id, false);
            let actions = self.setup.machines.link_lost(self.now(), id);
            self.act(actions);
        }
        self.forget();
    }

    /// Handles the operator's declaration that the process of a peer has ended.
    pub(super) fn declared_ended(&mut self, name: &str) -> Result<Vec<u64>, NodeError> {
        let ended = self.peers.take(name)?;
        let of = |job: &Job| ended.iter().any(|(id, _)| *id == job.link);
        let doubts = self.doubts().filter(|(_, job, _)| of(job));
        let sequences: Vec<_> = doubts.filter_map(|(_, job, _)| Some(job.sequence?.0)).collect();
        tracing::warn!(
            peer = name,
            ?sequences,
            "declared to have ended: this node goes on with the sequences"
        );
        for (id, peer) in ended {
            let actions = self.setup.machines.peer_ended(self.now(), id);
            self.act(actions);
            self.process_has_ended(id, &peer);
        }
        Ok(sequences)
    }

    /// Handles the end of a peer's process: it writes no more, and nothing is written to it.
    fn process_has_ended(&mut self, id: LinkId, before: &Peer) {
        let (gone, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.quarantined).into_iter().partition(|grant| grant.link == id);
        self.quarantined = rest;
        gone.iter().for_each(|grant| drop(self.end_grant(grant.way, grant.tag, SourceState::Over)));
        self.writing.retain(|(link, ..)| *link != id);
        self.said_over.retain(|(link, ..)| *link != id);
        self.leave_transports(before);
    }

    fn forget(&mut self) {
        let mut peers = std::mem::take(&mut self.peers);
        let gone = peers.forget(|id, peer| self.has_reason(id, peer));
        self.peers = peers;
        for (id, peer) in gone {
            // It has no machines left.
            let actions = self.setup.machines.peer_ended(self.now(), id);
            self.act(actions);
            self.leave_transports(&peer);
        }
    }

    fn leave_transports(&self, peer: &Peer) {
        for (way, number) in peer.ways().filter(|(way, _)| *way != Way::Tcp) {
            if let Some(carrier) = self.setup.carriers.get(&way) {
                carrier.transport.remove_peer(number);
            }
        }
    }

    /// Ends a grant. Returns its state, or `None` without that transport.
    pub(super) fn end_grant(&self, way: Way, tag: Tag, source: SourceState) -> Option<TransferState> {
        Some(self.setup.carriers.get(&way)?.transport.revoke(tag, source))
    }

    /// Asks all peers, or one that has just linked, whether they still write quarantined grants.
    pub(super) fn ask(&mut self, of: Option<LinkId>) {
        let all = std::mem::take(&mut self.quarantined);
        let is_quarantined = |grant: &Quarantined| {
            // A transport that receives every byte itself needs no answer.
            let state = self.end_grant(grant.way, grant.tag, SourceState::Unknown);
            matches!(state, Some(TransferState::Quarantined(_)))
        };
        self.quarantined = all.into_iter().filter(is_quarantined).collect();
        for grant in self.quarantined.iter().filter(|grant| of.is_none_or(|of| of == grant.link)) {
            if let Some(peer) = self.peers.get(grant.link) {
                // Repeated if it is lost.
                let _ = peer.send(&NodeMessage::IsOver { way: grant.way, tag: grant.tag.0 });
            }
        }
    }

    /// Tells a peer that this node no longer writes a grant.
    pub(super) fn say_over(&mut self, id: LinkId, way: Way, tag: u64) {
        let Some(peer) = self.peers.get(id) else { return };
        // If it is lost, the peer asks again.
        let _ = peer.send(&NodeMessage::Over { way, tag });
        let grant = (id, way, tag);
        if !self.said_over.contains(&grant) {
            self.said_over.push_back(grant);
        }
        if self.said_over.len() > SAID_OVER_MAX {
            self.said_over.pop_front();
        }
    }

    pub(super) fn message(&mut self, id: LinkId, link: &Link, message: NodeMessage) {
        match message {
            NodeMessage::Migration(envelope) => {
                let actions = self.setup.machines.received(self.now(), id, envelope);
                self.act(actions);
            }
            NodeMessage::Reach { way: Way::Nixl, metadata } => self.reach(id, metadata.to_vec()),
            NodeMessage::Reach { .. } => {}
            NodeMessage::Over { way, tag } => {
                let of = |grant: &Quarantined| grant.link == id && grant.way == way && grant.tag.0 == tag;
                if let Some(place) = self.quarantined.iter().position(of)
                    && !matches!(
                        self.end_grant(way, Tag(tag), SourceState::Over),
                        Some(TransferState::Quarantined(_))
                    )
                {
                    self.quarantined.swap_remove(place);
                }
            }
            NodeMessage::IsOver { way, tag } => {
                if !self.writing.contains(&(id, way, tag)) {
                    self.say_over(id, way, tag);
                }
            }
            NodeMessage::AskCached(question) => self.tell_cached(link, &question),
            NodeMessage::TellCached(answer) => self.told_cached(id, &answer),
            NodeMessage::Refused(denial) => link.denied(denial),
        }
    }

    /// Adds a peer to NIXL on a blocking thread, once per process.
    fn reach(&mut self, id: LinkId, metadata: Vec<u8>) {
        let carrier = self.setup.carriers.get(&Way::Nixl).cloned();
        let (Some(carrier), Some(inputs)) = (carrier, self.setup.sender.upgrade()) else { return };
        let Some(peer) = self.peers.get_mut(id).filter(|peer| !peer.was_added) else { return };
        peer.was_added = true;
        let incarnation = peer.incarnation;
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
        let Some(peer) = self.peers.get_mut(id).filter(|peer| peer.incarnation == incarnation) else {
            if let (Ok(number), Some(carrier)) = (reached, self.setup.carriers.get(&Way::Nixl)) {
                carrier.transport.remove_peer(number);
            }
            return;
        };
        match reached {
            Ok(number) => peer.set_way(Way::Nixl, number),
            Err(error) => tracing::warn!(peer = peer.name, %error, "NIXL is not used"),
        }
    }
}
