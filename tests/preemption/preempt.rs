//! Closed and swapped sequences, and what is reported of them.

use std::pin::pin;
use std::task::{Context, Waker};

use kvpool::{Preempt, ResumeOptions, SequenceError, SequenceId, TransferError};

use super::kv::{admit, builder, cached, check, extend, is_idle, plain, pool, pools, prompt};
use super::{far, near};

/// Full blocks of known tokens stay in the cache; the unfinished last block is lost.
#[tokio::test]
async fn recompute_keeps_cached_blocks() {
    let pool = pool(plain(), 50);
    let tokens = prompt(1, 42);
    let sequence = admit(&pool, 7, &tokens).unwrap();
    let fork = sequence.fork(SequenceId(8)).unwrap();
    let preempted = pool.preempt(fork, Preempt::Recompute).await.unwrap();
    assert_eq!((preempted.id, preempted.shared_blocks), (SequenceId(8), 11));
    assert_eq!((preempted.freed_blocks, preempted.cached_blocks), (0, 0));
    let free = pool.free_blocks();
    let preempted = pool.preempt(sequence, Preempt::Recompute).await.unwrap();
    assert_eq!((preempted.freed_blocks, preempted.cached_blocks, preempted.shared_blocks), (1, 10, 0));
    assert_eq!((preempted.tokens_kept, preempted.tokens_lost), (40, 2));
    assert!(preempted.swapped.is_none());
    assert_eq!((pool.free_blocks() - free, cached(&pool, &tokens)), (1, 10));
    is_idle(&pool);
}

/// Without a cache all is lost; with a reusable tail nothing is.
#[tokio::test]
async fn recompute_without_a_cache_and_with_a_tail() {
    let tokens = prompt(1, 42);
    let none = builder(plain(), 50).build().unwrap();
    let sequence = admit(&none, 7, &tokens).unwrap();
    let preempted = none.preempt(sequence, Preempt::Recompute).await.unwrap();
    assert_eq!((preempted.freed_blocks, preempted.tokens_kept, preempted.tokens_lost), (11, 0, 42));
    is_idle(&none);
    let pool = pool(plain(), 50);
    let mut sequence = pool.sequence(SequenceId(7)).reuse_tail().tokens(&tokens).unwrap();
    let mut batch = pool.begin_batch();
    extend(&mut batch, &mut sequence, &tokens).unwrap();
    batch.finish();
    let preempted = pool.preempt(sequence, Preempt::Recompute).await.unwrap();
    assert_eq!((preempted.freed_blocks, preempted.cached_blocks, preempted.tokens_lost), (0, 11, 0));
    is_idle(&pool);
}

/// A batch of another sequence, older than all, neither delays the swap nor loses anything. Blocks
/// that a fork shares stay.
#[tokio::test]
async fn swap_and_back() {
    let (pool, host) = pools(50);
    let tokens = prompt(1, 42);
    let older = pool.begin_batch();
    let sequence = admit(&pool, 7, &tokens).unwrap();
    let fork = sequence.fork(SequenceId(8)).unwrap();
    let preempted = pool.preempt(sequence, Preempt::Swap(&host)).await.unwrap();
    assert_eq!((preempted.freed_blocks, preempted.cached_blocks, preempted.shared_blocks), (0, 0, 11));
    assert_eq!((preempted.tokens_kept, preempted.tokens_lost), (42, 0));
    let swapped = preempted.swapped.unwrap();
    assert_eq!((swapped.pool, swapped.report.carried.blocks), (host.tag(), 11));
    check(&host, &swapped.sequence, &tokens);
    drop(fork);
    assert!(pool.victims(&kvpool::LowestPriorityFirst).is_empty());
    let (back, _) = pool.resume(&swapped.sequence, ResumeOptions::new()).await.unwrap();
    check(&pool, &back, &tokens);
    drop((older, back, swapped));
    [pool, host].iter().for_each(is_idle);
}

/// Refused preemptions give the sequence back, unchanged.
#[tokio::test]
async fn refusals() {
    let (pool, host) = pools(20);
    let tokens = prompt(1, 21);
    let mut sequence = pool.sequence(SequenceId(7)).tokens(&tokens).unwrap();
    let mut batch = pool.begin_batch();
    extend(&mut batch, &mut sequence, &tokens).unwrap();
    let error = pool.preempt(sequence, Preempt::Swap(&host)).until(near()).await.unwrap_err();
    assert_eq!(error.error, TransferError::BeingWritten { id: SequenceId(7), batch: batch.ticket() });
    // Recompute does not wait.
    let preempt = |sequence, how| pool.preempt(sequence, how).until(far());
    let error = host.preempt(*error.sequence, Preempt::Recompute).await.unwrap_err();
    assert_eq!(error.error, TransferError::ForeignSequence { id: SequenceId(7), pool: host.tag() });
    let error = preempt(*error.sequence, Preempt::Swap(&pool)).await.unwrap_err();
    assert!(matches!(&error.error, TransferError::Invalid(invalid) if invalid.what == "target"), "{error}");
    batch.finish();
    let open = host.sequence(SequenceId(7)).open().unwrap();
    let error = preempt(*error.sequence, Preempt::Swap(&host)).await.unwrap_err();
    assert_eq!(error.error, TransferError::Sequence(SequenceError::AlreadyOpen { id: SequenceId(7) }));
    drop(open);
    check(&pool, &error.sequence, &tokens);
    let preempted = preempt(*error.sequence, Preempt::Recompute).await.unwrap();
    assert_eq!((preempted.tokens_kept, preempted.tokens_lost), (20, 1));
    [pool, host].iter().for_each(is_idle);
}

/// A closed sequence whose batch is still in flight: its blocks stay in use, and are cached, or
/// freed, when that finishes.
#[tokio::test]
async fn recompute_beside_its_batch() {
    let pool = pool(plain(), 20);
    let tokens = prompt(1, 21);
    let mut sequence = pool.sequence(SequenceId(7)).tokens(&tokens).unwrap();
    let mut batch = pool.begin_batch();
    extend(&mut batch, &mut sequence, &tokens).unwrap();
    let preempted = pool.preempt(sequence, Preempt::Recompute).await.unwrap();
    assert_eq!((preempted.freed_blocks, preempted.tokens_kept, preempted.tokens_lost), (6, 0, 21));
    assert_eq!((pool.stats().closing, pool.stats().used, pool.free_blocks()), (1, 6, 14));
    batch.finish();
    assert_eq!((pool.stats().closing, pool.stats().evictable), (0, 5));
    assert_eq!(cached(&pool, &tokens), 5);
    is_idle(&pool);
}

/// A swap that is dropped while it waits closes its sequence, in both pools.
#[tokio::test]
async fn dropped_while_waiting() {
    let (pool, host) = pools(20);
    let tokens = prompt(1, 21);
    let mut sequence = pool.sequence(SequenceId(7)).tokens(&tokens).unwrap();
    let mut batch = pool.begin_batch();
    extend(&mut batch, &mut sequence, &tokens).unwrap();
    {
        let mut waiting = pin!(pool.preempt(sequence, Preempt::Swap(&host)).into_future());
        assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    batch.finish();
    [&pool, &host].into_iter().for_each(is_idle);
    let sequence = admit(&pool, 7, &tokens).unwrap();
    drop(pool.preempt(sequence, Preempt::Swap(&host)));
    let sequence = admit(&pool, 7, &tokens).unwrap();
    drop(pool.migrate(sequence, &host).await.unwrap());
    [pool, host].iter().for_each(is_idle);
}
