use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use kvpool::transport::Tag;
use kvpool::{GroupedSequence, Pool};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use super::input::Input;
use crate::admin::MigrationRecord;
use crate::node::arrival::Arrival;
use crate::node::job::Job;
use crate::node::message::Way;
use crate::node::name_lock::NameLock;
use crate::node::parts::PartCopies;
use crate::node::peers::Peers;
use crate::node::questions::Questions;
use crate::node::status::Counters;
use crate::node::work::Carrier;
use crate::protocol::{LinkId, MachineId, Migrations, Millis};
use crate::settings::Restarts;
use crate::transport::tcp::TcpTransport;

/// Interval of queries about a quarantined grant.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// A grant of an ended migration that a peer may still write.
pub(super) struct Quarantined {
    pub(super) link: LinkId,
    pub(super) way: Way,
    pub(super) tag: Tag,
}

pub(super) type PeerGrant = (LinkId, Way, u64);

/// Fixed inputs of a driver.
pub(in crate::node) struct Setup {
    pub(in crate::node) pool: Pool,
    pub(in crate::node) machines: Migrations,
    pub(in crate::node) tcp: Arc<TcpTransport>,
    pub(in crate::node) carriers: HashMap<Way, Carrier>,
    pub(in crate::node) counters: Arc<Counters>,
    pub(in crate::node) sender: mpsc::WeakSender<Input>,
    pub(in crate::node) arrivals: mpsc::Sender<Arrival<GroupedSequence>>,
    /// Whether the engine takes sequences of several lists.
    pub(in crate::node) takes_grouped: Arc<AtomicBool>,
    pub(in crate::node) parts: PartCopies,
    pub(in crate::node) fingerprint: [u8; 16],
    pub(in crate::node) restarts: Restarts,
    /// Time without a link to the target after which a doubt is resolved automatically.
    pub(in crate::node) doubt_limit: Option<Duration>,
    pub(in crate::node) lock: Option<NameLock>,
    /// Maximum number of blocks in transfer to a peer that fetches.
    pub(in crate::node) fetch_blocks_max: usize,
    pub(in crate::node) configured: Arc<Mutex<BTreeSet<String>>>,
    /// Number of unfinished migrations, once the driver has ended.
    pub(in crate::node) ended: watch::Sender<Option<usize>>,
    /// Closed when the node is dropped.
    pub(in crate::node) alive: watch::Receiver<()>,
}

pub(in crate::node) struct Driver {
    pub(super) setup: Setup,
    pub(super) origin: Instant,
    pub(super) peers: Peers,
    pub(super) questions: Questions,
    pub(super) jobs: HashMap<MachineId, Job>,
    pub(super) history: VecDeque<MigrationRecord>,
    pub(super) quarantined: Vec<Quarantined>,
    ask_at: Instant,
    pub(super) writing: HashSet<PeerGrant>,
    /// The latest grants of peers that this node reported as finished; it no longer writes them.
    pub(super) said_over: VecDeque<PeerGrant>,
    pub(super) next_tag: u64,
    pub(super) is_draining: bool,
}

impl Driver {
    pub(in crate::node) fn new(setup: Setup) -> Self {
        Self {
            setup,
            origin: Instant::now(),
            peers: Peers::default(),
            questions: Questions::default(),
            jobs: HashMap::new(),
            history: VecDeque::new(),
            quarantined: Vec::new(),
            ask_at: Instant::now(),
            writing: HashSet::new(),
            said_over: VecDeque::new(),
            // Random, so that late messages about another process's grants match none of this one.
            next_tag: fastrand::u64(1..1 << 62),
            is_draining: false,
        }
    }

    /// Runs until the node and all requests are gone, or draining has finished.
    pub(in crate::node) async fn run(mut self, mut inputs: mpsc::Receiver<Input>) {
        let mut alive = self.setup.alive.clone();
        loop {
            let doubt = self.limited_doubts().map(|(_, due)| due).min();
            let due = self.setup.machines.deadline().into_iter().chain(doubt).min();
            let due = due.map(|at| self.origin + Duration::from_millis(at.0));
            let ask = (!self.quarantined.is_empty()).then_some(self.ask_at);
            let wake = due.into_iter().chain(ask).chain(self.questions.deadline()).min();
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
                // Only closes; nothing is sent.
                _ = alive.changed() => break,
                () = tick => self.tick(),
                () = self.peers.reports.over() => self.peers.reports.sum_up(),
            }
            if self.is_draining && self.jobs.is_empty() && !self.is_awaited() {
                break;
            }
        }
        self.drain();
        // Queued requests get an answer.
        inputs.close();
        // Including senders that hold a reserved slot.
        while let Some(input) = inputs.recv().await {
            self.input(input);
        }
        self.peers.close().await;
        self.setup.ended.send_replace(Some(self.jobs.len()));
    }

    fn tick(&mut self) {
        self.note_clears();
        let actions = self.setup.machines.tick(self.now());
        self.act(actions);
        self.end_doubts();
        self.lose_late_questions();
        if Instant::now() >= self.ask_at {
            self.ask_at = Instant::now() + ASK_AGAIN;
            self.ask(None);
        }
    }

    pub(super) fn now(&self) -> Millis {
        Millis(self.origin.elapsed().as_millis() as u64)
    }

    pub(super) fn input(&mut self, input: Input) {
        self.note_clears();
        match input {
            Input::LinkUp(link) => self.link_up(link),
            Input::LinkLost(id, link) => self.link_lost(id, &link),
            Input::Message(id, link, message, _room) => self.message(id, &link, *message),
            Input::Done(machine, done) => self.done(machine, *done),
            Input::Reached(id, incarnation, reached) => self.reached(id, incarnation, reached),
            Input::Over(id, way, tag) => {
                self.writing.remove(&(id, way, tag));
                self.say_over(id, way, tag);
            }
            Input::Send(parcel, part) => self.send(*parcel, part),
            Input::Fetch(name, hashes, answer) => self.fetch(&name, &hashes, answer),
            Input::AskCached(name, hashes, cached) => self.ask_cached(&name, hashes, cached),
            Input::PeerEnded(name, answer) => {
                let _ = answer.send(self.declared_ended(&name));
            }
            Input::Cut(name) => {
                if let Some(peer) = self.peers.find(&name).and_then(|id| self.peers.get(id)) {
                    peer.cut();
                }
            }
            Input::Status(answer) => {
                let _ = answer.send(self.status());
            }
            Input::Drain => self.drain(),
        }
    }

    /// Accepts no more requests, and cancels what can be cancelled.
    fn drain(&mut self) {
        self.is_draining = true;
        let machines: Vec<_> = self.jobs.keys().copied().collect();
        for machine in machines {
            if let Ok(actions) = self.setup.machines.cancel(self.now(), machine) {
                self.act(actions);
            }
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.has_doubts()
            && let Some(lock) = self.setup.lock.take()
        {
            // While this process lives, no peer may take its doubts as ended.
            std::mem::forget(lock);
        }
    }
}
