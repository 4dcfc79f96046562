//! What the machines want done.

use std::sync::atomic::Ordering::Relaxed;

use kvpool::transport::{SourceState, TransferState, TransportError};

use super::driver::{Driver, Quarantined};
use super::input::{Done, Input};
use crate::node::job::{Ending, Incoming, Job, SideJob, Slot};
use crate::node::message::{NodeMessage, Way};
use crate::node::{parts, work};
use crate::protocol::{
    Action, Actions, Attempt, CopyPart, FetchBytes, Grant, MachineId, ManifestBytes, Places, SideState, Task,
    Text,
};

impl Driver {
    pub(super) fn act(&mut self, actions: Actions) {
        for action in actions {
            match action {
                Action::Send { link, envelope } => {
                    if let Some(peer) = self.peers.get(link)
                        && !peer.send(NodeMessage::Migration(envelope))
                    {
                        self.counters.dropped_messages.fetch_add(1, Relaxed);
                    }
                }
                Action::Do { machine, task } => self.task(machine, task),
                Action::Report { machine, report } => self.report(machine, report),
            }
        }
    }

    /// Returns the job of a machine, which exists if a peer began it only from its first task on.
    pub(super) fn job(&mut self, machine: MachineId) -> Option<&mut Job> {
        if !self.jobs.contains_key(&machine) {
            let status = self.machines.status().find(|status| status.machine == machine)?;
            let side = match status.state {
                SideState::Source(_) => Job::source(None, None),
                SideState::Target(_) => Job::target(None),
            };
            self.jobs.insert(machine, Job::new(status.id, status.link, status.kind, side));
        }
        self.jobs.get_mut(&machine)
    }

    pub(super) fn task(&mut self, machine: MachineId, task: Task) {
        match task {
            Task::Export { what } => self.export(machine, what),
            Task::Retain(places) => self.retain(machine, &places),
            Task::Transfer { attempt, places, grant } => self.transfer(machine, attempt, places, grant),
            Task::Reserve { manifest, part } => self.reserve(machine, manifest, part),
            Task::Verify(attempt) => self.verify(machine, attempt),
            Task::Commit { is_current } => self.commit(machine, is_current),
            Task::Finish => self.end(machine, Ending::Finish),
            Task::Restore | Task::Release => self.end(machine, Ending::Restore),
        }
    }

    /// Tells the sources whose export was made before the cache was cleared. Each event comes later.
    pub(super) fn note_clears(&mut self) {
        let is_old = |job: &Job| {
            let SideJob::Source { export: Slot::Here(export), .. } = &job.side else { return false };
            !job.is_cleared && !export.is_current()
        };
        let old: Vec<_> =
            self.jobs.iter().filter(|(_, job)| is_old(job)).map(|(&machine, _)| machine).collect();
        for machine in old {
            if let Some(job) = self.jobs.get_mut(&machine) {
                job.is_cleared = true;
            }
            let actions = self.machines.cleared(self.now(), machine);
            self.act(actions);
        }
    }

    /// Runs blocking work, and sends its result to this driver.
    pub(super) fn block(&self, machine: MachineId, work: impl FnOnce() -> Done + Send + 'static) {
        let Some(inputs) = self.sender.upgrade() else { return };
        tokio::task::spawn_blocking(move || {
            let _ = inputs.blocking_send(Input::Done(machine, Box::new(work())));
        });
    }

    pub(super) fn export(&mut self, machine: MachineId, what: Option<FetchBytes>) {
        let pool = self.pool.clone();
        let Some(Job { side: SideJob::Source { export, .. }, .. }) = self.job(machine) else { return };
        let given = export.lend();
        *export = Slot::Lent;
        self.block(machine, move || {
            let export = match (given, what) {
                (Some(export), _) => Ok(export),
                (None, Some(what)) => work::export_prefix(&pool, &what),
                (None, None) => Err(Text::new("nothing to export")),
            };
            match export {
                Ok(export) => {
                    let described = work::describe(&export);
                    Done::Exported(Some(export), described)
                }
                Err(error) => Done::Exported(None, Err(error)),
            }
        });
    }

    pub(super) fn retain(&mut self, machine: MachineId, places: &Places) {
        let Some(job) = self.job(machine) else { return };
        let places: Vec<u32> = places.iter().collect();
        job.accepted_blocks = Some(places.len());
        let SideJob::Source { export: Slot::Here(export), .. } = &mut job.side else { return };
        // A peer that lies about what it has loses blocks of its own cache, or keeps what is here.
        if let Err(error) = export.retain(&places) {
            tracing::warn!(%error, "a peer accepted blocks that were not offered");
        }
    }

    pub(super) fn transfer(&mut self, machine: MachineId, attempt: Attempt, places: Places, grant: Grant) {
        let Some(job) = self.jobs.get_mut(&machine) else { return };
        let link = job.link;
        let SideJob::Source { export, .. } = &mut job.side else { return };
        let Some(export) = export.lend() else { return };
        let mut stop = job.begin_task();
        let way = Way::of_number(grant.way);
        job.transport = way.and_then(|way| Some(self.peers.get(link)?.transport(way)));
        let peer = way.and_then(|way| self.peers.get(link)?.on(way));
        let carrier = way.and_then(|way| self.carriers.get(&way)).cloned();
        let Some(inputs) = self.sender.upgrade() else { return };
        tokio::spawn(async move {
            let result = match (&carrier, peer) {
                (Some(carrier), Some(peer)) => {
                    work::transfer(carrier, peer, &export, &places, &grant, &mut stop).await
                }
                _ => {
                    let what = format!("write by way {}", grant.way);
                    Err(TransportError::Unsupported { name: "node", what }.into())
                }
            };
            let done = Done::Transferred(export, attempt, grant, result);
            let _ = inputs.send(Input::Done(machine, Box::new(done))).await;
        });
    }

    pub(super) fn reserve(&mut self, machine: MachineId, manifest: ManifestBytes, part: Option<CopyPart>) {
        let pool = self.pool.clone();
        let gathering = part.and_then(|part| self.parts.gathering(part.copy));
        let Some(Job { side: SideJob::Target { import, .. }, .. }) = self.job(machine) else { return };
        *import = Slot::Lent;
        self.block(machine, move || {
            Done::Reserved(match part {
                None => work::reserve(&pool, &manifest).map(|reserved| reserved.map(Incoming::Whole)),
                Some(part) => parts::reserve(&pool, gathering, &manifest, part)
                    .map(|reserved| reserved.map(Incoming::Part)),
            })
        });
    }

    pub(super) fn verify(&mut self, machine: MachineId, attempt: Attempt) {
        let Some(job) = self.jobs.get_mut(&machine) else { return };
        let link = job.link;
        let SideJob::Target { import, grant, .. } = &mut job.side else { return };
        let ended = grant.take();
        let Some(mut import) = import.lend() else { return };
        if let Some((way, tag)) = ended
            && let Some(carrier) = self.carriers.get(&way)
            && let TransferState::Quarantined(_) = carrier.transport.revoke(tag, SourceState::Over)
        {
            // The verification is refused while the transport has its hold.
            self.quarantined.push(Quarantined { link, way, tag });
        }
        self.block(machine, move || {
            let verified = import.verify();
            Done::Verified(import, attempt, verified)
        });
    }

    pub(super) fn commit(&mut self, machine: MachineId, is_current: bool) {
        let Some(Job { side: SideJob::Target { import, .. }, .. }) = self.jobs.get_mut(&machine) else {
            return;
        };
        let Some(import) = import.lend() else { return };
        self.block(machine, move || Done::Committed(import.commit(is_current)));
    }
}
