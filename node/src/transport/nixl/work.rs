//! The thread that owns NIXL's objects: executes commands, and polls requests in flight.

use std::ffi::CString;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError};
use std::time::{Duration, Instant};

use kvpool::storage::StoragePlanes;
use kvpool::transport::{PeerId, TransferId, TransportError};

use super::agent::{Agent, Progress, Registration, Request, broken, lossy};
use super::api::Api;
use super::shared::{Job, Shared};
use super::span::Region;

/// Requests in flight per transfer.
const IN_FLIGHT: usize = 2;

/// Polling interval while a peer may write here, or a request has made no progress lately.
const PAUSE: Duration = Duration::from_micros(50);

/// The same while only quarantined transfers or idle peers are left.
const LONG_PAUSE: Duration = Duration::from_millis(10);

/// Polls without progress before the thread pauses.
const SPINS: u32 = 200;

pub(super) type Answer<T> = SyncSender<Result<T, TransportError>>;

pub(super) enum Command {
    /// Registers memory, and returns the agent's new metadata.
    Register { region: Region, owner: StoragePlanes, answer: Answer<Vec<u8>> },
    /// Loads a peer.
    AddPeer { peer: PeerId, agent: Vec<u8>, answer: Answer<()> },
    /// Forgets a peer, and aborts its transfers.
    RemovePeer { peer: PeerId },
    /// Begins a transfer.
    Submit(Box<Job>),
    /// Gives up a transfer.
    Cancel { transfer: TransferId },
    /// Only wakes the thread: peers may write from now on, so it must poll.
    Wake,
    /// Ends the thread, and the agent with it.
    Stop,
}

struct Active {
    job: Box<Job>,
    posted: Vec<Request>,
    moved_at: Instant,
    /// Why no further request is posted.
    ending: Option<TransportError>,
    is_quarantined: bool,
}

/// A peer's name, until it is removed.
struct Peer {
    id: PeerId,
    name: CString,
}

/// State of the thread, dropped in this order: the agent, then memory and holds.
struct Work {
    agent: Agent,
    shared: Arc<Shared>,
    peers: Vec<Peer>,
    active: Vec<Active>,
    registrations: Vec<(Registration, StoragePlanes)>,
    patience: Duration,
}

/// Creates the agent, reports it, and runs until it is stopped.
pub(super) fn run(
    api: Api,
    name: &str,
    shared: Arc<Shared>,
    patience: Duration,
    commands: &Receiver<Command>,
    started: &Answer<Vec<u8>>,
) {
    let agent = Agent::new(Rc::new(api), name);
    let (agent, metadata) = match agent.and_then(|agent| agent.metadata().map(|bytes| (agent, bytes))) {
        Ok(both) => both,
        Err(error) => return drop(started.send(Err(error))),
    };
    let (peers, active, registrations) = (Vec::new(), Vec::new(), Vec::new());
    let mut work = Work { agent, shared, peers, active, registrations, patience };
    let _ = started.send(Ok(metadata));
    work.until_stopped(commands);
    work.end();
}

impl Work {
    fn until_stopped(&mut self, commands: &Receiver<Command>) {
        let mut vain = 0;
        loop {
            let is_busy = self.advance();
            vain = if is_busy { 0 } else { vain + 1 };
            let command = match self.pause(vain) {
                _ if is_busy => commands.try_recv().map_err(|error| match error {
                    TryRecvError::Empty => RecvTimeoutError::Timeout,
                    TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                }),
                Some(pause) => commands.recv_timeout(pause),
                None => commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match command {
                Ok(Command::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(command) => {
                    vain = 0;
                    self.execute(command);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Returns how long to wait for the next command; `None` if there is nothing to poll.
    fn pause(&self, vain: u32) -> Option<Duration> {
        let is_moving = self.active.iter().any(|active| !active.is_quarantined);
        match () {
            () if (is_moving || self.shared.has_grants()) && vain < SPINS => Some(Duration::ZERO),
            () if is_moving || self.shared.has_grants() => Some(PAUSE),
            () if !self.active.is_empty() || !self.peers.is_empty() => Some(LONG_PAUSE),
            () => None,
        }
    }

    fn execute(&mut self, command: Command) {
        match command {
            Command::Register { region, owner, answer } => {
                drop(answer.send(self.register(&region, owner)));
            }
            Command::AddPeer { peer, agent, answer } => {
                let loaded = self.agent.load(&agent);
                drop(answer.send(loaded.map(|name| self.peers.push(Peer { id: peer, name }))));
            }
            Command::RemovePeer { peer } => self.remove(peer),
            Command::Submit(job) => self.active.push(Active {
                job,
                posted: Vec::new(),
                moved_at: Instant::now(),
                ending: None,
                is_quarantined: false,
            }),
            Command::Cancel { transfer } => {
                let found = self.active.iter_mut().find(|active| active.job.id == transfer);
                if let Some(active) = found {
                    active.ending.get_or_insert(TransportError::Closed);
                }
            }
            Command::Wake => {}
            Command::Stop => unreachable!("handled by the loop"),
        }
    }

    fn register(&mut self, region: &Region, owner: StoragePlanes) -> Result<Vec<u8>, TransportError> {
        // SAFETY: the owner keeps the memory, and is dropped after the agent.
        let registration = unsafe { self.agent.register(region.memory, &region.spans()) }?;
        self.registrations.push((registration, owner));
        self.agent.metadata()
    }

    fn remove(&mut self, peer: PeerId) {
        let Some(place) = self.peers.iter().position(|known| known.id == peer) else { return };
        let Peer { name, .. } = self.peers.remove(place);
        let gone = TransportError::PeerGone { peer: lossy(&name), reason: "it was removed".into() };
        for active in self.active.iter_mut().filter(|active| active.job.peer == peer) {
            active.ending.get_or_insert_with(|| gone.clone());
        }
        self.agent.unload(&name);
    }

    fn advance(&mut self) -> bool {
        let mut is_busy = false;
        let mut place = 0;
        while place < self.active.len() {
            let (agent, peers) = (&self.agent, &self.peers);
            let active = &mut self.active[place];
            is_busy |= active.poll(agent);
            is_busy |= active.post(agent, peers);
            if active.is_over() {
                let Active { job, ending, .. } = self.active.swap_remove(place);
                // The hold is dropped first: a caller that sees the end finds the frames released.
                let id = job.id;
                drop(job);
                self.shared.ended(id, ending);
                continue;
            }
            if !active.is_quarantined
                && let Some(reason) = active.lost(self.patience)
            {
                active.is_quarantined = true;
                active.ending.get_or_insert_with(|| reason.clone());
                self.shared.quarantined(active.job.id, reason);
            }
            place += 1;
        }
        if !self.peers.is_empty() {
            self.agent.serve();
        }
        is_busy
    }

    /// Drops the agent with what was in flight, then everything that it used.
    fn end(self) {
        let Self { agent, shared, active, registrations, .. } = self;
        let (mut over, mut owners) = (Vec::new(), Vec::new());
        for Active { job, posted, ending, .. } in active {
            posted.into_iter().for_each(|request| agent.release(request));
            over.push((job, ending));
        }
        for (registration, owner) in registrations {
            agent.deregister(registration);
            owners.push(owner);
        }
        drop(agent);
        drop(owners);
        for (job, ending) in over {
            let id = job.id;
            drop(job);
            shared.ended(id, Some(ending.unwrap_or(TransportError::Closed)));
        }
        shared.agent_is_gone();
    }
}

impl Active {
    fn poll(&mut self, agent: &Agent) -> bool {
        let mut place = 0;
        let posted = self.posted.len();
        while place < self.posted.len() {
            match agent.progress(&self.posted[place]) {
                Progress::InFlight => {
                    place += 1;
                    continue;
                }
                Progress::Done => {}
                Progress::Failed(status) => {
                    self.ending.get_or_insert_with(|| broken(status));
                }
            }
            agent.release(self.posted.swap_remove(place));
            self.moved_at = Instant::now();
        }
        posted != self.posted.len()
    }

    fn post(&mut self, agent: &Agent, peers: &[Peer]) -> bool {
        let mut is_posted = false;
        while self.ending.is_none() && self.posted.len() < IN_FLIGHT {
            let Some(pairs) = self.job.requests.pop_front() else { break };
            let Some(peer) = peers.iter().find(|peer| peer.id == self.job.peer) else {
                let number = u64::from(self.job.peer.0);
                self.ending = Some(TransportError::Unknown { what: "peer", number });
                break;
            };
            // SAFETY: the hold keeps the memory until this transfer has no request in flight.
            match unsafe { agent.post(self.job.memory, &pairs, &peer.name) } {
                Ok(request) => {
                    self.posted.push(request);
                    self.moved_at = Instant::now();
                    is_posted = true;
                }
                Err(error) => self.ending = Some(error),
            }
        }
        is_posted
    }

    fn is_over(&self) -> bool {
        self.posted.is_empty() && (self.ending.is_some() || self.job.requests.is_empty())
    }

    /// Returns the reason why the end of this transfer is unknown, if any.
    fn lost(&self, patience: Duration) -> Option<TransportError> {
        if let Some(ending) = &self.ending {
            return Some(ending.clone());
        }
        let waited = self.moved_at.elapsed();
        let stalled = || TransportError::Stalled {
            peer: format!("number {}", self.job.peer.0),
            waited_ms: waited.as_millis() as u64,
        };
        (waited > patience).then(stalled)
    }
}
