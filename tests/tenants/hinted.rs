//! Budgets of hints for the blocks of each tenant.

use kvpool::hints::{Action, Hint, HintLimits, Limit, Outcome, Rejection, Target};
use kvpool::prefix::policy::CachePriority;
use kvpool::{BuildError, SessionId};

use super::*;

/// A pool with two tenants without limits, and a budget of hints for each.
fn hinted(blocks: usize, budget: usize) -> Pool {
    let builder = builder(blocks, PrefixConfig::new().tolerance(0.0));
    let hints = HintLimits::new().tenant_bytes(budget as u64 * block_bytes());
    builder.tenants([(A, limits(None, 0)), (B, limits(None, 0))]).hints(hints).build().unwrap()
}

/// Runs a request of the session of this number.
fn turn(pool: &Pool, number: u32, blocks: usize, tenant: impl Into<Option<TenantId>>) -> Sequence {
    let tokens = prompt(number, blocks * BLOCK_TOKENS + 1);
    let request = request(number.into(), &tokens, tenant.into()).session(SessionId(number.into()));
    let mut sequence = pool.admit(&request).unwrap();
    let mut batch = pool.begin_batch();
    let missing = tokens.len() - sequence.len();
    batch.append(&mut sequence, Tokens::Announced(missing)).unwrap();
    batch.finish();
    sequence
}

fn retain(pool: &Pool) -> Action {
    let until = pool.prefix_cache().unwrap().now() + 60_000;
    Action::Retain { priority: CachePriority::Normal, until }
}

fn pin(pool: &Pool) -> Action {
    Action::Pin { until: pool.prefix_cache().unwrap().now() + 60_000 }
}

fn session(pool: &Pool, number: u32, action: Action) -> Outcome {
    pool.hint(&Hint::new(Target::Session(SessionId(number.into())), action))
}

fn clipped(outcome: &Outcome) -> Option<(usize, Limit)> {
    match *outcome {
        Outcome::Clipped { blocks, limit, .. } => Some((blocks, limit)),
        _ => None,
    }
}

/// Returns how many leading blocks of a prompt are cached, without a hit.
fn kept(pool: &Pool, number: u32) -> usize {
    let all: Vec<_> = pool.cached_blocks().into_iter().map(|(_, hash)| hash).collect();
    let tokens = prompt(number, 40 * BLOCK_TOKENS);
    let hashes = pool.prefix_cache().unwrap().hashes(&PrefixKeys::new(), &tokens).unwrap();
    hashes.iter().take_while(|hash| all.contains(hash)).count()
}

#[test]
fn a_tenant_retains_and_pins_within_its_budget_and_leaves_others_theirs() {
    for action in [retain as fn(&Pool) -> Action, pin] {
        let pool = hinted(100, 12);
        (1..=2).for_each(|number| drop(turn(&pool, number, 10, A)));
        drop(turn(&pool, 3, 10, B));
        assert_eq!(session(&pool, 1, action(&pool)), Outcome::Accepted { blocks: 10 });
        assert_eq!(session(&pool, 1, action(&pool)), Outcome::Accepted { blocks: 10 }, "counted once");
        assert_eq!(clipped(&session(&pool, 2, action(&pool))), Some((2, Limit::TenantBytes)));
        assert_eq!(clipped(&session(&pool, 2, action(&pool))), Some((2, Limit::TenantBytes)));
        drop(turn(&pool, 4, 10, A));
        let (limit, block_bytes) = (12 * block_bytes(), block_bytes());
        let reason = Rejection::Tenant { tenant: A, kept_bytes: limit, limit, block_bytes };
        assert_eq!(session(&pool, 4, action(&pool)), Outcome::Rejected { reason });
        assert_eq!(session(&pool, 3, action(&pool)), Outcome::Accepted { blocks: 10 });
        drop(evict(&pool, 18).unwrap());
        let left = [1, 2, 3, 4].map(|number| kept(&pool, number));
        assert_eq!(left, [10, 2, 10, 0], "blocks beyond the budget went first");
        // What it gives up, it has again.
        session(&pool, 1, Action::Release);
        drop(turn(&pool, 4, 10, A));
        assert_eq!(session(&pool, 4, action(&pool)), Outcome::Accepted { blocks: 10 });
        pool.audit().unwrap();
    }
}

#[test]
fn a_budget_counts_blocks_and_not_hints() {
    let pool = hinted(100, 10);
    drop(turn(&pool, 1, 10, A));
    session(&pool, 1, pin(&pool));
    assert_eq!(session(&pool, 1, retain(&pool)), Outcome::Accepted { blocks: 10 });
    assert_eq!(pool.sessions()[0].pinned_bytes, 0, "retained, not pinned");
    session(&pool, 1, pin(&pool));
    assert_eq!(pool.sessions()[0].pinned_bytes, 10 * block_bytes());
    // Evicted ones no longer count.
    drop(evict(&pool, 10).unwrap());
    drop(turn(&pool, 2, 10, A));
    assert_eq!(session(&pool, 2, retain(&pool)), Outcome::Accepted { blocks: 10 });
    // Nor do those whose place was lost, and whose frames are another tenant's.
    drop(evict(&pool, 10).unwrap());
    drop(turn(&pool, 3, 90, B));
    drop(turn(&pool, 4, 5, A));
    assert_eq!(session(&pool, 4, retain(&pool)), Outcome::Accepted { blocks: 5 });
}

/// A prefix of a tenant at its budget does not keep others from their own blocks behind it.
#[test]
fn blocks_of_others_behind_a_shared_prefix_are_retained() {
    let pool = hinted(100, 10);
    drop(turn(&pool, 1, 14, A));
    assert_eq!(clipped(&session(&pool, 1, retain(&pool))), Some((10, Limit::TenantBytes)));
    drop(turn(&pool, 1, 20, B));
    assert_eq!(clipped(&session(&pool, 1, retain(&pool))), Some((16, Limit::TenantBytes)));
    // Without a tenant, only the budgets of the pool and of sessions count.
    drop(turn(&pool, 2, 30, None));
    assert_eq!(session(&pool, 2, retain(&pool)), Outcome::Accepted { blocks: 30 });
}

#[test]
fn an_open_sequence_gets_what_is_left_at_its_close() {
    let pool = hinted(100, 6);
    let running = turn(&pool, 1, 10, A);
    let tokens = |number: u32, action| {
        let target = Target::Tokens(SequenceId(number.into()), 0..usize::MAX);
        pool.hint(&Hint::new(target, action))
    };
    assert_eq!(clipped(&tokens(1, retain(&pool))), Some((6, Limit::TenantBytes)));
    drop(turn(&pool, 2, 4, A));
    assert_eq!(session(&pool, 2, retain(&pool)), Outcome::Accepted { blocks: 4 });
    drop(running);
    drop(evict(&pool, 8).unwrap());
    assert_eq!([1, 2].map(|number| kept(&pool, number)), [2, 4]);
    let running = turn(&pool, 3, 3, A);
    assert!(matches!(
        tokens(3, pin(&pool)),
        Outcome::Rejected { reason: Rejection::Tenant { tenant: A, .. } }
    ));
    drop(running);
    let blocks = pool.session_blocks(SessionId(3)).unwrap().needed(usize::MAX);
    let hashes = blocks.iter().map(|block| block.hash()).collect();
    let outcome = pool.hint(&Hint::new(Target::Hashes(hashes), pin(&pool)));
    assert!(
        matches!(outcome, Outcome::Rejected { reason: Rejection::Tenant { tenant: A, .. } }),
        "{outcome:?}"
    );
}

fn tokens(pool: &Pool, number: u32, tokens: std::ops::Range<usize>, action: Action) -> Outcome {
    pool.hint(&Hint::new(Target::Tokens(SequenceId(number.into()), tokens), action))
}

#[test]
fn blocks_that_count_since_an_earlier_turn_are_renewed_by_tokens() {
    for action in [retain as fn(&Pool) -> Action, pin] {
        let pool = hinted(100, 10);
        for _ in 0..4 {
            let running = turn(&pool, 1, 10, A);
            assert_eq!(tokens(&pool, 1, 0..usize::MAX, action(&pool)), Outcome::Deferred { blocks: 10 });
            drop(running);
        }
        // The next turn is longer.
        let running = turn(&pool, 1, 14, A);
        let outcome = tokens(&pool, 1, 0..usize::MAX, action(&pool));
        assert_eq!(clipped(&outcome), Some((10, Limit::TenantBytes)));
        let new = tokens(&pool, 1, 10 * BLOCK_TOKENS..usize::MAX, action(&pool));
        assert!(matches!(new, Outcome::Rejected { reason: Rejection::Tenant { tenant: A, .. } }), "{new:?}");
        drop(running);
        pool.audit().unwrap();
    }
}

#[test]
fn each_block_of_a_range_counts_for_its_own_tenant() {
    let pool = hinted(100, 10);
    drop(turn(&pool, 2, 10, B));
    assert_eq!(session(&pool, 2, retain(&pool)), Outcome::Accepted { blocks: 10 });
    drop(turn(&pool, 1, 6, A));
    let running = turn(&pool, 1, 9, B);
    let of_a = tokens(&pool, 1, 0..6 * BLOCK_TOKENS, retain(&pool));
    assert_eq!(of_a, Outcome::Deferred { blocks: 6 });
    let of_both = tokens(&pool, 1, 0..usize::MAX, retain(&pool));
    assert_eq!(clipped(&of_both), Some((6, Limit::TenantBytes)));
    let kept_bytes = |id| info(&pool, id).kept_bytes / block_bytes();
    assert_eq!((kept_bytes(A), kept_bytes(B)), (0, 10), "A's when the sequence is closed");
    let of_b = tokens(&pool, 1, 6 * BLOCK_TOKENS..usize::MAX, retain(&pool));
    let Outcome::Rejected { reason } = of_b else { panic!("{of_b:?}") };
    let words = reason.to_string();
    assert!(
        words.contains("`HintLimits::tenant_bytes`") && words.contains("release or demote some"),
        "{words}"
    );
    assert!(matches!(reason, Rejection::Tenant { tenant: B, .. }), "{words}");
    drop(running);
    assert_eq!((kept_bytes(A), kept_bytes(B)), (6, 10));
    drop(evict(&pool, 3).unwrap());
    assert_eq!([1, 2].map(|number| kept(&pool, number)), [6, 10]);
    // The other way round: A's blocks exceed its budget, those of B do not.
    session(&pool, 2, Action::Release);
    drop(turn(&pool, 3, 14, A));
    let running = turn(&pool, 3, 19, B);
    let outcome = tokens(&pool, 3, 0..usize::MAX, retain(&pool));
    assert_eq!(clipped(&outcome), Some((4 + 5, Limit::TenantBytes)));
    drop(running);
    pool.audit().unwrap();
}

/// What is granted for blocks that a request still has is said too.
#[test]
fn a_clipped_hint_tells_how_many_owned_blocks_it_is_for() {
    let pool = hinted(100, 6);
    drop(turn(&pool, 1, 10, A));
    let running = turn(&pool, 1, 10, A);
    assert_eq!(clipped(&session(&pool, 1, retain(&pool))), Some((6, Limit::TenantBytes)));
    drop(running);
    drop(evict(&pool, 4).unwrap());
    assert_eq!(kept(&pool, 1), 6);
}

#[test]
fn a_budget_that_cannot_hold_is_refused() {
    let what = |tenants: bool, bytes| {
        let builder = builder(10, PrefixConfig::new()).hints(HintLimits::new().tenant_bytes(bytes));
        let builder = if tenants { builder.tenants([]) } else { builder };
        match builder.build().unwrap_err() {
            BuildError::Invalid(invalid) => (invalid.what, invalid.got.to_string()),
            other => panic!("{other}"),
        }
    };
    assert_eq!(what(false, 1), ("tenant_bytes", "a pool without tenants".to_owned()));
    assert_eq!(what(true, 1 << 40).0, "tenant_bytes");
}
