//! What a node does with its inputs, and the work of its machines.

use kvpool_node::protocol::*;

use crate::node::{Input, Job, Node, NodeId, link, name};
use crate::world::World;

impl World {
    pub fn take(&mut self, node: NodeId, input: Input) -> Result<(), String> {
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
                self.checks.before_message(node, now, (from, &envelope), migrations);
                note_clear(&mut self.nodes[node], from, &envelope);
                let migrations = &mut self.nodes[node].migrations;
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

    pub fn strikes(&mut self) -> bool {
        !self.is_healed && self.weather.struck > 0.0 && self.rng.f64() < self.weather.struck
    }

    pub fn finish_job(&mut self, node: NodeId, machine: MachineId, job: Job) -> Result<(), String> {
        let tag = self.rng.u64(..);
        let work = match job {
            Job::Export { what } => self.export(node, machine, what),
            Job::Transfer { attempt, places, tag } => self.transfer(node, machine, attempt, &places, tag),
            Job::Reserve { manifest, part } => {
                let shared = if self.rng.u8(..4) == 0 { self.rng.u32(..8) } else { 0 };
                self.nodes[node].pool.reserve(machine, (&manifest, part), shared, tag)
            }
            Job::Verify { attempt } => self.nodes[node].pool.verify(machine, attempt, tag),
            Job::Commit if self.rng.u8(..40) == 0 => {
                self.nodes[node].pool.fail(machine);
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

    pub fn export(&mut self, node: NodeId, machine: MachineId, what: Option<FetchBytes>) -> Work {
        let Node { pool, sequences, migrations, .. } = &mut self.nodes[node];
        let manifest = match (what, sequences.get(&machine)) {
            (None, Some(&(sequence, copy, kind))) => {
                let part = migrations.status().find(|one| one.machine == machine).and_then(|one| one.part);
                pool.export_sequence(machine, sequence, (copy, part), kind)
            }
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
    pub fn transfer(
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
    pub fn act(&mut self, node: NodeId, actions: Actions) -> Result<(), String> {
        for action in actions {
            match action {
                Action::Send { link, envelope } => {
                    self.check_said(node, link, &envelope)?;
                    self.send(node, link.0 as usize, envelope);
                }
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

    pub fn task(&mut self, node: NodeId, machine: MachineId, task: Task) -> Result<(), String> {
        self.log(|| format!("{node}: {machine:?} does {task:?}"));
        let incarnation = self.nodes[node].migrations.incarnation();
        let job = match task {
            Task::Export { what } => Job::Export { what },
            Task::Retain(places) => {
                self.nodes[node].pool.retain(machine, &places);
                return Ok(());
            }
            Task::Transfer { attempt, places, grant } => Job::Transfer { attempt, places, tag: grant.tag },
            Task::Reserve { manifest, part } => Job::Reserve { manifest, part },
            Task::Verify(attempt) => Job::Verify { attempt },
            Task::Commit { is_current } => {
                let transfer_deadline_ms = self.weather.timing.transfer_deadline_ms;
                for part in self.parts_of(node, machine) {
                    self.checks.commits(node, incarnation, part, self.now, transfer_deadline_ms)?;
                    if is_current && self.nodes[node].cleared.contains(&part) {
                        return Err("blocks of a cleared cache are committed as current".into());
                    }
                }
                if !is_current {
                    self.checks.count("commit of a cleared copy");
                }
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
        // Mostly short; sometimes longer than the transfer deadline.
        let longest =
            if self.rng.u8(..16) == 0 { self.weather.timing.transfer_deadline_ms * 3 / 2 } else { 40 };
        let time = self.now + self.rng.u64(..longest);
        self.input(time, node, Input::Job { machine, job });
        Ok(())
    }

    /// The machines of all parts of a target's copy.
    fn parts_of(&self, node: NodeId, machine: MachineId) -> Vec<MachineId> {
        let all = || self.nodes[node].migrations.status();
        let own = all().find(|one| one.machine == machine);
        let own = own.filter(|one| one.part.is_some()).map(|one| one.id);
        let parts = all().filter(|one| Some(one.id) == own && matches!(one.state, SideState::Target(_)));
        let parts: Vec<_> = parts.map(|one| one.machine).collect();
        if parts.is_empty() { vec![machine] } else { parts }
    }

    /// A commit says the truth about the source's cache.
    fn check_said(&self, node: NodeId, to: LinkId, envelope: &Envelope) -> Result<(), String> {
        let Message::ToTarget(ToTarget::Commit { is_current, .. }) = envelope.message else { return Ok(()) };
        let Node { migrations, pool, .. } = &self.nodes[node];
        let is_it = |one: &MigrationStatus| {
            (one.id, one.link) == (envelope.id, to) && matches!(one.state, SideState::Source(_))
        };
        let machine = migrations.status().find(is_it).map(|one| one.machine);
        match machine.and_then(|machine| pool.exports.get(&machine)) {
            Some(export) if (export.era == pool.era) != is_current => {
                Err(format!("a commit says that its cache is current: {is_current}"))
            }
            _ => Ok(()),
        }
    }

    pub fn reschedule(&mut self, node: NodeId) {
        let Some(deadline) = self.nodes[node].migrations.deadline() else { return };
        // Timers are late, never early.
        let late = if self.rng.u8(..32) == 0 { self.weather.timing.transfer_deadline_ms / 2 } else { 5 };
        let time = deadline.0.max(self.now + 1) + self.rng.u64(..late);
        if self.nodes[node].wake_at.is_none_or(|planned| time < planned) {
            self.nodes[node].wake_at = Some(time);
            self.input(time, node, Input::Wake { planned: time });
        }
    }
}

/// Notes that the source of a target says that its cache was cleared.
fn note_clear(node: &mut Node, from: NodeId, envelope: &Envelope) {
    let Message::ToTarget(ToTarget::Commit { reservation, is_current: false }) = envelope.message else {
        return;
    };
    let is_it = |one: &MigrationStatus| {
        let waits = matches!(one.state, SideState::Target(TargetState::Ready(_) | TargetState::Agreed(_)));
        waits && one.id == envelope.id && one.link == link(from) && one.machine.0 == reservation.0
    };
    if envelope.to == node.migrations.incarnation()
        && let Some(one) = node.migrations.status().find(is_it)
    {
        node.cleared.insert(one.machine);
    }
}
