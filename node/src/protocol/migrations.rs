//! All migrations of a node: routes events to machines, and answers for those that have ended.
//!
//! # Invariants
//!
//! ```text
//! a message reaches a machine only if it is of the peer's present process and for this one
//! a machine is here from its first action to its final report, a committed target until it is forgotten
//! at most one local request per sequence; at most one machine per peer, migration and side
//! ```
//!
//! A message for an unknown machine is answered without state, which is correct because ids and
//! reservations are never reused: see the [module](super).

use std::collections::BTreeMap;

use smallvec::SmallVec;

use super::copies::{self, Copies};
use super::machine::{self, Event, Task, Work};
use super::message::{
    AbortReason, Envelope, Incarnation, Kind, Message, MigrationId, Refusal, ReservationId, ToSource,
    ToTarget,
};
use super::outcome::{Origin, Report, Side};
use super::request::{CancelError, Command, Limits, LinkId, MachineId, Request, RequestError};
use super::source::{self, Source, SourceState};
use super::table::{Entry, Key, Machine, MigrationStatus, SideState};
use super::target::{self, Target, TargetState};
use super::timing::{Millis, Timing};

/// What the node has to do, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Send a message over a link; drop it if the link is down or its queue is full.
    Send {
        /// The link.
        link: LinkId,
        /// The message.
        envelope: Envelope,
    },
    /// Run a task, and return its result by [`Migrations::done`].
    Do {
        /// The machine.
        machine: MachineId,
        /// The work.
        task: Task,
    },
    /// An outcome for the engine and the counters.
    Report {
        /// The machine.
        machine: MachineId,
        /// The outcome.
        report: Report,
    },
}

/// Actions of one event, in order.
pub type Actions = SmallVec<[Action; 4]>;

/// All migrations of a node.
#[derive(Debug)]
pub struct Migrations {
    incarnation: Incarnation,
    timing: Timing,
    limits: Limits,
    next: u64,
    entries: BTreeMap<MachineId, Entry>,
    index: BTreeMap<Key, MachineId>,
    /// Copies that come in parts.
    copies: Copies,
    /// The present process of each peer.
    peers: BTreeMap<LinkId, Incarnation>,
    stale_messages: u64,
}

impl Migrations {
    /// Creates an empty set. The incarnation is random, and different at each start.
    pub fn new(incarnation: Incarnation, timing: Timing, limits: Limits) -> Self {
        let (entries, index, copies, peers) = Default::default();
        Self { incarnation, timing, limits, next: 1, entries, index, copies, peers, stale_messages: 0 }
    }

    /// Returns the incarnation of this node.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Returns the number of messages dropped because they were of, or for, another process.
    pub fn stale_messages(&self) -> u64 {
        self.stale_messages
    }

    /// Returns when [`tick`](Self::tick) must be called; `None` if nothing is in progress.
    pub fn deadline(&self) -> Option<Millis> {
        let machines = self.entries.values().filter_map(|entry| entry.machine.deadline());
        machines.chain(self.copies.deadline(self.timing.transfer_deadline_ms)).min()
    }

    /// Returns all migrations in progress, and committed copies that are not forgotten.
    pub fn status(&self) -> impl Iterator<Item = MigrationStatus> + '_ {
        self.entries.iter().map(|(&machine, entry)| MigrationStatus {
            machine,
            id: entry.id,
            link: entry.link,
            kind: entry.machine.kind(),
            part: entry.machine.part(),
            origin: entry.origin,
            state: entry.machine.state(),
            begun: entry.machine.begun(),
            deadline: entry.machine.deadline(),
        })
    }

    /// Begins a migration. Exactly one final outcome is reported for its machine.
    ///
    /// # Errors
    /// [`RequestError`]; nothing has begun, and no outcome follows.
    pub fn request(&mut self, now: Millis, request: Request) -> Result<(MachineId, Actions), RequestError> {
        let Request { id, link, command, part } = request;
        if !self.peers.contains_key(&link) {
            return Err(RequestError::NoLink(link));
        }
        if self.entries.values().any(|entry| entry.id == id) {
            return Err(RequestError::SameId(id));
        }
        let (kind, sequence) = (command.kind(), command.sequence());
        if let Some(part) = part {
            copies::check(kind, part).map_err(|fault| RequestError::Part { part, fault })?;
        }
        let is_exclusive = kind.is_exclusive();
        // A source of several targets copies a part to each.
        let is_shared = |machine: &Machine| machine.kind() == Kind::Replicate && machine.part().is_some();
        for other in self.entries.values().filter(|entry| sequence.is_some() && entry.sequence == sequence) {
            match other.machine.side() {
                Side::Source if kind == Kind::Replicate && part.is_some() && is_shared(&other.machine) => {}
                Side::Source => return Err(RequestError::SameSequence(other.id)),
                Side::Target if is_exclusive => return Err(RequestError::Unconfirmed(other.id)),
                Side::Target => {}
            }
        }
        let local = self.entries.values().filter(|entry| entry.origin == Origin::Local);
        if local.count() >= self.limits.local_max as usize {
            return Err(RequestError::Many { max: self.limits.local_max });
        }
        let (machine, timing) = (self.number(), self.timing);
        let actions = match command {
            Command::Migrate { .. } | Command::Replicate { .. } => {
                let (source, actions) = Source::begin(now, (kind, part), None, timing);
                self.begin(machine, Entry::source(id, link, Origin::Local, sequence, source), actions)
            }
            Command::Offload { what } => {
                let (source, actions) = Source::begin(now, (kind, None), Some(what), timing);
                self.begin(machine, Entry::source(id, link, Origin::Local, None, source), actions)
            }
            Command::BringBack { what } => {
                let (target, actions) = Target::fetch(now, ReservationId(machine.0), what, timing);
                self.begin(machine, Entry::target(id, link, Origin::Local, target), actions)
            }
        };
        Ok((machine, actions))
    }

    /// Takes a message that came over a link.
    pub fn received(&mut self, now: Millis, link: LinkId, envelope: Envelope) -> Actions {
        let Envelope { id, from, to, message } = envelope;
        if self.peers.get(&link) != Some(&from) || to != self.incarnation {
            self.stale_messages += 1;
            return Actions::new();
        }
        match message {
            Message::ToTarget(message) => match self.index.get(&(link, id, Side::Target)) {
                Some(&machine) => self.target_event(now, machine, Event::Message(message)),
                None => self.new_target(now, link, id, message),
            },
            Message::ToSource(message) => match self.index.get(&(link, id, Side::Source)) {
                Some(&machine) => self.source_event(now, machine, Event::Message(message)),
                None => self.new_source(now, link, id, message),
            },
        }
    }

    /// Takes the result of a task. `None` if the machine has ended: the caller drops what the
    /// result holds, as for a [`Task::Restore`] or [`Task::Release`].
    pub fn done(&mut self, now: Millis, machine: MachineId, work: Work) -> Option<Actions> {
        let entry = self.entries.get(&machine)?;
        if let Work::Committed { sequence } = work
            && entry.machine.kind().is_exclusive()
        {
            // Each source of a part must have answered before the sequence moves on.
            for part in self.copies.others(entry.id, machine).into_iter().chain([machine]) {
                self.entries.get_mut(&part).expect("a machine of the copy").sequence = sequence;
            }
        }
        match self.entries[&machine].machine {
            Machine::Source(_) => Some(self.source_event(now, machine, Event::Done(work))),
            Machine::Target(_) => Some(self.target_event(now, machine, Event::Done(work))),
        }
    }

    /// Notes that the cache of this node was cleared since the source exported its copy.
    ///
    /// The caller reports this before any later event.
    pub fn cleared(&mut self, now: Millis, machine: MachineId) -> Actions {
        match self.entries.get(&machine).map(|entry| entry.machine.side()) {
            Some(Side::Source) => self.source_event(now, machine, Event::Cleared),
            _ => Actions::new(),
        }
    }

    /// A link is up, to this process of the peer.
    ///
    /// The caller reports handshakes with one peer in the order of the peer's answers, and none of
    /// a process that it reported to have ended. Limiting each peer to one handshake at a time
    /// ensures that.
    pub fn link_up(&mut self, now: Millis, link: LinkId, incarnation: Incarnation) -> Actions {
        match self.peers.insert(link, incarnation) {
            Some(before) if before != incarnation => self.all_of(now, link, Happened::PeerEnded),
            _ => self.all_of(now, link, Happened::LinkUp),
        }
    }

    /// A link was lost.
    pub fn link_lost(&mut self, now: Millis, link: LinkId) -> Actions {
        self.all_of(now, link, Happened::LinkLost)
    }

    /// The operator declares that the peer's process has ended.
    ///
    /// Resolves copies in doubt and forgets committed ones. If the declaration is wrong, a sequence
    /// may run on both nodes.
    pub fn peer_ended(&mut self, now: Millis, link: LinkId) -> Actions {
        self.peers.remove(&link);
        self.all_of(now, link, Happened::PeerEnded)
    }

    /// Resolves a source's doubt as if the process of its target had ended, by the operator's
    /// choice. If it lives, a sequence may run on both nodes.
    pub fn end_doubt(&mut self, now: Millis, machine: MachineId) -> Actions {
        match self.entries.get(&machine).map(|entry| entry.machine.state()) {
            Some(SideState::Source(SourceState::InDoubt)) => self.happened(now, machine, Happened::PeerEnded),
            _ => Actions::new(),
        }
    }

    /// Cancels a migration. The actions report its outcome.
    ///
    /// # Errors
    /// [`CancelError`]; the migration continues.
    pub fn cancel(&mut self, now: Millis, machine: MachineId) -> Result<Actions, CancelError> {
        let entry = self.entries.get(&machine).ok_or(CancelError::Unknown)?;
        if !entry.machine.is_undecided() {
            return Err(CancelError::Committing);
        }
        Ok(self.happened(now, machine, Happened::Cancel))
    }

    /// Does what is due.
    pub fn tick(&mut self, now: Millis) -> Actions {
        let due = |entry: &Entry| entry.machine.deadline().is_some_and(|deadline| deadline <= now);
        let machines: Vec<_> =
            self.entries.iter().filter(|(_, entry)| due(entry)).map(|(&machine, _)| machine).collect();
        let mut actions: Actions =
            machines.into_iter().flat_map(|machine| self.if_here(now, machine, Happened::Tick)).collect();
        actions.extend(self.end_incomplete(now));
        actions
    }

    fn number(&mut self) -> MachineId {
        let machine = MachineId(self.next);
        self.next += 1;
        machine
    }

    fn new_target(&mut self, now: Millis, link: LinkId, id: MigrationId, message: ToTarget) -> Actions {
        let ToTarget::Prepare { kind, part, manifest } = message else {
            return self.send_all(link, id, target::unknown(&message));
        };
        let refusal = if kind == Kind::Fetch { Some(Refusal::NotAsked) } else { self.too_many(link) };
        if let Some(reason) = refusal {
            let message = Message::ToSource(ToSource::Refused { reason, free: 0 });
            return self.send(link, id, message).into_iter().collect();
        }
        let machine = self.number();
        let joined = part.map(|part| (part, self.copies.join(now, id, (kind, part), machine)));
        let part = match joined {
            Some((part, Err(fault))) => {
                let message = ToSource::Refused { reason: Refusal::Part { part, fault }, free: 0 };
                return self.send(link, id, message.into()).into_iter().collect();
            }
            Some((_, Ok(of_copy))) => Some(of_copy),
            None => None,
        };
        let (target, actions) =
            Target::prepare(now, ReservationId(machine.0), kind, part, manifest, self.timing);
        self.begin(machine, Entry::target(id, link, Origin::Peer, target), actions)
    }

    fn new_source(&mut self, now: Millis, link: LinkId, id: MigrationId, message: ToSource) -> Actions {
        let ToSource::Fetch { what } = message else {
            return self.send_all(link, id, source::unknown(&message));
        };
        if let Some(Refusal::Busy { max }) = self.too_many(link) {
            let message = ToTarget::Abort { reservation: None, reason: AbortReason::Busy { max } };
            return self.send(link, id, Message::ToTarget(message)).into_iter().collect();
        }
        let machine = self.number();
        let (source, actions) = Source::begin(now, (Kind::Fetch, None), Some(what), self.timing);
        self.begin(machine, Entry::source(id, link, Origin::Peer, None, source), actions)
    }

    fn too_many(&self, link: LinkId) -> Option<Refusal> {
        let committed = |entry: &&Entry| entry.machine.state() == SideState::Target(TargetState::Committed);
        let of_peer = |entry: &&Entry| entry.link == link && entry.origin == Origin::Peer;
        let all = self.entries.values().filter(of_peer).count();
        let kept = self.entries.values().filter(of_peer).filter(committed).count();
        let Limits { per_peer_max, committed_max, .. } = self.limits;
        if all - kept >= per_peer_max as usize {
            return Some(Refusal::Busy { max: per_peer_max });
        }
        (kept >= committed_max as usize).then_some(Refusal::Busy { max: committed_max })
    }

    fn begin<M: Into<Message>>(
        &mut self,
        machine: MachineId,
        entry: Entry,
        actions: machine::Actions<M>,
    ) -> Actions {
        self.index.insert(entry.key(), machine);
        self.entries.insert(machine, entry);
        self.addressed(machine, actions)
    }

    fn all_of(&mut self, now: Millis, link: LinkId, happened: Happened) -> Actions {
        let machines: Vec<_> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.link == link)
            .map(|(&machine, _)| machine)
            .collect();
        machines.into_iter().flat_map(|machine| self.if_here(now, machine, happened)).collect()
    }

    /// Delivers an event, unless the machine has ended with another part of its copy.
    fn if_here(&mut self, now: Millis, machine: MachineId, happened: Happened) -> Actions {
        if self.entries.contains_key(&machine) {
            self.happened(now, machine, happened)
        } else {
            Actions::new()
        }
    }

    fn happened(&mut self, now: Millis, machine: MachineId, happened: Happened) -> Actions {
        match self.entries[&machine].machine {
            Machine::Source(_) => self.source_event(now, machine, happened.into()),
            Machine::Target(_) => self.target_event(now, machine, happened.into()),
        }
    }

    fn source_event(&mut self, now: Millis, machine: MachineId, event: Event<ToSource>) -> Actions {
        match &mut self.entries.get_mut(&machine).expect("a machine of the index").machine {
            Machine::Source(source) => {
                let actions = source.on(now, event);
                self.addressed(machine, actions)
            }
            Machine::Target(_) => unreachable!("an event of a source for a target"),
        }
    }

    fn target_event(&mut self, now: Millis, machine: MachineId, event: Event<ToTarget>) -> Actions {
        match &mut self.entries.get_mut(&machine).expect("a machine of the index").machine {
            Machine::Target(target) => {
                let was_undecided = target.is_undecided();
                let actions = target.on(now, event);
                let Some(_) = target.part() else { return self.addressed(machine, actions) };
                let (state, id) = (target.state(), self.entries[&machine].id);
                let ended = actions.iter().find_map(|action| match action {
                    machine::Action::Report { outcome, .. } => Some(outcome.clone()),
                    _ => None,
                });
                let mut all = self.addressed(machine, actions);
                all.extend(match (state, ended) {
                    (TargetState::Agreed(_), _) => self.agreed(now, id, machine),
                    (_, Some(outcome)) => self.part_ended(now, (id, machine), was_undecided, &outcome),
                    _ => Actions::new(),
                });
                all
            }
            Machine::Source(_) => unreachable!("an event of a target for a source"),
        }
    }

    /// Addresses a machine's actions, and removes a machine that is over.
    fn addressed<M: Into<Message>>(&mut self, machine: MachineId, actions: machine::Actions<M>) -> Actions {
        let entry = &self.entries[&machine];
        let (id, link, is_over) = (entry.id, entry.link, entry.machine.is_over());
        let (side, kind, part) = (entry.machine.side(), entry.machine.kind(), entry.machine.part());
        let origin = entry.origin;
        if is_over {
            self.index.remove(&entry.key());
            self.entries.remove(&machine);
        }
        (actions.into_iter())
            .filter_map(|action| match action {
                machine::Action::Send(message) => self.send(link, id, message.into()),
                machine::Action::Do(task) => Some(Action::Do { machine, task }),
                machine::Action::Report { outcome, bad_blocks } => Some(Action::Report {
                    machine,
                    report: Report { id, side, kind, part, origin, bad_blocks, outcome },
                }),
            })
            .collect()
    }

    fn send_all<M: Into<Message>>(
        &self,
        link: LinkId,
        id: MigrationId,
        actions: machine::Actions<M>,
    ) -> Actions {
        let send = |action| match action {
            machine::Action::Send(message) => self.send(link, id, M::into(message)),
            _ => None,
        };
        actions.into_iter().filter_map(send).collect()
    }

    /// `None` if the peer's process is unknown: nothing could read the message.
    fn send(&self, link: LinkId, id: MigrationId, message: Message) -> Option<Action> {
        let to = *self.peers.get(&link)?;
        Some(Action::Send { link, envelope: Envelope { id, from: self.incarnation, to, message } })
    }
}

mod parts;

#[derive(Clone, Copy)]
enum Happened {
    LinkUp,
    LinkLost,
    PeerEnded,
    Cancel,
    Tick,
}

impl<M> From<Happened> for Event<M> {
    fn from(happened: Happened) -> Self {
        match happened {
            Happened::LinkUp => Self::LinkUp,
            Happened::LinkLost => Self::LinkLost,
            Happened::PeerEnded => Self::PeerEnded,
            Happened::Cancel => Self::Cancel,
            Happened::Tick => Self::Tick,
        }
    }
}

impl From<ToTarget> for Message {
    fn from(message: ToTarget) -> Self {
        Self::ToTarget(message)
    }
}

impl From<ToSource> for Message {
    fn from(message: ToSource) -> Self {
        Self::ToSource(message)
    }
}

#[cfg(test)]
mod tests;
