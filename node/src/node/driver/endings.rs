//! Outcomes, and what happens to the blocks of a migration at its end.

use kvpool::TransferError;
use kvpool::transfer::Fetched;
use kvpool::transport::{SourceState, TransferState};

use super::driver::{Driver, Quarantined};
use crate::node::arrival::Arrival;
use crate::node::job::{Ending, Job, SideJob};
use crate::node::message::Way;
use crate::node::status::{self, HISTORY, NodeStatus};
use crate::protocol::{MachineId, Outcome, Report};

impl Driver {
    pub(super) fn end(&mut self, machine: MachineId, ending: Ending) {
        let Some(job) = self.jobs.get_mut(&machine) else { return };
        job.ending = Some(ending);
        // Stops a task that waits for a transport.
        job.stop = None;
    }

    pub(super) fn report(&mut self, machine: MachineId, report: Report) {
        self.setup.counters.count(|counters| counters.bad_blocks += report.bad_blocks);
        let now = self.now();
        let Some(job) = self.jobs.get_mut(&machine) else { return };
        if let Outcome::InDoubt { since, .. } = report.outcome {
            self.setup.counters.count(|counters| counters.in_doubt += 1);
            job.in_doubt = Some(since);
            job.alone_since = (!self.peers.has_links(job.link)).then_some(now);
            let sequence = job.sequence.map(|id| id.0);
            let peer = self.peers.name(job.link);
            return tracing::warn!(peer, sequence, "a sequence is in doubt: {}", status::REMEDY);
        }
        job.outcome = Some(report.outcome);
        self.settle(machine);
    }

    /// Delivers the result of a migration that has ended and whose task has returned.
    pub(super) fn settle(&mut self, machine: MachineId) {
        let is_over = |job: &Job| !job.is_lent() && job.outcome.is_some();
        if !self.jobs.get(&machine).is_some_and(is_over) {
            return;
        }
        let Some(job) = self.jobs.remove(&machine) else { return };
        let outcome = job.outcome.clone().unwrap_or_else(|| unreachable!("checked above"));
        let node = self.peers.name(job.link).to_owned();
        let reason = status::reason(&job, &outcome);
        let record = status::ended(&job, node.clone(), &outcome);
        status::trace(&job, &record);
        self.history.push_front(record);
        self.history.truncate(HISTORY);
        self.setup.counters.ended(&job, &outcome);
        let (mut carried, shared_blocks) = (job.carried, job.shared_blocks());
        carried.took = job.begun.elapsed();
        let is_unconfirmed = outcome == Outcome::Unconfirmed;
        let error = |reason: Option<String>| {
            let (node, reason) = (node.clone(), reason.unwrap_or_else(|| "it did not confirm".into()));
            match is_unconfirmed {
                true => TransferError::InDoubt { node, reason },
                false => TransferError::Node { node, reason },
            }
        };
        match job.side {
            SideJob::Source { mut export } => {
                let Some(parcel) = export.take() else { return };
                match job.ending {
                    Some(Ending::Finish) => parcel.finish(shared_blocks, carried),
                    _ => parcel.fail(error(reason)),
                }
            }
            SideJob::Target { import, grant, arrived, place, answer } => {
                if let Some((way, tag)) = grant
                    && let Some(carrier) = self.setup.carriers.get(&way)
                    && let TransferState::Quarantined(_) = carrier.transport.revoke(tag, SourceState::Unknown)
                {
                    self.quarantined.push(Quarantined { link: job.link, way, tag });
                }
                drop(import);
                if let (Some(sequence), Some(place)) = (arrived, place) {
                    place.send(Arrival { sequence: *sequence, from: node.clone(), blocks: job.blocks });
                }
                if let Some(answer) = answer {
                    let _ = answer.send(match outcome {
                        Outcome::Done => Ok(Fetched { carried, damaged: job.damaged }),
                        _ => Err(error(reason)),
                    });
                }
            }
        }
    }

    pub(super) fn status(&self) -> NodeStatus {
        let running = self.setup.machines.status().filter_map(|status| {
            let job = self.jobs.get(&status.machine);
            status::running(&status, job, self.peers.name(status.link), self.now())
        });
        let migrations = running.chain(self.history.iter().cloned()).collect();
        let peers = self.peers.iter().map(|peer| peer.status(&self.setup.fingerprint)).collect();
        let nixl_peers = self.peers.iter().filter(|peer| peer.on(Way::Nixl).is_some());
        let nixl_peers = nixl_peers.map(|peer| peer.name.clone()).collect();
        let oldest_doubt = self.doubts().map(|(_, _, since)| self.now().since(since)).max();
        NodeStatus { migrations, peers, nixl_peers, quarantined_grants: self.quarantined.len(), oldest_doubt }
    }
}
