//! What the pool asks for.

use std::sync::Arc;

use kvpool::prefix::BlockHash;
use kvpool::{Carried, TransferError};
use tokio::sync::oneshot;

use super::driver::Driver;
use crate::node::job::Job;
use crate::node::parcel::Parcel;
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
            Err(reason) => return parcel.fail(TransferError::Node { node: name, reason }),
        };
        let mut job = Job::new(id, link, kind, Job::source(Some(parcel)));
        job.sequence = sequence;
        self.jobs.insert(machine, job);
        self.act(actions);
    }

    pub(super) fn fetch(
        &mut self,
        name: &str,
        (first, hashes): (u32, Vec<BlockHash>),
        answer: oneshot::Sender<Result<Carried, TransferError>>,
    ) {
        let what = work::fetch_bytes(first, &hashes).map_err(|error| error.to_string());
        match what.and_then(|what| self.begin(name, Command::BringBack { what }, None)) {
            Ok((machine, id, link, actions)) => {
                self.jobs.insert(machine, Job::new(id, link, Kind::Fetch, Job::target(Some(answer))));
                self.act(actions);
            }
            Err(reason) => {
                let _ = answer.send(Err(TransferError::Node { node: name.to_owned(), reason }));
            }
        }
    }

    /// Returns a peer, and its newest link that lives, for a request.
    pub(super) fn linked(&self, name: &str) -> Result<(LinkId, &Arc<Link>), &'static str> {
        if self.is_draining {
            return Err("this node is ending");
        }
        let id = self.peers.find(name).ok_or("it was never reached")?;
        let line = self.peers.get(id).and_then(|peer| peer.line());
        line.map(|line| (id, line)).ok_or("there is no link to it")
    }

    pub(super) fn begin(
        &mut self,
        name: &str,
        command: Command,
        part: Option<(MigrationId, Part)>,
    ) -> Result<(MachineId, MigrationId, LinkId, Actions), String> {
        let (link, _) = self.linked(name)?;
        if let (Command::BringBack { what }, Some(peer)) = (&command, self.peers.get(link)) {
            work::fits(what.len(), peer.message_max()).map_err(|error| error.to_string())?;
        }
        let (id, part) = match part {
            Some((id, part)) => (id, Some(part)),
            None => (MigrationId(fastrand::u128(..)), None),
        };
        let begun = self.setup.machines.request(self.now(), Request { id, link, command, part });
        begun.map(|(machine, actions)| (machine, id, link, actions)).map_err(|error| error.to_string())
    }
}
