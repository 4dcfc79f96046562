//! The task that owns all migrations of a node.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use kvpool::prefix::BlockHash;
use kvpool::transport::{Grant as Permission, Hold, PeerId, SourceState, Tag, TransferState, TransportError};
use kvpool::{Carried, Export, Import, Imported, SendError, Sent};
use kvpool::{Pool, Run, TransferError};
use tokio::sync::{mpsc, oneshot};

use super::arrival::Arrival;
use super::job::{Ending, Job, SideJob, Slot};
use super::message::{NodeMessage, Way};
use super::peers::{Joined, Peers};
use super::status::{self, Counters, HISTORY, NodeStatus};
use super::work::{self, Carrier, Lost, Reserved, Verified};
use crate::admin::MigrationRecord;
use crate::protocol::{
    Action, Actions, Attempt, Bytes, Command, FetchBytes, Grant, Incarnation, Kind, LinkId, MachineId,
    ManifestBytes, MigrationId, Migrations, Millis, Outcome, Places, Refusal, Report, Request, SideState,
    Task, Text, Work,
};
use crate::transport::tcp::{Link, TcpTransport};

/// Inputs that wait for the driver. Readers of links wait for a place; the peers then wait too.
pub(super) const INPUTS: usize = 1024;

/// What happens to a driver.
pub(super) enum Input {
    /// A handshake was completed.
    LinkUp(Arc<Link>),
    /// A link was closed.
    LinkLost(LinkId, Arc<Link>),
    /// A peer sent a message.
    Message(LinkId, NodeMessage),
    /// A task ended.
    Done(MachineId, Box<Done>),
    /// A peer was added to NIXL, or could not be.
    Reached(LinkId, Incarnation, Result<PeerId, TransportError>),
    /// A quarantined transfer of this node is over.
    Over(LinkId, Way, u64),
    /// The pool sends an export.
    Send(String, Box<Export>, oneshot::Sender<Result<Sent, SendError>>),
    /// The pool fetches cached blocks.
    Fetch(String, (u32, Vec<BlockHash>), oneshot::Sender<Result<Carried, TransferError>>),
    /// The operator declares that a peer's process has ended.
    PeerEnded(String),
    /// Closes the links to a peer.
    Cut(String),
    /// Asks for the state.
    Status(oneshot::Sender<NodeStatus>),
    /// Cancels what can be cancelled, and answers when nothing is under way.
    Drain(oneshot::Sender<()>),
}

/// The result of a task, and what it took along.
pub(super) enum Done {
    Exported(Option<Export>, Result<(ManifestBytes, usize), Text>),
    Transferred(Export, Attempt, Grant, Result<Carried, Lost>),
    Reserved(Result<Reserved, (Refusal, u64)>),
    Verified(Import, Attempt, Result<Verified, Text>),
    Committed(Result<Imported, Text>),
}

/// A grant of a migration that has ended, into which a peer may still write.
struct Quarantined {
    link: LinkId,
    way: Way,
    tag: Tag,
}

/// All migrations of a node, and everything that belongs to them.
pub(super) struct Driver {
    pub(super) pool: Pool,
    pub(super) origin: Instant,
    pub(super) machines: Migrations,
    pub(super) peers: Peers,
    pub(super) tcp: Arc<TcpTransport>,
    pub(super) carriers: HashMap<Way, Carrier>,
    pub(super) counters: Arc<Counters>,
    pub(super) sender: mpsc::WeakSender<Input>,
    pub(super) arrivals: mpsc::UnboundedSender<Arrival>,
    jobs: HashMap<MachineId, Job>,
    history: VecDeque<MigrationRecord>,
    quarantined: Vec<Quarantined>,
    next_tag: u64,
    /// Takes no requests and no links any more.
    is_draining: bool,
    drained: Vec<oneshot::Sender<()>>,
}

impl Driver {
    pub(super) fn new(
        pool: Pool,
        machines: Migrations,
        tcp: Arc<TcpTransport>,
        carriers: HashMap<Way, Carrier>,
        counters: Arc<Counters>,
        sender: mpsc::WeakSender<Input>,
        arrivals: mpsc::UnboundedSender<Arrival>,
    ) -> Self {
        Self {
            pool,
            origin: Instant::now(),
            machines,
            peers: Peers::default(),
            tcp,
            carriers,
            counters,
            sender,
            arrivals,
            jobs: HashMap::new(),
            history: VecDeque::new(),
            quarantined: Vec::new(),
            next_tag: 1,
            is_draining: false,
            drained: Vec::new(),
        }
    }

    /// Works until all handles of the node are gone, or it was drained.
    pub(super) async fn run(mut self, mut inputs: mpsc::Receiver<Input>) {
        loop {
            let wake = self.machines.deadline().map(|at| self.origin + Duration::from_millis(at.0));
            let tick = async {
                match wake {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                input = inputs.recv() => match input {
                    Some(input) => self.input(input),
                    None => break,
                },
                () = tick => {
                    let actions = self.machines.tick(self.now());
                    self.act(actions);
                }
            }
            if self.is_draining && self.jobs.is_empty() {
                break;
            }
        }
        // Requests that are queued get an answer.
        self.is_draining = true;
        inputs.close();
        while let Some(input) = inputs.recv().await {
            self.input(input);
        }
        self.peers.close();
        for drained in self.drained.drain(..) {
            let _ = drained.send(());
        }
    }

    fn now(&self) -> Millis {
        Millis(self.origin.elapsed().as_millis() as u64)
    }

    fn input(&mut self, input: Input) {
        match input {
            Input::LinkUp(link) => self.link_up(link),
            Input::LinkLost(id, link) => self.link_lost(id, &link),
            Input::Message(id, message) => self.message(id, message),
            Input::Done(machine, done) => self.done(machine, *done),
            Input::Reached(id, incarnation, reached) => self.reached(id, incarnation, reached),
            Input::Over(id, way, tag) => {
                if let Some(peer) = self.peers.get(id) {
                    peer.send(NodeMessage::Over { way, tag });
                }
            }
            Input::Send(name, export, answer) => self.send(&name, *export, answer),
            Input::Fetch(name, what, answer) => self.fetch(&name, what, answer),
            Input::PeerEnded(name) => {
                if let Some(id) = self.peers.find(&name) {
                    if let Some(peer) = self.peers.get_mut(id) {
                        peer.close();
                    }
                    self.peer_is_gone(id);
                    let actions = self.machines.peer_ended(self.now(), id);
                    self.act(actions);
                }
            }
            Input::Cut(name) => {
                if let Some(peer) = self.peers.find(&name).and_then(|id| self.peers.get(id)) {
                    peer.cut();
                }
            }
            Input::Status(answer) => {
                let _ = answer.send(self.status());
            }
            Input::Drain(drained) => {
                self.is_draining = true;
                self.drained.push(drained);
                let machines: Vec<_> = self.jobs.keys().copied().collect();
                for machine in machines {
                    if let Ok(actions) = self.machines.cancel(self.now(), machine) {
                        self.act(actions);
                    }
                }
            }
        }
    }

    fn link_up(&mut self, link: Arc<Link>) {
        if self.is_draining {
            return link.close();
        }
        let joined = self.peers.join(link.clone());
        let (Joined::Same(id) | Joined::Restarted(id)) = joined else { return };
        if let Joined::Restarted(_) = joined {
            self.peer_is_gone(id);
        }
        if let (Ok(number), Some(peer)) = (self.tcp.attach(&link), self.peers.get_mut(id)) {
            peer.set_way(Way::Tcp, number);
        }
        self.introduce(id);
        self.read(id, link.clone());
        let incarnation = Incarnation(link.peer().incarnation);
        let actions = self.machines.link_up(self.now(), id, incarnation);
        self.act(actions);
    }

    /// Tells a peer how else this node can be reached.
    fn introduce(&self, id: LinkId) {
        let (Some(carrier), Some(peer)) = (self.carriers.get(&Way::Nixl), self.peers.get(id)) else { return };
        if let Ok(metadata) = Bytes::new(carrier.transport.metadata()) {
            peer.send(NodeMessage::Reach { way: Way::Nixl, metadata });
        }
    }

    /// Starts the task that reads a link.
    fn read(&self, id: LinkId, link: Arc<Link>) {
        let Some(inputs) = self.sender.upgrade() else { return };
        let inputs = inputs.downgrade();
        tokio::spawn(async move {
            while let Ok(message) = link.recv::<NodeMessage>().await {
                let Some(inputs) = inputs.upgrade() else { return };
                if inputs.send(Input::Message(id, message)).await.is_err() {
                    return;
                }
            }
            if let Some(inputs) = inputs.upgrade() {
                let _ = inputs.send(Input::LinkLost(id, link)).await;
            }
        });
    }

    fn link_lost(&mut self, id: LinkId, link: &Arc<Link>) {
        if self.peers.leave(id, link) {
            let actions = self.machines.link_lost(self.now(), id);
            self.act(actions);
        }
    }

    /// The process of a peer has ended: it writes no more.
    fn peer_is_gone(&mut self, id: LinkId) {
        let (gone, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.quarantined).into_iter().partition(|grant| grant.link == id);
        self.quarantined = rest;
        gone.iter().for_each(|grant| self.end_grant(grant.way, grant.tag, SourceState::Over));
    }

    fn end_grant(&self, way: Way, tag: Tag, source: SourceState) {
        if let Some(carrier) = self.carriers.get(&way) {
            carrier.transport.revoke(tag, source);
        }
    }

    fn message(&mut self, id: LinkId, message: NodeMessage) {
        match message {
            NodeMessage::Migration(envelope) => {
                let actions = self.machines.received(self.now(), id, envelope);
                self.act(actions);
            }
            NodeMessage::Reach { way: Way::Nixl, metadata } => self.reach(id, metadata.to_vec()),
            NodeMessage::Reach { .. } => {}
            NodeMessage::Over { way, tag } => {
                let of = |grant: &Quarantined| grant.link == id && grant.way == way && grant.tag.0 == tag;
                if let Some(place) = self.quarantined.iter().position(of) {
                    self.quarantined.swap_remove(place);
                    self.end_grant(way, Tag(tag), SourceState::Over);
                }
            }
        }
    }

    /// Adds a peer to NIXL on a blocking thread.
    fn reach(&self, id: LinkId, metadata: Vec<u8>) {
        let (Some(carrier), Some(inputs)) = (self.carriers.get(&Way::Nixl).cloned(), self.sender.upgrade())
        else {
            return;
        };
        let Some(incarnation) = self.peers.get(id).and_then(|peer| peer.incarnation) else { return };
        tokio::task::spawn_blocking(move || {
            let reached = carrier.transport.add_peer(&metadata);
            let _ = inputs.blocking_send(Input::Reached(id, incarnation, reached));
        });
    }

    fn reached(&mut self, id: LinkId, incarnation: Incarnation, reached: Result<PeerId, TransportError>) {
        let Some(peer) = self.peers.get_mut(id).filter(|peer| peer.incarnation == Some(incarnation)) else {
            return;
        };
        match reached {
            Ok(number) => peer.set_way(Way::Nixl, number),
            Err(error) => tracing::warn!(peer = peer.name, %error, "NIXL is not used"),
        }
    }

    fn send(&mut self, name: &str, export: Export, answer: oneshot::Sender<Result<Sent, SendError>>) {
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
        let begun = self.begin(name, command);
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

    fn fetch(
        &mut self,
        name: &str,
        (first, hashes): (u32, Vec<BlockHash>),
        answer: oneshot::Sender<Result<Carried, TransferError>>,
    ) {
        let what = work::fetch_bytes(first, &hashes).map_err(|error| error.to_string());
        match what.and_then(|what| self.begin(name, Command::BringBack { what })) {
            Ok((machine, id, link, actions)) => {
                self.jobs.insert(machine, Job::new(id, link, Kind::Fetch, Job::target(Some(answer))));
                self.act(actions);
            }
            Err(reason) => {
                let _ = answer.send(Err(TransferError::Node { node: name.to_owned(), reason }));
            }
        }
    }

    fn begin(
        &mut self,
        name: &str,
        command: Command,
    ) -> Result<(MachineId, MigrationId, LinkId, Actions), String> {
        if self.is_draining {
            return Err("this node is ending".into());
        }
        let link = self.peers.find(name).ok_or("it was never reached")?;
        if !self.peers.get(link).is_some_and(|peer| peer.is_up()) {
            return Err("there is no link to it".into());
        }
        let id = MigrationId(fastrand::u128(..));
        let begun = self.machines.request(self.now(), Request { id, link, command });
        begun.map(|(machine, actions)| (machine, id, link, actions)).map_err(|error| error.to_string())
    }

    fn act(&mut self, actions: Actions) {
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
    fn job(&mut self, machine: MachineId) -> Option<&mut Job> {
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

    fn task(&mut self, machine: MachineId, task: Task) {
        match task {
            Task::Export { what } => self.export(machine, what),
            Task::Retain(places) => self.retain(machine, &places),
            Task::Transfer { attempt, places, grant } => self.transfer(machine, attempt, places, grant),
            Task::Reserve(manifest) => self.reserve(machine, manifest),
            Task::Verify(attempt) => self.verify(machine, attempt),
            Task::Commit => self.commit(machine),
            Task::Finish => self.end(machine, Ending::Finish),
            Task::Restore | Task::Release => self.end(machine, Ending::Restore),
        }
    }

    /// Runs blocking work, and sends its result to this driver.
    fn block(&self, machine: MachineId, work: impl FnOnce() -> Done + Send + 'static) {
        let Some(inputs) = self.sender.upgrade() else { return };
        tokio::task::spawn_blocking(move || {
            let _ = inputs.blocking_send(Input::Done(machine, Box::new(work())));
        });
    }

    fn export(&mut self, machine: MachineId, what: Option<FetchBytes>) {
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

    fn retain(&mut self, machine: MachineId, places: &Places) {
        let Some(job) = self.job(machine) else { return };
        let places: Vec<u32> = places.iter().collect();
        job.accepted_blocks = Some(places.len());
        let SideJob::Source { export: Slot::Here(export), .. } = &mut job.side else { return };
        // A peer that lies about what it has loses blocks of its own cache, or keeps what is here.
        if let Err(error) = export.retain(&places) {
            tracing::warn!(%error, "a peer accepted blocks that were not offered");
        }
    }

    fn transfer(&mut self, machine: MachineId, attempt: Attempt, places: Places, grant: Grant) {
        let Some(job) = self.jobs.get_mut(&machine) else { return };
        let link = job.link;
        let SideJob::Source { export, .. } = &mut job.side else { return };
        let Some(export) = export.lend() else { return };
        let mut stop = job.begin_task();
        let way = Way::of_number(grant.way);
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

    fn reserve(&mut self, machine: MachineId, manifest: ManifestBytes) {
        let pool = self.pool.clone();
        let Some(Job { side: SideJob::Target { import, .. }, .. }) = self.job(machine) else { return };
        *import = Slot::Lent;
        self.block(machine, move || Done::Reserved(work::reserve(&pool, &manifest)));
    }

    fn verify(&mut self, machine: MachineId, attempt: Attempt) {
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
            let verified = work::verify(&mut import);
            Done::Verified(import, attempt, verified)
        });
    }

    fn commit(&mut self, machine: MachineId) {
        let Some(Job { side: SideJob::Target { import, .. }, .. }) = self.jobs.get_mut(&machine) else {
            return;
        };
        let Some(import) = import.lend() else { return };
        self.block(machine, move || Done::Committed(work::commit(import)));
    }

    fn done(&mut self, machine: MachineId, done: Done) {
        let Some(job) = self.jobs.get_mut(&machine) else { return };
        job.stop = None;
        let link = job.link;
        let work = match (done, &mut job.side) {
            (Done::Exported(export, described), SideJob::Source { export: slot, .. }) => {
                job.sequence = job.sequence.or(export.as_ref().and_then(Export::sequence));
                *slot = export.map_or(Slot::Empty, Slot::Here);
                match described {
                    Ok((manifest, blocks)) => {
                        job.blocks = blocks;
                        Work::Exported(manifest)
                    }
                    Err(error) => Work::ExportFailed(error),
                }
            }
            (Done::Transferred(export, attempt, grant, result), SideJob::Source { export: slot, .. }) => {
                *slot = Slot::Here(export);
                if let Ok(carried) = &result {
                    // A block that is sent again is one block.
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
                    Ok(Verified { bad, piece }) => match self.permit(machine, piece) {
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
                        let sequence = match &imported {
                            Imported::Sequence(sequence) => Some(sequence.id().0),
                            _ => None,
                        };
                        *arrived = Some(imported);
                        Work::Committed { sequence }
                    }
                    Err(error) => Work::CommitFailed(error),
                }
            }
            _ => unreachable!("a result of the other side"),
        };
        // First what the machine may have decided meanwhile.
        self.settle(machine);
        if let Some(actions) = self.machines.done(self.now(), machine, work) {
            self.act(actions);
        }
    }

    /// Tells the peer when nothing is in flight into its grant any more.
    fn transfer_ended(&self, link: LinkId, grant: &Grant, lost: Option<Lost>) {
        let (Some(way), Some(lost)) = (Way::of_number(grant.way), lost) else { return };
        let tag = grant.tag;
        let (Some(transfer), Some(carrier)) = (lost.quarantined, self.carriers.get(&way)) else {
            if let Some(peer) = self.peers.get(link) {
                peer.send(NodeMessage::Over { way, tag });
            }
            return;
        };
        self.counters.quarantined_transfers.fetch_add(1, Relaxed);
        let (transport, inputs) = (carrier.transport.clone(), self.sender.clone());
        tokio::spawn(async move {
            work::over(transport, transfer).await;
            if let Some(inputs) = inputs.upgrade() {
                let _ = inputs.send(Input::Over(link, way, tag)).await;
            }
        });
    }

    fn reserved(&mut self, machine: MachineId, reserved: Reserved) -> Work {
        let Reserved { import: made, blocks, missing, accepted, piece } = reserved;
        let Some(job) = self.jobs.get_mut(&machine) else { return Work::VerifyFailed(Text::new("gone")) };
        job.blocks = blocks;
        if let Some((runs, _)) = &piece {
            let blocks = missing.count();
            job.carried.blocks = blocks as usize;
            job.carried.bytes = blocks * self.pool.layout().packed_bytes() as u64;
            job.carried.runs = runs.len();
        }
        job.sequence = job.sequence.or(made.sequence_id());
        if let SideJob::Target { import, .. } = &mut job.side {
            *import = Slot::Here(made);
        }
        match self.permit(machine, piece) {
            Ok(grant) => Work::Reserved { missing, accepted, grant },
            Err(error) => Work::ReserveRefused { reason: Refusal::Closed(error), free: 0 },
        }
    }

    /// Permits the peer of a migration to write frames.
    fn permit(&mut self, machine: MachineId, piece: Option<(Vec<Run>, Hold)>) -> Result<Grant, Text> {
        let Some((runs, hold)) = piece else { return Ok(Grant::default()) };
        let gone = || Text::new("the link was lost");
        let link = self.jobs.get(&machine).ok_or_else(gone)?.link;
        let (way, peer) = self.peers.get(link).and_then(|peer| peer.way()).ok_or_else(gone)?;
        let Carrier { transport, region } = self.carriers.get(&way).ok_or_else(gone)?.clone();
        let tag = Tag(self.next_tag);
        self.next_tag += 1;
        let grant = work::grant_of(way.number(), tag, region, &runs)?;
        let bytes = self.pool.layout().packed_bytes() as u64;
        self.counters
            .granted_bytes
            .fetch_add(bytes * u64::from(runs.iter().map(|run| run.len).sum::<u32>()), Relaxed);
        // SAFETY: the hold keeps the frames for the import alone: see `Import::piece`.
        let granted = unsafe { transport.grant(Permission { tag, region, runs, peer, hold }) };
        granted.map_err(work::text)?;
        if let Some(Job { side: SideJob::Target { grant, .. }, .. }) = self.jobs.get_mut(&machine) {
            *grant = Some((way, tag));
        }
        Ok(grant)
    }

    /// Ends what a machine had, now or when its task returns.
    fn end(&mut self, machine: MachineId, ending: Ending) {
        let Some(job) = self.jobs.get_mut(&machine) else { return };
        job.ending = Some(ending);
        // A task that waits for a transport stops.
        job.stop = None;
    }

    fn report(&mut self, machine: MachineId, report: Report) {
        if report.bad_blocks > 0 {
            self.counters.bad_blocks.fetch_add(report.bad_blocks, Relaxed);
        }
        if !report.outcome.is_final() {
            self.counters.in_doubt.fetch_add(1, Relaxed);
            return;
        }
        let Some(job) = self.jobs.get_mut(&machine) else { return };
        job.outcome = Some(report.outcome);
        self.settle(machine);
    }

    /// Gives the result of a migration away that has ended, and whose task has returned.
    fn settle(&mut self, machine: MachineId) {
        let is_over = |job: &Job| !job.is_lent() && job.outcome.is_some();
        if !self.jobs.get(&machine).is_some_and(is_over) {
            return;
        }
        let Some(job) = self.jobs.remove(&machine) else { return };
        let outcome = job.outcome.clone().unwrap_or_else(|| unreachable!("checked above"));
        let node = self.peers.name(job.link).to_owned();
        let reason = status::failure(&outcome);
        self.history.push_front(status::ended(&job, node.clone(), &outcome));
        self.history.truncate(HISTORY);
        self.counters.ended(&job, &outcome);
        let (mut carried, shared_blocks) = (job.carried, job.shared_blocks());
        carried.took = job.begun.elapsed();
        let error = |reason: Option<String>| TransferError::Node {
            node: node.clone(),
            reason: reason.unwrap_or_else(|| "it did not confirm".into()),
        };
        match job.side {
            SideJob::Source { mut export, answer } => {
                let Some(export) = export.take() else { return };
                match (job.ending, answer) {
                    (Some(Ending::Finish), answer) => {
                        let finished = export.finish();
                        if let Some(answer) = answer {
                            let _ = answer.send(Ok(Sent { shared_blocks, carried, finished }));
                        }
                    }
                    (_, Some(answer)) => {
                        let error = error(reason);
                        // Without a receiver the export is dropped, which closes its sequence.
                        let _ = answer.send(Err(SendError { error, export: Box::new(export) }));
                    }
                    (_, None) => drop(export.cancel()),
                }
            }
            SideJob::Target { import, grant, arrived, answer } => {
                if let Some((way, tag)) = grant
                    && let Some(carrier) = self.carriers.get(&way)
                    && let TransferState::Quarantined(_) = carrier.transport.revoke(tag, SourceState::Unknown)
                {
                    self.quarantined.push(Quarantined { link: job.link, way, tag });
                }
                drop(import);
                if let Some(Imported::Sequence(sequence)) = arrived {
                    let arrival = Arrival { sequence: *sequence, from: node.clone(), blocks: job.blocks };
                    let _ = self.arrivals.send(arrival);
                }
                if let Some(answer) = answer {
                    let _ = answer.send(match outcome {
                        Outcome::Done => Ok(carried),
                        _ => Err(error(reason)),
                    });
                }
            }
        }
    }

    fn status(&self) -> NodeStatus {
        let running = self.machines.status().filter_map(|status| {
            let job = self.jobs.get(&status.machine);
            status::running(&status, job, self.peers.name(status.link))
        });
        let migrations = running.chain(self.history.iter().cloned()).collect();
        let peers = self.peers.iter().map(|peer| (peer.name.clone(), peer.is_up())).collect();
        NodeStatus { migrations, peers, quarantined_grants: self.quarantined.len() }
    }
}
