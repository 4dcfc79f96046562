//! Nodes, their network, and the faults of both, on one queue of events in virtual time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use fastrand::Rng;
use kvpool_node::protocol::*;

use crate::check::Checks;
use crate::node::{Happening, Input, Node, NodeId, Weather};
use crate::pool::Pool;
use crate::pool::part_of;

pub struct World {
    pub now: u64,
    pub nodes: Vec<Node>,
    pub checks: Checks,
    pub rng: Rng,
    pub queue: BinaryHeap<Reverse<(u64, u64)>>,
    pub happenings: BTreeMap<u64, Happening>,
    pub next: u64,
    pub weather: Weather,
    pub cut: BTreeSet<(NodeId, NodeId)>,
    pub is_healed: bool,
    pub trace: bool,
}

pub const KEYS: u32 = 12;

/// Steps of a schedule; the longest takes a tenth of them.
const STEPS_MAX: u32 = 50_000;

impl World {
    pub fn new(seed: u64, trace: bool) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut often = |choices: &[f64]| choices[rng.usize(..choices.len())];
        let is_calm = seed.is_multiple_of(8);
        let (mut lost, doubled, mut late) =
            (often(&[0.0, 0.05, 0.2]), often(&[0.0, 0.1, 0.4]), often(&[0.0, 0.05, 0.2]));
        let (corrupt, mut struck) = (often(&[0.0, 0.0, 0.1, 0.6]), often(&[0.0, 0.02, 0.08]));
        if is_calm {
            (lost, late, struck) = (0.0, 0.0, 0.0);
        }
        let transfer_deadline_ms = often(&[30_000.0, 6_000.0, 1_500.0]) as u64;
        let timing = Timing {
            transfer_deadline_ms,
            retry_ms: transfer_deadline_ms / 30,
            limit_ms: transfer_deadline_ms * rng.u64(3..12),
        };
        let horizon = transfer_deadline_ms * rng.u64(2..8);
        let weather = Weather { lost, doubled, late, corrupt, struck, is_calm, horizon, timing };
        let count = rng.usize(2..=4);
        let mut world = Self {
            now: 0,
            nodes: Vec::new(),
            checks: Checks::new(transfer_deadline_ms, is_calm),
            rng,
            queue: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            next: 0,
            weather,
            cut: BTreeSet::new(),
            is_healed: false,
            trace,
        };
        for _ in 0..count {
            let node = world.node();
            world.nodes.push(node);
        }
        world.populate();
        world.plan();
        world
    }

    pub fn node(&mut self) -> Node {
        let incarnation = Incarnation(self.rng.u64(..));
        let limits = Limits { per_peer_max: self.rng.u32(2..8), ..Limits::default() };
        Node {
            migrations: Migrations::new(incarnation, self.weather.timing, limits),
            pool: Pool::new(self.rng.u32(12..40)),
            is_alive: true,
            is_paused: false,
            inbox: VecDeque::new(),
            wake_at: None,
            is_mute: self.rng.u8(..) < 12 && !self.weather.is_calm,
            sequences: BTreeMap::new(),
            cleared: BTreeSet::new(),
            links: BTreeMap::new(),
            shaken: BTreeMap::new(),
        }
    }

    fn populate(&mut self) {
        for sequence in 1..=self.rng.u64(1..5) {
            let (node, blocks) = (self.rng.usize(..self.nodes.len()), self.rng.u32(1..6));
            if self.nodes[node].pool.add(sequence, blocks) {
                self.checks.sequences.insert(sequence, false);
            }
        }
        // Sequences whose parts are on several nodes, one of which has none.
        for group in 0..self.rng.u64(..3) {
            let mut nodes: Vec<NodeId> = (0..self.nodes.len()).collect();
            self.rng.shuffle(&mut nodes);
            nodes.truncate(self.rng.usize(1..nodes.len()));
            let blocks = self.rng.u32(1..6);
            for (index, node) in nodes.into_iter().enumerate() {
                let part = part_of(group, index as u64);
                if self.nodes[node].pool.add(part, blocks) {
                    self.checks.sequences.insert(part, false);
                }
            }
        }
        for _ in 0..self.rng.u32(..10) {
            let (node, key) = (self.rng.usize(..self.nodes.len()), self.rng.u32(..KEYS));
            self.nodes[node].pool.cache(key);
        }
    }

    fn plan(&mut self) {
        let horizon = self.weather.horizon;
        for a in 0..self.nodes.len() {
            for b in a + 1..self.nodes.len() {
                self.connect(a, b);
            }
        }
        for _ in 0..self.rng.u32(1..24) {
            let node = self.rng.usize(..self.nodes.len());
            let at = self.rng.u64(..horizon);
            self.at(at, Happening::Request { node });
        }
        for _ in 0..self.rng.u32(..8) {
            let at = self.rng.u64(..horizon);
            self.at(at, Happening::Parts);
        }
        for _ in 0..self.rng.u32(..6) {
            let node = self.rng.usize(..self.nodes.len());
            let at = self.rng.u64(..horizon);
            self.at(at, Happening::Clear { node });
        }
        let faults = if self.weather.is_calm { 0 } else { self.rng.u32(..8) };
        for _ in 0..faults {
            let at = self.rng.u64(..horizon);
            self.at(at, Happening::Fault);
        }
        for _ in 0..8 {
            let at = self.rng.u64(..horizon);
            self.at(at, Happening::Engine);
        }
        self.at(horizon, Happening::Heal);
    }

    pub fn at(&mut self, time: u64, happening: Happening) {
        self.queue.push(Reverse((time, self.next)));
        self.happenings.insert(self.next, happening);
        self.next += 1;
    }

    pub fn input(&mut self, time: u64, node: NodeId, input: Input) {
        let incarnation = self.nodes[node].migrations.incarnation();
        self.at(time, Happening::Input { node, incarnation, input });
    }

    pub fn log(&self, what: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{:>8} {}", self.now, what());
        }
    }

    /// Runs until all is quiet behind the healing, and checks what is left.
    pub fn run(&mut self) -> Result<(), String> {
        let Timing { transfer_deadline_ms, limit_ms, .. } = self.weather.timing;
        let end = self.weather.horizon + 3 * limit_ms + 20 * transfer_deadline_ms;
        let mut steps = 0;
        while let Some(Reverse((time, number))) = self.queue.pop() {
            steps += 1;
            if steps > STEPS_MAX {
                return Err(format!(
                    "{STEPS_MAX} steps, and {} to come: messages cause each other",
                    self.queue.len()
                ));
            }
            self.now = self.now.max(time);
            let happening = self.happenings.remove(&number).expect("queued");
            self.step(happening)?;
            self.check_step()?;
            if self.is_healed && self.is_quiet() && !self.has_inputs() {
                break;
            }
            if self.now > end {
                return Err(format!(
                    "not quiet {} ms after the healing: {}",
                    end - self.weather.horizon,
                    self.left()
                ));
            }
        }
        if !self.is_quiet() {
            return Err(format!("the events ended, but not the migrations: {}", self.left()));
        }
        self.check_end()
    }

    fn is_quiet(&self) -> bool {
        self.nodes.iter().all(|node| node.migrations.status().next().is_none())
    }

    /// Whether messages or results are still on their way.
    fn has_inputs(&self) -> bool {
        self.happenings.values().any(|happening| match happening {
            Happening::Input { input: Input::Wake { .. }, .. } => false,
            Happening::Input { node, incarnation, .. } => {
                self.nodes[*node].migrations.incarnation() == *incarnation
            }
            _ => false,
        })
    }

    fn left(&self) -> String {
        let states = self.nodes.iter().enumerate().flat_map(|(number, node)| {
            node.migrations.status().map(move |one| format!("node {number}: {one:?}"))
        });
        states.collect::<Vec<_>>().join("; ")
    }

    fn step(&mut self, happening: Happening) -> Result<(), String> {
        match happening {
            Happening::Input { node, incarnation, input } => {
                let to = &mut self.nodes[node];
                if to.migrations.incarnation() != incarnation || !to.is_alive {
                    return Ok(());
                }
                if to.is_paused {
                    to.inbox.push_back(input);
                    return Ok(());
                }
                self.take(node, input)
            }
            Happening::Request { node } => self.request(node),
            Happening::Parts => {
                self.request_parts();
                Ok(())
            }
            Happening::Part { node, request } => self.request_part(node, request),
            Happening::Clear { node } => self.clear(node),
            Happening::Engine => {
                self.engine();
                Ok(())
            }
            Happening::Fault => {
                let node = self.rng.usize(..self.nodes.len());
                self.strike(node);
                Ok(())
            }
            Happening::Death { node } => {
                if !self.is_healed && self.nodes[node].is_alive {
                    self.kill(node);
                }
                Ok(())
            }
            Happening::Resume { node } => self.resume(node),
            Happening::Restart { node } => {
                self.restart(node);
                Ok(())
            }
            Happening::Mend { a, b } => {
                self.mend(a, b);
                Ok(())
            }
            Happening::Heal => self.heal(),
        }
    }

    pub fn check_step(&mut self) -> Result<(), String> {
        self.checks.owners(&self.nodes)?;
        let limit_ms = self.weather.timing.limit_ms;
        for node in self.nodes.iter().filter(|node| node.is_alive) {
            node.pool.check()?;
            for one in node.migrations.status() {
                self.checks.machine(&one, limit_ms)?;
            }
        }
        Ok(())
    }

    fn check_end(&mut self) -> Result<(), String> {
        self.checks.end(&self.nodes)?;
        self.nodes.iter().try_for_each(|node| node.pool.check_quiet())
    }
}
