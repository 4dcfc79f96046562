//! Limits: how they are set, and what waits for them.

use std::future::{Future, IntoFuture};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use kvpool::prefix::policy::CachePriority;
use kvpool::tenants::TENANTS_MAX;
use kvpool::{BuildError, Invalid, ResizeError, ResizeOptions};

use super::*;

fn invalid(error: BuildError) -> Invalid {
    match error {
        BuildError::Invalid(invalid) => invalid,
        other => panic!("{other}"),
    }
}

#[test]
fn limits_that_cannot_hold_are_refused() {
    let built = |tenants: &[(TenantId, TenantLimits)]| {
        builder(100, PrefixConfig::new()).tenants(tenants.iter().copied()).build()
    };
    let error = |tenants: &[(TenantId, TenantLimits)]| match built(tenants).unwrap_err() {
        BuildError::Tenant(error) => error,
        other => panic!("{other}"),
    };
    let floors = TenantError::Floors { tenant: B, floor: 41, others: 60, total: 100 };
    assert_eq!(error(&[(A, limits(None, 60)), (B, limits(None, 41))]), floors);
    let bytes = block_bytes();
    let below = TenantError::QuotaBelowFloor { tenant: A, quota: 4 * bytes, floor: 5 * bytes };
    assert_eq!(error(&[(A, limits(4, 5))]), below);
    assert_eq!(invalid(built(&[(A, limits(4, 0)), (A, limits(5, 0))]).unwrap_err()).index, Some(1));
    let huge = TenantLimits::new().floor(u64::MAX);
    assert!(matches!(error(&[(A, huge)]), TenantError::Floors { others: 0, total: 100, .. }));
    let without_cache = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(9).tenants([]).build();
    assert_eq!(invalid(without_cache.unwrap_err()).what, "tenants");
    // Not whole blocks: the floor is rounded up, the quota down, but not below it.
    let odd = TenantLimits::new().floor(bytes + 1).quota(bytes + 2);
    let pool = built(&[(A, odd)]).unwrap();
    assert_eq!(info(&pool, A).floor_bytes, 2 * bytes);
    assert_eq!(info(&pool, A).quota_bytes, Some(2 * bytes));
}

#[test]
fn unknown_tenants_are_refused_and_nothing_is_opened() {
    let pool = pool(100, &[(A, limits(None, 0))]);
    let tokens = prompt(1, 9);
    let refused = |tenant| match pool.admit(&request(1, &tokens, Some(tenant))) {
        Err(SequenceError::Tenant(error)) => error,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(B), TenantError::Unknown { tenant: B });
    assert!(pool.sequence(SequenceId(1)).tenant(B).open().is_err());
    let request = request(1, &tokens, Some(A));
    drop(pool.admit(&request).unwrap());
    let none = builder(100, PrefixConfig::new()).build().unwrap();
    let error = none.admit(&request).unwrap_err();
    assert_eq!(error, SequenceError::Tenant(TenantError::Disabled { tenant: A }));
    assert_eq!(none.set_tenant(A, limits(None, 0)), Err(TenantError::Disabled { tenant: A }));
    assert!(none.tenants().is_empty());
}

#[test]
fn limits_change_while_the_pool_is_used() {
    let pool = pool(100, &[]);
    for id in 0..TENANTS_MAX as u64 {
        pool.set_tenant(TenantId(id), limits(None, 1)).unwrap();
    }
    let one_more = TenantId(1_000);
    let error = TenantError::TooMany { tenant: one_more, max: TENANTS_MAX };
    assert_eq!(pool.set_tenant(one_more, limits(None, 0)), Err(error));
    run(&pool, 1, 30, A);
    pool.set_tenant(A, limits(20, 10)).unwrap();
    assert_eq!(holds(&pool, A), (30, 30), "a lower quota evicts nothing");
    run(&pool, 2, 4, A);
    assert_eq!(holds(&pool, A), (19, 19));
    let others = TENANTS_MAX - 1;
    let floors = TenantError::Floors { tenant: A, floor: 50, others, total: 100 };
    assert_eq!(pool.set_tenant(A, limits(None, 50)), Err(floors));
    assert_eq!(info(&pool, A).quota_bytes, Some(20 * block_bytes()), "unchanged");
    pool.set_tenant(A, limits(None, 100 - others)).unwrap();
    assert!(evict(&pool, 1).is_err(), "37 blocks are its floor");
    pool.set_tenant(A, limits(None, 0)).unwrap();
    drop(evict(&pool, 19).unwrap());
    pool.audit().unwrap();
}

/// Polls once.
fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn a_request_beyond_its_quota_does_not_wait() {
    let pool = pool(100, &[(A, limits(10, 0))]);
    let running = open(&pool, 1, 8, A);
    let tokens = prompt(2, 9);
    let request_of_a = request(2, &tokens, Some(A));
    let mut admission = pin!(pool.admit_async(&request_of_a).into_future());
    let refused =
        |polled| matches!(polled, Poll::Ready(Err(SequenceError::Alloc(AllocError::OverQuota { .. }))));
    assert!(refused(poll(admission.as_mut()).map(|admitted| admitted.map(drop))));
    // Nor in the queue, where it would keep others waiting.
    let lease = pool.allocate(AllocRequest::new(90)).unwrap();
    let (long, short) = (prompt(3, 16 * BLOCK_TOKENS), prompt(4, 4));
    let first = request(3, &long, None);
    let mut first = pin!(pool.admit_async(&first).into_future());
    assert!(poll(first.as_mut()).is_pending());
    let request_of_a = request(4, &tokens, Some(A));
    let mut second = pin!(pool.admit_async(&request_of_a).into_future());
    assert!(poll(second.as_mut()).is_pending(), "behind the first");
    let third = request(5, &short, None);
    let mut third = pin!(pool.admit_async(&third).into_future());
    assert!(poll(third.as_mut()).is_pending());
    drop(lease);
    assert!(matches!(poll(first.as_mut()), Poll::Ready(Ok(_))));
    assert!(refused(poll(second.as_mut()).map(|admitted| admitted.map(drop))));
    assert!(matches!(poll(third.as_mut()), Poll::Ready(Ok(_))), "the queue goes on");
    drop(running);
    pool.audit().unwrap();
}

#[test]
fn a_request_that_waits_for_a_floor_is_woken() {
    let pool = pool(40, &[(A, limits(None, 20)), (B, limits(None, 0))]);
    run(&pool, 1, 20, A);
    let lease = pool.allocate(AllocRequest::new(17)).unwrap();
    let tokens = prompt(2, 6 * BLOCK_TOKENS);
    let request_of_b = request(2, &tokens, Some(B));
    let mut waiting = pin!(pool.admit_async(&request_of_b).into_future());
    assert!(poll(waiting.as_mut()).is_pending(), "3 are free, and A is at its floor");
    pool.set_tenant(A, limits(None, 17)).unwrap();
    let Poll::Ready(Ok(sequence)) = poll(waiting.as_mut()) else { panic!("A has 3 beyond its floor") };
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((17, 17), (6, 0)));
    drop((sequence, lease));
    pool.audit().unwrap();
}

#[tokio::test]
async fn a_pool_does_not_shrink_below_its_floors() {
    let pool = pool(100, &[(A, limits(None, 30)), (B, limits(None, 20))]);
    run(&pool, 1, 40, A);
    run(&pool, 2, 40, B);
    let error = pool.resize_with(49, ResizeOptions::default()).await.unwrap_err();
    assert_eq!(error, ResizeError::Floors { asked: 49, floors: 50 });
    pool.resize(50).await.unwrap();
    assert_eq!((pool.stats().total, holds(&pool, A).0, holds(&pool, B).0), (50, 30, 20));
    pool.audit().unwrap();
}

#[test]
fn a_floor_holds_for_demoted_and_retained_blocks() {
    let hints = kvpool::hints::HintLimits::new();
    let cache = PrefixConfig::new().tolerance(0.0);
    let tenants = [(A, limits(None, 10)), (B, limits(None, 0))];
    let pool = builder(60, cache).tenants(tenants).hints(hints).build().unwrap();
    let hashes = |number, blocks| {
        let cache = pool.prefix_cache().unwrap();
        cache.hashes(&PrefixKeys::new(), &prompt(number, blocks * BLOCK_TOKENS)).unwrap()
    };
    run(&pool, 1, 20, A);
    run(&pool, 2, 10, B);
    run(&pool, 3, 10, None);
    let hint = |number, blocks, action| {
        let target = kvpool::hints::Target::Hashes(hashes(number, blocks));
        pool.hint(&kvpool::hints::Hint::new(target, action))
    };
    let until = pool.prefix_cache().unwrap().now() + 60_000;
    hint(1, 20, kvpool::hints::Action::Demote);
    hint(2, 10, kvpool::hints::Action::Retain { priority: CachePriority::Low, until });
    let lease = evict(&pool, 12).unwrap();
    assert_eq!((holds(&pool, A), in_cache(&pool, 3)), ((10, 10), 8), "demoted ones first");
    let rest = evict(&pool, 10).unwrap();
    assert_eq!((holds(&pool, A), holds(&pool, B), in_cache(&pool, 3)), ((10, 10), (8, 8), 0));
    drop((lease, rest));
    run(&pool, 4, 20, A);
    pool.audit().unwrap();
}

#[test]
fn a_run_of_frames_respects_floors() {
    let pool = pool(128, &[(A, limits(None, 64)), (B, limits(None, 0))]);
    run(&pool, 1, 60, A);
    run(&pool, 2, 60, B);
    let asked = AllocRequest::new(40).contiguous();
    let lease = pool.allocate(asked).expect("B's blocks lie in a row");
    assert_eq!(holds(&pool, A), (60, 60));
    assert!(pool.allocate(asked).is_err());
    assert_eq!(holds(&pool, A), (60, 60));
    drop(lease);
    pool.audit().unwrap();
}

#[test]
fn a_tenant_may_evict_its_own_blocks_for_a_run_of_frames() {
    let pool = pool(64, &[(A, limits(None, 60)), (B, limits(None, 0))]);
    run(&pool, 1, 60, A);
    let rest = pool.allocate(AllocRequest::new(pool.free_blocks())).unwrap();
    let tokens = prompt(2, 10 * BLOCK_TOKENS);
    let of = |id, tenant| request(id, &tokens, Some(tenant)).contiguous();
    let refused = pool.admit(&of(2, B)).map(drop).unwrap_err();
    assert!(matches!(refused, SequenceError::Alloc(AllocError::Exhausted { evictable: 0, .. })), "{refused}");
    let sequence = pool.admit(&of(3, A)).expect("they are its own");
    assert_eq!(holds(&pool, A), (60, 50));
    drop((sequence, rest));
    pool.audit().unwrap();
}

#[test]
fn a_waiting_request_evicts_for_its_quota_when_it_can_be_served() {
    let pool = pool(40, &[(A, limits(25, 0))]);
    run(&pool, 1, 20, A);
    let lease = pool.allocate(AllocRequest::new(20)).unwrap();
    let tokens = prompt(2, 22 * BLOCK_TOKENS);
    let request_of_a = request(2, &tokens, Some(A));
    let mut waiting = pin!(pool.admit_async(&request_of_a).into_future());
    assert!(poll(waiting.as_mut()).is_pending(), "20 are leased");
    let refusals = pool.metrics().refusals;
    for _ in 0..9 {
        assert!(poll(waiting.as_mut()).is_pending());
        assert_eq!((holds(&pool, A), pool.metrics().refusals), ((20, 20), refusals));
    }
    drop(lease);
    let Poll::Ready(Ok(sequence)) = poll(waiting.as_mut()) else { panic!("20 are free") };
    assert_eq!(holds(&pool, A), (25, 3));
    drop(sequence);
    pool.audit().unwrap();
}
