//! What must hold at every step, and at the end.

use std::collections::{BTreeMap, BTreeSet};

use kvpool_node::protocol::*;

use crate::node::{Node, NodeId, link};
use crate::pool::whole_of;

#[derive(Default)]
pub struct Checks {
    /// The sequences, and whether a node died while it owned one.
    pub sequences: BTreeMap<u64, bool>,
    /// What happened, and how often.
    pub counts: BTreeMap<String, u64>,
    /// Which process committed a migration.
    commits: BTreeMap<MigrationId, Incarnation>,
    /// Of each target: when its transfer deadline was renewed last.
    renewed: BTreeMap<(NodeId, Incarnation, MachineId), Millis>,
    /// Local requests without an outcome.
    requested: BTreeSet<(Incarnation, MachineId)>,
    in_doubt: BTreeSet<(Incarnation, MachineId)>,
    ended: BTreeSet<(Incarnation, MachineId)>,
    /// The transfer deadline, for the model of its renewals.
    transfer_deadline_ms: u64,
    /// The schedule has no faults.
    is_calm: bool,
}

impl Checks {
    pub fn new(transfer_deadline_ms: u64, is_calm: bool) -> Self {
        Self { transfer_deadline_ms, is_calm, ..Self::default() }
    }

    pub fn count(&mut self, what: impl Into<String>) {
        *self.counts.entry(what.into()).or_default() += 1;
    }

    pub fn requested(&mut self, incarnation: Incarnation, machine: MachineId) {
        self.requested.insert((incarnation, machine));
    }

    /// Notes what a message renews, if it comes within the transfer deadline.
    pub fn before_message(
        &mut self,
        node: NodeId,
        now: Millis,
        (from, envelope): (NodeId, &Envelope),
        migrations: &Migrations,
    ) {
        if envelope.to != migrations.incarnation() {
            self.count("message for an earlier process");
            return;
        }
        let Message::ToTarget(message) = &envelope.message else { return };
        let reservation = match message {
            ToTarget::Sent { reservation, .. }
            | ToTarget::Commit { reservation, .. }
            | ToTarget::Query { reservation }
            | ToTarget::Heartbeat { reservation } => Some(*reservation),
            ToTarget::Prepare { .. } => None,
            _ => return,
        };
        let is_target = |one: &MigrationStatus| {
            matches!(one.state, SideState::Target(_)) && (one.id, one.link) == (envelope.id, link(from))
        };
        for one in migrations.status().filter(is_target) {
            if reservation.is_none_or(|reservation| reservation.0 == one.machine.0) {
                let key = (node, migrations.incarnation(), one.machine);
                let last = self.renewed.entry(key).or_insert(one.begun);
                if now.since(*last) < self.transfer_deadline_ms {
                    *last = now;
                }
            }
        }
    }

    /// A target begins to commit: within its transfer deadline.
    pub fn commits(
        &mut self,
        node: NodeId,
        incarnation: Incarnation,
        machine: MachineId,
        now: u64,
        transfer_deadline_ms: u64,
    ) -> Result<(), String> {
        let Some(&renewed) = self.renewed.get(&(node, incarnation, machine)) else {
            return Err("a commit without a renewal".into());
        };
        let age = Millis(now).since(renewed);
        if age >= transfer_deadline_ms {
            Err(format!("a commit in a reservation that ended {} ms ago", age - transfer_deadline_ms))
        } else {
            Ok(())
        }
    }

    pub fn committed(
        &mut self,
        node: NodeId,
        machine: MachineId,
        migrations: &Migrations,
    ) -> Result<(), String> {
        let one = migrations.status().find(|one| one.machine == machine);
        let one = one.ok_or_else(|| format!("node {node} commits for a machine that has ended"))?;
        match self.commits.insert(one.id, migrations.incarnation()) {
            Some(_) => Err(format!("migration {} was committed twice", one.id)),
            None => Ok(()),
        }
    }

    /// Outcomes come once, and say the truth.
    pub fn reported(
        &mut self,
        incarnation: Incarnation,
        machine: MachineId,
        report: &Report,
        alive: &[Option<Incarnation>],
    ) -> Result<(), String> {
        let key = (incarnation, machine);
        let Report { id, side, kind, part, origin, outcome, .. } = report;
        let failed = |why: &str| Err(format!("{why}: {report:?}"));
        if self.ended.contains(&key) {
            return failed("an outcome behind the final one");
        }
        if let Outcome::Failed(
            Cause::Own(AbortReason::Violation(_)) | Cause::Peer(AbortReason::Violation(_)),
        ) = outcome
        {
            return failed("a violation between nodes that follow the protocol");
        }
        // A request for cached blocks waits one transfer deadline for their export.
        if let Outcome::Failed(Cause::Silent { .. } | Cause::PeerEnded | Cause::Peer(AbortReason::Lapsed)) =
            outcome
            && self.is_calm
            && *kind != Kind::Fetch
            && *side == Side::Source
        {
            return failed("a silence or an end without a fault");
        }
        self.count(match outcome {
            Outcome::Failed(cause) => format!("{side:?}: {}", variant(cause)),
            Outcome::Refused { reason, .. } => format!("{side:?}: refused, {}", variant(reason)),
            Outcome::InDoubt { doubt, .. } => format!("in doubt: {doubt:?}"),
            Outcome::Done if part.is_some() => format!("{side:?}: done, part of {kind:?}"),
            Outcome::Done => format!("{side:?}: done, {kind:?}"),
            other => variant(other),
        });
        if report.bad_blocks > 0 && *outcome == Outcome::Done {
            self.count(format!("{side:?}: done with blocks sent again"));
        }
        if !outcome.is_final() {
            return if self.in_doubt.insert(key) { Ok(()) } else { failed("two doubts") };
        }
        if self.in_doubt.contains(&key) {
            self.count(match outcome {
                Outcome::Done => "a doubt ended: committed",
                Outcome::Failed(Cause::PeerEnded) => "a doubt ended: the peer's process is another",
                _ => "a doubt ended: aborted",
            });
        }
        self.ended.insert(key);
        self.requested.remove(&key);
        let committed = self.commits.get(id);
        match outcome {
            Outcome::Done if committed.is_none() => failed("done without a commit"),
            // A side that a peer's late message began may fail behind the commit.
            Outcome::Failed(_) | Outcome::Refused { .. }
                if *side == Side::Source
                    && *origin == Origin::Local
                    && committed.is_some_and(|by| alive.contains(&Some(*by))) =>
            {
                failed("failed, and committed at a process that lives")
            }
            _ => Ok(()),
        }
    }

    /// A wait of a machine has an end.
    pub fn machine(&self, one: &MigrationStatus, limit_ms: u64) -> Result<(), String> {
        let is_undecided = match one.state {
            SideState::Target(TargetState::Committing) => return Ok(()),
            SideState::Target(TargetState::Committed) => false,
            SideState::Source(SourceState::Committing | SourceState::InDoubt) => false,
            _ => true,
        };
        match one.deadline {
            None => Err(format!("no deadline: {one:?}")),
            Some(deadline) if is_undecided && deadline > one.begun.plus(limit_ms) => {
                Err(format!("a deadline above the limit: {one:?}"))
            }
            _ => Ok(()),
        }
    }

    /// Never two owners; never none, unless an owner died.
    pub fn owners(&self, nodes: &[Node]) -> Result<(), String> {
        for (&sequence, &is_excused) in &self.sequences {
            let runnable = owners_of(nodes, sequence);
            if runnable > 1 {
                return Err(format!("sequence {sequence} has {runnable} owners"));
            }
            if !is_excused && !nodes.iter().any(|node| has(node, sequence)) {
                return Err(format!("sequence {sequence} is lost, and no owner of it died"));
            }
        }
        Ok(())
    }

    /// A node is about to die. It owns what it runs, and what it holds and no other node runs.
    pub fn died(&mut self, node: NodeId, nodes: &[Node]) {
        for (&sequence, is_excused) in &mut self.sequences {
            let own = &nodes[node];
            let elsewhere =
                || nodes.iter().enumerate().any(|(one, other)| one != node && runs(other, sequence) > 0);
            *is_excused |= runs(own, sequence) > 0 || (has(own, sequence) && !elsewhere());
        }
    }

    /// All is quiet: each sequence runs, each request has its outcome.
    pub fn end(&mut self, nodes: &[Node]) -> Result<(), String> {
        for (&sequence, &is_excused) in &self.sequences {
            let runnable = owners_of(nodes, sequence);
            if runnable != 1 && !(is_excused && runnable == 0) {
                return Err(format!("in the end, sequence {sequence} has {runnable} owners"));
            }
        }
        let alive: BTreeSet<_> = nodes.iter().map(|node| node.migrations.incarnation()).collect();
        match self.requested.iter().find(|(incarnation, _)| alive.contains(incarnation)) {
            Some(request) => Err(format!("a request without an outcome: {request:?}")),
            None => Ok(()),
        }
    }
}

/// How often a node runs a sequence: by itself, or with the other parts of the whole.
fn runs(node: &Node, sequence: u64) -> usize {
    let alone = node.pool.is_runnable(sequence);
    let whole = whole_of(sequence).is_some_and(|whole| node.pool.is_runnable(whole));
    usize::from(alone) + usize::from(whole)
}

fn has(node: &Node, sequence: u64) -> bool {
    node.pool.has(sequence) || whole_of(sequence).is_some_and(|whole| node.pool.has(whole))
}

fn owners_of(nodes: &[Node], sequence: u64) -> usize {
    nodes.iter().map(|node| runs(node, sequence)).sum()
}

/// The name of a variant.
fn variant(value: &impl std::fmt::Debug) -> String {
    let all = format!("{value:?}");
    let parts: Vec<&str> =
        all.split(|c: char| !c.is_alphanumeric()).filter(|part| !part.is_empty()).take(2).collect();
    match parts[0] {
        "Peer" => parts.join(" "),
        "Own" => parts[1..].join(" "),
        other => other.to_owned(),
    }
}
