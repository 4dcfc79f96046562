//! The network, and the faults of links and nodes.

use fastrand::Rng;
use kvpool_node::protocol::*;

use crate::node::{Happening, Input, Node, NodeId, name};
use crate::pool::Pool;
use crate::world::World;

impl World {
    pub fn is_cut(&self, a: NodeId, b: NodeId) -> bool {
        self.cut.contains(&(a, b))
    }

    pub fn send(&mut self, from: NodeId, to: NodeId, envelope: Envelope) {
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
            let longest = if is_late { self.weather.timing.transfer_deadline_ms * 2 } else { 30 };
            let time = self.now + 1 + self.rng.u64(..longest);
            let input = Input::Message { from, envelope: envelope.clone() };
            // To the address, not to a process: it may arrive at a later one (see `restart`).
            self.input(time, to, input);
        }
    }

    pub fn connect(&mut self, a: NodeId, b: NodeId) {
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

    pub fn connect_all(&mut self, node: NodeId) {
        for peer in (0..self.nodes.len()).filter(|&peer| peer != node) {
            self.connect(node, peer);
        }
    }

    pub fn strike(&mut self, node: NodeId) {
        if self.is_healed || !self.nodes[node].is_alive {
            return;
        }
        let transfer_deadline_ms = self.weather.timing.transfer_deadline_ms;
        let span = |rng: &mut Rng| {
            if rng.bool() {
                rng.u64(1..transfer_deadline_ms * 2)
            } else {
                rng.u64(1..transfer_deadline_ms / 10)
            }
        };
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

    pub fn cut(&mut self, node: NodeId, peer: NodeId) {
        self.log(|| format!("{node} is cut from {peer}"));
        self.checks.count("cut");
        let transfer_deadline_ms = self.weather.timing.transfer_deadline_ms;
        self.cut.insert((node, peer));
        if self.rng.u8(..4) > 0 {
            self.cut.insert((peer, node));
        }
        for (node, peer) in [(node, peer), (peer, node)] {
            if self.rng.bool() {
                let time = self.now + self.rng.u64(1..transfer_deadline_ms);
                self.input(time, node, Input::LinkLost { peer });
            }
        }
        let longest = if self.rng.bool() { transfer_deadline_ms * 2 } else { transfer_deadline_ms / 10 };
        let time = self.now + self.rng.u64(1..longest);
        self.at(time, Happening::Mend { a: node, b: peer });
    }

    /// A sequence has arrived. It may be sent on at once, while its source cannot hear of it, and the
    /// node in between may die.
    pub fn arrived(&mut self, node: NodeId, from: NodeId) {
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

    pub fn kill(&mut self, node: NodeId) {
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
        let time = self.now + self.rng.u64(1..self.weather.timing.transfer_deadline_ms * 2);
        self.at(time, Happening::Restart { node });
    }

    pub fn restart(&mut self, node: NodeId) {
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

    pub fn resume(&mut self, node: NodeId) -> Result<(), String> {
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

    pub fn mend(&mut self, a: NodeId, b: NodeId) {
        self.cut.remove(&(a, b));
        self.cut.remove(&(b, a));
        self.connect(a, b);
    }

    pub fn heal(&mut self) -> Result<(), String> {
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
}
