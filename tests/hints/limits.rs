//! Budgets, times and what is refused.

use std::time::Duration;

use kvpool::BuildError;

use super::*;

#[test]
fn a_budget_of_pins_is_shared_and_says_whose() {
    let bytes = Bench::new(40, HintLimits::new()).block_bytes();
    let bench = Bench::new(40, HintLimits::new().pinned_bytes(8 * bytes + 1));
    (1..=3).for_each(|number| bench.run(number, 5));
    assert_eq!(bench.session(1, pin(5_000)), Outcome::Accepted { blocks: 5 });
    let clipped = Outcome::Clipped { blocks: 3, until: Millis(6_000), limit: Limit::PinnedBytes };
    assert_eq!(bench.session(2, pin(6_000)), clipped);
    let full = Rejection::Pinned { pinned_bytes: 8 * bytes, limit: 8 * bytes + 1, block_bytes: bytes };
    assert_eq!(bench.session(3, pin(7_000)), Outcome::Rejected { reason: full });
    let pinned = |bench: &Bench| {
        let mut all: Vec<_> = bench
            .pool
            .sessions()
            .iter()
            .map(|session| (session.id.0, session.pinned_bytes / bytes))
            .collect();
        all.sort_unstable();
        all
    };
    assert_eq!(pinned(&bench), [(1, 5), (2, 3), (3, 0)]);
    // Pins of the same session replace each other, and end by themselves.
    assert_eq!(bench.session(1, pin(5_500)), Outcome::Accepted { blocks: 5 });
    bench.time.store(5_500, Relaxed);
    assert_eq!(bench.session(3, pin(7_000)), Outcome::Accepted { blocks: 5 });
    assert_eq!(pinned(&bench), [(1, 0), (2, 3), (3, 5)]);
    // Another hint about a session ends its pin.
    bench.session(3, Action::Demote);
    assert_eq!(pinned(&bench), [(1, 0), (2, 3), (3, 0)]);
    bench.evict(7);
    assert_eq!([1, 2, 3].map(|number| bench.cached(number)), [3, 5, 0]);
}

#[test]
fn a_session_has_a_budget() {
    let bytes = Bench::new(40, HintLimits::new()).block_bytes();
    let bench = Bench::new(60, HintLimits::new().session_bytes(4 * bytes));
    (1..=2).for_each(|number| bench.run(number, 6));
    let clipped = Outcome::Clipped { blocks: 4, until: Millis(5_000), limit: Limit::SessionBytes };
    assert_eq!(bench.retain(1, 5_000), clipped);
    assert_eq!(bench.session(2, pin(5_000)), clipped);
    bench.run(1, 8);
    bench.run(3, 6);
    bench.evict(12);
    assert_eq!([1, 2, 3].map(|number| bench.cached(number)), [4, 4, 0], "the first blocks of each");
}

#[test]
fn times_are_clipped_or_refused() {
    let bench = Bench::new(40, HintLimits::new().longest(Duration::from_secs(60)));
    bench.run(1, 5);
    let year = 1_000 + 365 * 24 * 3_600 * 1_000;
    let clipped = Outcome::Clipped { blocks: 5, until: Millis(61_000), limit: Limit::Longest };
    for until in [year, u64::MAX] {
        assert_eq!(bench.retain(1, until), clipped);
        assert_eq!(bench.session(1, pin(until)), clipped);
    }
    for until in [0, 999, 1_000] {
        let ended = Rejection::Ended { until: Millis(until), now: Millis(1_000) };
        assert_eq!(bench.retain(1, until), Outcome::Rejected { reason: ended });
    }
    assert_eq!(bench.pool.sessions()[0].retained_until, Some(Millis(61_000)), "refused ones change nothing");
}

#[test]
fn what_cannot_be_done_is_refused_with_words() {
    let bench = Bench::new(40, HintLimits::new());
    for action in [retain(CachePriority::Low, 5_000), pin(5_000), Action::Demote, Action::Release] {
        assert_eq!(bench.hint(target(7), action), Outcome::Missing, "{action:?}");
    }
    assert!(bench.pool.sessions().is_empty(), "a hint creates no session");
    let prefetch = Action::Prefetch { deadline: Millis(2_000) };
    assert_eq!(bench.session(1, prefetch), Outcome::Rejected { reason: Rejection::NoTier });
    let plain = kvpool_testkit::prompts::pool(10);
    let hint = Hint::new(target(1), Action::Demote);
    assert_eq!(plain.hint(&hint), Outcome::Rejected { reason: Rejection::Disabled });
    assert!(Rejection::Disabled.to_string().contains("PoolBuilder::hints"));
    let open = bench.open(1, 1, 3);
    let tokens = |tokens| bench.hint(Target::Tokens(SequenceId(1), tokens), Action::Demote);
    for at in 0..16 {
        tokens(at * BLOCK_TOKENS..(at + 1) * BLOCK_TOKENS);
    }
    let many = tokens(100 * BLOCK_TOKENS..usize::MAX);
    assert!(matches!(many, Outcome::Rejected { reason: Rejection::Unsupported { .. } }), "{many:?}");
    assert_eq!(tokens(0..usize::MAX), Outcome::Deferred { blocks: 3 }, "in place of all of them");
    drop(open);
}

#[test]
fn limits_that_no_pool_can_keep_fail_its_construction() {
    let build = |limits: HintLimits, has_cache: bool| {
        let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(10).hints(limits);
        let builder = if has_cache { builder.prefix_cache(PrefixConfig::new()) } else { builder };
        match builder.build() {
            Err(BuildError::Invalid(error)) => error.what,
            other => panic!("{:?}", other.map(|_| ())),
        }
    };
    assert_eq!(build(HintLimits::new(), false), "hints");
    assert_eq!(build(HintLimits::new().pinned_bytes(u64::MAX), true), "pinned_bytes");
    assert_eq!(build(HintLimits::new().session_bytes(1 << 40), true), "session_bytes");
    assert_eq!(build(HintLimits::new().longest(Duration::ZERO), true), "longest");
}

#[test]
fn sessions_say_what_they_hold() {
    let bench = Bench::new(60, HintLimits::new());
    bench.run(1, 5);
    bench.time.store(2_000, Relaxed);
    let mut sequence = bench.open(2, 2, 7);
    sequence.expect_return(Millis(4_000));
    drop(sequence);
    bench.run(1, 6);
    bench.retain(1, 9_000);
    let sessions = bench.pool.sessions();
    let all = |pick: fn(&kvpool::hints::SessionInfo) -> u64| sessions.iter().map(pick).collect::<Vec<_>>();
    assert_eq!(all(|session| session.id.0), [1, 2]);
    assert_eq!(all(|session| session.requests), [2, 1]);
    assert_eq!(all(|session| session.cached_blocks as u64), [6, 7]);
    assert_eq!(all(|session| session.last_use.0), [2_000, 2_000]);
    assert_eq!(all(|session| session.returns_at.map_or(0, |at| at.0)), [0, 4_000]);
    assert_eq!(all(|session| session.retained_until.map_or(0, |at| at.0)), [9_000, 0]);
    assert_eq!(sessions[0].cached_bytes, 6 * bench.block_bytes());
}

/// What is remembered is bounded: the sessions used longest ago are forgotten.
#[test]
fn sessions_are_bounded() {
    let bench = Bench::new(100, HintLimits::new());
    for number in 0..400u32 {
        bench.time.fetch_add(1, Relaxed);
        bench.run(1_000 + number, 20);
    }
    let sessions = bench.pool.sessions();
    assert!((100..300).contains(&sessions.len()), "{} of 400 sessions with 20 hashes each", sessions.len());
    assert_eq!((sessions[0].id, bench.cached(1_399)), (SessionId(1_399), 20));
}
