//! The state of the driver, and its loop.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::Pool;
use kvpool::transport::Tag;
use tokio::sync::{mpsc, oneshot};

use super::input::Input;
use crate::admin::MigrationRecord;
use crate::node::arrival::Arrival;
use crate::node::job::Job;
use crate::node::message::{NodeMessage, Way};
use crate::node::parts::PartCopies;
use crate::node::peers::Peers;
use crate::node::status::Counters;
use crate::node::work::Carrier;
use crate::protocol::{LinkId, MachineId, Migrations, Millis};
use crate::transport::tcp::TcpTransport;

/// A grant of a migration that has ended, into which a peer may still write.
pub(super) struct Quarantined {
    pub(super) link: LinkId,
    pub(super) way: Way,
    pub(super) tag: Tag,
}

/// All migrations of a node, and everything that belongs to them.
pub(in crate::node) struct Driver {
    pub(super) pool: Pool,
    pub(super) origin: Instant,
    pub(super) machines: Migrations,
    pub(super) peers: Peers,
    pub(super) tcp: Arc<TcpTransport>,
    pub(super) carriers: HashMap<Way, Carrier>,
    pub(super) counters: Arc<Counters>,
    pub(super) sender: mpsc::WeakSender<Input>,
    pub(super) arrivals: mpsc::UnboundedSender<Arrival>,
    pub(super) parts: PartCopies,
    pub(super) jobs: HashMap<MachineId, Job>,
    pub(super) history: VecDeque<MigrationRecord>,
    pub(super) quarantined: Vec<Quarantined>,
    pub(super) next_tag: u64,
    /// Takes no requests and no links any more.
    pub(super) is_draining: bool,
    pub(super) drained: Vec<oneshot::Sender<()>>,
}

impl Driver {
    pub(in crate::node) fn new(
        pool: Pool,
        machines: Migrations,
        tcp: Arc<TcpTransport>,
        carriers: HashMap<Way, Carrier>,
        counters: Arc<Counters>,
        sender: mpsc::WeakSender<Input>,
        arrivals: mpsc::UnboundedSender<Arrival>,
        parts: PartCopies,
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
            parts,
            jobs: HashMap::new(),
            history: VecDeque::new(),
            quarantined: Vec::new(),
            next_tag: 1,
            is_draining: false,
            drained: Vec::new(),
        }
    }

    /// Works until all handles of the node are gone, or it was drained.
    pub(in crate::node) async fn run(mut self, mut inputs: mpsc::Receiver<Input>) {
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
                    self.note_clears();
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

    pub(super) fn now(&self) -> Millis {
        Millis(self.origin.elapsed().as_millis() as u64)
    }

    pub(super) fn input(&mut self, input: Input) {
        self.note_clears();
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
            Input::Send(name, export, part, answer) => self.send(&name, *export, part, answer),
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
}
