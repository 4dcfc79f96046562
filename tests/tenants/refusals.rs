//! Requests that limits refuse: what is refused instead of waiting, what is tried first, and what is not evicted.

use std::future::{Future, IntoFuture};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use kvpool::Window;
use kvpool::{Append, BuildError, ResizeError, ResizeOptions, StepError, TenantError};

use super::*;

/// Polls a request once.
fn poll<T, E>(request: impl IntoFuture<Output = Result<T, E>>) -> Poll<Result<T, E>> {
    pin!(request.into_future()).poll(&mut Context::from_waker(Waker::noop()))
}

fn refused<T>(polled: Poll<Result<T, SequenceError>>) -> AllocError {
    match polled {
        Poll::Ready(Err(SequenceError::Alloc(error))) => error,
        Poll::Ready(Err(error)) => panic!("{error}"),
        Poll::Ready(Ok(_)) => panic!("it has its blocks"),
        Poll::Pending => panic!("it waits"),
    }
}

#[test]
fn a_request_that_floors_keep_from_its_blocks_does_not_wait() {
    let pool = pool(100, &[(A, limits(None, 60)), (B, limits(None, 0))]);
    run(&pool, 1, 60, A);
    let tokens = prompt(2, 50 * BLOCK_TOKENS);
    let request_of_b = request(2, &tokens, Some(B));
    let error = refused(poll(pool.admit_async(&request_of_b)));
    assert_eq!(error, AllocError::Floors { asked: 50, most: 40 });
    assert_eq!(error.retry(), kvpool::Retry::Never);
    let leased = poll(pool.allocate_async(AllocRequest::new(41)));
    assert!(matches!(leased, Poll::Ready(Err(AllocError::Floors { asked: 41, most: 40 }))));
    // What it hits is not available either, unless it is protected.
    run(&pool, 2, 10, B);
    let error = refused(poll(pool.admit_async(&request_of_b)));
    assert_eq!(error, AllocError::Floors { asked: 40, most: 30 });
    assert_eq!(holds(&pool, A), (60, 60));
    let shared = prompt(1, 90 * BLOCK_TOKENS);
    let request_of_b = request(3, &shared, Some(B));
    let Poll::Ready(Ok(sequence)) = poll(pool.admit_async(&request_of_b)) else { panic!("it hits A's 60") };
    assert_eq!((sequence.len(), holds(&pool, B).0 >= 30), (60 * BLOCK_TOKENS, true));
    drop(sequence);
    // As much as is left is waited for.
    let lease = pool.allocate(AllocRequest::new(20)).unwrap();
    assert!(poll(pool.allocate_async(AllocRequest::new(40))).is_pending());
    drop(lease);
    // Growth, with what the sequence has.
    let mut growing = open(&pool, 4, 19, B);
    let lease = pool.allocate(AllocRequest::new(20)).unwrap();
    assert!(poll(pool.reserve_async(&mut growing, 20 * BLOCK_TOKENS)).is_pending());
    let error = refused(poll(pool.reserve_async(&mut growing, 24 * BLOCK_TOKENS)));
    assert!(matches!(error, AllocError::Floors { most: 20, .. }), "{error}");
    drop((growing, lease));
    // The tenant itself is not kept from its own.
    assert!(matches!(poll(pool.admit_async(&request(5, &tokens, Some(A)))), Poll::Ready(Ok(_))));
    pool.audit().unwrap();
}

#[test]
fn a_wait_ends_when_blocks_within_a_floor_are_cached() {
    let pool = pool(100, &[(A, limits(None, 60)), (B, limits(None, 0))]);
    let mut of_a = open(&pool, 1, 1, A);
    let lease = pool.allocate(AllocRequest::new(48)).unwrap();
    let (tokens, short) = (prompt(2, 60 * BLOCK_TOKENS), prompt(3, 4));
    let request_of_b = request(2, &tokens, Some(B));
    let mut first = pin!(pool.admit_async(&request_of_b).into_future());
    let mut context = Context::from_waker(Waker::noop());
    assert!(first.as_mut().poll(&mut context).is_pending(), "A holds 2");
    let behind = request(3, &short, None);
    let mut second = pin!(pool.admit_async(&behind).into_future());
    assert!(second.as_mut().poll(&mut context).is_pending());
    let mut batch = pool.begin_batch();
    batch.append(&mut of_a, Tokens::Ids(&prompt(4, 49 * BLOCK_TOKENS))).unwrap();
    batch.finish();
    drop((of_a, lease));
    let error = refused(first.as_mut().poll(&mut context));
    assert_eq!(error, AllocError::Floors { asked: 60, most: 50 });
    assert!(matches!(second.as_mut().poll(&mut context), Poll::Ready(Ok(_))), "the queue goes on");
    pool.audit().unwrap();
}

#[test]
fn a_tail_gives_way_to_its_own_sequence_in_a_quota() {
    let pool = pool(100, &[(A, limits(4, 0))]);
    let (short, long) = (prompt(1, 10), prompt(1, 13));
    for waits in [false, true] {
        let request_of = |tokens| request(1, tokens, Some(A)).reuse_tail();
        let mut sequence = pool.admit(&request_of(&short)).unwrap();
        let mut batch = pool.begin_batch();
        let missing = short.len() - sequence.len();
        batch.append(&mut sequence, Tokens::Announced(missing)).unwrap();
        batch.finish();
        drop(sequence);
        assert_eq!(holds(&pool, A), (3, 3), "two full blocks, and a tail");
        let request = request_of(&long);
        let sequence = if waits {
            // In a turn.
            let rest = pool.allocate(AllocRequest::new(97)).unwrap();
            let mut admission = pin!(pool.admit_async(&request).into_future());
            let mut context = Context::from_waker(Waker::noop());
            assert!(admission.as_mut().poll(&mut context).is_pending());
            drop(rest);
            let Poll::Ready(admitted) = admission.as_mut().poll(&mut context) else { panic!("it waits") };
            admitted.unwrap()
        } else {
            pool.admit(&request).unwrap()
        };
        assert_eq!((sequence.len(), holds(&pool, A).0), (8, 4));
        drop(sequence);
        pool.evict_cached(0);
    }
    pool.audit().unwrap();
}

/// With the tail, others' floors would keep the request from its blocks for good. A refusal counts when
/// it ends the wait.
#[test]
fn a_tail_gives_way_to_its_own_sequence_beside_floors() {
    let pool = pool(10, &[(B, limits(None, 4))]);
    run(&pool, 1, 4, B);
    let (short, long) = (prompt(2, 14), prompt(2, 6 * BLOCK_TOKENS));
    let request_of = |tokens| request(2, tokens, None).reuse_tail();
    let mut sequence = pool.admit(&request_of(&short)).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, Tokens::Announced(14)).unwrap();
    batch.finish();
    drop(sequence);
    assert_eq!((pool.stats().evictable, holds(&pool, B)), (8, (4, 4)), "three full blocks, and a tail");
    let rest = pool.allocate(AllocRequest::new(2)).unwrap();
    let request = request_of(&long);
    let mut admission = pin!(pool.admit_async(&request).into_future());
    let mut context = Context::from_waker(Waker::noop());
    assert!(admission.as_mut().poll(&mut context).is_pending());
    drop(rest);
    let before = pool.metrics().refusals;
    let Poll::Ready(admitted) = admission.as_mut().poll(&mut context) else { panic!("it waits") };
    let sequence = admitted.unwrap();
    assert_eq!((sequence.len(), sequence.reserved_blocks()), (12, 3));
    assert_eq!(pool.metrics().refusals, before);
    drop(sequence);
    pool.audit().unwrap();
}

#[test]
fn a_checkpoint_gives_way_to_its_own_sequence_in_a_quota() {
    let layout = KvLayout::named("tiny").unwrap();
    let pool = Pool::builder(layout)
        .blocks(100)
        .threads(1)
        .without_storage()
        .prefix_cache(PrefixConfig::new())
        .groups([None, Some(Window::new(9).unwrap())])
        .list_tokens([4, 4])
        .states([5, 2])
        .tenants([(A, limits(24, 0))])
        .build()
        .unwrap();
    let all: Vec<u32> = (0..30).collect();
    let mut sequence = pool.admit_grouped(&request(1, &all[..28], Some(A)).chunk(16)).unwrap();
    for tokens in [16, 12] {
        let mut batch = pool.begin_batch();
        batch.append_grouped(&mut sequence, Tokens::Announced(tokens)).unwrap();
        batch.finish();
    }
    drop(sequence);
    let sequence = pool.admit_grouped(&request(2, &all, Some(A))).unwrap();
    assert_eq!(sequence.len(), 0, "beside the checkpoint it exceeds the quota");
    drop(sequence);
    pool.audit().unwrap();
}

#[test]
fn a_step_names_the_sequences_beyond_a_quota() {
    let pool = pool(100, &[(A, limits(5, 0)), (B, limits(None, 0))]);
    let (mut of_a, mut of_b) = (open(&pool, 1, 4, A), open(&pool, 2, 4, B));
    let mut batch = pool.begin_batch();
    let mut step = [Append::new(&mut of_a, 4), Append::new(&mut of_b, 4)];
    let StepError::Lacking { sequences, error } = batch.step(&mut step).unwrap_err() else {
        panic!("not named")
    };
    assert_eq!(sequences, [SequenceId(1)], "B's gets its block");
    assert!(matches!(error, AllocError::OverQuota { asked: 1, tenant: A, .. }), "{error}");
    batch.step(&mut [Append::new(&mut of_b, 4)]).unwrap();
    batch.finish();
    drop((of_a, of_b));
    pool.audit().unwrap();
}

#[tokio::test]
async fn a_shrink_that_floors_prevent_evicts_nothing() {
    let pool = pool(100, &[(A, limits(None, 30)), (B, limits(None, 0))]);
    let lease = pool.allocate(AllocRequest::new(30)).unwrap();
    run(&pool, 1, 30, A);
    run(&pool, 2, 30, B);
    let error = pool.resize_with(55, ResizeOptions::default()).await.unwrap_err();
    assert_eq!(error, ResizeError::NoRoom { asked: 55, used: 60 });
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((30, 30), (30, 30)));
    pool.resize(60).await.unwrap();
    assert_eq!((holds(&pool, A), holds(&pool, B)), ((30, 30), (0, 0)));
    drop(lease);
    pool.audit().unwrap();
}

#[tokio::test]
async fn floors_leave_the_reserve() {
    let reserved = || builder(100, PrefixConfig::new()).reserve(10);
    let floors = TenantError::Floors { tenant: A, floor: 91, others: 0, total: 90 };
    let error = reserved().tenants([(A, limits(None, 91))]).build().unwrap_err();
    assert!(matches!(error, BuildError::Tenant(error) if error == floors), "{error}");
    let pool = reserved().tenants([(A, limits(None, 90))]).build().unwrap();
    pool.set_tenant(A, limits(None, 50)).unwrap();
    assert_eq!(pool.set_tenant(A, limits(None, 91)), Err(floors));
    assert_eq!(pool.resize(59).await, Err(ResizeError::Floors { asked: 59, floors: 50 }));
    pool.resize(60).await.unwrap();
    pool.audit().unwrap();
}
