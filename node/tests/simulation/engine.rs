//! The engines of the nodes: what they ask for.

use std::collections::BTreeSet;

use kvpool_node::protocol::*;

use crate::node::{Happening, NodeId, link};
use crate::pool::{part_of, whole_of};
use crate::world::{KEYS, World};

impl World {
    pub fn engine(&mut self) {
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

    pub fn request(&mut self, node: NodeId) -> Result<(), String> {
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
        self.ask(node, Request { id, link: link(peer), command, part: None })
    }

    fn ask(&mut self, node: NodeId, request: Request) -> Result<(), String> {
        let Request { id, link: LinkId(peer), command, part } = request.clone();
        let peer = peer as usize;
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
                let copy = if part.is_some() { whole_of(sequence).expect("a part") } else { sequence };
                state.sequences.insert(machine, (sequence, copy, Kind::Migrate));
                // The engine gives the sequence away.
                if let Some(own) = state.pool.sequences.get_mut(&sequence).filter(|own| own.held.is_none()) {
                    own.held = Some(machine);
                }
            }
            Command::Replicate { sequence } => {
                // That of all parts is the same.
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

    /// The ranks of a sequence are asked, one after another, to send their parts to a node that has
    /// none of them.
    pub fn request_parts(&mut self) {
        let group = self.rng.u64(..3);
        let parts =
            (0..4).map(|index| part_of(group, index)).filter(|part| self.checks.sequences.contains_key(part));
        let owner = |part: &u64| self.nodes.iter().position(|node| node.pool.is_runnable(*part));
        let owners: Option<Vec<(u64, NodeId)>> = parts.map(|part| Some((part, owner(&part)?))).collect();
        let Some(owners) = owners.filter(|owners| !owners.is_empty()) else { return };
        let has_none = |node: &NodeId| owners.iter().all(|(_, owner)| owner != node);
        let free: Vec<NodeId> = (0..self.nodes.len()).filter(has_none).collect();
        let nodes: BTreeSet<NodeId> = owners.iter().map(|(_, owner)| *owner).collect();
        let Some(&peer) = self.rng.choice(&free).filter(|_| nodes.len() == owners.len()) else { return };
        let (id, copies) = (MigrationId(self.rng.u128(..)), self.rng.u8(..4) == 0);
        let of = owners.len() as u16;
        // Sometimes one is not asked, or is asked for the part of another.
        let (absent, wrong) = (self.rng.usize(..12), self.rng.usize(..24));
        for (index, (sequence, node)) in owners.into_iter().enumerate() {
            if index == absent {
                self.checks.count("absent part");
                continue;
            }
            let command =
                if copies { Command::Replicate { sequence } } else { Command::Migrate { sequence } };
            let index = if index == wrong { 0 } else { index as u16 };
            let part = Some(Part { index, of });
            let longest =
                if self.rng.u8(..4) == 0 { self.weather.timing.transfer_deadline_ms / 2 } else { 50 };
            let time = self.now + self.rng.u64(..longest);
            let request = Request { id, link: link(peer), command, part };
            self.at(time, Happening::Part { node, request });
        }
    }

    pub fn request_part(&mut self, node: NodeId, request: Request) -> Result<(), String> {
        if !self.nodes[node].is_alive || self.nodes[node].is_paused {
            return Ok(());
        }
        self.ask(node, request)
    }

    /// The prefix cache of a node is cleared.
    pub fn clear(&mut self, node: NodeId) -> Result<(), String> {
        if !self.nodes[node].is_alive || self.nodes[node].is_paused {
            return Ok(());
        }
        self.checks.count("clear");
        for machine in self.nodes[node].pool.clear() {
            let actions = self.nodes[node].migrations.cleared(Millis(self.now), machine);
            self.act(node, actions)?;
        }
        Ok(())
    }

    pub fn request_again(&mut self, node: NodeId, peer: NodeId, id: MigrationId) -> Result<(), String> {
        let request = Request { id, link: link(peer), command: Command::Migrate { sequence: 1 }, part: None };
        match self.nodes[node].migrations.request(Millis(self.now), request) {
            Err(RequestError::SameId(_) | RequestError::NoLink(_)) => {
                self.checks.count("same id");
                Ok(())
            }
            other => Err(format!("the same request twice: {other:?}")),
        }
    }

    pub fn cancel(&mut self, node: NodeId, machine: MachineId) -> Result<(), String> {
        self.checks.count("cancel");
        match self.nodes[node].migrations.cancel(Millis(self.now), machine) {
            Ok(actions) => self.act(node, actions),
            Err(CancelError::Committing) => Ok(()),
            Err(error) => Err(format!("{error}")),
        }
    }
}
