//! Pins, budgets and hints that could be lost: in groups and states, beside batches, after clears.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;

use super::*;

/// The blocks of a state belong to no list of tokens, but are what the session has cached.
#[test]
fn a_pool_with_states_notes_the_lists_of_tokens_only() {
    let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(100).threads(1).without_storage();
    let builder = builder.prefix_cache(PrefixConfig::new()).states([10]).hints(HintLimits::new());
    let pool = builder.build().unwrap();
    let tokens = prompt(1, 33);
    for id in 1..=3 {
        let request = AdmitRequest::new(SequenceId(id), &tokens).session(SessionId(7));
        let mut sequence = pool.admit_grouped(&request).unwrap();
        let mut batch = pool.begin_batch();
        let missing = 32 - sequence.len();
        batch.append_grouped(&mut sequence, Tokens::Announced(missing)).unwrap();
        batch.checkpoint(&mut sequence).unwrap();
        batch.finish();
    }
    let sessions = pool.sessions();
    assert_eq!((sessions.len(), sessions[0].requests, sessions[0].cached_blocks), (1, 3, 18));
    pool.hint(&Hint::new(target(7), Action::Release));
    pool.audit().unwrap();
}

/// A batch in flight may see many demoted blocks: pinned ones do not go for them.
#[test]
fn demoted_blocks_that_a_batch_sees_do_not_cost_pinned_ones() {
    let bench = Bench::new(160, HintLimits::new());
    bench.run(1, 20);
    bench.session(1, pin(90_000));
    bench.run(3, 30);
    let batch = bench.pool.begin_batch();
    bench.run(2, 60);
    assert_eq!(bench.session(2, Action::Demote), Outcome::Accepted { blocks: 60 });
    (0..4).for_each(|_| bench.evict(5));
    assert_eq!([1, 3].map(|number| bench.cached(number)), [20, 10]);
    batch.finish();
    // What it held back is free, and no reason to evict.
    bench.pool.trim();
    bench.evict(20);
    assert_eq!(
        [1, 3].map(|number| bench.cached(number)),
        [20, 10],
        "the demoted ones, once the batch has ended"
    );
    assert_eq!(bench.evictions_of_retained(), 0);
}

/// Requests that are refused take blocks and put them back: their places are not noted again and
/// again.
#[test]
fn refused_requests_leave_no_more_than_the_blocks() {
    let bench = Bench::new(100, HintLimits::new());
    bench.run(1, 20);
    bench.retain(1, 90_000);
    let _held = bench.pool.allocate(AllocRequest::new(70)).unwrap();
    let tokens = prompt(1, 60 * BLOCK_TOKENS);
    let request = AdmitRequest::new(SequenceId(9), &tokens).session(SessionId(1));
    let began = std::time::Instant::now();
    for _ in 0..20_000 {
        assert!(bench.pool.admit(&request).is_err());
    }
    assert_eq!(bench.pool.sessions()[0].requests, 1, "none of them was a request");
    for _ in 0..200 {
        bench.retain(1, 90_000);
    }
    assert!(began.elapsed().as_secs() < 60, "{:?}", began.elapsed());
    bench.evict(5);
    assert_eq!((bench.cached(1), bench.evictions_of_retained()), (15, 5));
}

#[test]
fn grants_are_given_back_and_never_exceeded() {
    let bytes = Bench::new(40, HintLimits::new()).block_bytes();
    let bench = Bench::new(60, HintLimits::new().pinned_bytes(10 * bytes));
    (1..=3).for_each(|number| bench.run(number, 10));
    let hashes = |number| {
        let cache = bench.pool.prefix_cache().unwrap();
        Target::Hashes(cache.hashes(&PrefixKeys::new(), &prompt(number, 10 * BLOCK_TOKENS)).unwrap())
    };
    for _ in 0..3 {
        assert_eq!(bench.hint(hashes(8), pin(9_000)), Outcome::Missing, "and takes nothing");
        assert_eq!(bench.hint(Target::Hashes(Vec::new()), pin(9_000)), Outcome::Missing);
        assert_eq!(bench.hint(hashes(2), pin(9_000)), Outcome::Accepted { blocks: 10 }, "renewed");
    }
    assert!(matches!(bench.session(1, pin(9_000)), Outcome::Rejected { reason: Rejection::Pinned { .. } }));
    assert_eq!(bench.hint(hashes(2), Action::Demote), Outcome::Accepted { blocks: 10 });
    // An answer may be long: a pin is for what there is.
    let empty = bench.pool.sequence(SequenceId(50)).open().unwrap();
    let all = Target::Tokens(SequenceId(50), 0..usize::MAX);
    assert_eq!(bench.hint(all, pin(9_000)), Outcome::Deferred { blocks: 0 });
    drop(empty);
    assert_eq!(bench.session(1, pin(9_000)), Outcome::Accepted { blocks: 10 });
    bench.run(1, 20);
    bench.evict(25);
    assert_eq!([1, 2, 3].map(|number| bench.cached(number)), [15, 0, 0], "as many as it had");
}

/// What others have hit loses its pin with the session's.
#[test]
fn a_release_ends_the_pin_of_shared_blocks_too() {
    let bytes = Bench::new(40, HintLimits::new()).block_bytes();
    let bench = Bench::new(40, HintLimits::new().pinned_bytes(5 * bytes));
    bench.run(1, 5);
    bench.session(1, pin(90_000));
    let tokens = prompt(1, 5 * BLOCK_TOKENS + 1);
    let request = AdmitRequest::new(SequenceId(0), &tokens).session(SessionId(9));
    drop(bench.pool.admit(&request).unwrap());
    bench.session(1, pin(90_000));
    bench.session(1, Action::Release);
    bench.run(2, 5);
    bench.retain(2, 90_000);
    bench.evict(5);
    assert_eq!([1, 2].map(|number| bench.cached(number)), [0, 5]);
}

#[test]
fn a_hint_waits_for_the_request_that_has_the_blocks() {
    let bench = Bench::new(40, HintLimits::new());
    for (action, sessions) in [(Action::Demote, 2), (Action::Release, 1)] {
        bench.run(1, 5);
        let open = bench.open(7, 1, 5);
        assert_eq!(bench.session(1, action), Outcome::Deferred { blocks: 5 });
        bench.run(2, 5);
        drop(open);
        bench.evict(5);
        assert_eq!([1, 2].map(|number| bench.cached(number)), [0, 5], "{action:?}");
        assert_eq!(bench.pool.sessions().len(), sessions, "{action:?}");
        drop(bench.pool.allocate(AllocRequest::new(40)).unwrap());
    }
}

/// Blocks from before a clear are found by nothing, and retained by nothing.
#[test]
fn nothing_from_before_a_clear_is_retained() {
    let bench = Bench::new(60, HintLimits::new());
    bench.run(1, 8);
    bench.retain(1, 90_000);
    let open = bench.open(7, 1, 8);
    bench.run(3, 1);
    bench.pool.clear_prefix_cache();
    bench.evict(1);
    drop(open);
    bench.run(2, 5);
    assert!(!matches!(bench.retain(1, 90_000), Outcome::Accepted { .. }));
    assert_eq!(bench.pool.sessions().iter().map(|session| session.cached_blocks).sum::<usize>(), 5);
    bench.evict(8);
    assert_eq!(bench.cached(2), 5);
}

/// A sequence that is closed while a batch writes it keeps its hints, and a later one of its id has
/// its own.
#[test]
fn hints_go_with_their_sequence() {
    let bench = Bench::new(60, HintLimits::new());
    let hint = |action| bench.hint(Target::Tokens(SequenceId(1), 0..usize::MAX), action);
    let open = |number: u32| {
        let tokens = prompt(number, 5 * BLOCK_TOKENS + 1);
        let mut sequence = bench.pool.admit(&AdmitRequest::new(SequenceId(1), &tokens)).unwrap();
        let mut batch = bench.pool.begin_batch();
        batch.append(&mut sequence, Tokens::Announced(tokens.len())).unwrap();
        (sequence, batch)
    };
    let (first, batch) = open(1);
    assert_eq!(hint(Action::Demote), Outcome::Deferred { blocks: 5 });
    drop(first);
    let (second, other) = open(2);
    assert_eq!(hint(retain(CachePriority::High, 90_000)), Outcome::Deferred { blocks: 5 });
    batch.finish();
    other.finish();
    drop(second);
    bench.pool.trim();
    bench.run(3, 5);
    bench.evict(5);
    assert_eq!([1, 3].map(|number| bench.cached(number)), [0, 5]);
    bench.evict(5);
    assert_eq!([2, 3].map(|number| bench.cached(number)), [5, 0]);
}

/// The clock is the user's code, and a sequence is closed in a destructor.
#[test]
fn a_clock_that_panics_closes_no_sequence_halfway() {
    let fails = Arc::new(AtomicBool::new(false));
    let failing = fails.clone();
    let cache = PrefixConfig::new().clock(move || {
        assert!(!failing.load(Relaxed), "the clock fails");
        Millis(5)
    });
    let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(40).threads(1);
    let pool = builder.prefix_cache(cache).hints(HintLimits::new()).build().unwrap();
    let tokens = prompt(1, 21);
    let mut sequence = pool.admit(&AdmitRequest::new(SequenceId(1), &tokens).session(SessionId(1))).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, Tokens::Announced(21)).unwrap();
    batch.finish();
    fails.store(true, Relaxed);
    drop(sequence);
    let hint = Hint::new(target(1), retain(CachePriority::High, 60));
    let outcome = catch_unwind(AssertUnwindSafe(|| pool.hint(&hint)));
    assert_eq!(outcome.unwrap(), Outcome::Accepted { blocks: 5 });
    drop(pool.allocate(AllocRequest::new(40)).unwrap());
    pool.audit().unwrap();
}

/// Milliseconds since 1970 are a clock too.
#[test]
fn retention_ends_by_a_clock_of_the_epoch() {
    let epoch = 1_764_000_000_000;
    let (time, cache) = (Arc::new(AtomicU64::new(epoch)), PrefixConfig::new().tolerance(0.0));
    let clock = time.clone();
    let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(30).threads(1).magazine_blocks(4);
    let builder = builder.prefix_cache(cache.clock(move || Millis(clock.load(Relaxed))));
    let bench = Bench { pool: builder.hints(HintLimits::new()).build().unwrap(), time };
    (1..=2).for_each(|number| bench.run(number, 5));
    bench.retain(1, epoch + 1_000);
    bench.evict(3);
    assert_eq!([1, 2].map(|number| bench.cached(number)), [5, 2]);
    bench.time.store(epoch + 1_000, Relaxed);
    bench.evict(3);
    assert_eq!([1, 2].map(|number| bench.cached(number)), [2, 2]);
}

/// The beginning of a prompt outlives its end, also when its retention has ended.
#[test]
fn a_long_prefix_goes_from_its_end_after_its_retention() {
    let bench = Bench::new(420, HintLimits::new());
    bench.run(1, 40);
    bench.run(2, 300);
    bench.retain(1, 9_000);
    assert_eq!(bench.retain(2, 9_000), Outcome::Accepted { blocks: 300 });
    bench.run(3, 40);
    bench.evict(20);
    bench.time.store(9_000, Relaxed);
    let cached = |bench: &Bench| {
        let cache = bench.pool.prefix_cache().unwrap();
        let all: Vec<_> = bench.pool.cached_blocks().into_iter().map(|(_, hash)| hash).collect();
        let hashes = cache.hashes(&PrefixKeys::new(), &prompt(2, 300 * BLOCK_TOKENS)).unwrap();
        let is_cached: Vec<_> = hashes.iter().map(|hash| all.contains(hash)).collect();
        assert!(is_cached.is_sorted_by(|one, other| one >= other), "no block outlives those before it");
        is_cached.into_iter().filter(|&is_cached| is_cached).count()
    };
    bench.evict(40);
    for evicted in [70, 1, 130, 60] {
        let before = cached(&bench);
        bench.evict(evicted);
        assert_eq!(cached(&bench), before - evicted);
    }
}

/// A prompt that its session has left is no longer pinned for it.
#[test]
fn a_pin_is_for_one_request_at_a_time() {
    let bytes = Bench::new(40, HintLimits::new()).block_bytes();
    let bench = Bench::new(60, HintLimits::new().pinned_bytes(10 * bytes));
    bench.run(1, 5);
    bench.session(1, pin(90_000));
    let tokens = prompt(7, 5 * BLOCK_TOKENS + 1);
    let request = AdmitRequest::new(SequenceId(5), &tokens).session(SessionId(1));
    let mut sequence = bench.pool.admit(&request).unwrap();
    let mut batch = bench.pool.begin_batch();
    batch.append(&mut sequence, Tokens::Announced(tokens.len())).unwrap();
    batch.finish();
    drop(sequence);
    bench.run(2, 5);
    bench.retain(2, 90_000);
    bench.evict(5);
    assert_eq!([1, 7, 2].map(|number| bench.cached(number)), [0, 5, 5]);
}

/// Hints on tokens in several groups of layers.
#[test]
fn tokens_of_grouped_sequences_take_hints() {
    let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(100).threads(1).without_storage();
    let builder = builder.prefix_cache(PrefixConfig::new()).groups([None, None]).hints(HintLimits::new());
    let pool = builder.build().unwrap();
    let tokens = prompt(1, 33);
    let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(1), &tokens)).unwrap();
    let mut batch = pool.begin_batch();
    batch.append_grouped(&mut sequence, Tokens::Announced(33)).unwrap();
    batch.finish();
    let until = Millis(pool.prefix_cache().unwrap().now().0 + 60_000);
    let all = Target::Tokens(SequenceId(1), 0..usize::MAX);
    for action in [Action::Pin { until }, Action::Retain { priority: CachePriority::Low, until }] {
        assert_eq!(pool.hint(&Hint::new(all.clone(), action)), Outcome::Deferred { blocks: 16 });
    }
    drop(sequence);
    drop(pool.allocate(AllocRequest::new(90)).unwrap());
    let metrics = pool.metrics().evictions;
    assert!(metrics.retained > 0, "{metrics:?}");
    pool.audit().unwrap();
}
