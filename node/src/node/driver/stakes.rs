//! State that depends on whether a process of a peer has ended.

use super::driver::Driver;
use crate::node::job::{Job, SideJob, Slot};
use crate::node::message::Way;
use crate::node::peers::Peer;
use crate::protocol::{LinkId, MachineId, MigrationStatus, Millis, SideState, SourceState, TargetState};

/// Returns whether only one side may continue with a copy, and it may be either.
fn is_undecidable(status: &MigrationStatus) -> bool {
    status.kind.is_exclusive()
        && matches!(
            status.state,
            SideState::Source(SourceState::Committing | SourceState::InDoubt)
                | SideState::Target(TargetState::Committing | TargetState::Committed)
        )
}

impl Driver {
    /// Returns the sequences in doubt, each with the time of its first `Commit`.
    pub(super) fn doubts(&self) -> impl Iterator<Item = (MachineId, &Job, Millis)> {
        let is_open = |job: &&Job| job.outcome.is_none();
        self.jobs
            .iter()
            .filter_map(move |(&machine, job)| Some((machine, Some(job).filter(is_open)?, job.in_doubt?)))
    }

    /// Returns the sequences in doubt without a link to the target, each with the time at which the
    /// operator's limit ends the doubt. Only continuous time without a link counts.
    pub(super) fn limited_doubts(&self) -> impl Iterator<Item = (MachineId, Millis)> {
        self.setup.doubt_limit.into_iter().flat_map(move |limit| {
            let due = move |job: &Job| Some(job.alone_since?.plus(limit.as_millis() as u64));
            self.doubts().filter_map(move |(machine, job, _)| Some((machine, due(job)?)))
        })
    }

    pub(super) fn note_link(&mut self, id: LinkId, is_linked: bool) {
        let now = self.now();
        for job in self.jobs.values_mut().filter(|job| job.link == id && job.in_doubt.is_some()) {
            job.alone_since = (!is_linked).then_some(now);
        }
    }

    /// Resolves doubts that have reached the operator's limit.
    pub(super) fn end_doubts(&mut self) {
        let now = self.now();
        let due = self.limited_doubts().filter(|(_, due)| *due <= now);
        for machine in due.map(|(machine, _)| machine).collect::<Vec<_>>() {
            if let Some(job) = self.jobs.get_mut(&machine) {
                let (peer, sequence) = (self.peers.name(job.link), job.sequence.map(|id| id.0));
                tracing::warn!(peer, sequence, "in doubt for the limit: this node goes on with the sequence");
                job.trouble = Some("in doubt for the limit: its target is taken to have ended".to_owned());
            }
            let actions = self.setup.machines.end_doubt(now, machine);
            self.act(actions);
        }
    }

    /// Returns whether anything depends on whether a process of a peer has ended: a copy that only
    /// one side may continue with, or frames that the peer may write directly.
    pub(super) fn is_at_stake(&self, id: LinkId) -> bool {
        let writes = |job: &Job| {
            let grant = if let SideJob::Target { grant, .. } = &job.side { *grant } else { None };
            job.link == id && matches!(grant, Some((Way::Nixl, _)))
        };
        self.setup.machines.status().any(|status| status.link == id && is_undecidable(&status))
            || self.quarantined.iter().any(|grant| grant.link == id)
            || self.jobs.values().any(writes)
    }

    pub(super) fn has_reason(&self, id: LinkId, peer: &Peer) -> bool {
        let configured = self.setup.configured.lock();
        configured.contains(&peer.name)
            || self.quarantined.iter().any(|grant| grant.link == id)
            || self.jobs.values().any(|job| job.link == id)
            || self.setup.machines.status().any(|status| status.link == id)
            || self.writing.iter().any(|(link, ..)| *link == id)
    }

    /// Returns whether a linked peer has not received yet that a sequence is here.
    pub(super) fn is_awaited(&self) -> bool {
        let is_up = |id| self.peers.get(id).is_some_and(Peer::is_up);
        self.setup.machines.status().any(|status| is_undecidable(&status) && is_up(status.link))
    }

    /// Returns whether this process and a peer may both hold an exclusive sequence, or this process
    /// may still write frames of a peer.
    pub(super) fn has_doubts(&self) -> bool {
        let is_in_doubt = |job: &Job| match &job.side {
            SideJob::Source { export: Slot::Here(parcel) } => parcel.is_in_doubt(),
            _ => false,
        };
        self.setup.machines.status().any(|status| is_undecidable(&status))
            || self.jobs.values().any(is_in_doubt)
            || !self.writing.is_empty()
    }
}
