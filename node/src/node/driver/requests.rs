use std::sync::Arc;

use kvpool::TransferError;
use kvpool::prefix::BlockHash;
use kvpool::transfer::Fetched;
use tokio::sync::oneshot;

use super::driver::Driver;
use crate::node::job::Job;
use crate::node::parcel::Parcel;
use crate::node::peers::Peer;
use crate::node::work;
use crate::protocol::{Actions, Command, FetchBytes, Kind, LinkId, MachineId, MigrationId, Part, Request};
use crate::transport::tcp::Link;

impl Driver {
    pub(super) fn send(&mut self, parcel: Parcel, part: Option<(MigrationId, Part)>) {
        let (export, name) = (parcel.export(), parcel.node().to_owned());
        let kind = match export.sequence() {
            Some(_) if export.owns_sequence() => Kind::Migrate,
            Some(_) => Kind::Replicate,
            None => Kind::Cached,
        };
        let sequence = export.sequence();
        let command = match (kind, sequence) {
            (Kind::Migrate, Some(id)) => Command::Migrate { sequence: id.0 },
            (Kind::Replicate, Some(id)) => Command::Replicate { sequence: id.0 },
            _ => Command::Offload { what: FetchBytes::default() },
        };
        let (machine, id, link, actions) = match self.begin(&name, command, part) {
            Ok(begun) => begun,
            Err(error) => return parcel.fail(error),
        };
        let mut job = Job::new(id, link, kind, Job::source(Some(parcel)));
        job.sequence = sequence;
        self.jobs.insert(machine, job);
        self.act(actions);
    }

    pub(super) fn fetch(
        &mut self,
        name: &str,
        hashes: &[BlockHash],
        answer: oneshot::Sender<Result<Fetched, TransferError>>,
    ) {
        let what = work::fetch_bytes(hashes).map_err(|error| of_node(name, &error));
        match what.and_then(|what| self.begin(name, Command::BringBack { what }, None)) {
            Ok((machine, id, link, actions)) => {
                self.jobs.insert(machine, Job::new(id, link, Kind::Fetch, Job::target(Some(answer))));
                self.act(actions);
            }
            Err(error) => drop(answer.send(Err(error))),
        }
    }

    /// Returns a peer, and its newest live link, for a request. All requests but parts of copies
    /// require that the peer's blocks have this node's layout.
    pub(super) fn linked(&self, name: &str, is_part: bool) -> Result<(LinkId, &Arc<Link>), TransferError> {
        let failed = |reason: &str| of_node(name, &reason);
        if self.is_draining {
            return Err(failed("this node is ending"));
        }
        let id = self.peers.find(name).ok_or_else(|| failed("it was never reached"))?;
        let peer = self.peers.get(id);
        let line = peer.and_then(Peer::line).ok_or_else(|| failed("there is no link to it"))?;
        if !is_part && peer.is_some_and(|peer| peer.has_other_layout(&self.setup.fingerprint)) {
            return Err(TransferError::OtherLayout { node: name.to_owned() });
        }
        Ok((id, line))
    }

    pub(super) fn begin(
        &mut self,
        name: &str,
        command: Command,
        part: Option<(MigrationId, Part)>,
    ) -> Result<(MachineId, MigrationId, LinkId, Actions), TransferError> {
        let (link, _) = self.linked(name, part.is_some())?;
        if let (Command::BringBack { what }, Some(peer)) = (&command, self.peers.get(link)) {
            work::fits(what.len(), peer.message_max()).map_err(|error| of_node(name, &error))?;
        }
        let (id, part) = match part {
            Some((id, part)) => (id, Some(part)),
            None => (MigrationId(fastrand::u128(..)), None),
        };
        let begun = self.setup.machines.request(self.now(), Request { id, link, command, part });
        begun.map(|(machine, actions)| (machine, id, link, actions)).map_err(|error| of_node(name, &error))
    }
}

pub(super) fn of_node(name: &str, reason: &dyn std::fmt::Display) -> TransferError {
    TransferError::Node { node: name.to_owned(), reason: reason.to_string() }
}
