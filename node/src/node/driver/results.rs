use kvpool::transport::{Grant as Permission, Tag};

use super::driver::Driver;
use super::input::{Done, Input};
use crate::node::job::{Incoming, Job, SideJob, Slot};
use crate::node::message::Way;
use crate::node::parcel::Parcel;
use crate::node::work::{self, Carrier, Lost, Piece, Reserved, Verified};
use crate::protocol::{AbortReason, Grant, LinkId, MachineId, Refusal, Text, Work};

impl Driver {
    pub(super) fn done(&mut self, machine: MachineId, done: Done) {
        let Some(job) = self.jobs.get_mut(&machine) else { return };
        job.stop = None;
        let link = job.link;
        let work = match (done, &mut job.side) {
            (Done::Exported(parcel, described), SideJob::Source { export: slot }) => {
                let sequence = |parcel: &Parcel| parcel.export().sequence();
                job.sequence = job.sequence.or(parcel.as_ref().and_then(sequence));
                *slot = parcel.map_or(Slot::Empty, Slot::Here);
                match described {
                    Ok((manifest, blocks)) => {
                        job.blocks = blocks;
                        job.fetched_blocks = job.fetched_blocks.min(blocks);
                        Work::Exported(manifest)
                    }
                    Err(AbortReason::Local(error)) => Work::ExportFailed(error),
                    Err(reason) => Work::ExportRefused(reason),
                }
            }
            (Done::Transferred(parcel, attempt, grant, result), SideJob::Source { export: slot }) => {
                *slot = Slot::Here(parcel);
                if let Ok(carried) = &result {
                    // A block that is sent again counts once.
                    job.carried.blocks = job.carried.blocks.max(carried.blocks);
                    job.carried.bytes += carried.bytes;
                    job.carried.runs += carried.runs;
                }
                let work = work::transferred(attempt, &result);
                self.transfer_ended(link, &grant, result.err());
                work
            }
            (Done::Reserved(reserved), SideJob::Target { import, .. }) => {
                *import = Slot::Empty;
                match reserved {
                    Ok(reserved) => self.reserved(machine, reserved),
                    Err(refused) => work::refused(refused),
                }
            }
            (Done::Verified(import, attempt, verified), SideJob::Target { import: slot, .. }) => {
                *slot = Slot::Here(import);
                match verified {
                    Ok(Verified { bad, piece }) => match self
                        .fits(
                            link,
                            work::places_bytes(&[&bad], piece.as_ref().map_or(0, |piece| piece.runs.len())),
                        )
                        .and_then(|()| self.permit(machine, piece))
                    {
                        Ok(grant) => Work::Verified { attempt, bad, grant },
                        Err(error) => Work::VerifyFailed(error),
                    },
                    Err(error) => Work::VerifyFailed(error),
                }
            }
            (Done::Committed(imported), SideJob::Target { import, arrived, .. }) => {
                *import = Slot::Empty;
                match imported {
                    Ok(imported) => {
                        *arrived = imported.into_grouped().map(Box::new);
                        Work::Committed { sequence: arrived.as_ref().map(|sequence| sequence.id().0) }
                    }
                    Err(error) => Work::CommitFailed(error),
                }
            }
            _ => unreachable!("a result of the other side"),
        };
        // Decisions that the machine made meanwhile come first.
        self.settle(machine);
        if let Some(actions) = self.setup.machines.done(self.now(), machine, work) {
            self.act(actions);
        }
    }

    /// Tells the peer when no transfer into its grant is in flight any more.
    pub(super) fn transfer_ended(&mut self, link: LinkId, grant: &Grant, lost: Option<Lost>) {
        let (Some(way), tag) = (Way::of_number(grant.way), grant.tag) else { return };
        let quarantined = lost.as_ref().and_then(|lost| lost.quarantined);
        let (Some(transfer), Some(carrier)) = (quarantined, self.setup.carriers.get(&way)) else {
            self.writing.remove(&(link, way, tag));
            if lost.is_some() {
                self.say_over(link, way, tag);
            }
            return;
        };
        self.setup.counters.count(|counters| counters.quarantined_transfers += 1);
        let (transport, inputs) = (carrier.transport.clone(), self.setup.sender.clone());
        tokio::spawn(async move {
            work::over(transport, transfer).await;
            if let Some(inputs) = inputs.upgrade() {
                let _ = inputs.send(Input::Over(link, way, tag)).await;
            }
        });
    }

    pub(super) fn reserved(&mut self, machine: MachineId, reserved: Reserved<Incoming>) -> Work {
        let Reserved { import: made, blocks, missing, accepted, piece, damaged } = reserved;
        let Some(job) = self.jobs.get_mut(&machine) else { return Work::VerifyFailed(Text::new("gone")) };
        (job.blocks, job.damaged) = (blocks, damaged);
        if let Some(Piece { runs, .. }) = &piece {
            let blocks = missing.count();
            job.carried.blocks = blocks as usize;
            job.carried.bytes = blocks * self.setup.pool.layout().packed_bytes() as u64;
            job.carried.runs = runs.len();
        }
        job.sequence = job.sequence.or(made.sequence_id());
        if let SideJob::Target { import, .. } = &mut job.side {
            *import = Slot::Here(made);
        }
        let places =
            work::places_bytes(&[&missing, &accepted], piece.as_ref().map_or(0, |piece| piece.runs.len()));
        let link = job.link;
        if let Err(error) = self.fits(link, places) {
            return Work::ReserveRefused { reason: Refusal::Closed(error), free: 0 };
        }
        match self.permit(machine, piece) {
            Ok(grant) => Work::Reserved { missing, accepted, grant },
            Err(error) => Work::ReserveRefused { reason: Refusal::Closed(error), free: 0 },
        }
    }

    /// Checks that a message of this length can be sent to a peer.
    fn fits(&self, link: LinkId, bytes: usize) -> Result<(), Text> {
        work::fits(bytes, self.peers.get(link).map_or(usize::MAX, |peer| peer.message_max()))
    }

    /// Permits the peer of a migration to write frames, unless the migration has ended meanwhile:
    /// the peer would never learn of the grant, and a transport that cannot revoke it would keep
    /// the frames.
    pub(super) fn permit(&mut self, machine: MachineId, piece: Option<Piece>) -> Result<Grant, Text> {
        let Some(Piece { runs, hold, staged }) = piece else { return Ok(Grant::default()) };
        let gone = || Text::new("the link was lost");
        let job = self.jobs.get(&machine).ok_or_else(gone)?;
        if job.outcome.is_some() {
            return Err(Text::new("the migration has ended"));
        }
        let link = job.link;
        let peer = self.peers.get(link).ok_or_else(gone)?;
        let way = match staged {
            // Other transports cannot reach a staging.
            Some(_) => peer.on(Way::Tcp).map(|peer| (Way::Tcp, peer)),
            None => peer.way(),
        };
        let (way, peer) = way.ok_or_else(gone)?;
        let Carrier { transport, region } = self.setup.carriers.get(&way).ok_or_else(gone)?.clone();
        let region = staged.unwrap_or(region);
        let tag = Tag(self.next_tag);
        self.next_tag += 1;
        let grant = work::grant_of(way.number(), tag, region, &runs)?;
        let frames: u64 = runs.iter().map(|run| u64::from(run.len)).sum();
        let bytes = frames * self.setup.pool.layout().packed_bytes() as u64;
        self.setup.counters.count(|counters| counters.granted_bytes += bytes);
        // SAFETY: the hold keeps the frames exclusive to the import: see `Import::piece`.
        let granted = unsafe { transport.grant(Permission { tag, region, runs, peer, hold }) };
        granted.map_err(work::text)?;
        let name = self.peers.get(link).map(|peer| peer.transport(way));
        if let Some(Job { side: SideJob::Target { grant, .. }, transport, .. }) = self.jobs.get_mut(&machine)
        {
            *grant = Some((way, tag));
            *transport = name;
        }
        Ok(grant)
    }
}
