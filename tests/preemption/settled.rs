//! Waits for the batches that write a sequence, and for all up to a ticket.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};

use kvpool::{SequenceId, SettleError, Ticket, TransferError};

use super::kv::{admit, check, extend, is_idle, plain, pool, pools, prompt};
use super::{far, near, past};

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// A sequence waits for those that wrote it, each of them, and for no other. No runtime is needed,
/// and a future that waits is polled once for each wake-up.
#[test]
fn the_writers_and_no_others() {
    let pool = pool(plain(), 50);
    let wakes = Arc::new(Wakes::default());
    let waker = Waker::from(wakes.clone());
    let mut context = Context::from_waker(&waker);
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    assert_eq!(pin!(pool.settled(&sequence)).poll(&mut context), Poll::Ready(Ok(())));
    let older = pool.begin_batch();
    let (mut a, mut b) = (pool.begin_batch(), pool.begin_batch());
    let later = pool.begin_batch();
    a.append(&mut sequence, 3).unwrap();
    b.append(&mut sequence, 9).unwrap();
    let fork = sequence.fork(SequenceId(2)).unwrap();
    let mut waits = [pool.settled(&sequence), pool.settled(&fork)].map(Box::pin);
    for wait in &mut waits {
        assert!(wait.as_mut().poll(&mut context).is_pending());
    }
    b.finish();
    assert_eq!(wakes.0.load(SeqCst), 0, "one of two has ended");
    a.finish();
    assert_eq!(wakes.0.load(SeqCst), 2);
    for mut wait in waits {
        assert_eq!(wait.as_mut().poll(&mut context), Poll::Ready(Ok(())));
    }
    drop((older, later, fork, sequence));
    is_idle(&pool);
}

/// Tokens stored again by a batch that appended none are written by it.
#[tokio::test]
async fn a_store_is_a_write() {
    let pool = pool(plain(), 50);
    let tokens = prompt(1, 3);
    let mut sequence = admit(&pool, 1, &tokens).unwrap();
    let mut batch = pool.begin_batch();
    super::kv::store(&mut batch, &mut sequence, 0, &tokens);
    let error = pool.settled(&sequence).until(past()).await.unwrap_err();
    assert_eq!(error, SettleError::Deadline { batch: batch.ticket() });
    batch.finish();
    pool.settled(&sequence).until(past()).await.unwrap();
}

/// More writers at once than a sequence tells apart: all are waited for.
#[tokio::test]
async fn many_writers() {
    let pool = pool(plain(), 50);
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    let mut batches: Vec<_> = (0..7).map(|_| pool.begin_batch()).collect();
    for batch in &mut batches {
        batch.append(&mut sequence, 1).unwrap();
    }
    let mut rng = fastrand::Rng::with_seed(3);
    while let Some(last) = batches.iter().map(|batch| batch.ticket()).max() {
        let error = pool.settled(&sequence).until(past()).await.unwrap_err();
        assert!(matches!(error, SettleError::Deadline { batch } if batch <= last), "{error}");
        batches.swap_remove(rng.usize(..batches.len())).finish();
    }
    pool.settled(&sequence).await.unwrap();
}

#[tokio::test]
async fn all_batches_up_to_a_ticket() {
    let pool = pool(plain(), 50);
    pool.settled_up_to(Ticket(0)).await.unwrap();
    let want = SettleError::NotBegun { ticket: Ticket(1), newest: Ticket(0) };
    assert_eq!(pool.settled_up_to(Ticket(1)).await, Err(want));
    let (a, b, c) = (pool.begin_batch(), pool.begin_batch(), pool.begin_batch());
    let (first, second) = (a.ticket(), b.ticket());
    b.finish();
    let error = pool.settled_up_to(second).until(near()).await.unwrap_err();
    assert_eq!(error, SettleError::Deadline { batch: first });
    let (waited, ()) = tokio::join!(pool.settled_up_to(second).until(far()), async { a.finish() });
    waited.unwrap();
    c.finish();
}

#[tokio::test]
async fn foreign_sequences() {
    let (here, there) = pools(20);
    let sequence = here.sequence(SequenceId(7)).open().unwrap();
    assert_eq!((here.owns(&sequence), there.owns(&sequence)), (true, false));
    assert_eq!(sequence.pool_tag(), here.tag());
    let want = SettleError::ForeignSequence { id: SequenceId(7), pool: there.tag() };
    assert_eq!(there.settled(&sequence).await, Err(want));
}

/// A sequence knows its pool while there is one, and does not keep it.
#[tokio::test]
async fn the_pool_of_a_sequence() {
    let (here, there) = pools(20);
    let sequence = admit(&here, 7, &prompt(1, 9)).unwrap();
    assert_eq!(sequence.pool().unwrap().tag(), here.tag());
    let (moved, _) = here.migrate(sequence, &there).await.unwrap();
    let pool = moved.pool().unwrap();
    assert!(pool.owns(&moved) && pool.tag() == there.tag());
    drop((there, pool));
    assert!(moved.pool().is_none());
    drop(moved);
    is_idle(&here);
}

/// A wait that is dropped leaves nothing behind; one that outlives its pool completes.
#[test]
fn dropped_waits_and_pools() {
    let pool = pool(plain(), 50);
    let mut context = Context::from_waker(Waker::noop());
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 3).unwrap();
    let mut kept = Box::pin(pool.settled(&sequence));
    for polls in 0..3 {
        let mut dropped = Box::pin(pool.settled(&sequence));
        for _ in 0..polls {
            assert!(dropped.as_mut().poll(&mut context).is_pending());
        }
    }
    assert!(kept.as_mut().poll(&mut context).is_pending());
    assert_eq!(pool.blocks().clock().waiting_for_ends(), 1);
    drop((pool, sequence));
    batch.finish();
    assert_eq!(kept.as_mut().poll(&mut context), Poll::Ready(Ok(())));
}

/// A migration waits for its sequence until the deadline, and gives it back then.
#[tokio::test]
async fn migrations_with_a_deadline() {
    let (from, to) = pools(20);
    let tokens = prompt(1, 21);
    let mut sequence = from.sequence(SequenceId(7)).tokens(&tokens).unwrap();
    let older = from.begin_batch();
    let mut batch = from.begin_batch();
    extend(&mut batch, &mut sequence, &tokens).unwrap();
    let want = TransferError::BeingWritten { id: SequenceId(7), batch: batch.ticket() };
    for deadline in [past(), near()] {
        let error = from.replicate(&sequence, &to).until(deadline).await.unwrap_err();
        assert_eq!(error, want);
        let error = from.migrate(sequence, &to).until(deadline).await.unwrap_err();
        assert_eq!(error.error, want);
        sequence = *error.sequence;
        assert_eq!((sequence.len(), to.sequence_count()), (21, 0));
    }
    let migration = from.migrate(sequence, &to).until(far());
    let (arrived, ()) = tokio::join!(migration, async { batch.finish() });
    check(&to, &arrived.unwrap().0, &tokens);
    older.finish();
    [from, to].iter().for_each(is_idle);
}

/// A migration that is dropped while it waits closes its sequence; a replication leaves it open.
#[tokio::test]
async fn dropped_while_waiting() {
    let (from, to) = pools(20);
    let tokens = prompt(1, 21);
    let mut context = Context::from_waker(Waker::noop());
    let mut sequence = from.sequence(SequenceId(7)).tokens(&tokens).unwrap();
    let mut batch = from.begin_batch();
    extend(&mut batch, &mut sequence, &tokens).unwrap();
    {
        let mut waiting = pin!(from.replicate(&sequence, &to).until(far()));
        assert!(waiting.as_mut().poll(&mut context).is_pending());
    }
    assert_eq!(from.sequence_count(), 1);
    {
        let mut waiting = pin!(from.migrate(sequence, &to).until(far()));
        assert!(waiting.as_mut().poll(&mut context).is_pending());
    }
    assert_eq!((from.sequence_count(), to.sequence_count()), (0, 0));
    assert_eq!(from.blocks().clock().waiting_for_ends(), 0);
    batch.finish();
    [from, to].iter().for_each(is_idle);
}
