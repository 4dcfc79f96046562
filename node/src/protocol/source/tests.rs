use super::*;
use crate::protocol::message::Refusal;
use crate::protocol::places::Range;

const T: ReservationId = ReservationId(7);
const NOW: Millis = Millis(1_000);

fn timing() -> Timing {
    Timing::default()
}

fn places(ranges: &[(u32, u32)]) -> Places {
    Places::new(ranges.iter().map(|&(start, len)| Range { start, len }).collect()).unwrap()
}

fn prepared(reservation: ReservationId, missing: &[(u32, u32)]) -> Event<ToSource> {
    let (accepted, missing) = (places(&[(0, 8)]), places(missing));
    Event::Message(ToSource::Prepared { reservation, accepted, missing, grant: Grant::default() })
}

fn verified(attempt: u8, bad: &[(u32, u32)]) -> Event<ToSource> {
    let (attempt, bad) = (Attempt(attempt), places(bad));
    Event::Message(ToSource::Verified { reservation: T, attempt, bad, grant: Grant::default() })
}

fn status(phase: Phase) -> Event<ToSource> {
    Event::Message(ToSource::Status { reservation: T, phase })
}

fn aborted() -> Event<ToSource> {
    Event::Message(ToSource::Aborted { reservation: T, reason: AbortReason::Lapsed })
}

fn transferred(attempt: u8) -> Event<ToSource> {
    Event::Done(Work::Transferred(Attempt(attempt)))
}

const COMMITTED: Event<ToSource> = Event::Message(ToSource::Committed { reservation: T });

fn manifest() -> ManifestBytes {
    ManifestBytes::new(vec![1, 2, 3]).unwrap()
}

fn source(kind: Kind, state: SourceState) -> Source {
    let (mut source, actions) = Source::begin(NOW, (kind, None), None, timing());
    assert_eq!(actions.to_vec(), [Action::Do(Task::Export { what: None })]);
    let events = [
        Event::Done(Work::Exported(manifest())),
        prepared(T, &[(0, 4)]),
        transferred(0),
        verified(0, &[(1, 2)]),
        transferred(1),
        verified(1, &[]),
        Event::LinkLost,
    ];
    for event in events {
        if source.state() == state {
            break;
        }
        source.on(NOW, event);
    }
    assert_eq!(source.state(), state);
    source
}

fn migrate(state: SourceState) -> Source {
    source(Kind::Migrate, state)
}

const ONE: Attempt = Attempt(1);

const UNDECIDED: [SourceState; 4] = [
    SourceState::Exporting,
    SourceState::Preparing,
    SourceState::Sending(Attempt(0)),
    SourceState::Checking(Attempt(1)),
];

fn prepare() -> Action<ToTarget> {
    Action::Send(ToTarget::Prepare { kind: Kind::Migrate, part: None, manifest: manifest() })
}

fn report(outcome: Outcome, bad_blocks: u64) -> Action<ToTarget> {
    Action::Report { outcome, bad_blocks }
}

/// Whether the actions restore the copy, and end the machine with this outcome.
fn restores(source: &Source, actions: &Sent, outcome: &Outcome) -> bool {
    let reports =
        |action: &Action<ToTarget>| matches!(action, Action::Report { outcome: own, .. } if own == outcome);
    actions.contains(&Action::Do(Task::Restore))
        && actions.iter().any(reports)
        && !actions.contains(&Action::Do(Task::Finish))
        && source.state() == SourceState::Over
        && source.deadline().is_none()
}

#[test]
fn exporting() {
    let mut source = migrate(SourceState::Exporting);
    assert_eq!(source.on(NOW, Event::Done(Work::Exported(manifest()))).to_vec(), [prepare()]);
    assert_eq!(source.state(), SourceState::Preparing);

    let mut source = migrate(SourceState::Exporting);
    let reason = Text::new("unknown sequence");
    let actions = source.on(NOW, Event::Done(Work::ExportFailed(reason.clone())));
    let abort = ToTarget::Abort { reservation: None, reason: AbortReason::Local(reason.clone()) };
    assert_eq!(actions[0], Action::Send(abort));
    assert!(restores(&source, &actions, &Outcome::Failed(Cause::Own(AbortReason::Local(reason)))));
}

#[test]
fn preparing() {
    let mut source = migrate(SourceState::Preparing);
    let transfer = Task::Transfer { attempt: Attempt(0), places: places(&[(0, 4)]), grant: Grant::default() };
    assert_eq!(source.on(NOW, prepared(T, &[(0, 4)])).to_vec(), [Action::Do(transfer)]);
    assert_eq!(source.state(), SourceState::Sending(Attempt(0)));

    // All blocks are there already.
    let mut source = migrate(SourceState::Preparing);
    let sent = ToTarget::Sent { reservation: T, attempt: Attempt(0) };
    assert_eq!(source.on(NOW, prepared(T, &[])).to_vec(), [Action::Send(sent)]);
    assert_eq!(source.state(), SourceState::Checking(Attempt(0)));

    let mut source = migrate(SourceState::Preparing);
    let reason = Refusal::Full { needed: 9 };
    let actions = source.on(NOW, Event::Message(ToSource::Refused { reason: reason.clone(), free: 3 }));
    assert!(restores(&source, &actions, &Outcome::Refused { reason, free: 3 }));

    // Of a reservation that was never agreed on.
    let mut source = migrate(SourceState::Preparing);
    for event in [aborted(), COMMITTED, verified(0, &[]), status(Phase::Reserving)] {
        assert!(source.on(NOW, event).is_empty());
        assert_eq!(source.state(), SourceState::Preparing);
    }
    assert_eq!(
        source.on(NOW, Event::Message(ToSource::Fetch { what: FetchBytes::default() })).to_vec(),
        [prepare()]
    );
}

#[test]
fn sending() {
    let mut source = migrate(SourceState::Sending(Attempt(0)));
    // Results of an attempt that is over.
    assert!(source.on(NOW, transferred(1)).is_empty());
    let sent = ToTarget::Sent { reservation: T, attempt: Attempt(0) };
    assert_eq!(source.on(NOW, transferred(0)).to_vec(), [Action::Send(sent)]);
    assert_eq!(source.state(), SourceState::Checking(Attempt(0)));

    let mut source = migrate(SourceState::Sending(Attempt(0)));
    let reason = Text::new("cut");
    let actions = source.on(NOW, Event::Done(Work::TransferFailed(Attempt(0), reason.clone())));
    let abort = ToTarget::Abort { reservation: Some(T), reason: AbortReason::Transfer(reason.clone()) };
    assert_eq!(actions[0], Action::Send(abort));
    assert!(restores(&source, &actions, &Outcome::Failed(Cause::Own(AbortReason::Transfer(reason)))));

    // A second reservation is not needed; a second Prepared of this one changes nothing.
    let mut source = migrate(SourceState::Sending(Attempt(0)));
    let abort = ToTarget::Abort { reservation: Some(ReservationId(8)), reason: AbortReason::Unknown };
    assert_eq!(source.on(NOW, prepared(ReservationId(8), &[])).to_vec(), [Action::Send(abort)]);
    assert!(source.on(NOW, prepared(T, &[])).is_empty());
    assert!(source.on(NOW, verified(0, &[])).is_empty());
    assert!(source.on(NOW, COMMITTED).is_empty());
    assert_eq!(source.state(), SourceState::Sending(Attempt(0)));
    let actions = source.on(NOW, aborted());
    assert!(restores(&source, &actions, &Outcome::Failed(Cause::Peer(AbortReason::Lapsed))));
}

#[test]
fn checking() {
    let mut source = migrate(SourceState::Checking(Attempt(0)));
    assert!(source.on(NOW, verified(1, &[])).is_empty());
    let transfer = Task::Transfer { attempt: ONE, places: places(&[(1, 2)]), grant: Grant::default() };
    assert_eq!(source.on(NOW, verified(0, &[(1, 2)])).to_vec(), [Action::Do(transfer)]);
    // The same answer once more.
    assert!(source.on(NOW, verified(0, &[(1, 2)])).is_empty());
    source.on(NOW, transferred(1));
    assert_eq!(
        source.on(NOW, verified(1, &[])).to_vec(),
        [Action::Send(ToTarget::Commit { reservation: T, is_current: true })]
    );
    assert_eq!(source.state(), SourceState::Committing);
    let actions = source.on(NOW, COMMITTED);
    assert_eq!(actions[2], report(Outcome::Done, 2));

    let mut source = migrate(SourceState::Checking(Attempt(0)));
    let actions = source.on(NOW, verified(0, &[(3, 2)]));
    let what = Text::new("bad places that were not sent");
    assert!(restores(&source, &actions, &Outcome::Failed(Cause::Own(AbortReason::Violation(what)))));
}

#[test]
fn bad_places_are_sent_again_twice() {
    let mut source = migrate(SourceState::Checking(Attempt(0)));
    for attempt in 0..2 {
        let actions = source.on(NOW, verified(attempt, &[(0, 1)]));
        assert!(
            matches!(actions[0], Action::Do(Task::Transfer { attempt: Attempt(next), .. }) if next == attempt + 1)
        );
        source.on(NOW, transferred(attempt + 1));
    }
    let actions = source.on(NOW, verified(2, &[(0, 1)]));
    let abort = ToTarget::Abort { reservation: Some(T), reason: AbortReason::Checksums(1) };
    assert_eq!(actions[0], Action::Send(abort));
    assert!(restores(&source, &actions, &Outcome::Failed(Cause::Own(AbortReason::Checksums(1)))));
    assert_eq!(actions[2], report(Outcome::Failed(Cause::Own(AbortReason::Checksums(1))), 3));
}

#[test]
fn committing() {
    let mut source = migrate(SourceState::Committing);
    // Neither a cancellation nor a second verification changes what was decided.
    for event in [Event::Cancel, verified(1, &[(1, 1)]), status(Phase::Committing), prepared(T, &[])] {
        assert!(source.on(NOW, event).is_empty());
        assert_eq!(source.state(), SourceState::Committing);
    }
    assert!(source.on(NOW, Event::Message(ToSource::Committed { reservation: ReservationId(8) })).is_empty());
    let actions = source.on(NOW, COMMITTED);
    let forget = Action::Send(ToTarget::Forget { reservation: T });
    assert_eq!(actions.to_vec(), [Action::Do(Task::Finish), forget, report(Outcome::Done, 2)]);
    assert_eq!(source.state(), SourceState::Over);
    assert!(source.on(NOW, COMMITTED).is_empty() && source.on(NOW, aborted()).is_empty());

    let mut source = migrate(SourceState::Committing);
    let actions = source.on(NOW, aborted());
    assert!(restores(&source, &actions, &Outcome::Failed(Cause::Peer(AbortReason::Lapsed))));
}

#[test]
fn silence_behind_the_commit_is_a_doubt_for_a_migration_alone() {
    let late = NOW.plus(timing().transfer_deadline_ms);
    let mut source = migrate(SourceState::Committing);
    let outcome = Outcome::InDoubt { since: NOW, doubt: Doubt::Silent };
    let query = Action::Send(ToTarget::Query { reservation: T });
    assert_eq!(source.on(late, Event::Tick).to_vec(), [report(outcome.clone(), 2), query.clone()]);
    assert!(!outcome.is_final());
    // Held without a time limit, with a query at each renewal.
    for _ in 0..1_000 {
        let deadline = source.deadline().unwrap();
        assert_eq!(source.on(deadline, Event::Tick).as_slice(), std::slice::from_ref(&query));
    }
    let late = source.deadline().unwrap();
    assert!(source.on(late, Event::Cancel).is_empty());
    assert!(source.on(late, status(Phase::Committing)).is_empty());
    assert_eq!(
        source.on(late, status(Phase::Ready)).to_vec(),
        [Action::Send(ToTarget::Commit { reservation: T, is_current: true })]
    );
    assert!(source.on(late, COMMITTED).contains(&Action::Do(Task::Finish)));

    for kind in [Kind::Replicate, Kind::Cached, Kind::Fetch] {
        for event in [Event::LinkLost, Event::Tick] {
            let mut source = self::source(kind, SourceState::Committing);
            let actions = source.on(NOW.plus(timing().transfer_deadline_ms), event);
            assert!(restores(&source, &actions, &Outcome::Unconfirmed));
        }
    }
}

#[test]
fn a_doubt_ends_by_an_answer_or_with_the_peers_process() {
    let mut source = migrate(SourceState::InDoubt);
    let actions = source.on(NOW, aborted());
    assert!(restores(&source, &actions, &Outcome::Failed(Cause::Peer(AbortReason::Lapsed))));
    let mut source = migrate(SourceState::InDoubt);
    let actions = source.on(NOW, Event::PeerEnded);
    assert!(restores(&source, &actions, &Outcome::Failed(Cause::PeerEnded)));
    let mut source = migrate(SourceState::InDoubt);
    let query = Action::Send(ToTarget::Query { reservation: T });
    assert_eq!(source.on(NOW, Event::LinkUp).to_vec(), [query]);
    assert!(source.on(NOW, Event::LinkLost).is_empty());
}

#[test]
fn an_undecided_source_ends_alone() {
    for state in UNDECIDED {
        let mut source = match state {
            SourceState::Checking(_) => migrate(SourceState::Checking(Attempt(0))),
            state => migrate(state),
        };
        let actions = source.on(NOW, Event::Cancel);
        assert!(
            restores(&source, &actions, &Outcome::Failed(Cause::Own(AbortReason::Cancelled))),
            "{state:?}"
        );
        let mut source = migrate(state);
        let actions = source.on(NOW, Event::PeerEnded);
        assert!(restores(&source, &actions, &Outcome::Failed(Cause::PeerEnded)), "{state:?}");
        let mut source = migrate(state);
        assert!(source.on(NOW, Event::LinkLost).is_empty());
        let limit_ms = timing().limit_ms;
        let actions = source.on(NOW.plus(limit_ms), Event::Tick);
        assert!(restores(&source, &actions, &Outcome::Failed(Cause::Limit { limit_ms })), "{state:?}");
    }
}

#[test]
fn a_lost_link_ends_what_is_of_the_cache() {
    for state in UNDECIDED {
        for kind in [Kind::Cached, Kind::Fetch] {
            let mut source = source(kind, state);
            let actions = source.on(NOW, Event::LinkLost);
            assert!(restores(&source, &actions, &Outcome::Failed(Cause::LinkLost)), "{kind:?}, {state:?}");
        }
        let mut source = source(Kind::Replicate, state);
        assert!(source.on(NOW, Event::LinkLost).is_empty() && source.state() == state);
    }
}

#[test]
fn silence_of_a_reservation_ends_an_undecided_source_but_not_its_export() {
    let waited_ms = timing().transfer_deadline_ms;
    for state in UNDECIDED {
        let mut source = migrate(state);
        let actions = source.on(NOW.plus(waited_ms), Event::Tick);
        if state == SourceState::Exporting {
            assert!(actions.is_empty() && source.state() == state);
        } else {
            assert!(restores(&source, &actions, &Outcome::Failed(Cause::Silent { waited_ms })), "{state:?}");
        }
    }
    // Each message of the reservation proves that the target lives.
    let mut source = migrate(SourceState::Sending(Attempt(0)));
    source.on(NOW.plus(waited_ms - 1), status(Phase::Receiving));
    source.on(NOW.plus(waited_ms), Event::Tick);
    assert_eq!(source.state(), SourceState::Sending(Attempt(0)));
}

#[test]
fn messages_are_repeated_at_growing_intervals() {
    let expected = [
        (SourceState::Preparing, prepare()),
        (
            SourceState::Checking(Attempt(0)),
            Action::Send(ToTarget::Sent { reservation: T, attempt: Attempt(0) }),
        ),
        (SourceState::Committing, Action::Send(ToTarget::Commit { reservation: T, is_current: true })),
    ];
    for (state, message) in expected {
        let mut source = migrate(state);
        let (mut now, mut times) = (NOW, Vec::new());
        while now < NOW.plus(20_000) {
            now = source.deadline().unwrap();
            assert_eq!(source.on(now, Event::Tick).as_slice(), std::slice::from_ref(&message), "{state:?}");
            times.push(now.since(NOW));
        }
        assert_eq!(times, [1_000, 3_000, 7_000, 12_000, 17_000, 22_000], "{state:?}");
    }
    let mut source = migrate(SourceState::Sending(Attempt(0)));
    assert_eq!(source.deadline(), Some(NOW.plus(5_000)));
    let heartbeat = Action::Send(ToTarget::Heartbeat { reservation: T });
    assert_eq!(source.on(NOW.plus(5_000), Event::Tick).to_vec(), [heartbeat]);
}

#[test]
fn a_target_that_waits_for_other_parts_is_not_silent() {
    let mut source = self::source(Kind::Migrate, SourceState::Committing);
    let mut now = NOW;
    for _ in 0..5 {
        now = now.plus(timing().transfer_deadline_ms - 1);
        source.on(now, status(Phase::Agreed));
        source.on(now, Event::Tick);
        assert_eq!(source.state(), SourceState::Committing);
    }
    source.on(now.plus(timing().transfer_deadline_ms), Event::Tick);
    assert_eq!(source.state(), SourceState::InDoubt);
}

#[test]
fn a_commit_says_that_the_cache_was_cleared() {
    let mut source = self::source(Kind::Migrate, SourceState::Committing);
    let commit = |is_current| Action::Send(ToTarget::Commit { reservation: T, is_current });
    assert_eq!(source.on(NOW, Event::LinkUp).to_vec(), [commit(true)]);
    assert!(source.on(NOW, Event::Cleared).is_empty());
    assert_eq!(source.on(NOW, Event::LinkUp).to_vec(), [commit(false)]);
}
