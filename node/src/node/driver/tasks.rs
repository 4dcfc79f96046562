use std::sync::atomic::Ordering::Relaxed;

use kvpool::transport::{SourceState, TransferState, TransportError};
use tokio::sync::mpsc::error::TrySendError;

use super::driver::{Driver, Quarantined};
use super::input::{Done, Input};
use crate::node::caught::{caught, caught_async};
use crate::node::job::{Ending, Incoming, Job, SideJob, Slot};
use crate::node::message::{NodeMessage, Way};
use crate::node::parcel::Parcel;
use crate::node::{parts, work};
use crate::protocol::{
    AbortReason, Action, Actions, Attempt, CopyPart, Envelope, FetchBytes, Grant, Kind, LinkId, MachineId,
    ManifestBytes, Message, Places, Refusal, SideState, Task, Text, ToTarget,
};
use crate::transport::tcp::LinkError;

impl Driver {
    pub(super) fn act(&mut self, actions: Actions) {
        for action in actions {
            match action {
                Action::Send { link, envelope } => self.message_to(link, envelope),
                Action::Do { machine, task } => self.task(machine, task),
                Action::Report { machine, report } => self.report(machine, report),
            }
        }
    }

    /// Sends a machine's message. The machine repeats one that is dropped.
    fn message_to(&mut self, link: LinkId, envelope: Envelope) {
        if matches!(envelope.message, Message::ToTarget(ToTarget::Commit { .. })) {
            let of = |job: &&mut Job| {
                job.link == link && job.id == envelope.id && matches!(job.side, SideJob::Source { .. })
            };
            if let Some(Job { side: SideJob::Source { export: Slot::Here(parcel) }, .. }) =
                self.jobs.values_mut().find(of)
            {
                parcel.tell();
            }
        }
        let Some(peer) = self.peers.get(link) else { return };
        match peer.send(&NodeMessage::Migration(envelope)) {
            Ok(()) => {}
            // Lengths are checked where messages are built.
            Err(error @ LinkError::Wire(_)) => tracing::warn!(peer = peer.name, %error, "not sent"),
            Err(_) => self.setup.counters.count(|counters| counters.dropped_messages += 1),
        }
    }

    fn violated(&mut self, machine: MachineId, what: &str) {
        if let Some(job) = self.jobs.get_mut(&machine) {
            job.trouble = Some(format!("the peer violated the protocol: {what}"));
        }
        if let Ok(actions) = self.setup.machines.cancel(self.now(), machine) {
            self.act(actions);
        }
    }

    /// Returns whether the manifest has all of these places, of which ranges can name very many.
    fn are_of_manifest(&self, machine: MachineId, places: &Places) -> bool {
        let end = places.ranges().last().map_or(0, |last| u64::from(last.start) + u64::from(last.len));
        self.jobs.get(&machine).is_some_and(|job| end <= job.blocks as u64)
    }

    /// Returns the job of a machine. One that a peer began has a job only from its first task on.
    pub(super) fn job(&mut self, machine: MachineId) -> Option<&mut Job> {
        if !self.jobs.contains_key(&machine) {
            let status = self.setup.machines.status().find(|status| status.machine == machine)?;
            let side = match status.state {
                SideState::Source(_) => Job::source(None),
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

    /// Informs the sources that exported before the cache was cleared, before any later event.
    pub(super) fn note_clears(&mut self) {
        let is_old = |job: &Job| {
            let SideJob::Source { export: Slot::Here(parcel) } = &job.side else { return false };
            !job.is_cleared && !parcel.export().is_current()
        };
        let old: Vec<_> =
            self.jobs.iter().filter(|(_, job)| is_old(job)).map(|(&machine, _)| machine).collect();
        for machine in old {
            if let Some(job) = self.jobs.get_mut(&machine) {
                job.is_cleared = true;
            }
            let actions = self.setup.machines.cleared(self.now(), machine);
            self.act(actions);
        }
    }

    /// Runs blocking work, and sends its result to this driver.
    pub(super) fn block(&self, machine: MachineId, work: impl FnOnce() -> Done + Send + 'static) {
        let Some(inputs) = self.setup.sender.upgrade() else { return };
        tokio::task::spawn_blocking(move || {
            let _ = inputs.blocking_send(Input::Done(machine, Box::new(work())));
        });
    }

    pub(super) fn export(&mut self, machine: MachineId, what: Option<FetchBytes>) {
        let (pool, is_draining) = (self.setup.pool.clone(), self.is_draining);
        let Some(job) = self.job(machine) else { return };
        let link = job.link;
        let SideJob::Source { export } = &mut job.side else { return };
        let given = export.lend();
        *export = Slot::Lent;
        let permitted = match &what {
            Some(what) if given.is_none() => self.permitted_blocks(machine, work::asked_blocks(what)),
            _ => Ok(0),
        };
        let (node, message_max) = self
            .peers
            .get(link)
            .map_or_else(Default::default, |peer| (peer.name.clone(), peer.message_max()));
        let counters = self.setup.counters.clone();
        self.block(machine, move || {
            let local = |error: &str| AbortReason::Local(Text::new(error));
            let (parcel, described) = match (given, what, permitted) {
                (Some(parcel), ..) => {
                    let described = caught(|| work::describe(parcel.export(), message_max));
                    (Some(parcel), described.and_then(|described| described).map_err(AbortReason::Local))
                }
                (None, Some(_), _) if is_draining => (None, Err(local("this node is ending"))),
                (None, Some(_), Err(quota)) => (None, Err(quota)),
                (None, Some(what), Ok(blocks_max)) => {
                    let found = caught(|| work::export_prefix(&pool, &what, blocks_max, message_max));
                    match found.and_then(|found| found) {
                        Ok(found) => {
                            counters.count(|counters| counters.damaged_blocks += found.damaged as u64);
                            let parcel = Parcel::new(&node, found.export, None);
                            (Some(parcel), Ok((found.manifest, found.blocks)))
                        }
                        Err(error) => (None, Err(AbortReason::Local(error))),
                    }
                }
                (None, None, _) => (None, Err(local("nothing to export"))),
            };
            Done::Exported(parcel, described)
        });
    }

    /// Returns how many blocks a peer may fetch now, and notes them. Truncates a single request.
    fn permitted_blocks(&mut self, machine: MachineId, asked: usize) -> Result<usize, AbortReason> {
        let max = self.setup.fetch_blocks_max;
        let link = self.jobs.get(&machine).map(|job| job.link);
        let of_peer = self.jobs.values().filter(|job| Some(job.link) == link);
        let under_way: usize = of_peer.map(|job| job.fetched_blocks).sum();
        if under_way > 0 && under_way + asked > max {
            let (asked, under_way, max) = (asked as u64, under_way as u64, max as u64);
            return Err(AbortReason::Quota { asked, under_way, max });
        }
        if let Some(job) = self.jobs.get_mut(&machine) {
            job.fetched_blocks = asked.min(max);
        }
        Ok(asked.min(max))
    }

    pub(super) fn retain(&mut self, machine: MachineId, places: &Places) {
        if !self.are_of_manifest(machine, places) {
            return self.violated(machine, "it accepted blocks that were not offered");
        }
        let Some(job) = self.job(machine) else { return };
        let places: Vec<u32> = places.iter().collect();
        job.accepted_blocks = Some(places.len());
        let SideJob::Source { export: Slot::Here(parcel) } = &mut job.side else { return };
        // A peer that lies about what it has loses blocks of its own cache, or leaves these here.
        if let Err(error) = parcel.export_mut().retain(&places) {
            tracing::warn!(%error, "a peer accepted blocks that were not offered");
        }
    }

    pub(super) fn transfer(&mut self, machine: MachineId, attempt: Attempt, places: Places, grant: Grant) {
        if !self.are_of_manifest(machine, &places) {
            return self.violated(machine, "it misses blocks that were not offered");
        }
        let Some(job) = self.jobs.get_mut(&machine) else { return };
        let link = job.link;
        let SideJob::Source { export } = &mut job.side else { return };
        let Some(parcel) = export.lend() else { return };
        let mut stop = job.begin_task();
        let way = Way::of_number(grant.way);
        job.transport = way.and_then(|way| Some(self.peers.get(link)?.transport(way)));
        let is_over = way.is_some_and(|way| self.said_over.contains(&(link, way, grant.tag)));
        let peer = way.filter(|_| !is_over).and_then(|way| self.peers.get(link)?.on(way));
        let carrier = way.and_then(|way| self.setup.carriers.get(&way)).cloned();
        if let (Some(way), Some(_)) = (way, peer) {
            self.writing.insert((link, way, grant.tag));
        }
        let Some(inputs) = self.setup.sender.upgrade() else { return };
        tokio::spawn(async move {
            let result = match (&carrier, peer) {
                (Some(carrier), Some(peer)) => {
                    let sent = work::transfer(carrier, peer, parcel.export(), &places, &grant, &mut stop);
                    match caught_async(sent).await {
                        Ok(result) => result,
                        Err(panic) => Err(TransportError::Storage(panic.to_string()).into()),
                    }
                }
                _ => {
                    let what = format!("write by way {}", grant.way);
                    Err(TransportError::Unsupported { name: "node", what }.into())
                }
            };
            let done = Done::Transferred(parcel, attempt, grant, result);
            let _ = inputs.send(Input::Done(machine, Box::new(done))).await;
        });
    }

    pub(super) fn reserve(&mut self, machine: MachineId, manifest: ManifestBytes, part: Option<CopyPart>) {
        let (pool, arrivals, is_draining) =
            (self.setup.pool.clone(), self.setup.arrivals.clone(), self.is_draining);
        let takes_grouped = self.setup.takes_grouped.load(Relaxed);
        let gathering = part.and_then(|part| self.setup.parts.gathering(part.copy));
        let Some(Job { kind, side: SideJob::Target { import, place, .. }, .. }) = self.job(machine) else {
            return;
        };
        let brings_sequence = matches!(kind, Kind::Migrate | Kind::Replicate);
        let max = arrivals.max_capacity() as u32;
        let reserved = match &gathering {
            _ if !brings_sequence => Ok(()),
            // The parts of a copy deliver one sequence.
            Some(gathering) => gathering.reserve_place(arrivals),
            None => match arrivals.try_reserve_owned() {
                Ok(permit) => {
                    *place = Some(permit);
                    Ok(())
                }
                Err(TrySendError::Full(_)) => Err(TrySendError::Full(())),
                Err(TrySendError::Closed(_)) => Err(TrySendError::Closed(())),
            },
        };
        let refused = match reserved {
            _ if is_draining => Some(Refusal::Closed(Text::new("it is ending"))),
            Ok(()) => None,
            Err(TrySendError::Full(())) => Some(Refusal::Unread { max }),
            Err(TrySendError::Closed(())) => {
                Some(Refusal::Closed(Text::new("its engine takes no sequences")))
            }
        };
        *import = Slot::Lent;
        self.block(machine, move || {
            let refused = refused.map_or(Ok(()), |refusal| Err((refusal, work::free_blocks(&pool))));
            let reserve = || match part {
                None => work::reserve(&pool, &manifest, brings_sequence, takes_grouped)
                    .map(|reserved| reserved.map(Incoming::Whole)),
                Some(part) => parts::reserve(&pool, gathering, &manifest, part)
                    .map(|reserved| reserved.map(Incoming::Part)),
            };
            Done::Reserved(
                refused
                    .and_then(|()| caught(reserve).unwrap_or_else(|panic| Err((Refusal::Closed(panic), 0)))),
            )
        });
    }

    pub(super) fn verify(&mut self, machine: MachineId, attempt: Attempt) {
        let Some(job) = self.jobs.get_mut(&machine) else { return };
        let link = job.link;
        let SideJob::Target { import, grant, .. } = &mut job.side else { return };
        let ended = grant.take();
        let Some(mut import) = import.lend() else { return };
        if let Some((way, tag)) = ended
            && let Some(carrier) = self.setup.carriers.get(&way)
            && let TransferState::Quarantined(_) = carrier.transport.revoke(tag, SourceState::Over)
        {
            // Verification is refused while the transport has its hold.
            self.quarantined.push(Quarantined { link, way, tag });
        }
        self.block(machine, move || {
            let verified = caught(|| import.verify());
            Done::Verified(import, attempt, verified.and_then(|verified| verified))
        });
    }

    pub(super) fn commit(&mut self, machine: MachineId, is_current: bool) {
        let Some(Job { side: SideJob::Target { import, place, .. }, .. }) = self.jobs.get_mut(&machine)
        else {
            return;
        };
        let Some(import) = import.lend() else { return };
        if let Incoming::Part(part) = &import {
            *place = part.take_place();
        }
        let is_taken = place.is_none() || !self.setup.arrivals.is_closed();
        self.block(machine, move || {
            // Nothing would receive it: a commit would close it.
            let taken = is_taken.then_some(import).ok_or_else(|| Text::new("its engine takes no sequences"));
            let commit = |import: Incoming| caught(|| import.commit(is_current)).and_then(|done| done);
            Done::Committed(taken.and_then(commit))
        });
    }
}
