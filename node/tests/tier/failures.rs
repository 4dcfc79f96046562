//! Stores that fail: deadlines, the breaker, the queue, keys that failed.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;

use kvpool_node::tier::{
    BreakerState, InProcess, Outcome, SharedTier, StoreError, TierError, TierFailure, TierSettings,
    ValueError,
};

use super::faulty::Fault;
use super::support::{SLACK, WAIT, all, get, hasty, in_process, keys, put, reads, soon, until, values};

const SHORT: Duration = Duration::from_millis(50);

fn is_unreachable(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Failed(TierFailure::Store(StoreError::Unreachable { .. })))
}

/// A store that hangs: calls return at their deadline, and all memory with them. What the store
/// answers later is dropped.
#[tokio::test]
async fn a_hang() {
    let mut settings = TierSettings::default();
    settings.calls = 1;
    let (store, tier) = in_process(settings);
    let some = keys(0..40);
    put(&tier, &some).await;
    store.set_fault(Fault::Hang);
    let (first, memory) = reads(&some);
    let deadline = Instant::now() + SHORT;
    let outcomes = tier.get(first, deadline).await;
    assert!(Instant::now() >= deadline && Instant::now() < deadline + SLACK);
    // One call of the session is under way.
    let late = Outcome::Failed(TierFailure::Late);
    assert_eq!(outcomes[..16], all(Outcome::InFlight, &some[..16]));
    assert_eq!(outcomes[16..], all(late.clone(), &some[16..]));
    let counters = tier.counters();
    assert_eq!((counters.in_flight, counters.overdue, counters.failed), (16, 16, 24));
    let held = || memory.iter().filter(|memory| Arc::strong_count(memory) > 1).count();
    assert_eq!(held(), 0);
    // A later call waits for its turn, and is taken back too.
    let (second, memory_of_second) = reads(&some[..2]);
    assert_eq!(tier.get(second, Instant::now() + SHORT).await, all(late, &some[..2]));
    assert!(memory_of_second.iter().all(|own| Arc::strong_count(own) == 1), "while the call is stuck");
    store.set_fault(Fault::None);
    until("the store has answered", || tier.counters().in_flight == 0).await;
    assert!(memory.iter().chain(&memory_of_second).all(|own| own.lock().unwrap().is_empty()));
    assert_eq!(tier.counters().hits, 0);
    assert_eq!(get(&tier, &some).await, all(Outcome::Hit, &some));
}

/// A caller whose future is kept and not polled holds up no other.
#[tokio::test]
async fn a_caller_that_is_not_polled() {
    let mut settings = TierSettings::default();
    settings.calls = 1;
    let (store, tier) = in_process(settings);
    let some = keys(0..2);
    put(&tier, &some).await;
    store.set_fault(Fault::Hang);
    let (first, second) = (reads(&some), reads(&some));
    let mut first = pin!(tier.get(first.0, Instant::now() + WAIT));
    assert!(first.as_mut().now_or_never().is_none());
    until("the store is asked", || tier.counters().in_flight == 2).await;
    let mut second = pin!(tier.get(second.0, Instant::now() + WAIT));
    assert!(second.as_mut().now_or_never().is_none());
    tokio::task::yield_now().await;
    store.set_fault(Fault::None);
    assert_eq!(get(&tier, &some).await, all(Outcome::Hit, &some));
    assert_eq!(first.await, all(Outcome::Hit, &some));
    assert_eq!(second.await, all(Outcome::Hit, &some));
}

/// Whatever a store does, its tier counts and says it.
#[tokio::test]
async fn no_failure_is_silent() {
    for (fault, reason) in [
        (Fault::Refuse, "cannot be reached"),
        (Fault::Miscounts, "asked for"),
        (Fault::Short, "those of this layout have"),
        (Fault::Panic, "panicked"),
        (Fault::Hang, "no answer within"),
        (Fault::Corrupt, "checksum"),
    ] {
        let (store, tier) = in_process(hasty());
        let failures = tier.failures();
        let some = keys(0..20);
        put(&tier, &some).await;
        assert_eq!((failures.count(), failures.last_error()), (0, None));
        store.set_fault(fault);
        let (is_told, began) =
            (|| failures.last_error().is_some_and(|(last, _)| last.contains(reason)), Instant::now());
        while !is_told() {
            tier.put(values(&some), Instant::now() + SHORT).await;
            tier.get(reads(&some).0, Instant::now() + SHORT).await;
            assert!(began.elapsed() < WAIT, "{reason}: {:?}", failures.last_error());
        }
        assert!(failures.count() > 0);
        store.set_fault(Fault::None);
    }
}

/// Dropping the future of a call takes back what has not begun.
#[tokio::test]
async fn a_dropped_call() {
    let mut settings = TierSettings::default();
    settings.calls = 1;
    let (store, tier) = in_process(settings);
    let some = keys(0..20);
    put(&tier, &some).await;
    store.set_fault(Fault::Hang);
    let (all_of_it, memory) = reads(&some);
    let call = tier.get(all_of_it, soon());
    tokio::time::timeout(SHORT, call).await.unwrap_err();
    store.set_fault(Fault::None);
    until("memory is given back", || memory.iter().all(|own| Arc::strong_count(own) == 1)).await;
    assert!(memory[16..].iter().all(|own| own.lock().unwrap().is_empty()), "it was never begun");
}

#[tokio::test]
async fn the_breaker_opens_and_closes() {
    let mut settings = hasty();
    settings.rest = Duration::from_millis(500);
    let (store, tier) = in_process(settings);
    let some = keys(0..1);
    put(&tier, &some).await;
    store.set_fault(Fault::Refuse);
    for _ in 0..3 {
        assert!(is_unreachable(&get(&tier, &some).await[0]));
    }
    let counters = tier.counters();
    assert_eq!((counters.breaker, counters.breaker_opened), (BreakerState::Open, 1));
    store.set_fault(Fault::None);
    let open = Outcome::Failed(TierFailure::Open);
    assert_eq!(get(&tier, &some).await, all(open.clone(), &some));
    assert_eq!(put(&tier, &some).await, all(open.clone(), &some));
    assert_eq!(tier.exists(some.clone(), soon()).await, all(open, &some));
    // After the rest one call tries, and closes it.
    let began = Instant::now();
    while get(&tier, &some).await != [Outcome::Hit] {
        assert!(began.elapsed() < WAIT);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(tier.counters().breaker, BreakerState::Closed);
    // No key was blamed for the store.
    assert_eq!(tier.counters().remembered, 0);
}

/// All calls of the store hang: further calls do not wait for their deadline.
#[tokio::test]
async fn stuck_calls_open_the_breaker() {
    let (store, tier) = in_process(hasty());
    let some = keys(0..8);
    put(&tier, &some).await;
    store.set_fault(Fault::Hang);
    for half in some.chunks(4) {
        let (reads, _memory) = reads(half);
        let outcomes = tier.get(reads, Instant::now() + SHORT).await;
        assert!(outcomes.iter().all(|outcome| *outcome != Outcome::Hit));
    }
    until("both calls are stuck", || tier.counters().breaker == BreakerState::Open).await;
    let (reads, memory) = reads(&some);
    let outcomes = tier.get(reads, soon()).await;
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Failed(_))), "{outcomes:?}");
    assert!(memory.iter().all(|own| Arc::strong_count(own) == 1));
    // It can be closed and dropped meanwhile.
    tier.close();
    assert!(tier.counters().in_flight > 0);
    store.set_fault(Fault::None);
    until("the calls end", || tier.counters().in_flight == 0).await;
}

#[tokio::test]
async fn puts_that_find_no_room_are_dropped() {
    let mut settings = TierSettings::default();
    (settings.calls, settings.puts_max) = (1, 10);
    let (store, tier) = in_process(settings);
    store.set_fault(Fault::Hang);
    let some = keys(0..40);
    // The first call asks the store, the second one waits.
    let mut first = pin!(tier.put(values(&some[..1]), soon()));
    assert!(first.as_mut().now_or_never().is_none());
    until("the store was asked", || tier.counters().in_flight == 1).await;
    let mut second = pin!(tier.put(values(&some[1..11]), soon()));
    assert!(second.as_mut().now_or_never().is_none());
    let busy = Outcome::Failed(TierFailure::Busy);
    assert_eq!(tier.put(values(&some[11..13]), soon()).await, all(busy, &some[11..13]));
    assert_eq!(tier.counters().dropped_puts, 2);
    store.set_fault(Fault::None);
    assert_eq!(first.await, [Outcome::Stored]);
    assert_eq!(second.await, all(Outcome::Stored, &some[1..11]));
    assert_eq!(store.len(), 11);
}

/// A read waits for one put at most behind the one that runs, however many came before it.
#[tokio::test]
async fn reads_go_ahead_of_puts() {
    let mut settings = TierSettings::default();
    settings.calls = 1;
    let (store, tier) = in_process(settings);
    let some = keys(0..6);
    put(&tier, &some[..1]).await;
    store.set_fault(Fault::Slow(Duration::from_millis(20)));
    let puts = some[1..].iter().map(|key| {
        let (tier, values) = (tier.clone(), values(&[*key]));
        tokio::spawn(async move { tier.put(values, soon()).await })
    });
    let puts: Vec<_> = puts.collect();
    until("the first of them runs", || tier.counters().in_flight == 1).await;
    assert_eq!(get(&tier, &some[..1]).await, [Outcome::Hit]);
    assert_eq!(store.len(), 3);
    for put in puts {
        assert_eq!(put.await.unwrap(), [Outcome::Stored]);
    }
}

/// A queue that is shorter than a call takes a part of it: otherwise long calls would never succeed.
#[tokio::test]
async fn calls_that_are_longer_than_the_queue() {
    let mut settings = TierSettings::default();
    (settings.puts_max, settings.reads_max) = (8, 8);
    let (store, tier) = in_process(settings);
    let some = keys(0..40);
    let stored = put(&tier, &some).await;
    assert!(stored[..8].iter().all(|outcome| *outcome == Outcome::Stored), "{stored:?}");
    for some in some.chunks(8) {
        until("they are stored", || tier.counters().in_flight == 0).await;
        put(&tier, some).await;
    }
    assert_eq!(store.len(), 40);
    let found = tier.exists(some.clone(), soon()).await;
    assert!(found[..8].iter().all(|outcome| *outcome == Outcome::Hit), "{found:?}");
    let read = get(&tier, &some).await;
    assert!(read[..8].iter().all(|outcome| *outcome == Outcome::Hit), "{read:?}");
}

/// A store whose failures are not forgiven: no time is too long to be added to the present.
#[tokio::test]
async fn times_without_an_end() {
    let mut settings = TierSettings::default();
    (settings.patience, settings.rest, settings.failed_for) = (Duration::MAX, Duration::MAX, Duration::MAX);
    let (store, tier) = in_process(settings);
    let some = keys(0..1);
    store.set_fault(Fault::Refuse);
    for _ in 0..3 {
        assert!(is_unreachable(&get(&tier, &some).await[0]));
    }
    store.set_fault(Fault::None);
    assert_eq!(get(&tier, &some).await, all(Outcome::Failed(TierFailure::Open), &some));
}

/// A key whose value is wrong is not asked for again for a while, or until it is put.
#[tokio::test]
async fn keys_that_failed() {
    let mut settings = TierSettings::default();
    settings.failed_for = Duration::from_secs(3600);
    let (store, tier) = in_process(settings);
    let some = keys(0..2);
    put(&tier, &some).await;
    store.set_fault(Fault::Corrupt);
    assert_eq!(get(&tier, &some[..1]).await, [Outcome::Failed(ValueError::Checksum.into())]);
    store.set_fault(Fault::None);
    let remembered = Outcome::Failed(TierFailure::Remembered);
    assert_eq!(get(&tier, &some).await, [remembered, Outcome::Hit]);
    // A get is not worth a try, and a put is.
    assert_eq!(tier.exists(some.clone(), soon()).await, [Outcome::Miss, Outcome::Hit]);
    assert_eq!((tier.counters().bad_values, tier.counters().remembered), (1, 1));
    assert_eq!(put(&tier, &some[..1]).await, [Outcome::Stored]);
    assert_eq!(get(&tier, &some).await, all(Outcome::Hit, &some));
}

/// Every way in which an answer can be wrong has its outcome, and none is a hit.
#[tokio::test]
async fn wrong_answers() {
    let some = keys(0..10);
    for fault in [
        Fault::Short,
        Fault::Long,
        Fault::Foreign,
        Fault::Corrupt,
        Fault::ClaimsAll,
        Fault::Miscounts,
        Fault::Panic,
        Fault::Refuse,
    ] {
        let (store, tier) = in_process(hasty());
        put(&tier, &some).await;
        store.set_fault(fault);
        let outcomes = get(&tier, &some).await;
        match fault {
            Fault::ClaimsAll => assert_eq!(outcomes, all(Outcome::Miss, &some)),
            Fault::Miscounts => {
                let hits = outcomes.iter().filter(|outcome| **outcome == Outcome::Hit).count();
                assert!((1..10).contains(&hits), "{outcomes:?}");
                let answer = |outcome: &Outcome| {
                    matches!(outcome, Outcome::Failed(TierFailure::Store(StoreError::Answer { .. })))
                };
                assert_eq!(outcomes.iter().filter(|outcome| answer(outcome)).count(), 10 - hits);
            }
            Fault::Panic => assert_eq!(outcomes, all(Outcome::Failed(TierFailure::Panicked), &some)),
            Fault::Refuse => assert!(outcomes.iter().all(is_unreachable)),
            _ => assert!(
                outcomes.iter().all(|outcome| matches!(outcome, Outcome::Failed(TierFailure::Value(_)))),
                "{fault:?}: {outcomes:?}"
            ),
        }
        // A count that is wrong is no answer.
        if fault == Fault::Miscounts {
            let found = tier.exists(some.clone(), soon()).await;
            assert!(found.iter().all(|found| matches!(found, Outcome::Failed(_))), "{found:?}");
        }
        // It goes on.
        store.set_fault(Fault::None);
        until("it works again", || tier.counters().in_flight == 0).await;
        let began = Instant::now();
        while get(&tier, &some).await != all(Outcome::Hit, &some) {
            assert!(began.elapsed() < WAIT, "{fault:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test]
async fn settings_that_cannot_work() {
    let set: [fn(&mut TierSettings); 5] = [
        |own| own.calls = 0,
        |own| own.calls = usize::MAX,
        |own| own.puts_max = 0,
        |own| own.reads_max = 0,
        |own| own.failures = 0,
    ];
    for set in set {
        let mut settings = TierSettings::default();
        set(&mut settings);
        let error = SharedTier::new(InProcess::new(1), settings).err();
        assert!(matches!(error, Some(TierError::OutOfRange { .. })), "{error:?}");
    }
}

/// A full store forgets its oldest values, and refuses one that it has no room for.
#[tokio::test]
async fn a_full_store() {
    let bytes = values(&keys(0..1))[0].bytes().len();
    let tier = super::support::tier(InProcess::new(4 * bytes), hasty());
    let some = keys(0..10);
    assert_eq!(put(&tier, &some).await, all(Outcome::Stored, &some));
    let hits = get(&tier, &some).await.iter().filter(|outcome| **outcome == Outcome::Hit).count();
    assert_eq!(hits, 4);
    let tier = super::support::tier(InProcess::new(bytes - 1), hasty());
    let outcomes = put(&tier, &some[..1]).await;
    assert!(matches!(outcomes[..], [Outcome::Failed(TierFailure::Store(StoreError::Refused { .. }))]));
}
