//! Nodes, their network, and the faults of both, on one queue of events in virtual time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use fastrand::Rng;
use kvpool_node::protocol::*;

use crate::check::Checks;
use crate::pool::Pool;

pub type NodeId = usize;

/// Something that happens to one node.
#[derive(Clone, Debug)]
pub enum Input {
    Message {
        from: NodeId,
        envelope: Envelope,
    },
    LinkUp {
        peer: NodeId,
        incarnation: Incarnation,
    },
    LinkLost {
        peer: NodeId,
    },
    Job {
        machine: MachineId,
        job: Job,
    },
    /// A timer that was set for this time.
    Wake {
        planned: u64,
    },
}

/// Work of a node that takes time.
#[derive(Clone, Debug)]
pub enum Job {
    Export { what: Option<FetchBytes> },
    Transfer { attempt: Attempt, places: Places, tag: u64 },
    Reserve { manifest: ManifestBytes },
    Verify { attempt: Attempt },
    Commit,
}

#[derive(Clone, Debug)]
enum Happening {
    Input { node: NodeId, incarnation: Incarnation, input: Input },
    Request { node: NodeId },
    Engine,
    Fault,
    Death { node: NodeId },
    Resume { node: NodeId },
    Restart { node: NodeId },
    Mend { a: NodeId, b: NodeId },
    Heal,
}

pub struct Node {
    pub migrations: Migrations,
    pub pool: Pool,
    pub is_alive: bool,
    is_paused: bool,
    inbox: VecDeque<Input>,
    wake_at: Option<u64>,
    /// Its transfers never end.
    is_mute: bool,
    /// Of a source: the sequence here, the one at the target, and the kind.
    pub sequences: BTreeMap<MachineId, (u64, u64, Kind)>,
    /// Of all machines: the peer.
    links: BTreeMap<MachineId, NodeId>,
    /// Time of the last report of a handshake, per peer.
    shaken: BTreeMap<NodeId, u64>,
}

/// How bad the network and the nodes are, in one schedule.
struct Weather {
    lost: f64,
    doubled: f64,
    late: f64,
    corrupt: f64,
    struck: f64,
    /// No faults at all: then no side may believe in one.
    is_calm: bool,
    horizon: u64,
    timing: Timing,
}

pub struct World {
    pub now: u64,
    pub nodes: Vec<Node>,
    pub checks: Checks,
    rng: Rng,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    happenings: BTreeMap<u64, Happening>,
    next: u64,
    weather: Weather,
    cut: BTreeSet<(NodeId, NodeId)>,
    is_healed: bool,
    trace: bool,
}

const KEYS: u32 = 12;

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
        let term_ms = often(&[30_000.0, 6_000.0, 1_500.0]) as u64;
        let timing = Timing { term_ms, retry_ms: term_ms / 30, limit_ms: term_ms * rng.u64(3..12) };
        let horizon = term_ms * rng.u64(2..8);
        let weather = Weather { lost, doubled, late, corrupt, struck, is_calm, horizon, timing };
        let count = rng.usize(2..=3);
        let mut world = Self {
            now: 0,
            nodes: Vec::new(),
            checks: Checks::new(term_ms, is_calm),
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

    fn node(&mut self) -> Node {
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

    fn at(&mut self, time: u64, happening: Happening) {
        self.queue.push(Reverse((time, self.next)));
        self.happenings.insert(self.next, happening);
        self.next += 1;
    }

    fn input(&mut self, time: u64, node: NodeId, input: Input) {
        let incarnation = self.nodes[node].migrations.incarnation();
        self.at(time, Happening::Input { node, incarnation, input });
    }

    fn log(&self, what: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{:>8} {}", self.now, what());
        }
    }

    /// Runs until all is quiet behind the healing, and checks what is left.
    pub fn run(&mut self) -> Result<(), String> {
        let Timing { term_ms, limit_ms, .. } = self.weather.timing;
        let end = self.weather.horizon + 3 * limit_ms + 20 * term_ms;
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

    // ---- A node takes an input

    fn take(&mut self, node: NodeId, input: Input) -> Result<(), String> {
        let now = Millis(self.now);
        if let Input::Message { from, envelope } = &input {
            self.log(|| format!("{from} -> {node}: {:?} {:?}", envelope.id, envelope.message));
            if envelope.from != self.nodes[*from].migrations.incarnation() {
                self.checks.count("message of an earlier process");
            }
            // A fault at this very step, in front of it or behind it.
            let decides = matches!(name(&envelope.message), "Commit" | "Committed" | "Forget");
            if self.strikes() || (decides && (0..4).any(|_| self.strikes())) {
                let victim = if self.rng.bool() { node } else { *from };
                self.strike(victim);
                if !self.nodes[node].is_alive {
                    return Ok(());
                }
                if self.nodes[node].is_paused {
                    self.nodes[node].inbox.push_back(input);
                    return Ok(());
                }
            }
        }
        if let Input::Wake { planned } = input {
            // Only the timer that was set last.
            if self.nodes[node].wake_at != Some(planned) {
                return Ok(());
            }
            self.nodes[node].wake_at = None;
        }
        let migrations = &mut self.nodes[node].migrations;
        let actions = match input {
            Input::Message { from, envelope } => {
                self.checks.before_message(node, now, &envelope, migrations);
                let actions = migrations.received(now, link(from), envelope);
                for action in &actions {
                    if let Action::Do { machine, .. } = action {
                        self.nodes[node].links.entry(*machine).or_insert(from);
                    }
                }
                actions
            }
            Input::LinkUp { peer, incarnation } => migrations.link_up(now, link(peer), incarnation),
            Input::LinkLost { peer } => migrations.link_lost(now, link(peer)),
            Input::Wake { .. } => migrations.tick(now),
            Input::Job { machine, job } => return self.finish_job(node, machine, job),
        };
        self.act(node, actions)?;
        if self.strikes() {
            self.strike(node);
        }
        Ok(())
    }

    fn strikes(&mut self) -> bool {
        !self.is_healed && self.weather.struck > 0.0 && self.rng.f64() < self.weather.struck
    }

    fn finish_job(&mut self, node: NodeId, machine: MachineId, job: Job) -> Result<(), String> {
        let tag = self.rng.u64(..);
        let work = match job {
            Job::Export { what } => self.export(node, machine, what),
            Job::Transfer { attempt, places, tag } => self.transfer(node, machine, attempt, &places, tag),
            Job::Reserve { manifest } => {
                let shared = if self.rng.u8(..4) == 0 { self.rng.u32(..8) } else { 0 };
                self.nodes[node].pool.reserve(machine, &manifest, shared, tag)
            }
            Job::Verify { attempt } => self.nodes[node].pool.verify(machine, attempt, tag),
            Job::Commit if self.rng.u8(..40) == 0 => {
                self.nodes[node].pool.release(machine);
                Work::CommitFailed(Text::new("no"))
            }
            Job::Commit => {
                let sequence = self.nodes[node].pool.commit(machine)?;
                self.checks.committed(node, machine, &self.nodes[node].migrations)?;
                Work::Committed { sequence }
            }
        };
        self.log(|| format!("{node}: {machine:?} {work:?}"));
        let was_commit = matches!(work, Work::Committed { .. } | Work::CommitFailed(_));
        match self.nodes[node].migrations.done(Millis(self.now), machine, work) {
            Some(actions) => self.act(node, actions),
            None if was_commit => Err("a machine ended while it committed".into()),
            // What the result holds is given up.
            None => {
                self.nodes[node].pool.restore(machine);
                self.nodes[node].pool.release(machine);
                self.reschedule(node);
                Ok(())
            }
        }
    }

    fn export(&mut self, node: NodeId, machine: MachineId, what: Option<FetchBytes>) -> Work {
        let Node { pool, sequences, .. } = &mut self.nodes[node];
        let manifest = match (what, sequences.get(&machine)) {
            (None, Some(&(sequence, copy, kind))) => pool.export_sequence(machine, sequence, copy, kind),
            (None, None) => None,
            (Some(what), own) => {
                // A request of a peer has no entry.
                let kind = own.map_or(Kind::Fetch, |own| own.2);
                postcard::from_bytes::<Vec<u32>>(&what)
                    .ok()
                    .and_then(|keys| pool.export_cached(machine, &keys, kind))
            }
        };
        match manifest {
            Some(manifest) => {
                Work::Exported(ManifestBytes::new(postcard::to_allocvec(&manifest).unwrap()).unwrap())
            }
            None => Work::ExportFailed(Text::new("nothing to export")),
        }
    }

    /// Writes what is due, also if the machine that asked for it has ended.
    fn transfer(
        &mut self,
        node: NodeId,
        machine: MachineId,
        attempt: Attempt,
        places: &Places,
        tag: u64,
    ) -> Work {
        let failed = |why: &str| Work::TransferFailed(attempt, Text::new(why));
        let Some(&to) = self.nodes[node].links.get(&machine) else { return failed("no peer") };
        let Some(manifest) =
            self.nodes[node].pool.exports.get(&machine).map(|export| export.manifest.clone())
        else {
            return failed("stopped");
        };
        if self.is_cut(node, to) || !self.nodes[to].is_alive || (self.nodes[to].is_paused && self.rng.bool())
        {
            return failed("cut");
        }
        for place in places.iter() {
            let is_bad = self.rng.f64() < self.weather.corrupt;
            let bytes = if is_bad { 0 } else { manifest.bytes(place) };
            if !self.nodes[to].pool.write(tag, place, bytes) {
                return failed("no grant");
            }
        }
        Work::Transferred(attempt)
    }

    /// Does what the machines of a node want.
    fn act(&mut self, node: NodeId, actions: Actions) -> Result<(), String> {
        for action in actions {
            match action {
                Action::Send { link, envelope } => self.send(node, link.0 as usize, envelope),
                Action::Do { machine, task } => self.task(node, machine, task)?,
                Action::Report { machine, report } => {
                    self.log(|| format!("{node}: {machine:?} reports {report:?}"));
                    let incarnation = self.nodes[node].migrations.incarnation();
                    let alive: Vec<_> = self
                        .nodes
                        .iter()
                        .map(|node| node.is_alive.then_some(node.migrations.incarnation()))
                        .collect();
                    self.checks.reported(incarnation, machine, &report, &alive)?;
                    let is_arrival = report.side == Side::Target && report.kind == Kind::Migrate;
                    if is_arrival && report.outcome == Outcome::Done {
                        let from = self.nodes[node].links[&machine];
                        self.arrived(node, from);
                    }
                }
            }
        }
        self.reschedule(node);
        Ok(())
    }

    fn task(&mut self, node: NodeId, machine: MachineId, task: Task) -> Result<(), String> {
        self.log(|| format!("{node}: {machine:?} does {task:?}"));
        let incarnation = self.nodes[node].migrations.incarnation();
        let job = match task {
            Task::Export { what } => Job::Export { what },
            Task::Retain(places) => {
                self.nodes[node].pool.retain(machine, &places);
                return Ok(());
            }
            Task::Transfer { attempt, places, grant } => Job::Transfer { attempt, places, tag: grant.tag },
            Task::Reserve(manifest) => Job::Reserve { manifest },
            Task::Verify(attempt) => Job::Verify { attempt },
            Task::Commit => {
                let term_ms = self.weather.timing.term_ms;
                self.checks.commits(node, incarnation, machine, self.now, term_ms)?;
                Job::Commit
            }
            Task::Finish => return self.nodes[node].pool.finish(machine),
            Task::Restore => {
                self.nodes[node].pool.restore(machine);
                return Ok(());
            }
            Task::Release => {
                self.nodes[node].pool.release(machine);
                return Ok(());
            }
            other => return Err(format!("an unknown task {other:?}")),
        };
        if self.nodes[node].is_mute && matches!(job, Job::Transfer { .. }) {
            self.checks.count("transfer that never ends");
            return Ok(());
        }
        // Mostly short; sometimes longer than a term.
        let longest = if self.rng.u8(..16) == 0 { self.weather.timing.term_ms * 3 / 2 } else { 40 };
        let time = self.now + self.rng.u64(..longest);
        self.input(time, node, Input::Job { machine, job });
        Ok(())
    }

    fn reschedule(&mut self, node: NodeId) {
        let Some(deadline) = self.nodes[node].migrations.deadline() else { return };
        // Timers are late, never early.
        let late = if self.rng.u8(..32) == 0 { self.weather.timing.term_ms / 2 } else { 5 };
        let time = deadline.0.max(self.now + 1) + self.rng.u64(..late);
        if self.nodes[node].wake_at.is_none_or(|planned| time < planned) {
            self.nodes[node].wake_at = Some(time);
            self.input(time, node, Input::Wake { planned: time });
        }
    }

    // ---- The network

    fn is_cut(&self, a: NodeId, b: NodeId) -> bool {
        self.cut.contains(&(a, b))
    }

    fn send(&mut self, from: NodeId, to: NodeId, envelope: Envelope) {
        // What a process gets, it has decoded.
        let wire = postcard::to_allocvec(&envelope).expect("messages are encoded");
        let envelope: Envelope = postcard::from_bytes(&wire).expect("messages are decoded");
        self.checks.count(name(&envelope.message));
        let copies = 1
            + u32::from(self.rng.f64() < self.weather.doubled)
            + u32::from(self.rng.f64() < self.weather.doubled / 4.0);
        for _ in 0..copies {
            if self.is_cut(from, to) || (!self.is_healed && self.rng.f64() < self.weather.lost) {
                continue;
            }
            let is_late = self.rng.f64() < self.weather.late;
            let longest = if is_late { self.weather.timing.term_ms * 2 } else { 30 };
            let time = self.now + 1 + self.rng.u64(..longest);
            let input = Input::Message { from, envelope: envelope.clone() };
            // To the address, not to a process: it may arrive at a later one (see `restart`).
            self.input(time, to, input);
        }
    }

    fn connect(&mut self, a: NodeId, b: NodeId) {
        let can = |node: &Node| node.is_alive && !node.is_paused;
        if self.is_cut(a, b) || self.is_cut(b, a) || !can(&self.nodes[a]) || !can(&self.nodes[b]) {
            return;
        }
        for (node, peer) in [(a, b), (b, a)] {
            let incarnation = self.nodes[peer].migrations.incarnation();
            let earliest = self.nodes[node].shaken.get(&peer).map_or(0, |last| last + 1);
            let time = (self.now + 1 + self.rng.u64(..50)).max(earliest);
            self.nodes[node].shaken.insert(peer, time);
            self.input(time, node, Input::LinkUp { peer, incarnation });
        }
    }

    fn connect_all(&mut self, node: NodeId) {
        for peer in (0..self.nodes.len()).filter(|&peer| peer != node) {
            self.connect(node, peer);
        }
    }

    // ---- Faults

    fn strike(&mut self, node: NodeId) {
        if self.is_healed || !self.nodes[node].is_alive {
            return;
        }
        let term_ms = self.weather.timing.term_ms;
        let span =
            |rng: &mut Rng| if rng.bool() { rng.u64(1..term_ms * 2) } else { rng.u64(1..term_ms / 10) };
        match self.rng.u8(..5) {
            0 => self.kill(node),
            1 | 2 => {
                self.log(|| format!("{node} stops"));
                self.checks.count("stop");
                self.nodes[node].is_paused = true;
                let time = self.now + span(&mut self.rng);
                self.at(time, Happening::Resume { node });
            }
            _ => {
                let peer = (node + self.rng.usize(1..self.nodes.len())) % self.nodes.len();
                self.cut(node, peer);
            }
        }
    }

    fn cut(&mut self, node: NodeId, peer: NodeId) {
        self.log(|| format!("{node} is cut from {peer}"));
        self.checks.count("cut");
        let term_ms = self.weather.timing.term_ms;
        self.cut.insert((node, peer));
        if self.rng.u8(..4) > 0 {
            self.cut.insert((peer, node));
        }
        for (node, peer) in [(node, peer), (peer, node)] {
            if self.rng.bool() {
                let time = self.now + self.rng.u64(1..term_ms);
                self.input(time, node, Input::LinkLost { peer });
            }
        }
        let longest = if self.rng.bool() { term_ms * 2 } else { term_ms / 10 };
        let time = self.now + self.rng.u64(1..longest);
        self.at(time, Happening::Mend { a: node, b: peer });
    }

    /// A sequence has arrived. It may be sent on at once, while its source cannot hear of it, and the
    /// node in between may die.
    fn arrived(&mut self, node: NodeId, from: NodeId) {
        if self.is_healed || self.weather.struck == 0.0 || self.rng.u8(..3) > 0 {
            return;
        }
        self.cut(node, from);
        let soon = self.now + self.rng.u64(1..200);
        self.at(soon, Happening::Request { node });
        if self.rng.bool() {
            let later = self.now + self.rng.u64(1..1_500);
            self.at(later, Happening::Death { node });
        }
    }

    fn kill(&mut self, node: NodeId) {
        self.log(|| format!("{node} dies"));
        self.checks.count("death");
        self.checks.died(node, &self.nodes);
        self.nodes[node].is_alive = false;
        self.nodes[node].is_paused = false;
        self.nodes[node].pool = Pool::new(self.nodes[node].pool.capacity);
        self.nodes[node].inbox.clear();
        for peer in (0..self.nodes.len()).filter(|&peer| peer != node) {
            if self.rng.bool() {
                let time = self.now + self.rng.u64(1..100);
                self.input(time, peer, Input::LinkLost { peer: node });
            }
        }
        let time = self.now + self.rng.u64(1..self.weather.timing.term_ms * 2);
        self.at(time, Happening::Restart { node });
    }

    fn restart(&mut self, node: NodeId) {
        if self.nodes[node].is_alive {
            return;
        }
        self.nodes[node] = self.node();
        let incarnation = self.nodes[node].migrations.incarnation();
        self.log(|| format!("{node} starts as {incarnation:?}"));
        // Messages that are still on their way to the address reach the new process.
        for happening in self.happenings.values_mut() {
            if let Happening::Input { node: to, incarnation: at, input: Input::Message { .. } } = happening
                && *to == node
            {
                *at = incarnation;
            }
        }
        self.connect_all(node);
    }

    fn resume(&mut self, node: NodeId) -> Result<(), String> {
        if !self.nodes[node].is_paused {
            return Ok(());
        }
        self.log(|| format!("{node} goes on"));
        self.nodes[node].is_paused = false;
        let inputs: Vec<Input> = self.nodes[node].inbox.drain(..).collect();
        let incarnation = self.nodes[node].migrations.incarnation();
        // Late timers come in front of all that has arrived, or behind it.
        if let Some(planned) = self.nodes[node].wake_at
            && self.rng.bool()
        {
            self.take(node, Input::Wake { planned })?;
        }
        for input in inputs {
            let present = &mut self.nodes[node];
            if !present.is_alive || present.migrations.incarnation() != incarnation {
                return Ok(());
            }
            if present.is_paused {
                present.inbox.push_back(input);
                continue;
            }
            self.take(node, input)?;
            self.check_step()?;
        }
        self.connect_all(node);
        self.reschedule(node);
        Ok(())
    }

    fn mend(&mut self, a: NodeId, b: NodeId) {
        self.cut.remove(&(a, b));
        self.cut.remove(&(b, a));
        self.connect(a, b);
    }

    fn heal(&mut self) -> Result<(), String> {
        self.log(|| "all heals".into());
        self.is_healed = true;
        self.cut.clear();
        for node in 0..self.nodes.len() {
            self.restart(node);
            self.resume(node)?;
            self.connect_all(node);
        }
        Ok(())
    }

    // ---- The engine

    fn engine(&mut self) {
        for (number, node) in self.nodes.iter_mut().enumerate() {
            if !node.is_alive || node.is_paused {
                continue;
            }
            for own in node.pool.sequences.values_mut().filter(|own| own.held.is_none()) {
                own.tokens += 1;
            }
            // Replicas end.
            let replicas: Vec<u64> =
                node.pool.sequences.keys().copied().filter(|&one| one >= 1_000).collect();
            for replica in replicas {
                let own = node.pool.sequences.remove(&replica).expect("listed");
                node.pool.free += own.blocks;
            }
            if number == self.rng.usize(..3) {
                node.pool.cache(self.rng.u32(..KEYS));
            }
        }
    }

    fn request(&mut self, node: NodeId) -> Result<(), String> {
        if !self.nodes[node].is_alive || self.nodes[node].is_paused {
            return Ok(());
        }
        let peer = (node + self.rng.usize(1..self.nodes.len())) % self.nodes.len();
        let own: Vec<u64> =
            self.nodes[node].pool.sequences.keys().copied().filter(|&one| one < 1_000).collect();
        let under_way: Vec<_> =
            self.nodes[node].migrations.status().map(|one| (one.id, one.machine)).collect();
        if let Some(&(id, machine)) = self.rng.choice(&under_way) {
            match self.rng.u8(..6) {
                0 => return self.request_again(node, peer, id),
                1 => return self.cancel(node, machine),
                _ => {}
            }
        }
        // Sometimes a sequence that is unknown, or under way.
        let any = self.rng.u64(1..6);
        let sequence = match self.rng.choice(&own) {
            Some(&sequence) if self.rng.u8(..8) > 0 => sequence,
            _ => any,
        };
        let keys: Vec<u32> = (0..KEYS).filter(|_| self.rng.bool()).collect();
        let what = FetchBytes::new(postcard::to_allocvec(&keys).unwrap()).unwrap();
        let command = match self.rng.u8(..8) {
            0 => Command::Replicate { sequence },
            1 => Command::Offload { what },
            2 => Command::BringBack { what },
            _ => Command::Migrate { sequence },
        };
        let id = MigrationId(self.rng.u128(..));
        self.begin(node, peer, id, command)
    }

    fn begin(&mut self, node: NodeId, peer: NodeId, id: MigrationId, command: Command) -> Result<(), String> {
        let request = Request { id, link: link(peer), command: command.clone() };
        self.log(|| format!("{node} is asked for {request:?}"));
        let result = self.nodes[node].migrations.request(Millis(self.now), request);
        let (machine, actions) = match result {
            Ok(begun) => begun,
            Err(error) => {
                self.checks.count(match error {
                    RequestError::NoLink(_) => "no link",
                    RequestError::SameSequence(_) => "same sequence",
                    RequestError::Unconfirmed(_) => "unconfirmed sequence",
                    _ => "refused request",
                });
                return Ok(());
            }
        };
        let state = &mut self.nodes[node];
        let incarnation = state.migrations.incarnation();
        self.checks.requested(incarnation, machine);
        state.links.insert(machine, peer);
        match command {
            Command::Migrate { sequence } => {
                state.sequences.insert(machine, (sequence, sequence, Kind::Migrate));
                // The engine gives the sequence away.
                if let Some(own) = state.pool.sequences.get_mut(&sequence).filter(|own| own.held.is_none()) {
                    own.held = Some(machine);
                }
            }
            Command::Replicate { sequence } => {
                let copy = 1_000 + (id.0 as u64 >> 20);
                state.sequences.insert(machine, (sequence, copy, Kind::Replicate));
            }
            Command::Offload { .. } => {
                state.sequences.insert(machine, (0, 0, Kind::Cached));
            }
            _ => {}
        }
        self.act(node, actions)
    }

    fn request_again(&mut self, node: NodeId, peer: NodeId, id: MigrationId) -> Result<(), String> {
        let request = Request { id, link: link(peer), command: Command::Migrate { sequence: 1 } };
        match self.nodes[node].migrations.request(Millis(self.now), request) {
            Err(RequestError::SameId(_) | RequestError::NoLink(_)) => {
                self.checks.count("same id");
                Ok(())
            }
            other => Err(format!("the same request twice: {other:?}")),
        }
    }

    fn cancel(&mut self, node: NodeId, machine: MachineId) -> Result<(), String> {
        self.checks.count("cancel");
        match self.nodes[node].migrations.cancel(Millis(self.now), machine) {
            Ok(actions) => self.act(node, actions),
            Err(CancelError::Committing) => Ok(()),
            Err(error) => Err(format!("{error}")),
        }
    }

    // ---- Checks

    fn check_step(&mut self) -> Result<(), String> {
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

fn link(peer: NodeId) -> LinkId {
    LinkId(peer as u32)
}

fn name(message: &Message) -> &'static str {
    match message {
        Message::ToTarget(message) => match message {
            ToTarget::Prepare { .. } => "Prepare",
            ToTarget::Sent { .. } => "Sent",
            ToTarget::Commit { .. } => "Commit",
            ToTarget::Abort { .. } => "Abort",
            ToTarget::Query { .. } => "Query",
            ToTarget::Heartbeat { .. } => "Heartbeat",
            ToTarget::Forget { .. } => "Forget",
        },
        Message::ToSource(message) => match message {
            ToSource::Fetch { .. } => "Fetch",
            ToSource::Prepared { .. } => "Prepared",
            ToSource::Refused { .. } => "Refused",
            ToSource::Verified { .. } => "Verified",
            ToSource::Status { .. } => "Status",
            ToSource::Committed { .. } => "Committed",
            ToSource::Aborted { .. } => "Aborted",
        },
    }
}
