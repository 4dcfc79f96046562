//! The source of a migration. The [module](super) has its states as a table.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use super::bounded::Text;
use super::machine::{Action, Actions, Event, Task, Work};
use super::message::{
    AbortReason, Attempt, FetchBytes, Grant, Kind, ManifestBytes, Part, Phase, ReservationId, ToSource,
    ToTarget,
};
use super::outcome::{Cause, Doubt, Outcome};
use super::places::Places;
use super::timing::{Millis, Repeat, Timing};

/// State of a source.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SourceState {
    /// The copy is being exported.
    Exporting,
    /// The target was asked to reserve.
    Preparing,
    /// Bytes are being sent.
    Sending(Attempt),
    /// The target is comparing checksums.
    Checking(Attempt),
    /// The target was sent `Commit`.
    Committing,
    /// The target was sent `Commit`, and has not answered within the transfer deadline.
    InDoubt,
    /// The migration has ended on this side.
    Over,
}

/// The source of one migration.
#[derive(Debug)]
pub struct Source {
    state: SourceState,
    kind: Kind,
    part: Option<Part>,
    timing: Timing,
    manifest: ManifestBytes,
    reservation: Option<ReservationId>,
    /// Places that the target initially lacked.
    missing: Places,
    bad_blocks: u64,
    is_current: bool,
    begun: Millis,
    /// Time of the target's last message; from the commit on, the time of the commit, or of the
    /// last message that other parts are awaited.
    heard: Millis,
    repeat: Repeat,
}

type Sent = Actions<ToTarget>;

impl Source {
    /// Begins with the export of a copy; `what` describes the cached blocks that the target asked
    /// for.
    pub fn begin(
        now: Millis,
        (kind, part): (Kind, Option<Part>),
        what: Option<FetchBytes>,
        timing: Timing,
    ) -> (Self, Sent) {
        let source = Self {
            state: SourceState::Exporting,
            kind,
            part,
            timing,
            manifest: ManifestBytes::default(),
            reservation: None,
            missing: Places::default(),
            bad_blocks: 0,
            is_current: true,
            begun: now,
            heard: now,
            repeat: Repeat::renewing(now, &timing),
        };
        (source, smallvec![Action::Do(Task::Export { what })])
    }

    /// Returns its state.
    pub fn state(&self) -> SourceState {
        self.state
    }

    /// Returns its kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the part of the copy that it sends; `None` for the whole copy.
    pub fn part(&self) -> Option<Part> {
        self.part
    }

    /// Returns when it began.
    pub fn begun(&self) -> Millis {
        self.begun
    }

    /// Returns whether it can still end without the peer's answer.
    pub fn is_undecided(&self) -> bool {
        !matches!(self.state, SourceState::Committing | SourceState::InDoubt | SourceState::Over)
    }

    /// Returns the time by which it must get an [`Event::Tick`]; `None` once it is over.
    pub fn deadline(&self) -> Option<Millis> {
        let (limit, silence) =
            (self.begun.plus(self.timing.limit_ms), self.heard.plus(self.timing.transfer_deadline_ms));
        match self.state {
            SourceState::Over => None,
            SourceState::Exporting => Some(limit),
            SourceState::InDoubt => Some(self.repeat.at()),
            SourceState::Committing => Some(self.repeat.at().min(silence)),
            _ => Some(self.repeat.at().min(silence).min(limit)),
        }
    }

    /// Handles an event, and returns the resulting actions.
    pub fn on(&mut self, now: Millis, event: Event<ToSource>) -> Sent {
        if self.state == SourceState::Over {
            return Sent::new();
        }
        match event {
            Event::Message(message) => self.message(now, message),
            Event::Done(work) => self.done(now, work),
            Event::LinkUp => self.repeat_message().into_iter().collect(),
            Event::LinkLost if self.state == SourceState::Committing => self.doubt(now, Doubt::LinkLost),
            // The target learns of it from the answer to its next message.
            Event::LinkLost if self.kind.is_of_cache() && self.is_undecided() => {
                self.restore(Outcome::Failed(Cause::LinkLost))
            }
            Event::LinkLost => Sent::new(),
            // The target's copy, committed or not, is gone with its process.
            Event::PeerEnded => self.restore(Outcome::Failed(Cause::PeerEnded)),
            Event::Cancel if self.is_undecided() => self.abort(AbortReason::Cancelled),
            Event::Cleared => {
                self.is_current = false;
                Sent::new()
            }
            Event::Cancel | Event::Copy(_) => Sent::new(),
            Event::Tick => self.tick(now),
        }
    }

    fn message(&mut self, now: Millis, message: ToSource) -> Sent {
        match message {
            ToSource::Fetch { .. } => return self.repeat_message().into_iter().collect(),
            ToSource::Refused { reason, free } => {
                if self.state == SourceState::Preparing {
                    return self.restore(Outcome::Refused { reason, free });
                }
                return Sent::new();
            }
            _ => {}
        }
        let reservation = match message {
            ToSource::Prepared { reservation, .. }
            | ToSource::Verified { reservation, .. }
            | ToSource::Status { reservation, .. }
            | ToSource::Committed { reservation }
            | ToSource::Aborted { reservation, .. } => reservation,
            ToSource::Fetch { .. } | ToSource::Refused { .. } => unreachable!("handled above"),
        };
        if self.reservation.is_some_and(|own| own != reservation) {
            return match message {
                // A repeated `Prepare` began a second reservation, which is not needed.
                ToSource::Prepared { .. } => abort_message(Some(reservation), AbortReason::Unknown),
                _ => Sent::new(),
            };
        }
        if self.is_undecided() {
            self.heard = now;
        }
        match (message, self.state) {
            (ToSource::Prepared { accepted, missing, grant, .. }, SourceState::Preparing) => {
                self.prepared(now, reservation, accepted, missing, grant)
            }
            (ToSource::Verified { attempt, bad, grant, .. }, SourceState::Checking(sent))
                if attempt == sent =>
            {
                self.verified(now, attempt, bad, grant)
            }
            (ToSource::Status { phase: Phase::Ready, .. }, SourceState::InDoubt) => {
                [self.commit(reservation)].into_iter().collect()
            }
            // It lives, and waits for other parts of the copy.
            (ToSource::Status { phase: Phase::Agreed, .. }, SourceState::Committing) => {
                self.heard = now;
                Sent::new()
            }
            (ToSource::Committed { .. }, SourceState::Committing | SourceState::InDoubt) => {
                self.finish(reservation)
            }
            (ToSource::Aborted { reason, .. }, _) if self.reservation.is_some() => {
                self.restore(Outcome::Failed(Cause::Peer(reason)))
            }
            _ => Sent::new(),
        }
    }

    fn prepared(
        &mut self,
        now: Millis,
        reservation: ReservationId,
        accepted: Places,
        missing: Places,
        grant: Grant,
    ) -> Sent {
        self.reservation = Some(reservation);
        if !accepted.contains(&missing) {
            return self.violation("missing places that were not accepted");
        }
        self.missing = missing.clone();
        let mut actions = Sent::new();
        if self.kind == Kind::Cached {
            actions.push(Action::Do(Task::Retain(accepted)));
        }
        actions.extend(self.send(now, Attempt::default(), missing, grant));
        actions
    }

    fn send(&mut self, now: Millis, attempt: Attempt, places: Places, grant: Grant) -> Sent {
        if places.is_empty() {
            return self.sent(now, attempt);
        }
        self.state = SourceState::Sending(attempt);
        self.repeat = Repeat::renewing(now, &self.timing);
        smallvec![Action::Do(Task::Transfer { attempt, places, grant })]
    }

    fn sent(&mut self, now: Millis, attempt: Attempt) -> Sent {
        self.state = SourceState::Checking(attempt);
        self.repeat = Repeat::soon(now, &self.timing);
        self.repeat_message().into_iter().collect()
    }

    fn verified(&mut self, now: Millis, attempt: Attempt, bad: Places, grant: Grant) -> Sent {
        if !self.missing.contains(&bad) {
            return self.violation("bad places that were not sent");
        }
        self.bad_blocks += bad.count();
        if !bad.is_empty() {
            return match attempt.next() {
                Some(next) => self.send(now, next, bad, grant),
                None => self.abort(AbortReason::Checksums(bad.count())),
            };
        }
        self.state = SourceState::Committing;
        // From here on, this is the time of the commit.
        self.heard = now;
        self.repeat = Repeat::soon(now, &self.timing);
        self.repeat_message().into_iter().collect()
    }

    fn done(&mut self, now: Millis, work: Work) -> Sent {
        match (work, self.state) {
            (Work::Exported(manifest), SourceState::Exporting) => {
                self.manifest = manifest;
                self.state = SourceState::Preparing;
                self.heard = now;
                self.repeat = Repeat::soon(now, &self.timing);
                self.repeat_message().into_iter().collect()
            }
            (Work::ExportFailed(reason), SourceState::Exporting) => self.abort(AbortReason::Local(reason)),
            (Work::ExportRefused(reason), SourceState::Exporting) => self.abort(reason),
            (Work::Transferred(attempt), SourceState::Sending(current)) if attempt == current => {
                self.sent(now, attempt)
            }
            (Work::TransferFailed(attempt, reason), SourceState::Sending(current)) if attempt == current => {
                self.abort(AbortReason::Transfer(reason))
            }
            _ => Sent::new(),
        }
    }

    fn tick(&mut self, now: Millis) -> Sent {
        let waited_ms = now.since(self.heard);
        let is_silent = waited_ms >= self.timing.transfer_deadline_ms;
        match self.state {
            SourceState::Committing if is_silent => return self.doubt(now, Doubt::Silent),
            SourceState::Committing | SourceState::InDoubt => {}
            _ if now >= self.begun.plus(self.timing.limit_ms) => {
                return self.abort_as(AbortReason::Limit, Cause::Limit { limit_ms: self.timing.limit_ms });
            }
            SourceState::Exporting => return Sent::new(),
            _ if is_silent => return self.abort_as(AbortReason::Lapsed, Cause::Silent { waited_ms }),
            _ => {}
        }
        if self.repeat.is_due(now, &self.timing) {
            self.repeat_message().into_iter().collect()
        } else {
            Sent::new()
        }
    }

    /// Returns the message whose answer this state awaits.
    fn repeat_message(&self) -> Option<Action<ToTarget>> {
        let message = match (self.state, self.reservation) {
            (SourceState::Preparing, _) => {
                let manifest = self.manifest.clone();
                ToTarget::Prepare { kind: self.kind, part: self.part, manifest }
            }
            (SourceState::Sending(_), Some(reservation)) => ToTarget::Heartbeat { reservation },
            (SourceState::Checking(attempt), Some(reservation)) => ToTarget::Sent { reservation, attempt },
            (SourceState::Committing, Some(reservation)) => return Some(self.commit(reservation)),
            (SourceState::InDoubt, Some(reservation)) => ToTarget::Query { reservation },
            _ => return None,
        };
        Some(Action::Send(message))
    }

    fn commit(&self, reservation: ReservationId) -> Action<ToTarget> {
        Action::Send(ToTarget::Commit { reservation, is_current: self.is_current })
    }

    /// Handles a late answer. A copy that only one side may have is held until there is one.
    fn doubt(&mut self, now: Millis, doubt: Doubt) -> Sent {
        if !self.kind.is_exclusive() {
            return self.restore(Outcome::Unconfirmed);
        }
        self.state = SourceState::InDoubt;
        self.repeat = Repeat::renewing(now, &self.timing);
        let report = self.report(Outcome::InDoubt { since: self.heard, doubt });
        [report].into_iter().chain(self.repeat_message()).collect()
    }

    fn finish(&mut self, reservation: ReservationId) -> Sent {
        self.state = SourceState::Over;
        smallvec![
            Action::Do(Task::Finish),
            Action::Send(ToTarget::Forget { reservation }),
            self.report(Outcome::Done)
        ]
    }

    /// Ends without the target's consent: only before the commit was sent.
    fn abort(&mut self, reason: AbortReason) -> Sent {
        self.abort_as(reason.clone(), Cause::Own(reason))
    }

    fn abort_as(&mut self, reason: AbortReason, cause: Cause) -> Sent {
        debug_assert!(self.is_undecided(), "an abort behind the commit");
        let mut actions = abort_message(self.reservation, reason);
        actions.extend(self.restore(Outcome::Failed(cause)));
        actions
    }

    fn violation(&mut self, what: &'static str) -> Sent {
        self.abort(AbortReason::Violation(Text::new(what)))
    }

    fn restore(&mut self, outcome: Outcome) -> Sent {
        self.state = SourceState::Over;
        smallvec![Action::Do(Task::Restore), self.report(outcome)]
    }

    fn report(&self, outcome: Outcome) -> Action<ToTarget> {
        Action::Report { outcome, bad_blocks: self.bad_blocks }
    }
}

/// Returns the answer for a migration without a source here: it has ended, or never began.
pub(super) fn unknown(message: &ToSource) -> Sent {
    match *message {
        ToSource::Prepared { reservation, .. }
        | ToSource::Verified { reservation, .. }
        | ToSource::Status { reservation, .. } => abort_message(Some(reservation), AbortReason::Unknown),
        // After its commit, a source ends only if it is known whether the other side's copy exists.
        ToSource::Committed { reservation } => smallvec![Action::Send(ToTarget::Forget { reservation })],
        ToSource::Fetch { .. } | ToSource::Refused { .. } | ToSource::Aborted { .. } => Sent::new(),
    }
}

fn abort_message(reservation: Option<ReservationId>, reason: AbortReason) -> Sent {
    smallvec![Action::Send(ToTarget::Abort { reservation, reason })]
}

#[cfg(test)]
mod tests;
