//! The target of a migration. The [module](super) has its states as a table.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use super::bounded::Text;
use super::copies::{CopyEvent, CopyPart};
use super::machine::{Action, Actions, Event, Task, Work};
use super::message::{
    AbortReason, Attempt, FetchBytes, Kind, ManifestBytes, Part, Phase, Refusal, ReservationId, ToSource,
    ToTarget,
};
use super::outcome::{Cause, Outcome};
use super::timing::{Millis, Repeat, Timing};

/// State of a target.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TargetState {
    /// The peer was asked to be the source.
    Asking,
    /// Blocks are being reserved.
    Reserving,
    /// The source writes the bytes of this attempt.
    Receiving(Attempt),
    /// Checksums are being compared.
    Verifying(Attempt),
    /// All checksums are right.
    Ready(Attempt),
    /// For a part: its source has sent its commit; those of other parts have not.
    Agreed(Attempt),
    /// The copy is being committed.
    Committing,
    /// The copy is committed; the source may not know it.
    Committed,
    /// The migration has ended on this side.
    Over,
}

/// The target of one migration.
#[derive(Debug)]
pub struct Target {
    state: TargetState,
    kind: Kind,
    timing: Timing,
    reservation: ReservationId,
    what: Option<FetchBytes>,
    part: Option<CopyPart>,
    /// Whether no source has cleared its cache, as far as known.
    is_current: bool,
    /// The answer that the source awaits, once there is one.
    answer: Option<ToSource>,
    bad_blocks: u64,
    begun: Millis,
    /// When the transfer deadline was last renewed.
    renewed: Millis,
    repeat: Repeat,
    /// The source's process ended during the commit.
    is_alone: bool,
}

type Sent = Actions<ToSource>;

impl Target {
    /// Begins by asking a peer for cached blocks.
    pub fn fetch(now: Millis, reservation: ReservationId, what: FetchBytes, timing: Timing) -> (Self, Sent) {
        let mut target = Self::new(now, reservation, Kind::Fetch, timing);
        target.what = Some(what);
        let actions = target.repeat_message().into_iter().collect();
        (target, actions)
    }

    /// Begins with the request of a source.
    pub fn prepare(
        now: Millis,
        reservation: ReservationId,
        kind: Kind,
        part: Option<CopyPart>,
        manifest: ManifestBytes,
        timing: Timing,
    ) -> (Self, Sent) {
        let mut target = Self::new(now, reservation, kind, timing);
        target.part = part;
        let actions = target.reserve(now, manifest);
        (target, actions)
    }

    fn new(now: Millis, reservation: ReservationId, kind: Kind, timing: Timing) -> Self {
        Self {
            state: TargetState::Asking,
            kind,
            timing,
            reservation,
            what: None,
            part: None,
            is_current: true,
            answer: None,
            bad_blocks: 0,
            begun: now,
            renewed: now,
            repeat: Repeat::soon(now, &timing),
            is_alone: false,
        }
    }

    /// Returns its state.
    pub fn state(&self) -> TargetState {
        self.state
    }

    /// Returns its kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the part of the copy that it receives; `None` for the whole copy.
    pub fn part(&self) -> Option<CopyPart> {
        self.part
    }

    /// Returns whether no source has reported that its cache was cleared.
    pub fn is_current(&self) -> bool {
        self.is_current
    }

    /// Returns when it began.
    pub fn begun(&self) -> Millis {
        self.begun
    }

    /// Returns the number of its reservation.
    pub fn reservation(&self) -> ReservationId {
        self.reservation
    }

    /// Returns whether it can still end without the source: nothing was committed.
    pub fn is_undecided(&self) -> bool {
        !matches!(self.state, TargetState::Committing | TargetState::Committed | TargetState::Over)
    }

    /// Returns the time by which it must get an [`Event::Tick`]; `None` while it commits, and once
    /// it is over.
    pub fn deadline(&self) -> Option<Millis> {
        match self.state {
            TargetState::Committing | TargetState::Over => None,
            TargetState::Committed => Some(self.repeat.at()),
            TargetState::Asking => Some(self.repeat.at().min(self.end())),
            _ => Some(self.end()),
        }
    }

    /// Returns the earlier of the transfer deadline and the limit.
    fn end(&self) -> Millis {
        self.renewed.plus(self.timing.transfer_deadline_ms).min(self.begun.plus(self.timing.limit_ms))
    }

    /// Returns whether its deadline or limit has passed without a tick.
    pub fn is_late(&self, now: Millis) -> bool {
        self.is_undecided() && now >= self.end()
    }

    /// Handles an event, and returns the resulting actions.
    pub fn on(&mut self, now: Millis, event: Event<ToTarget>) -> Sent {
        if self.state == TargetState::Over {
            return Sent::new();
        }
        // Before the event: a late message must not renew an expired reservation.
        if self.is_late(now) {
            return self.lapse(now);
        }
        match event {
            Event::Message(message) => self.message(now, message),
            Event::Done(work) => self.done(now, work),
            // If the source has ended and its abort was lost with the link, it answers with
            // another.
            Event::LinkUp if self.is_undecided() && self.state != TargetState::Asking => self.status(),
            Event::LinkUp => self.repeat_message().into_iter().collect(),
            // The source learns of it from the answer to its next message.
            Event::LinkLost if self.kind.is_of_cache() && self.is_undecided() => {
                self.release(Outcome::Failed(Cause::LinkLost))
            }
            Event::LinkLost => Sent::new(),
            Event::PeerEnded => self.peer_ended(),
            Event::Cancel if self.is_undecided() => self.abort(AbortReason::Cancelled),
            Event::Cancel | Event::Cleared => Sent::new(),
            Event::Copy(event) => self.of_copy(now, event),
            Event::Tick => self.tick(now),
        }
    }

    fn message(&mut self, now: Millis, message: ToTarget) -> Sent {
        let reservation = match message {
            ToTarget::Prepare { kind, part, manifest } => return self.prepared(now, kind, part, manifest),
            ToTarget::Abort { reservation, reason } => {
                let is_own = reservation.is_none_or(|reservation| reservation == self.reservation);
                return if is_own { self.aborted(reason) } else { Sent::new() };
            }
            ToTarget::Sent { reservation, .. }
            | ToTarget::Commit { reservation, .. }
            | ToTarget::Query { reservation }
            | ToTarget::Heartbeat { reservation }
            | ToTarget::Forget { reservation } => reservation,
        };
        if reservation != self.reservation || self.state == TargetState::Asking {
            return unknown(&message);
        }
        self.renewed = now;
        match (message, self.state) {
            (ToTarget::Forget { .. }, TargetState::Committed) => {
                self.state = TargetState::Over;
                Sent::new()
            }
            (ToTarget::Forget { .. }, _) => Sent::new(),
            (ToTarget::Sent { attempt, .. }, _) if attempt > Attempt::LAST && self.is_undecided() => {
                self.violation("more attempts than permitted")
            }
            (ToTarget::Sent { attempt, .. }, TargetState::Receiving(awaited)) if attempt == awaited => {
                self.state = TargetState::Verifying(attempt);
                smallvec![Action::Do(Task::Verify(attempt))]
            }
            (ToTarget::Commit { is_current, .. }, TargetState::Ready(attempt)) => {
                self.agreed(attempt, is_current)
            }
            (ToTarget::Commit { is_current, .. }, TargetState::Agreed(_)) => {
                self.is_current &= is_current;
                self.status()
            }
            (ToTarget::Commit { .. }, _) if self.is_undecided() => {
                self.violation("a commit of a copy that was not verified")
            }
            (ToTarget::Heartbeat { .. }, state) if state != TargetState::Committed => self.status(),
            _ => self.reply(),
        }
    }

    /// Handles a first or repeated request for a reservation.
    fn prepared(&mut self, now: Millis, kind: Kind, part: Option<Part>, manifest: ManifestBytes) -> Sent {
        self.renewed = now;
        match self.state {
            TargetState::Asking if kind == Kind::Fetch && part.is_none() => self.reserve(now, manifest),
            TargetState::Asking => Sent::new(),
            _ => self.reply(),
        }
    }

    fn reserve(&mut self, now: Millis, manifest: ManifestBytes) -> Sent {
        self.renewed = now;
        self.state = TargetState::Reserving;
        smallvec![Action::Do(Task::Reserve { manifest, part: self.part })]
    }

    /// Handles the commit of the source.
    fn agreed(&mut self, attempt: Attempt, is_current: bool) -> Sent {
        self.is_current = is_current;
        if self.kind.is_of_cache() && !is_current {
            return self.abort(AbortReason::Cleared);
        }
        if self.part.is_some() {
            self.state = TargetState::Agreed(attempt);
            return self.status();
        }
        self.state = TargetState::Committing;
        smallvec![Action::Do(Task::Commit { is_current })]
    }

    /// Handles an event of the other parts.
    fn of_copy(&mut self, now: Millis, event: CopyEvent) -> Sent {
        match (event, self.state) {
            (CopyEvent::Commits { leads, is_current }, TargetState::Agreed(_)) => {
                self.state = TargetState::Committing;
                let commit = Action::Do(Task::Commit { is_current });
                leads.then_some(commit).into_iter().collect()
            }
            (CopyEvent::Committed, TargetState::Committing) => self.committed(now),
            (CopyEvent::Failed(reason), TargetState::Committing) => self.failed(reason),
            (CopyEvent::Ended(why), _) if self.is_undecided() => self.abort(AbortReason::OtherPart(why)),
            _ => Sent::new(),
        }
    }

    fn done(&mut self, now: Millis, work: Work) -> Sent {
        let reservation = self.reservation;
        match (work, self.state) {
            (Work::Reserved { accepted, missing, grant }, TargetState::Reserving) => {
                self.state = TargetState::Receiving(Attempt::default());
                self.answer(ToSource::Prepared { reservation, accepted, missing, grant })
            }
            (Work::ReserveRefused { reason, free }, TargetState::Reserving) => self.refuse(reason, free),
            (Work::Verified { attempt, bad, grant }, TargetState::Verifying(current))
                if attempt == current =>
            {
                self.bad_blocks += bad.count();
                self.state = match attempt.next() {
                    _ if bad.is_empty() => TargetState::Ready(attempt),
                    // After the last attempt, the source gives up, or the reservation expires.
                    next => TargetState::Receiving(next.unwrap_or(Attempt(Attempt::LAST.0 + 1))),
                };
                self.answer(ToSource::Verified { reservation, attempt, bad, grant })
            }
            (Work::VerifyFailed(reason), TargetState::Verifying(_)) => self.abort(AbortReason::Local(reason)),
            (Work::Committed { .. }, TargetState::Committing) => self.committed(now),
            (Work::CommitFailed(reason), TargetState::Committing) => self.failed(reason),
            _ => Sent::new(),
        }
    }

    fn failed(&mut self, reason: Text) -> Sent {
        self.state = TargetState::Over;
        let reason = AbortReason::Local(reason);
        let message = ToSource::Aborted { reservation: self.reservation, reason: reason.clone() };
        smallvec![Action::Send(message), self.report(Outcome::Failed(Cause::Own(reason)))]
    }

    fn committed(&mut self, now: Millis) -> Sent {
        let report = self.report(Outcome::Done);
        if self.is_alone {
            self.state = TargetState::Over;
            return smallvec![report];
        }
        self.state = TargetState::Committed;
        self.repeat = Repeat::soon(now, &self.timing);
        let mut actions = self.answer(ToSource::Committed { reservation: self.reservation });
        actions.push(report);
        actions
    }

    fn peer_ended(&mut self) -> Sent {
        match self.state {
            TargetState::Committing => {
                self.is_alone = true;
                Sent::new()
            }
            // What was committed stays; the only process that could ask for it is gone.
            TargetState::Committed => {
                self.state = TargetState::Over;
                Sent::new()
            }
            _ => self.release(Outcome::Failed(Cause::PeerEnded)),
        }
    }

    fn tick(&mut self, now: Millis) -> Sent {
        let repeats = matches!(self.state, TargetState::Asking | TargetState::Committed);
        if repeats && self.repeat.is_due(now, &self.timing) {
            return self.repeat_message().into_iter().collect();
        }
        Sent::new()
    }

    fn repeat_message(&self) -> Option<Action<ToSource>> {
        match self.state {
            TargetState::Asking => {
                Some(Action::Send(ToSource::Fetch { what: self.what.clone().unwrap_or_default() }))
            }
            TargetState::Committed => {
                Some(Action::Send(ToSource::Committed { reservation: self.reservation }))
            }
            _ => None,
        }
    }

    fn answer(&mut self, answer: ToSource) -> Sent {
        self.answer = Some(answer.clone());
        smallvec![Action::Send(answer)]
    }

    /// Repeats the last answer, or the phase while one is being made.
    fn reply(&self) -> Sent {
        match (&self.answer, self.state) {
            (None, _) | (_, TargetState::Verifying(_) | TargetState::Agreed(_) | TargetState::Committing) => {
                self.status()
            }
            (Some(answer), _) => smallvec![Action::Send(answer.clone())],
        }
    }

    fn status(&self) -> Sent {
        let phase = match self.state {
            TargetState::Asking => Phase::Asking,
            TargetState::Reserving => Phase::Reserving,
            TargetState::Receiving(_) => Phase::Receiving,
            TargetState::Verifying(_) => Phase::Verifying,
            TargetState::Ready(_) => Phase::Ready,
            TargetState::Agreed(_) => Phase::Agreed,
            TargetState::Committing => Phase::Committing,
            TargetState::Committed | TargetState::Over => Phase::Committed,
        };
        smallvec![Action::Send(ToSource::Status { reservation: self.reservation, phase })]
    }

    fn aborted(&mut self, reason: AbortReason) -> Sent {
        match self.state {
            // A source that aborts after its commit has ended. A phase would make it abort again.
            TargetState::Committing => Sent::new(),
            TargetState::Committed => self.reply(),
            _ => self.release(Outcome::Failed(Cause::Peer(reason))),
        }
    }

    fn lapse(&mut self, now: Millis) -> Sent {
        if now >= self.begun.plus(self.timing.limit_ms) {
            return self.abort_as(AbortReason::Limit, Cause::Limit { limit_ms: self.timing.limit_ms });
        }
        self.abort_as(AbortReason::Lapsed, Cause::Silent { waited_ms: now.since(self.renewed) })
    }

    fn violation(&mut self, what: &'static str) -> Sent {
        self.abort(AbortReason::Violation(Text::new(what)))
    }

    fn abort(&mut self, reason: AbortReason) -> Sent {
        self.abort_as(reason.clone(), Cause::Own(reason))
    }

    fn abort_as(&mut self, reason: AbortReason, cause: Cause) -> Sent {
        debug_assert!(self.is_undecided(), "an abort behind the commit");
        let was_asking = self.state == TargetState::Asking;
        let mut actions = self.release(Outcome::Failed(cause));
        if !was_asking {
            actions.push(Action::Send(ToSource::Aborted { reservation: self.reservation, reason }));
        }
        actions
    }

    fn refuse(&mut self, reason: Refusal, free: u64) -> Sent {
        self.state = TargetState::Over;
        let outcome = Outcome::Refused { reason: reason.clone(), free };
        smallvec![Action::Send(ToSource::Refused { reason, free }), self.report(outcome)]
    }

    fn release(&mut self, outcome: Outcome) -> Sent {
        let mut actions = Sent::new();
        if self.state != TargetState::Asking {
            actions.push(Action::Do(Task::Release));
        }
        self.state = TargetState::Over;
        actions.push(self.report(outcome));
        actions
    }

    fn report(&self, outcome: Outcome) -> Action<ToSource> {
        Action::Report { outcome, bad_blocks: self.bad_blocks }
    }
}

/// Returns the answer for an unknown reservation.
pub(super) fn unknown(message: &ToTarget) -> Sent {
    match *message {
        ToTarget::Sent { reservation, .. }
        | ToTarget::Commit { reservation, .. }
        | ToTarget::Query { reservation }
        | ToTarget::Heartbeat { reservation } => {
            smallvec![Action::Send(ToSource::Aborted { reservation, reason: AbortReason::Unknown })]
        }
        ToTarget::Prepare { .. } | ToTarget::Abort { .. } | ToTarget::Forget { .. } => Sent::new(),
    }
}

#[cfg(test)]
mod tests;
