//! What the pool asks for.

use kvpool::prefix::BlockHash;
use kvpool::{Carried, Export, SendError, Sent, TransferError};
use tokio::sync::oneshot;

use super::driver::Driver;
use crate::node::job::Job;
use crate::node::work;
use crate::protocol::{Actions, Command, FetchBytes, Kind, LinkId, MachineId, MigrationId, Part, Request};

impl Driver {
    pub(super) fn send(
        &mut self,
        name: &str,
        export: Export,
        part: Option<(MigrationId, Part)>,
        answer: oneshot::Sender<Result<Sent, SendError>>,
    ) {
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
        let begun = self.begin(name, command, part);
        let (machine, id, link, actions) = match begun {
            Ok(begun) => begun,
            Err(reason) => {
                let error = TransferError::Node { node: name.to_owned(), reason };
                let _ = answer.send(Err(SendError { error, export: Box::new(export) }));
                return;
            }
        };
        let mut job = Job::new(id, link, kind, Job::source(Some(export), Some(answer)));
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

    pub(super) fn begin(
        &mut self,
        name: &str,
        command: Command,
        part: Option<(MigrationId, Part)>,
    ) -> Result<(MachineId, MigrationId, LinkId, Actions), String> {
        if self.is_draining {
            return Err("this node is ending".into());
        }
        let link = self.peers.find(name).ok_or("it was never reached")?;
        if !self.peers.get(link).is_some_and(|peer| peer.is_up()) {
            return Err("there is no link to it".into());
        }
        let (id, part) = match part {
            Some((id, part)) => (id, Some(part)),
            None => (MigrationId(fastrand::u128(..)), None),
        };
        let begun = self.machines.request(self.now(), Request { id, link, command, part });
        begun.map(|(machine, actions)| (machine, id, link, actions)).map_err(|error| error.to_string())
    }
}
