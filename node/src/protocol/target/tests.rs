use super::*;
use crate::protocol::copies::CopyNumber;
use crate::protocol::message::Grant;
use crate::protocol::places::{Places, Range};

const T: ReservationId = ReservationId(7);
const NOW: Millis = Millis(1_000);

fn timing() -> Timing {
    Timing::default()
}

fn places(ranges: &[(u32, u32)]) -> Places {
    Places::new(ranges.iter().map(|&(start, len)| Range { start, len }).collect()).unwrap()
}

fn prepare(kind: Kind) -> Event<ToTarget> {
    Event::Message(ToTarget::Prepare { kind, part: None, manifest: ManifestBytes::default() })
}

fn sent(attempt: u8) -> Event<ToTarget> {
    Event::Message(ToTarget::Sent { reservation: T, attempt: Attempt(attempt) })
}

fn verified(attempt: u8, bad: &[(u32, u32)]) -> Event<ToTarget> {
    let (attempt, bad) = (Attempt(attempt), places(bad));
    Event::Done(Work::Verified { attempt, bad, grant: Grant::default() })
}

fn reserved() -> Event<ToTarget> {
    let (accepted, missing) = (places(&[(0, 8)]), places(&[(0, 4)]));
    Event::Done(Work::Reserved { accepted, missing, grant: Grant::default() })
}

const COMMIT: Event<ToTarget> = Event::Message(ToTarget::Commit { reservation: T, is_current: true });
const QUERY: Event<ToTarget> = Event::Message(ToTarget::Query { reservation: T });
const HEARTBEAT: Event<ToTarget> = Event::Message(ToTarget::Heartbeat { reservation: T });
const FORGET: Event<ToTarget> = Event::Message(ToTarget::Forget { reservation: T });

fn abort(reservation: Option<ReservationId>) -> Event<ToTarget> {
    Event::Message(ToTarget::Abort { reservation, reason: AbortReason::Cancelled })
}

/// Puts a target into a state: of a fetch if it asks, otherwise of a sequence.
fn target(state: TargetState) -> Target {
    target_of(if state == TargetState::Asking { Kind::Fetch } else { Kind::Migrate }, state)
}

fn target_of(kind: Kind, state: TargetState) -> Target {
    let mut target = if kind == Kind::Fetch {
        Target::fetch(NOW, T, FetchBytes::default(), timing()).0
    } else {
        Target::prepare(NOW, T, kind, None, ManifestBytes::default(), timing()).0
    };
    if kind == Kind::Fetch && state != TargetState::Asking {
        target.on(NOW, prepare(kind));
    }
    for event in [
        reserved(),
        sent(0),
        verified(0, &[(1, 2)]),
        sent(1),
        verified(1, &[]),
        COMMIT,
        Event::Done(Work::Committed { sequence: None }),
    ] {
        if target.state() == state {
            break;
        }
        target.on(NOW, event);
    }
    assert_eq!(target.state(), state);
    target
}

const UNDECIDED: [TargetState; 7] = [
    TargetState::Asking,
    TargetState::Reserving,
    TargetState::Receiving(Attempt(0)),
    TargetState::Verifying(Attempt(0)),
    TargetState::Receiving(Attempt(1)),
    TargetState::Verifying(Attempt(1)),
    TargetState::Ready(Attempt(1)),
];

fn prepared() -> Action<ToSource> {
    Action::Send(ToSource::Prepared {
        reservation: T,
        accepted: places(&[(0, 8)]),
        missing: places(&[(0, 4)]),
        grant: Grant::default(),
    })
}

fn bad(attempt: u8, bad: &[(u32, u32)]) -> Action<ToSource> {
    let (attempt, bad) = (Attempt(attempt), places(bad));
    Action::Send(ToSource::Verified { reservation: T, attempt, bad, grant: Grant::default() })
}

fn status(phase: Phase) -> Action<ToSource> {
    Action::Send(ToSource::Status { reservation: T, phase })
}

fn aborted(reservation: ReservationId, reason: AbortReason) -> Action<ToSource> {
    Action::Send(ToSource::Aborted { reservation, reason })
}

const COMMITTED: Action<ToSource> = Action::Send(ToSource::Committed { reservation: T });

/// Whether the actions free what was reserved, and end the machine with this outcome.
fn releases(target: &Target, actions: &Sent, outcome: &Outcome) -> bool {
    let reports =
        |action: &Action<ToSource>| matches!(action, Action::Report { outcome: own, .. } if own == outcome);
    let (tasks, is_over) =
        (actions.contains(&Action::Do(Task::Release)), target.state() == TargetState::Over);
    // A target that only asked has nothing to free.
    (tasks || !actions.iter().any(|action| matches!(action, Action::Do(_))))
        && actions.iter().any(reports)
        && is_over
        && target.deadline().is_none()
}

#[test]
fn asking() {
    let fetch = Action::Send(ToSource::Fetch { what: FetchBytes::default() });
    assert_eq!(Target::fetch(NOW, T, FetchBytes::default(), timing()).1[0], fetch);
    let mut target = target(TargetState::Asking);
    assert_eq!(target.on(NOW.plus(999), Event::Tick).to_vec(), []);
    assert_eq!(target.on(NOW.plus(1_000), Event::Tick)[0], fetch);
    assert_eq!(target.on(NOW, Event::LinkUp).to_vec(), [fetch]);
    // A kind that was not asked for, and a message about a reservation that has not begun.
    assert!(target.on(NOW, prepare(Kind::Cached)).is_empty());
    assert_eq!(target.on(NOW, COMMIT).to_vec(), [aborted(T, AbortReason::Unknown)]);
    assert_eq!(target.state(), TargetState::Asking);
    assert_eq!(
        target.on(NOW, prepare(Kind::Fetch)).to_vec(),
        [Action::Do(Task::Reserve { manifest: ManifestBytes::default(), part: None })]
    );
    assert_eq!(target.state(), TargetState::Reserving);

    let mut target = self::target(TargetState::Asking);
    let actions = target.on(NOW, abort(None));
    assert_eq!(actions.len(), 1);
    assert!(releases(&target, &actions, &Outcome::Failed(Cause::Peer(AbortReason::Cancelled))));
}

#[test]
fn reserving() {
    let mut target = target(TargetState::Reserving);
    assert_eq!(target.on(NOW, prepare(Kind::Migrate)).to_vec(), [status(Phase::Reserving)]);
    assert_eq!(target.on(NOW, reserved()).to_vec(), [prepared()]);
    assert_eq!(target.state(), TargetState::Receiving(Attempt(0)));

    let mut target = self::target(TargetState::Reserving);
    let reason = Refusal::Full { needed: 4 };
    let actions = target.on(NOW, Event::Done(Work::ReserveRefused { reason: reason.clone(), free: 3 }));
    let outcome = Outcome::Refused { reason: reason.clone(), free: 3 };
    let refused = Action::Send(ToSource::Refused { reason, free: 3 });
    assert_eq!(actions.to_vec(), [refused, Action::Report { outcome, bad_blocks: 0 }]);
}

#[test]
fn receiving() {
    let mut target = target(TargetState::Receiving(Attempt(0)));
    assert_eq!(target.on(NOW, prepare(Kind::Migrate)).to_vec(), [prepared()]);
    assert_eq!(target.on(NOW, QUERY).to_vec(), [prepared()]);
    assert_eq!(target.on(NOW, sent(1)).to_vec(), [prepared()]);
    assert_eq!(target.on(NOW, HEARTBEAT).to_vec(), [status(Phase::Receiving)]);
    assert_eq!(target.on(NOW, sent(0)).to_vec(), [Action::Do(Task::Verify(Attempt(0)))]);
    assert_eq!(target.state(), TargetState::Verifying(Attempt(0)));

    // The verdict was lost: the source repeats `Sent`.
    let mut target = self::target(TargetState::Receiving(Attempt(1)));
    assert_eq!(target.on(NOW, sent(0)).to_vec(), [bad(0, &[(1, 2)])]);
    assert_eq!(target.on(NOW, QUERY).to_vec(), [bad(0, &[(1, 2)])]);
    assert_eq!(target.on(NOW, sent(1)).to_vec(), [Action::Do(Task::Verify(Attempt(1)))]);
}

#[test]
fn verifying() {
    let mut target = target(TargetState::Verifying(Attempt(0)));
    for event in [sent(0), QUERY, HEARTBEAT, prepare(Kind::Migrate)] {
        assert_eq!(target.on(NOW, event).to_vec(), [status(Phase::Verifying)]);
    }
    assert_eq!(target.on(NOW, verified(0, &[(1, 2)])).to_vec(), [bad(0, &[(1, 2)])]);
    assert_eq!(target.state(), TargetState::Receiving(Attempt(1)));
    target.on(NOW, sent(1));
    // A result of an earlier attempt.
    assert!(target.on(NOW, verified(0, &[])).is_empty());
    assert_eq!(target.on(NOW, verified(1, &[])).to_vec(), [bad(1, &[])]);
    assert_eq!(target.state(), TargetState::Ready(Attempt(1)));

    let mut target = self::target(TargetState::Verifying(Attempt(0)));
    let reason = Text::new("device lost");
    let actions = target.on(NOW, Event::Done(Work::VerifyFailed(reason.clone())));
    assert_eq!(actions[2], aborted(T, AbortReason::Local(reason.clone())));
    assert!(releases(&target, &actions, &Outcome::Failed(Cause::Own(AbortReason::Local(reason)))));
}

#[test]
fn attempts_are_bounded_at_the_target_too() {
    let mut target = target(TargetState::Receiving(Attempt(0)));
    for attempt in 0..=2 {
        target.on(NOW, sent(attempt));
        assert_eq!(target.on(NOW, verified(attempt, &[(0, 1)])).to_vec(), [bad(attempt, &[(0, 1)])]);
    }
    assert_eq!(target.on(NOW, sent(2)).to_vec(), [bad(2, &[(0, 1)])]);
    let actions = target.on(NOW, sent(3));
    let what = Text::new("more attempts than permitted");
    assert!(releases(&target, &actions, &Outcome::Failed(Cause::Own(AbortReason::Violation(what)))));
    assert!(matches!(actions[1], Action::Report { bad_blocks: 3, .. }));
}

#[test]
fn ready() {
    let mut target = target(TargetState::Ready(Attempt(1)));
    for event in [sent(1), sent(0), QUERY, prepare(Kind::Migrate)] {
        assert_eq!(target.on(NOW, event).to_vec(), [bad(1, &[])]);
    }
    for event in [HEARTBEAT, Event::LinkUp] {
        assert_eq!(target.on(NOW, event).to_vec(), [status(Phase::Ready)]);
    }
    assert_eq!(target.on(NOW, COMMIT).to_vec(), [Action::Do(Task::Commit { is_current: true })]);
    assert_eq!(target.state(), TargetState::Committing);
}

#[test]
fn committing() {
    let mut target = target(TargetState::Committing);
    for event in [COMMIT, QUERY, HEARTBEAT, sent(1), prepare(Kind::Migrate)] {
        assert_eq!(target.on(NOW, event).to_vec(), [status(Phase::Committing)]);
    }
    for event in [Event::Cancel, FORGET, abort(Some(T)), Event::LinkLost, Event::LinkUp, Event::Tick] {
        assert!(target.on(NOW.plus(1_000_000), event).is_empty());
    }
    let report = Action::Report { outcome: Outcome::Done, bad_blocks: 2 };
    assert_eq!(
        target.on(NOW, Event::Done(Work::Committed { sequence: None })).to_vec(),
        [COMMITTED, report.clone()]
    );
    assert_eq!(target.state(), TargetState::Committed);

    // Without a source to tell.
    let mut target = self::target(TargetState::Committing);
    assert!(target.on(NOW, Event::PeerEnded).is_empty());
    assert_eq!(target.on(NOW, Event::Done(Work::Committed { sequence: None })).to_vec(), [report]);
    assert_eq!(target.state(), TargetState::Over);

    let mut target = self::target(TargetState::Committing);
    let reason = Text::new("no");
    let outcome = Outcome::Failed(Cause::Own(AbortReason::Local(reason.clone())));
    let report = Action::Report { outcome, bad_blocks: 2 };
    let actions = target.on(NOW, Event::Done(Work::CommitFailed(reason.clone())));
    assert_eq!(actions.to_vec(), [aborted(T, AbortReason::Local(reason)), report]);
    assert_eq!(target.state(), TargetState::Over);
}

#[test]
fn committed() {
    let mut target = target(TargetState::Committed);
    for event in [
        COMMIT,
        QUERY,
        HEARTBEAT,
        sent(0),
        sent(9),
        abort(None),
        abort(Some(T)),
        prepare(Kind::Migrate),
        Event::LinkUp,
    ] {
        assert_eq!(target.on(NOW, event).to_vec(), [COMMITTED]);
    }
    for event in [Event::Cancel, Event::LinkLost, Event::Done(Work::Committed { sequence: None })] {
        assert!(target.on(NOW, event).is_empty());
    }
    for _ in 0..1_000 {
        let deadline = target.deadline().unwrap();
        assert_eq!(target.on(deadline, Event::Tick).to_vec(), [COMMITTED]);
    }
    let other = Event::Message(ToTarget::Forget { reservation: ReservationId(8) });
    assert!(target.on(NOW, other).is_empty() && target.state() == TargetState::Committed);
    assert!(target.on(NOW, FORGET).is_empty() && target.state() == TargetState::Over);
    assert!(target.on(NOW, COMMIT).is_empty());

    let mut target = self::target(TargetState::Committed);
    assert!(target.on(NOW, Event::PeerEnded).is_empty() && target.state() == TargetState::Over);
}

#[test]
fn an_undecided_target_ends_alone() {
    for state in UNDECIDED {
        let asks = state == TargetState::Asking;
        let mut target = target(state);
        let actions = target.on(NOW, Event::Cancel);
        assert!(
            releases(&target, &actions, &Outcome::Failed(Cause::Own(AbortReason::Cancelled))),
            "{state:?}"
        );
        assert_eq!(actions.contains(&aborted(T, AbortReason::Cancelled)), !asks);
        let mut target = self::target(state);
        let actions = target.on(NOW, Event::PeerEnded);
        assert!(releases(&target, &actions, &Outcome::Failed(Cause::PeerEnded)), "{state:?}");
        let mut target = self::target(state);
        assert_eq!(target.on(NOW, Event::LinkLost).is_empty(), !asks);
        let mut target = self::target(state);
        let actions = target.on(NOW, abort(if asks { None } else { Some(T) }));
        assert!(
            releases(&target, &actions, &Outcome::Failed(Cause::Peer(AbortReason::Cancelled))),
            "{state:?}"
        );
    }
}

#[test]
fn a_lost_link_ends_what_is_of_the_cache() {
    for state in UNDECIDED {
        for kind in [Kind::Cached, Kind::Fetch] {
            if state == TargetState::Asking && kind == Kind::Cached {
                continue;
            }
            let mut target = target_of(kind, state);
            let actions = target.on(NOW, Event::LinkLost);
            assert!(releases(&target, &actions, &Outcome::Failed(Cause::LinkLost)), "{kind:?}, {state:?}");
        }
    }
    // What is being committed is completed.
    for state in [TargetState::Committing, TargetState::Committed] {
        let mut target = target_of(Kind::Cached, state);
        assert!(target.on(NOW, Event::LinkLost).is_empty() && target.state() == state);
    }
}

#[test]
fn a_reservation_that_ended_is_not_renewed_by_a_late_message() {
    let waited_ms = timing().transfer_deadline_ms;
    for state in UNDECIDED {
        for event in [COMMIT, HEARTBEAT, sent(0), Event::Tick, prepare(Kind::Fetch)] {
            let mut target = target(state);
            let actions = target.on(NOW.plus(waited_ms), event);
            assert!(releases(&target, &actions, &Outcome::Failed(Cause::Silent { waited_ms })), "{state:?}");
        }
    }
}

#[test]
fn heartbeats_renew_a_reservation_up_to_the_limit() {
    let mut target = target(TargetState::Receiving(Attempt(0)));
    let limit_ms = timing().limit_ms;
    for ms in (0..limit_ms).step_by(5_000) {
        assert_eq!(target.on(NOW.plus(ms), HEARTBEAT).to_vec(), [status(Phase::Receiving)]);
    }
    assert_eq!(target.deadline(), Some(NOW.plus(limit_ms)));
    let actions = target.on(NOW.plus(limit_ms), Event::Tick);
    assert!(releases(&target, &actions, &Outcome::Failed(Cause::Limit { limit_ms })));
    assert_eq!(actions[2], aborted(T, AbortReason::Limit));
}

#[test]
fn messages_about_another_reservation_change_and_renew_nothing() {
    let other = ReservationId(8);
    for state in UNDECIDED {
        let mut target = target(state);
        let deadline = target.deadline();
        let messages = [
            ToTarget::Commit { reservation: other, is_current: true },
            ToTarget::Query { reservation: other },
            ToTarget::Heartbeat { reservation: other },
            ToTarget::Sent { reservation: other, attempt: Attempt(0) },
        ];
        for message in messages {
            let actions = target.on(NOW.plus(1), Event::Message(message));
            assert_eq!(actions.to_vec(), [aborted(other, AbortReason::Unknown)]);
        }
        assert!(target.on(NOW.plus(1), abort(Some(other))).is_empty());
        assert_eq!((target.state(), target.deadline()), (state, deadline));
    }
}

#[test]
fn a_commit_of_a_copy_that_was_not_verified_is_a_violation() {
    for state in UNDECIDED[1..6].iter().copied() {
        let mut target = target(state);
        let actions = target.on(NOW, COMMIT);
        let what = Text::new("a commit of a copy that was not verified");
        assert!(
            releases(&target, &actions, &Outcome::Failed(Cause::Own(AbortReason::Violation(what)))),
            "{state:?}"
        );
    }
}

const OF_COPY: CopyPart = CopyPart { copy: CopyNumber(1), part: Part { index: 1, of: 2 } };

/// Puts the target of a part into the state after its source's commit.
fn agreed() -> Target {
    let mut target =
        Target::prepare(NOW, T, Kind::Migrate, Some(OF_COPY), ManifestBytes::default(), timing()).0;
    for event in [reserved(), sent(0), verified(0, &[])] {
        target.on(NOW, event);
    }
    assert_eq!(target.on(NOW, COMMIT).to_vec(), [status(Phase::Agreed)]);
    assert_eq!(target.state(), TargetState::Agreed(Attempt(0)));
    target
}

fn of_copy(event: CopyEvent) -> Event<ToTarget> {
    Event::Copy(event)
}

#[test]
fn agreed_parts_commit_together() {
    for leads in [true, false] {
        let mut target = agreed();
        for again in [COMMIT, QUERY, HEARTBEAT] {
            assert_eq!(target.on(NOW, again).to_vec(), [status(Phase::Agreed)]);
        }
        let commits = target.on(NOW, of_copy(CopyEvent::Commits { leads, is_current: true }));
        let commit = Action::Do(Task::Commit { is_current: true });
        assert_eq!(commits.to_vec(), leads.then_some(commit).into_iter().collect::<Vec<_>>());
        assert_eq!(target.state(), TargetState::Committing);
        // Nothing ends it any more.
        assert!(target.on(NOW, of_copy(CopyEvent::Ended(Text::new("late")))).is_empty());
        assert!(target.on(NOW, Event::Cancel).is_empty());
        let actions = target.on(NOW, of_copy(CopyEvent::Committed));
        assert_eq!(actions[0], Action::Send(ToSource::Committed { reservation: T }));
        assert_eq!(target.state(), TargetState::Committed);
    }
    let mut target = agreed();
    target.on(NOW, of_copy(CopyEvent::Commits { leads: false, is_current: true }));
    let actions = target.on(NOW, of_copy(CopyEvent::Failed(Text::new("no"))));
    assert_eq!(actions[0], aborted(T, AbortReason::Local(Text::new("no"))));
    assert_eq!(target.state(), TargetState::Over);
}

#[test]
fn the_end_of_another_part_ends_an_agreed_one() {
    let mut target = agreed();
    let why = Text::new("the peer's process has ended");
    let actions = target.on(NOW, of_copy(CopyEvent::Ended(why.clone())));
    let outcome = Outcome::Failed(Cause::Own(AbortReason::OtherPart(why.clone())));
    let (release, abort) = (Action::Do(Task::Release), aborted(T, AbortReason::OtherPart(why)));
    assert_eq!(actions.to_vec(), [release, Action::Report { outcome, bad_blocks: 0 }, abort]);
    let mut target = agreed();
    assert!(target.is_late(NOW.plus(timing().transfer_deadline_ms)) && !target.is_late(NOW));
    target.on(NOW.plus(timing().transfer_deadline_ms), Event::Tick);
    assert_eq!(target.state(), TargetState::Over);
}

#[test]
fn copies_of_a_cleared_cache() {
    let commit = |is_current| Event::Message(ToTarget::Commit { reservation: T, is_current });
    let mut sequence = self::target(TargetState::Ready(Attempt(1)));
    let actions = sequence.on(NOW, commit(false));
    assert_eq!(actions.to_vec(), [Action::Do(Task::Commit { is_current: false })]);
    for kind in [Kind::Cached, Kind::Fetch] {
        let (mut cached, _) = Target::prepare(NOW, T, kind, None, ManifestBytes::default(), timing());
        for event in [reserved(), sent(0), verified(0, &[])] {
            cached.on(NOW, event);
        }
        let actions = cached.on(NOW, commit(false));
        let report =
            Action::Report { outcome: Outcome::Failed(Cause::Own(AbortReason::Cleared)), bad_blocks: 0 };
        assert_eq!(actions.to_vec(), [Action::Do(Task::Release), report, aborted(T, AbortReason::Cleared)]);
    }
    // A part: a repeated message may report it first or later; it stays reported.
    let mut part = agreed();
    assert!(part.is_current());
    part.on(NOW, commit(false));
    part.on(NOW, commit(true));
    assert!(!part.is_current());
}
