use super::*;

#[test]
fn the_oldest_follows_ends_out_of_order() {
    let clock = Clock::default();
    assert_eq!(clock.idle_or_tag(), None);
    let (a, b, c) = (clock.begin(), clock.begin(), clock.begin());
    assert_eq!((a.ticket(), b.ticket(), c.ticket()), (Ticket(1), Ticket(2), Ticket(3)));
    assert_eq!(clock.idle_or_tag(), Some(Ticket(3)));
    assert!(!clock.end(b));
    assert_eq!(clock.oldest(), Ticket(1));
    assert!(!clock.end(a));
    assert_eq!(clock.oldest(), Ticket(3));
    assert!(clock.ended(Ticket(2)) && !clock.ended(Ticket(3)));
    assert!(!clock.end(c));
    assert_eq!(clock.oldest(), Ticket(4));
    assert_eq!(clock.idle_or_tag(), None);
}

#[test]
fn the_end_of_a_batch_reports_waiting_requests() {
    let clock = Clock::default();
    let (a, b) = (clock.begin(), clock.begin());
    clock.set_awaited();
    assert!(clock.end(a));
    assert_eq!((clock.in_flight(), clock.newest()), (1, Ticket(2)));
    clock.clear_awaited();
    assert!(!clock.end(b));
    assert!(clock.read().is_quiet());
}

/// Ending another clock's batch would allow the reuse of frames that a batch still reads.
#[test]
fn a_batch_of_another_clock_is_refused() {
    let (clock, other) = (Clock::default(), Clock::default());
    let batch = clock.begin();
    let foreign = other.begin();
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| clock.end(foreign)));
    assert!(refused.is_err());
    assert_eq!((clock.in_flight(), clock.oldest()), (1, batch.ticket()));
    assert!(!clock.end(batch));
}

#[test]
fn one_batch_too_many_changes_nothing() {
    let clock = Clock::default();
    clock.word.store(ClockWord::IN_FLIGHT_MAX, Relaxed);
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| clock.begin()));
    assert!(refused.is_err());
    assert_eq!(clock.in_flight(), ClockWord::IN_FLIGHT_MAX);
    assert_eq!(clock.oldest(), Ticket(2), "its slot is empty again");
}

#[test]
fn batches_of_all_places_are_seen() {
    let clock = Clock::default();
    let batches: Vec<_> = (0..3 * SLOTS).map(|first| clock.begin_from(first * 7)).collect();
    let mut slots: Vec<usize> = batches.iter().map(|batch| batch.batch.slot()).collect();
    slots.sort_unstable();
    assert!(slots.iter().copied().eq(0..3 * SLOTS), "{slots:?}");
    for (ended, batch) in (1..).zip(batches) {
        assert_eq!(clock.oldest(), Ticket(ended));
        assert!(!clock.end(batch));
    }
    assert_eq!(clock.oldest_in_flight(), None);
}

/// A batch is distinguished from those in flight around it, and from a later one in its slot.
#[test]
fn a_batch_ends_by_itself() {
    let clock = Clock::default();
    let (a, b) = (clock.begin(), clock.begin());
    let (older, newer) = (a.batch(), b.batch());
    assert!(clock.is_in_flight(older) && clock.is_in_flight(newer));
    assert!(!clock.end(b));
    assert!(clock.is_in_flight(older) && !clock.is_in_flight(newer));
    let again = clock.begin_from(newer.slot());
    assert_eq!(again.batch().slot(), newer.slot());
    assert!(!clock.is_in_flight(newer) && clock.is_in_flight(again.batch()));
    assert!(!clock.end(a) && !clock.end(again));
    assert!(!clock.is_in_flight(BatchRef::default()));
}

/// Only an ended batch is replaced, and the batch added last does not count itself.
#[test]
fn the_batch_added_last_may_be_the_only_one_in_flight() {
    let clock = Clock::default();
    let (mut set, mut gone) = (BatchSet::default(), BatchRef::default());
    let (a, b) = (clock.begin(), clock.begin());
    clock.note(&mut set, a.batch(), &mut gone);
    assert!(clock.others_ended(&set));
    clock.note(&mut set, b.batch(), &mut gone);
    assert!(!clock.others_ended(&set), "the first is in flight");
    assert_eq!(gone, BatchRef::default());
    let _ = clock.end(a);
    assert!(clock.others_ended(&set));
    set.add_up_to(Ticket(1));
    assert!(clock.others_ended(&set));
    set.add_up_to(b.ticket());
    assert!(!clock.others_ended(&set), "one up to that ticket is in flight");
    let c = clock.begin();
    let b_was = b.batch();
    let _ = clock.end(b);
    clock.note(&mut set, c.batch(), &mut gone);
    assert_eq!(gone, b_was);
    assert_eq!(clock.state(&set), SetState::InFlight(c.batch()));
    let _ = clock.end(c);
}

/// A batch that is added again is in the set once.
#[test]
fn a_batch_that_writes_again_takes_one_place() {
    let clock = Clock::default();
    let (mut set, mut gone) = (BatchSet::default(), BatchRef::default());
    let (a, b) = (clock.begin(), clock.begin());
    clock.note(&mut set, a.batch(), &mut gone);
    clock.note(&mut set, b.batch(), &mut gone);
    let _ = clock.end(b);
    clock.note(&mut set, a.batch(), &mut gone);
    assert!(clock.others_ended(&set), "only the one added last is in flight");
    let (c, d) = (clock.begin(), clock.begin());
    clock.note(&mut set, c.batch(), &mut gone);
    clock.note(&mut set, d.batch(), &mut gone);
    assert_eq!(set.up_to(), Ticket(0), "three are in flight, and told apart");
    [a, c, d].into_iter().for_each(|batch| assert!(!clock.end(batch)));
    assert_eq!(clock.state(&set), SetState::Ended);
}

/// The provisional value in a slot is no batch of that ticket, and is waited for.
#[test]
fn a_batch_that_begins_is_neither_in_flight_nor_ended() {
    let clock = Clock::default();
    let mut all = BatchSet::default();
    all.add_up_to(Ticket(1));
    let slot = clock.slots.take(0, clock.read());
    assert_eq!(clock.oldest(), Ticket(1));
    let beginning = BatchRef::new(Ticket(1), slot);
    assert!(!clock.is_in_flight(beginning));
    assert_eq!(clock.state(&all), SetState::Beginning(beginning));
    clock.slots.leave(slot);
    assert_eq!(clock.state(&all), SetState::Ended);
}

#[test]
fn more_batches_than_a_chunk() {
    let clock = Clock::default();
    let mut batches: Vec<_> = (0..3 * SLOTS + 1).map(|_| clock.begin()).collect();
    assert_eq!(clock.in_flight(), batches.len() as u64);
    while let Some(batch) = batches.pop() {
        assert_eq!(clock.oldest(), Ticket(1));
        assert!(!clock.end(batch));
    }
    assert_eq!(clock.oldest(), Ticket(3 * SLOTS as u64 + 2));
}

/// The slots of a burst are closed after it, and reopened by the next one.
#[test]
fn a_burst_leaves_no_slots_to_look_at() {
    let clock = Clock::default();
    for _ in 0..3 {
        let batches: Vec<_> = (0..40 * SLOTS).map(|_| clock.begin()).collect();
        assert!(clock.slots.mark().slots() >= 40 * SLOTS);
        let mut last = None;
        for batch in batches {
            if let Some(before) = last.replace(batch) {
                let _ = clock.end(before);
            }
        }
        let last = last.unwrap();
        assert_eq!((clock.oldest(), clock.in_flight()), (last.ticket(), 1));
        let other = clock.begin();
        let _ = clock.end(last);
        assert_eq!(clock.oldest(), other.ticket());
        assert_eq!(clock.slots.mark().slots(), SLOTS);
        let _ = clock.end(other);
    }
}

/// Compares with a naive set of tickets, with bursts, and ends in any order.
#[test]
fn the_oldest_is_that_of_a_set() {
    for seed in 0..if cfg!(miri) { 2 } else { 50 } {
        let (clock, mut rng) = (Clock::default(), fastrand::Rng::with_seed(seed));
        let mut batches = Vec::new();
        for _ in 0..if cfg!(miri) { 20 } else { 400 } {
            let burst = if rng.u8(..) < 8 { rng.usize(..10 * SLOTS) } else { rng.usize(..3) };
            for _ in 0..burst {
                batches.push(clock.begin_from(rng.usize(..)));
            }
            let most = if rng.u8(..) < 16 { batches.len() } else { batches.len().min(3) };
            for _ in 0..rng.usize(..=most) {
                let at = rng.usize(..batches.len());
                assert!(!clock.end(batches.swap_remove(at)));
            }
            let oldest = batches.iter().map(InFlight::ticket).min();
            let oldest = oldest.unwrap_or(Ticket(clock.newest().0 + 1));
            assert_eq!((clock.oldest(), clock.scan_oldest()), (oldest, oldest), "seed {seed}");
            assert_eq!(clock.in_flight(), batches.len() as u64);
            let known = batches.iter().all(|batch| clock.is_in_flight(batch.batch()));
            assert!(known, "seed {seed}");
        }
    }
}

/// Threads begin, scan and end, with bursts: none finds a batch of its own older than the oldest.
#[test]
#[cfg_attr(miri, ignore = "too slow")]
fn no_thread_is_overtaken() {
    let clock = Clock::default();
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let clock = &clock;
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed);
                let mut own = std::collections::VecDeque::new();
                for _ in 0..20_000 {
                    let burst = if rng.u16(..) < 100 { 5 * SLOTS } else { 1 };
                    own.extend((0..burst).map(|_| clock.begin()));
                    let oldest = clock.oldest();
                    let first: &InFlight = &own[0];
                    assert!(oldest <= first.ticket(), "{first:?} is in flight, the oldest is {oldest:?}");
                    let keep = rng.usize(..4);
                    while own.len() > keep {
                        let _ = own.pop_front().map(|batch| clock.end(batch));
                    }
                }
                own.into_iter().for_each(|batch| assert!(!clock.end(batch)));
            });
        }
    });
    assert_eq!((clock.in_flight(), clock.oldest()), (0, Ticket(clock.newest().0 + 1)));
}

/// Batches that end in any order leave slots below the mark, which are taken before it rises.
#[test]
fn the_mark_stays_near_the_number_in_flight() {
    let (clock, mut rng) = (Clock::default(), fastrand::Rng::with_seed(7));
    let oldest = clock.begin();
    let count = if cfg!(miri) { 2 * SLOTS } else { 16 * SLOTS };
    let mut batches: Vec<_> = (0..count).map(|_| clock.begin()).collect();
    for _ in 0..if cfg!(miri) { 50 } else { 50_000 } {
        let at = rng.usize(..count);
        let _ = clock.end(std::mem::replace(&mut batches[at], clock.begin()));
        assert_eq!(clock.oldest(), oldest.ticket());
    }
    let mark = clock.slots.mark().slots();
    assert!(mark <= 2 * (count + 2 + SLOTS), "{mark} slots for {count} batches");
    batches.into_iter().chain([oldest]).for_each(|batch| assert!(!clock.end(batch)));
}

/// The case in which each search begins after the slot that was just vacated.
#[test]
fn the_mark_does_not_climb() {
    let clock = Clock::default();
    let oldest = clock.begin();
    let mut long: Vec<_> = (1..SLOTS + 32).map(|_| clock.begin()).collect();
    for _ in 0..if cfg!(miri) { 100 } else { 10_000 } {
        let _ = clock.end(long.swap_remove(SLOTS - 1));
        long.push(clock.begin());
        let last = long.len() - 1;
        long.swap(SLOTS - 1, last);
        let _ = clock.end(clock.begin());
        assert_eq!(clock.oldest(), oldest.ticket());
    }
    assert!(clock.slots.mark().slots() <= 6 * SLOTS, "{:?}", clock.slots.mark());
    long.into_iter().chain([oldest]).for_each(|batch| assert!(!clock.end(batch)));
}
