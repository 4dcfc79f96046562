//! The peers of a node: their links, and the transports that reach them.
//!
//! A peer is a process. Of the processes of one name, the *present* one can be linked; a *former*
//! one is remembered while it may have a copy that only one side may continue with.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvpool::transport::PeerId;
use tokio::time::timeout;

use super::error::NodeError;
use super::message::{NodeMessage, Way};
use super::reports::Reports;
use super::status::{PeerStatus, REMEDY};
use crate::admin::MigrationTransport;
use crate::protocol::{Incarnation, LinkId};
use crate::settings::Restarts;
use crate::transport::tcp::{Address, Link, LinkError, SocketKind};
use crate::wire::Denial;

const PEERS_MAX: usize = 1024;

/// Most peers that are remembered only so that a lost link can be reported.
const LOST_MAX: usize = 64;

/// Time for sending the last messages of a link that is closed.
pub(super) const LAST_WORDS: Duration = Duration::from_millis(500);

const OTHER_LAYOUT: &str = "its blocks have another layout: only parts of copies are transferred";

pub(super) struct Peer {
    pub(super) name: String,
    pub(super) incarnation: Incarnation,
    /// When it began by its own clock; at most the time of the first link by this node's clock.
    began_ms: u64,
    /// Fingerprint of its block layout; zeros if it states none.
    fingerprint: [u8; 16],
    was_layout_said: bool,
    lock: Option<[u8; 16]>,
    /// Newest last.
    lines: Vec<Arc<Link>>,
    /// Its ids at the transports.
    ways: HashMap<Way, PeerId>,
    /// Whether a transport was given its address.
    pub(super) was_added: bool,
    /// Whether another process has taken its name.
    is_former: bool,
    /// When its last link was lost, as a counter of such events.
    lost: u64,
    refused: Option<(Incarnation, Denial)>,
    /// What an operator can do about it.
    remedy: Option<&'static str>,
}

impl Peer {
    fn new(link: &Link) -> Self {
        let of = link.peer();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            name: of.name.clone(),
            incarnation: Incarnation(of.incarnation),
            // A clock that runs ahead must not lock out the next processes.
            began_ms: of.statement.began_ms.min(now.as_millis() as u64),
            fingerprint: of.fingerprint,
            was_layout_said: false,
            lock: of.statement.lock,
            lines: Vec::new(),
            ways: HashMap::new(),
            was_added: false,
            is_former: false,
            lost: 0,
            refused: None,
            remedy: None,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.lines.iter().any(|line| line.cause().is_none())
    }

    /// Returns whether its block layout has another fingerprint.
    pub(super) fn has_other_layout(&self, than: &[u8; 16]) -> bool {
        self.fingerprint != [0; 16] && self.fingerprint != *than
    }

    /// Logs once that its block layout has another fingerprint, if so.
    pub(super) fn say_layout(&mut self, than: &[u8; 16], address: &Address) {
        if self.has_other_layout(than) && !std::mem::replace(&mut self.was_layout_said, true) {
            tracing::warn!(peer = self.name, %address, "linked, but {OTHER_LAYOUT}");
        }
    }

    /// Returns its state, for an operator of a node with this layout fingerprint.
    pub(super) fn status(&self, fingerprint: &[u8; 16]) -> PeerStatus {
        let (name, is_up) = (self.name.clone(), self.is_up());
        let note = match self.refused {
            _ if is_up => self.has_other_layout(fingerprint).then(|| OTHER_LAYOUT.to_owned()),
            Some((_, denial @ Denial::OlderProcess)) => {
                let remedy = self.remedy.unwrap_or_default();
                Some(format!("a process of this name is refused: {denial}{remedy}"))
            }
            _ => None,
        };
        PeerStatus { name, is_up, note }
    }

    pub(super) fn line(&self) -> Option<&Arc<Link>> {
        self.lines.iter().rev().find(|line| line.cause().is_none())
    }

    /// Queues a message at the newest live link; an error drops it.
    pub(super) fn send(&self, message: &NodeMessage) -> Result<(), LinkError> {
        self.line().ok_or(LinkError::Closed)?.try_send(message)
    }

    pub(super) fn message_max(&self) -> usize {
        self.line().map_or(usize::MAX, |line| line.message_max())
    }

    pub(super) fn way(&self) -> Option<(Way, PeerId)> {
        [Way::Nixl, Way::Tcp].into_iter().find_map(|way| Some((way, *self.ways.get(&way)?)))
    }

    pub(super) fn transport(&self, way: Way) -> MigrationTransport {
        let newest = self.lines.last().map(|line| line.kind());
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

    pub(super) fn ways(&self) -> impl Iterator<Item = (Way, PeerId)> + '_ {
        self.ways.iter().map(|(&way, &peer)| (way, peer))
    }

    /// Closes its links, which are then reported as lost.
    pub(super) fn cut(&self) {
        self.lines.iter().for_each(|line| line.close());
    }
}

/// What an operator can do about a refused older process.
const DECLARE_LATER: &str =
    "; if that one has ended, declare it at this node: kvpool declare-ended --peer NAME";

pub(super) enum Joined {
    Same(LinkId),
    /// Of another process than before, which has ended.
    Restarted(LinkId, Peer),
    Refused(Denial),
}

#[derive(Default)]
pub(super) struct Peers {
    all: BTreeMap<LinkId, Peer>,
    next: u32,
    losses: u64,
    /// Limits the log of events that other processes can cause.
    pub(super) reports: Reports,
}

impl Peers {
    /// Adds a link. `is_at_stake` tells whether something depends on whether a process has ended.
    pub(super) fn join(
        &mut self,
        link: &Arc<Link>,
        restarts: Restarts,
        is_at_stake: impl Fn(LinkId) -> bool,
    ) -> Joined {
        let new = Peer::new(link);
        let former = |peer: &Peer| peer.is_former && peer.name == new.name;
        if self.all.values().any(|peer| former(peer) && peer.incarnation == new.incarnation) {
            return self.refuse(&new, link, Denial::OlderProcess);
        }
        let Some(id) = self.find(&new.name) else { return self.add(new, link) };
        let Some(peer) = self.all.get_mut(&id) else { return self.add(new, link) };
        if peer.incarnation == new.incarnation {
            peer.lines.push(link.clone());
            (peer.refused, peer.remedy) = (None, None);
            return Joined::Same(id);
        }
        if peer.is_up() {
            return self.refuse(&new, link, Denial::SecondProcess);
        }
        // A clock may have been set back; a lock is proof.
        let is_proven = peer.lock.is_some() && peer.lock == new.lock;
        // Compares clocks of the peers: if this node's was set back, that locks no process out.
        if !is_proven && link.peer().statement.began_ms < peer.began_ms {
            return self.refuse(&new, link, Denial::OlderProcess);
        }
        if is_proven || restarts == Restarts::ByName || !is_at_stake(id) {
            let before = std::mem::replace(peer, new);
            peer.lines.push(link.clone());
            return Joined::Restarted(id, before);
        }
        let name = &peer.name;
        tracing::warn!(
            peer = name,
            "another process has this name, and it is not proven that the former one has ended: what is in \
             doubt stays so. {REMEDY}"
        );
        match self.add(new, link) {
            Joined::Refused(denial) => Joined::Refused(denial),
            joined => {
                self.all.entry(id).and_modify(|peer| peer.is_former = true);
                joined
            }
        }
    }

    fn add(&mut self, peer: Peer, link: &Arc<Link>) -> Joined {
        if self.all.len() >= PEERS_MAX {
            return Joined::Refused(Denial::Peers);
        }
        let id = LinkId(self.next);
        self.next += 1;
        self.all.insert(id, Peer { lines: vec![link.clone()], ..peer });
        Joined::Same(id)
    }

    /// Logs a refusal once per process.
    fn refuse(&mut self, new: &Peer, link: &Link, denial: Denial) -> Joined {
        // A declaration would apply to the former process of the name, which may be this one.
        let has_former = self.all.values().any(|peer| peer.is_former && peer.name == new.name);
        let remedy = (denial == Denial::OlderProcess && !has_former).then_some(DECLARE_LATER);
        let present = self.all.values_mut().find(|peer| !peer.is_former && peer.name == new.name);
        let refused = Some((new.incarnation, denial));
        if let Some(present) = present
            && present.refused != refused
        {
            let address = link.address();
            let hint = remedy.unwrap_or_default();
            if self.reports.is_new(format!("{denial} {}", new.name)) {
                tracing::warn!(peer = new.name, %address, "a process of this name is refused: {denial}{hint}");
            }
            (present.refused, present.remedy) = (refused, remedy);
        }
        Joined::Refused(denial)
    }

    /// Returns whether a peer has a link, or a lost one that is not handled yet.
    pub(super) fn has_links(&self, id: LinkId) -> bool {
        self.all.get(&id).is_some_and(|peer| !peer.lines.is_empty())
    }

    /// Removes a lost link. Returns whether it was the peer's last one.
    pub(super) fn leave(&mut self, id: LinkId, link: &Arc<Link>) -> bool {
        let Some(peer) = self.all.get_mut(&id) else { return false };
        let count = peer.lines.len();
        peer.lines.retain(|line| !Arc::ptr_eq(line, link));
        self.losses += 1;
        peer.lost = self.losses;
        count > 0 && peer.lines.is_empty()
    }

    /// Forgets and returns unlinked peers without a reason to be remembered, except the latest.
    pub(super) fn forget(&mut self, has_reason: impl Fn(LinkId, &Peer) -> bool) -> Vec<(LinkId, Peer)> {
        let idle = |(&id, peer): (&LinkId, &Peer)| {
            (!peer.is_up() && !has_reason(id, peer)).then_some((peer.is_former, peer.lost, id))
        };
        let mut idle: Vec<_> = self.all.iter().filter_map(idle).collect();
        idle.sort_unstable_by_key(|&(is_former, lost, _)| (!is_former, lost));
        let former = idle.iter().filter(|(is_former, ..)| *is_former).count();
        let count = former.max(idle.len().saturating_sub(LOST_MAX));
        let gone = idle.into_iter().take(count);
        gone.filter_map(|(.., id)| Some((id, self.all.remove(&id)?))).collect()
    }

    /// Removes the processes of a name that the operator declares to have ended: the former ones,
    /// or else the present one.
    ///
    /// # Errors
    /// [`NodeError::UnknownPeer`]; [`NodeError::PeerLives`] for a present one with a link.
    pub(super) fn take(&mut self, name: &str) -> Result<Vec<(LinkId, Peer)>, NodeError> {
        let of_name = self.all.iter().filter(|(_, peer)| peer.name == name);
        let mut ended: Vec<_> =
            of_name.clone().filter(|(_, peer)| peer.is_former).map(|(&id, _)| id).collect();
        if ended.is_empty() {
            if of_name.clone().any(|(_, peer)| peer.is_up()) {
                return Err(NodeError::PeerLives { name: name.to_owned() });
            }
            ended = of_name.map(|(&id, _)| id).collect();
        }
        if ended.is_empty() {
            return Err(NodeError::UnknownPeer { name: name.to_owned() });
        }
        Ok(ended.into_iter().filter_map(|id| Some((id, self.all.remove(&id)?))).collect())
    }

    pub(super) fn get(&self, id: LinkId) -> Option<&Peer> {
        self.all.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: LinkId) -> Option<&mut Peer> {
        self.all.get_mut(&id)
    }

    pub(super) fn find(&self, name: &str) -> Option<LinkId> {
        self.all.iter().find(|(_, peer)| !peer.is_former && peer.name == name).map(|(&id, _)| id)
    }

    pub(super) fn name(&self, id: LinkId) -> &str {
        self.get(id).map_or("unknown", |peer| &peer.name)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.all.values().filter(|peer| !peer.is_former)
    }

    /// Closes all links, once their queues are written, or after a short time.
    pub(super) async fn close(&mut self) {
        let lines = self.all.values_mut().flat_map(|peer| peer.lines.drain(..));
        let closing: Vec<_> = lines
            .map(|line| {
                tokio::spawn(async move {
                    let _ = timeout(LAST_WORDS, line.flush()).await;
                    line.close();
                })
            })
            .collect();
        for closed in closing {
            let _ = closed.await;
        }
    }
}

pub(super) fn refuse(link: Arc<Link>, denial: Denial) {
    tokio::spawn(async move {
        let told = async {
            link.send(&NodeMessage::Refused(denial)).await?;
            // The peer closes first, so that it sees the reason and not only the end.
            Err::<(), _>(link.closed().await)
        };
        let _ = timeout(LAST_WORDS, told).await;
        link.close();
    });
}
