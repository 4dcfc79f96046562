use super::*;
use crate::protocol::message::{FetchBytes, ManifestBytes, Phase};
use crate::protocol::outcome::{Cause, Outcome};
use crate::protocol::places::Places;

const NOW: Millis = Millis(5);
const LINK: LinkId = LinkId(3);
const ID: MigrationId = MigrationId(0xabc);
const OWN: Incarnation = Incarnation(1);
const PEER: Incarnation = Incarnation(2);

fn node(limits: Limits) -> Migrations {
    let mut node = Migrations::new(OWN, Timing::default(), limits);
    assert!(node.link_up(NOW, LINK, PEER).is_empty());
    node
}

fn request(id: u128, sequence: u64) -> Request {
    Request { id: MigrationId(id), link: LINK, command: Command::Migrate { sequence }, part: None }
}

fn receive(node: &mut Migrations, id: MigrationId, message: impl Into<Message>) -> Actions {
    node.received(NOW, LINK, Envelope { id, from: PEER, to: OWN, message: message.into() })
}

fn prepare() -> ToTarget {
    ToTarget::Prepare { kind: Kind::Migrate, part: None, manifest: ManifestBytes::default() }
}

fn sent(action: &Action) -> &Message {
    match action {
        Action::Send { envelope, .. } => &envelope.message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_request_is_refused_without_a_link_or_twice() {
    let mut node = node(Limits { local_max: 2, ..Limits::default() });
    let foreign = Request { link: LinkId(9), ..request(1, 7) };
    assert_eq!(node.request(NOW, foreign), Err(RequestError::NoLink(LinkId(9))));
    let (machine, actions) = node.request(NOW, request(1, 7)).unwrap();
    assert_eq!(actions.to_vec(), [Action::Do { machine, task: Task::Export { what: None } }]);
    assert_eq!(node.request(NOW, request(1, 8)), Err(RequestError::SameId(MigrationId(1))));
    assert_eq!(node.request(NOW, request(2, 7)), Err(RequestError::SameSequence(MigrationId(1))));
    node.request(NOW, request(2, 8)).unwrap();
    assert_eq!(node.request(NOW, request(3, 9)), Err(RequestError::Many { max: 2 }));
    assert_eq!(node.status().count(), 2);
}

#[test]
fn messages_of_or_for_another_process_are_dropped() {
    let mut node = node(Limits::default());
    for (from, to) in [(Incarnation(9), OWN), (PEER, Incarnation(9))] {
        let envelope = Envelope { id: ID, from, to, message: prepare().into() };
        assert!(node.received(NOW, LINK, envelope.clone()).is_empty());
        assert!(node.received(NOW, LinkId(4), envelope).is_empty());
    }
    assert_eq!((node.stale_messages(), node.status().count()), (4, 0));
    let actions = receive(&mut node, ID, prepare());
    assert!(matches!(actions[0], Action::Do { task: Task::Reserve { .. }, .. }));
}

#[test]
fn what_is_not_here_is_answered_so_that_the_peer_can_end() {
    let mut node = node(Limits::default());
    let reservation = ReservationId(4);
    let aborted: Message = ToSource::Aborted { reservation, reason: AbortReason::Unknown }.into();
    for message in [
        ToTarget::Commit { reservation, is_current: true },
        ToTarget::Query { reservation },
        ToTarget::Heartbeat { reservation },
    ] {
        assert_eq!(*sent(&receive(&mut node, ID, message)[0]), aborted);
    }
    let abort: Message =
        ToTarget::Abort { reservation: Some(reservation), reason: AbortReason::Unknown }.into();
    assert_eq!(
        *sent(&receive(&mut node, ID, ToSource::Status { reservation, phase: Phase::Ready })[0]),
        abort
    );
    let forget: Message = ToTarget::Forget { reservation }.into();
    assert_eq!(*sent(&receive(&mut node, ID, ToSource::Committed { reservation })[0]), forget);
    // These end the exchange.
    let reason = AbortReason::Unknown;
    assert!(receive(&mut node, ID, ToTarget::Forget { reservation }).is_empty());
    assert!(receive(&mut node, ID, ToTarget::Abort { reservation: None, reason: reason.clone() }).is_empty());
    assert!(receive(&mut node, ID, ToSource::Aborted { reservation, reason }).is_empty());
    // Blocks that were not asked for.
    let fetched = ToTarget::Prepare { kind: Kind::Fetch, part: None, manifest: ManifestBytes::default() };
    let refused: Message = ToSource::Refused { reason: Refusal::NotAsked, free: 0 }.into();
    assert_eq!(*sent(&receive(&mut node, ID, fetched)[0]), refused);
    assert_eq!(node.status().count(), 0);
}

#[test]
fn a_peer_has_a_bounded_number_of_migrations() {
    let mut node = node(Limits { per_peer_max: 2, ..Limits::default() });
    for id in 0..2 {
        receive(&mut node, MigrationId(id), prepare());
    }
    let busy: Message = ToSource::Refused { reason: Refusal::Busy { max: 2 }, free: 0 }.into();
    assert_eq!(*sent(&receive(&mut node, ID, prepare())[0]), busy);
    let abort: Message = ToTarget::Abort { reservation: None, reason: AbortReason::Busy { max: 2 } }.into();
    let fetch = ToSource::Fetch { what: FetchBytes::default() };
    assert_eq!(*sent(&receive(&mut node, ID, fetch)[0]), abort);
    // A repeated one does not count again; another peer has its own limit.
    assert_eq!(receive(&mut node, MigrationId(0), prepare()).len(), 1);
    node.link_up(NOW, LinkId(4), Incarnation(8));
    let envelope = Envelope { id: ID, from: Incarnation(8), to: OWN, message: prepare().into() };
    assert!(matches!(node.received(NOW, LinkId(4), envelope)[0], Action::Do { .. }));
    assert_eq!(node.status().count(), 3);
}

#[test]
fn committed_copies_that_are_not_forgotten_are_bounded_too() {
    let mut node = node(Limits { per_peer_max: 2, committed_max: 1, ..Limits::default() });
    receive(&mut node, ID, prepare());
    let one = node.status().next().unwrap();
    let reservation = ReservationId(one.machine.0);
    node.done(
        NOW,
        one.machine,
        Work::Reserved { accepted: Places::default(), missing: Places::default(), grant: Default::default() },
    );
    receive(&mut node, ID, ToTarget::Sent { reservation, attempt: Default::default() });
    let (attempt, bad, grant) = Default::default();
    node.done(NOW, one.machine, Work::Verified { attempt, bad, grant });
    receive(&mut node, ID, ToTarget::Commit { reservation, is_current: true });
    node.done(NOW, one.machine, Work::Committed { sequence: Some(7) });
    // It cannot move on before its source has received the commit.
    assert_eq!(node.request(NOW, request(9, 7)), Err(RequestError::Unconfirmed(ID)));
    assert!(
        node.request(NOW, Request { command: Command::Replicate { sequence: 7 }, ..request(8, 7) }).is_ok()
    );
    let busy: Message = ToSource::Refused { reason: Refusal::Busy { max: 1 }, free: 0 }.into();
    assert_eq!(*sent(&receive(&mut node, MigrationId(9), prepare())[0]), busy);
    receive(&mut node, ID, ToTarget::Forget { reservation });
    assert!(matches!(receive(&mut node, MigrationId(9), prepare())[0], Action::Do { .. }));
    assert_eq!(node.request(NOW, request(9, 7)), Err(RequestError::SameId(MigrationId(9))));
    assert_eq!(node.request(NOW, request(10, 7)), Err(RequestError::SameSequence(MigrationId(8))));
}

#[test]
fn another_process_of_the_peer_ends_its_migrations_and_no_others() {
    let mut node = node(Limits::default());
    node.link_up(NOW, LinkId(4), Incarnation(8));
    let (machine, _) = node.request(NOW, request(1, 7)).unwrap();
    let (other, _) = node.request(NOW, Request { link: LinkId(4), ..request(2, 8) }).unwrap();
    assert!(node.link_up(NOW, LINK, PEER).is_empty());
    let actions = node.link_up(NOW, LINK, Incarnation(5));
    assert_eq!(actions[0], Action::Do { machine, task: Task::Restore });
    assert!(
        matches!(&actions[1], Action::Report { report, .. } if report.outcome == Outcome::Failed(Cause::PeerEnded))
    );
    assert_eq!(node.status().map(|one| one.machine).collect::<Vec<_>>(), [other]);
    // Its results are dropped.
    assert_eq!(node.done(NOW, machine, Work::Exported(ManifestBytes::default())), None);
    // The operator's declaration does the same, and no request begins before the next handshake.
    assert_eq!(node.peer_ended(NOW, LinkId(4)).len(), 2);
    assert_eq!(
        node.request(NOW, Request { link: LinkId(4), ..request(3, 8) }),
        Err(RequestError::NoLink(LinkId(4)))
    );
}

#[test]
fn a_cancellation_has_an_outcome_or_an_error() {
    let mut node = node(Limits::default());
    let (machine, _) = node.request(NOW, request(1, 7)).unwrap();
    let actions = node.cancel(NOW, machine).unwrap();
    // The abort, for a peer that may know of it; the copy; the outcome.
    assert_eq!(actions.len(), 3);
    assert_eq!(node.cancel(NOW, machine), Err(CancelError::Unknown));
    assert_eq!(node.deadline(), None);
}

/// Parts of one copy, over a link each.
mod parts {
    use super::*;
    use crate::protocol::message::{Attempt, Grant, Part, PartFault};

    fn links(count: u32) -> Migrations {
        let mut node = Migrations::new(OWN, Timing::default(), Limits::default());
        (0..count).for_each(|link| drop(node.link_up(NOW, LinkId(link), PEER)));
        node
    }

    fn tell(node: &mut Migrations, now: Millis, link: u32, message: ToTarget) -> Actions {
        node.received(now, LinkId(link), Envelope { id: ID, from: PEER, to: OWN, message: message.into() })
    }

    fn part(index: u16, of: u16) -> ToTarget {
        let part = Some(Part { index, of });
        ToTarget::Prepare { kind: Kind::Migrate, part, manifest: ManifestBytes::default() }
    }

    /// Advances a part to its commit. Returns its machine.
    fn ready(node: &mut Migrations, link: u32, index: u16, of: u16) -> MachineId {
        let Action::Do { machine, .. } = tell(node, NOW, link, part(index, of))[0].clone() else { panic!() };
        let (accepted, missing) = (Places::default(), Places::default());
        node.done(NOW, machine, Work::Reserved { accepted, missing, grant: Grant::default() }).unwrap();
        tell(node, NOW, link, ToTarget::Sent { reservation: ReservationId(machine.0), attempt: Attempt(0) });
        let (bad, grant) = (Places::default(), Grant::default());
        node.done(NOW, machine, Work::Verified { attempt: Attempt(0), bad, grant }).unwrap();
        machine
    }

    fn commit(node: &mut Migrations, now: Millis, link: u32, machine: MachineId) -> Actions {
        tell(node, now, link, ToTarget::Commit { reservation: ReservationId(machine.0), is_current: true })
    }

    #[test]
    fn the_last_commit_opens_the_barrier_and_all_sources_hear_of_it() {
        let mut node = links(3);
        let machines: Vec<_> = (0..3).map(|index| ready(&mut node, index, index as u16, 3)).collect();
        for index in [2, 0] {
            let actions = commit(&mut node, NOW, index, machines[index as usize]);
            assert!(matches!(
                sent(&actions[0]),
                Message::ToSource(ToSource::Status { phase: Phase::Agreed, .. })
            ));
            assert_eq!(actions.len(), 1);
        }
        let actions = commit(&mut node, NOW, 1, machines[1]);
        let commits: Vec<_> = actions.iter().filter(|action| matches!(action, Action::Do { .. })).collect();
        let task = Task::Commit { is_current: true };
        assert_eq!(commits, [&Action::Do { machine: machines[0], task }]);
        let actions = node.done(NOW, machines[0], Work::Committed { sequence: Some(7) }).unwrap();
        for (index, &machine) in machines.iter().enumerate() {
            let reservation = ReservationId(machine.0);
            let told = actions.iter().any(|action| {
                matches!(action, Action::Send { link, envelope }
                if link.0 == index as u32 && envelope.message == ToSource::Committed { reservation }.into())
            });
            assert!(told, "source {index}");
        }
        // Until all of them have answered, it cannot move on.
        for (index, &machine) in machines.iter().enumerate() {
            let onwards = Request { link: LinkId(0), ..request(9 + index as u128, 7) };
            assert_eq!(node.request(NOW, onwards), Err(RequestError::Unconfirmed(ID)));
            tell(&mut node, NOW, index as u32, ToTarget::Forget { reservation: ReservationId(machine.0) });
        }
        assert!(node.request(NOW, Request { link: LinkId(0), ..request(20, 7) }).is_ok());
    }

    #[test]
    fn the_end_of_a_part_ends_those_that_have_agreed() {
        let mut node = links(3);
        let machines: Vec<_> = (0..3).map(|index| ready(&mut node, index, index as u16, 3)).collect();
        commit(&mut node, NOW, 0, machines[0]);
        commit(&mut node, NOW, 1, machines[1]);
        let actions = node.link_up(NOW, LinkId(2), Incarnation(77));
        let releases =
            actions.iter().filter(|action| matches!(action, Action::Do { task: Task::Release, .. }));
        assert_eq!((releases.count(), node.status().count()), (3, 0));
        // A late commit finds nothing.
        let actions = commit(&mut node, NOW, 0, machines[0]);
        assert!(matches!(sent(&actions[0]), Message::ToSource(ToSource::Aborted { .. })));
    }

    #[test]
    fn a_reservation_that_ended_unseen_opens_no_barrier() {
        let mut node = links(2);
        let machines: Vec<_> = (0..2).map(|index| ready(&mut node, index, index as u16, 2)).collect();
        commit(&mut node, NOW, 0, machines[0]);
        let later = NOW.plus(Timing::default().transfer_deadline_ms - 1);
        tell(&mut node, later, 1, ToTarget::Heartbeat { reservation: ReservationId(machines[1].0) });
        let actions = commit(&mut node, later.plus(1), 1, machines[1]);
        assert!(actions.iter().all(|action| !matches!(action, Action::Do { task: Task::Commit { .. }, .. })));
        assert_eq!(node.status().count(), 0);
    }

    #[test]
    fn an_absent_part_ends_the_others_after_a_reservation() {
        let mut node = links(2);
        let machine = ready(&mut node, 0, 0, 2);
        commit(&mut node, NOW, 0, machine);
        let (half, reservation) =
            (Timing::default().transfer_deadline_ms / 2, Timing::default().transfer_deadline_ms);
        commit(&mut node, NOW.plus(half), 0, machine);
        assert_eq!(node.deadline(), Some(NOW.plus(reservation)));
        assert!(node.tick(NOW.plus(reservation - 1)).is_empty());
        assert!(!node.tick(NOW.plus(reservation)).is_empty());
        assert_eq!(node.status().count(), 0);
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let mut node = links(3);
        tell(&mut node, NOW, 0, part(0, 2));
        let mut refused = |message| {
            let actions = tell(&mut node, NOW, 1, message);
            match sent(&actions[0]) {
                Message::ToSource(ToSource::Refused { reason: Refusal::Part { fault, .. }, .. }) => {
                    fault.clone()
                }
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(refused(part(2, 2)), PartFault::Number);
        assert_eq!(refused(part(0, 1000)), PartFault::Number);
        assert_eq!(refused(part(0, 2)), PartFault::Repeated);
        assert_eq!(refused(part(1, 3)), PartFault::Disagrees);
        let (kind, manifest) = (Kind::Cached, ManifestBytes::default());
        let cached = ToTarget::Prepare { kind, part: Some(Part { index: 1, of: 2 }), manifest };
        assert_eq!(refused(cached), PartFault::Cached);
        assert_eq!(node.status().count(), 1);
        let command = Command::Offload { what: FetchBytes::default() };
        let part = Part { index: 0, of: 1 };
        let request = Request { part: Some(part), link: LinkId(2), command, id: MigrationId(8) };
        let fault = PartFault::Cached;
        assert_eq!(node.request(NOW, request), Err(RequestError::Part { part, fault }));
    }

    #[test]
    fn a_source_copies_its_sequence_to_several_targets() {
        let mut node = links(3);
        let copy = |id, link, command| {
            let part = Some(Part { index: 0, of: 1 });
            Request { id: MigrationId(id), link: LinkId(link), command, part }
        };
        node.request(NOW, copy(1, 0, Command::Replicate { sequence: 7 })).unwrap();
        node.request(NOW, copy(2, 1, Command::Replicate { sequence: 7 })).unwrap();
        let moved = copy(3, 2, Command::Migrate { sequence: 7 });
        assert_eq!(node.request(NOW, moved), Err(RequestError::SameSequence(MigrationId(1))));
    }
}
