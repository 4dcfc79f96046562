//! Theorem: no request sleeps while a block is free. Whichever way a block becomes free (into a
//! magazine, into the bitmaps, out of retire lists at the end of a batch, by growth, by a request
//! that is undone, by a thread that ends), and wherever the request that waits for it is at that
//! moment, the request gets it; the most urgent one first; and a dropped request passes its turn
//! on. A thread that sleeps forever is a deadlock, which the checker reports.
//!
//! Theorem: a request that is woken and not polled holds up no other, and loses nothing by it. (The
//! patience of these pools is zero or infinite: a model has no time.)
//!
//! Theorem: no request waits for a lost device. When the device is found to have failed, every
//! waiting or arriving request is refused; none keeps sleeping.
#![cfg(kvpool_loom)]

use std::pin::pin;
use std::time::Duration;

use kvpool::storage::KvLayout;
use kvpool::{AllocError, AllocRequest, FrameId, Lease, Pool, PoolBuilder, Priority};
use kvpool_loom_tests::{block_on, boxed, check_to, check_wide, conclude, join_last, lull};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering::*};
use loom::thread;

fn open(blocks: usize, blocks_max: usize, magazine_blocks: usize, reserve: usize) -> Pool {
    builder(blocks, blocks_max, magazine_blocks, reserve).build().unwrap()
}

/// Creates a pool of one block, in which a head that was woken is passed over as soon as another
/// thread sees that it was not polled.
fn impatient() -> Pool {
    builder(1, 1, 0, 0).turn_patience(Duration::ZERO).build().unwrap()
}

fn builder(blocks: usize, blocks_max: usize, magazine_blocks: usize, reserve: usize) -> PoolBuilder {
    let layout = KvLayout::named("tiny").unwrap();
    Pool::builder(layout)
        .blocks(blocks)
        .blocks_max(blocks_max)
        .reserve(reserve)
        .without_null_block()
        .segment_blocks(4)
        .without_storage()
        .magazine_blocks(magazine_blocks)
}

/// Every block is free, and no request waits: frees take the short path again.
fn close(pool: &Pool) {
    conclude(pool.blocks());
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, pool.stats().waiting), (0, 0), "{report:?}");
    assert!(!pool.blocks().is_awaited());
}

fn one() -> AllocRequest {
    AllocRequest::new(1)
}

/// A thread that waits for a block, and frees it.
fn waiter(pool: &Pool, request: AllocRequest) -> thread::JoinHandle<()> {
    let pool = pool.clone();
    thread::spawn(move || drop(block_on(pool.allocate_async(request)).unwrap()))
}

/// The last block is freed into the magazine that it came from, or, if its owner sees the waiting
/// request, into the bitmaps.
#[test]
fn freed_into_a_magazine() {
    check_wide(2, "waiters::freed_into_a_magazine", || {
        let pool = open(1, 1, 1, 0);
        drop(pool.allocate(one()).unwrap());
        let held = pool.allocate(one()).unwrap();
        let thread = waiter(&pool, one());
        drop(held);
        thread.join().unwrap();
        close(&pool);
    });
}

#[test]
fn freed_into_the_bitmaps() {
    check_wide(2, "waiters::freed_into_the_bitmaps", || {
        let pool = open(1, 1, 0, 0);
        let held = pool.allocate(one()).unwrap();
        let thread = waiter(&pool, one());
        drop(held);
        thread.join().unwrap();
        close(&pool);
    });
}

/// The block is in a retire list when the batch ends, and that end is the only announcement: it is
/// no sequence's batch, which looks for frames left by moves.
#[test]
fn held_back_by_a_batch() {
    check_wide(2, "waiters::held_back_by_a_batch", || {
        let pool = open(1, 1, 0, 0);
        let held = pool.allocate(one()).unwrap();
        let batch = pool.blocks().begin_batch();
        drop(held);
        let thread = waiter(&pool, one());
        pool.blocks().end_batch(batch);
        thread.join().unwrap();
        close(&pool);
    });
}

/// The batch ends while the block is on its way into a retire list.
#[test]
fn freed_while_the_batch_ends() {
    check_to(1, "waiters::freed_while_the_batch_ends", || {
        let pool = open(1, 1, 0, 0);
        let held = pool.allocate(one()).unwrap();
        let batch = pool.begin_batch();
        let thread = waiter(&pool, one());
        let device = thread::spawn(move || batch.finish());
        drop(held);
        device.join().unwrap();
        thread.join().unwrap();
        close(&pool);
    });
}

/// A batch that begins stands for older tickets than its own for a moment, and holds back blocks
/// that it does not see. Then it continues until the block was allocated.
#[test]
fn held_back_by_a_batch_that_begins() {
    const UNKNOWN: u64 = u64::MAX;
    const SERVED: u64 = u64::MAX - 1;
    check_wide(2, "waiters::held_back_by_a_batch_that_begins", || {
        let pool = open(1, 1, 0, 0);
        let held = pool.allocate(one()).unwrap();
        let freed = Arc::new(AtomicU64::new(UNKNOWN));
        let (other, tag) = (pool.clone(), freed.clone());
        let engine = thread::spawn(move || {
            let long = other.begin_batch();
            loop {
                match tag.load(Acquire) {
                    UNKNOWN => {}
                    SERVED => break,
                    // It may see the block, which becomes available when it ends.
                    newest if long.ticket().0 <= newest => break,
                    _ => {}
                }
                thread::yield_now();
            }
        });
        let short = pool.begin_batch();
        drop(held);
        freed.store(pool.blocks().clock().newest().0, Release);
        short.finish();
        drop(block_on(pool.allocate_async(one())).unwrap());
        freed.store(SERVED, Release);
        join_last(engine);
        close(&pool);
    });
}

/// A move vacated a frame that two batches may read. The end of each looks whether the frame is
/// free now; the one that looked too early has it in its hands when the other's end makes it free.
#[test]
fn left_by_a_move() {
    check_wide(2, "waiters::left_by_a_move", || {
        let pool = open(2, 2, 0, 0);
        let mut held = pool.allocate(one()).unwrap();
        held.seal(..);
        let from = held.frames().next().unwrap();
        let batches = [pool.begin_batch(), pool.begin_batch()];
        let moved =
            pool.blocks().begin_wave([(from, FrameId(1 - from.0))], &mut |_, _| panic!("it can move"));
        // SAFETY: there are no bytes.
        assert_eq!(unsafe { moved.publish(&mut |_, _| panic!("no other thread has it")) }, 1);
        let [first, second] = batches;
        let thread = thread::spawn(move || drop(first));
        drop(second);
        drop(block_on(pool.allocate_async(one())).unwrap());
        join_last(thread);
        drop(held);
        close(&pool);
    });
}

#[test]
fn beside_growth() {
    check_wide(2, "waiters::beside_growth", || {
        let pool = open(1, 2, 0, 0);
        let held = pool.allocate(one()).unwrap();
        let thread = waiter(&pool, one());
        pool.grow(1).unwrap();
        thread.join().unwrap();
        drop(held);
        close(&pool);
    });
}

/// Another request takes the free block and frees it again, because it needs two.
#[test]
fn beside_a_request_that_is_undone() {
    check_wide(2, "waiters::beside_a_request_that_is_undone", || {
        let pool = open(2, 2, 0, 0);
        let held = pool.allocate(one()).unwrap();
        let thread = waiter(&pool, one());
        let two = pool.allocate(AllocRequest::new(2));
        assert!(two.is_err());
        thread.join().unwrap();
        drop(held);
        close(&pool);
    });
}

/// A thread that ends leaves blocks in its magazines.
#[test]
fn beside_a_thread_that_ends() {
    check_to(1, "waiters::beside_a_thread_that_ends", || {
        let pool = open(1, 1, 1, 0);
        let other = pool.clone();
        let ending = thread::spawn(move || drop(block_on(other.allocate_async(one())).unwrap()));
        drop(block_on(pool.allocate_async(one())).unwrap());
        join_last(ending);
        close(&pool);
    });
}

/// Two requests sleep when a block is freed: the urgent one gets it, and then the other.
#[test]
fn two_priorities_and_one_free() {
    check_wide(2, "waiters::two_priorities_and_one_free", || {
        let pool = open(1, 1, 0, 0);
        let held = pool.allocate_owned(one()).unwrap();
        let mut normal = pin!(pool.allocate_async(one()).into_future());
        lull(normal.as_mut());
        let mut urgent = pin!(pool.allocate_async(one().priority(Priority::Urgent)).into_future());
        lull(urgent.as_mut());
        let thread = thread::spawn(move || drop(held));
        let mut order = vec![];
        block_on(std::future::poll_fn(|context| {
            for (name, future) in [("normal", normal.as_mut()), ("urgent", urgent.as_mut())] {
                if !order.contains(&name) && future.poll(context).is_ready() {
                    order.push(name);
                }
            }
            if order.len() == 2 { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        }));
        assert_eq!(order, ["urgent", "normal"]);
        join_last(thread);
        close(&pool);
    });
}

/// Two threads wait for the only block: both get it, one after the other, in either order.
#[test]
fn two_waiters() {
    check_wide(2, "waiters::two_waiters", || {
        let pool = open(1, 1, 0, 0);
        let held = pool.allocate(one()).unwrap();
        let thread = waiter(&pool, one());
        drop(held);
        drop(block_on(pool.allocate_async(one().priority(Priority::High))).unwrap());
        thread.join().unwrap();
        close(&pool);
    });
}

/// The head of the queue is dropped after a block was freed, while the second falls asleep or
/// sleeps already.
#[test]
fn a_dropped_future_hands_its_turn_on() {
    check_wide(2, "waiters::a_dropped_future_hands_its_turn_on", || {
        let pool = open(1, 1, 0, 0);
        let held = pool.allocate_owned(one()).unwrap();
        let mut first = Box::pin(pool.allocate_async(one()).into_future());
        lull(first.as_mut());
        let thread = waiter(&pool, one());
        drop(held);
        drop(first);
        thread.join().unwrap();
        close(&pool);
    });
}

/// The head of the queue is dropped while the block is freed: asleep, woken, or in between.
#[test]
fn dropped_while_it_is_woken() {
    check_wide(2, "waiters::dropped_while_it_is_woken", || {
        let pool = open(1, 1, 0, 0);
        let held = pool.allocate_owned(one()).unwrap();
        let mut first = boxed(|| pool.allocate_async(one()).into_future());
        lull(first.as_mut());
        let thread = thread::spawn(move || drop(held));
        let second = boxed(|| pool.allocate_async(one().priority(Priority::High)).into_future());
        drop(first);
        drop(block_on(second).unwrap());
        join_last(thread);
        close(&pool);
    });
}

/// An urgent request takes the reserve while a block is freed and a normal one waits for it: both
/// are served, and the reserve is full at the end.
#[test]
fn the_reserve_and_a_waiter() {
    check_to(1, "waiters::the_reserve_and_a_waiter", || {
        let pool = open(2, 2, 0, 1);
        let held = pool.allocate(one()).unwrap();
        let thread = waiter(&pool, one());
        let urgent = pool.allocate(one().priority(Priority::Urgent)).unwrap();
        drop(held);
        drop(urgent);
        thread.join().unwrap();
        close(&pool);
        assert_eq!(pool.stats().reserved, 1);
    });
}

/// The free wakes the head of the queue, which is not polled. The second request arrives before or
/// after, and gets the block; then the head is polled, and gets it too.
#[test]
fn a_head_that_does_not_come_is_passed_over() {
    check_wide(2, "waiters::a_head_that_does_not_come_is_passed_over", || {
        let pool = impatient();
        let held = pool.allocate_owned(one()).unwrap();
        let mut first = pin!(pool.allocate_async(one()).into_future());
        let bell = lull(first.as_mut());
        let thread = waiter(&pool, one());
        drop(held);
        // By the free, or by the second request, if the two met at the queue.
        bell.wait();
        // Any call that announces, once.
        pool.blocks().announce();
        thread.join().unwrap();
        drop(block_on(first).unwrap());
        close(&pool);
    });
}

/// The head is passed over, and polled late: the second request needs more than was freed, and has
/// searched for it, or has not yet. The head gets the blocks for which it was woken.
#[test]
fn a_head_that_comes_late_has_its_place() {
    check_wide(2, "waiters::a_head_that_comes_late_has_its_place", || {
        let pool = builder(2, 2, 0, 0).turn_patience(Duration::ZERO).build().unwrap();
        let held = [(); 2].map(|()| pool.allocate_owned(one()).unwrap());
        let mut first = pin!(pool.allocate_async(one()).into_future());
        let bell = lull(first.as_mut());
        let other = pool.clone();
        let mut second = Box::pin(async move { other.allocate_async(AllocRequest::new(2)).await });
        lull(second.as_mut());
        let thread = thread::spawn(move || drop(block_on(second).unwrap()));
        let [freed, kept] = held;
        drop(freed);
        bell.wait();
        pool.blocks().announce();
        drop(block_on(first).unwrap());
        drop(kept);
        join_last(thread);
        close(&pool);
    });
}

/// The head was passed over, and is dropped while the second request waits.
#[test]
fn a_head_that_was_passed_over_is_dropped() {
    check_wide(2, "waiters::a_head_that_was_passed_over_is_dropped", || {
        let pool = impatient();
        let held = pool.allocate_owned(one()).unwrap();
        let mut first = Box::pin(pool.allocate_async(one()).into_future());
        let bell = lull(first.as_mut());
        let thread = waiter(&pool, one());
        drop(held);
        bell.wait();
        let other = pool.clone();
        let announcing = thread::spawn(move || other.blocks().announce());
        drop(first);
        thread.join().unwrap();
        announcing.join().unwrap();
        close(&pool);
    });
}

fn is_refused(outcome: &Result<Lease<'static>, AllocError>) {
    assert!(matches!(outcome, Err(AllocError::DeviceLost { .. })), "{outcome:?}");
}

/// The device is found to have failed before the request arrives, while it searches, while it falls
/// asleep, or when it sleeps.
#[test]
fn refused_when_the_device_is_lost() {
    check_wide(2, "waiters::refused_when_the_device_is_lost", || {
        let pool = open(1, 1, 0, 0);
        let held = pool.allocate_owned(one()).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || is_refused(&block_on(other.allocate_async(one()))));
        pool.blocks().poison();
        join_last(thread);
        drop(held);
        close(&pool);
    });
}

/// The thread that found the failure tells the head of the queue, and the head tells the second.
#[test]
fn the_whole_line_is_refused() {
    check_wide(2, "waiters::the_whole_line_is_refused", || {
        let pool = open(1, 1, 0, 0);
        let held = pool.allocate_owned(one()).unwrap();
        let mut normal = pin!(pool.allocate_async(one()).into_future());
        lull(normal.as_mut());
        let mut high = pin!(pool.allocate_async(one().priority(Priority::High)).into_future());
        lull(high.as_mut());
        let other = pool.clone();
        let thread = thread::spawn(move || other.blocks().poison());
        let mut refused = [false; 2];
        block_on(std::future::poll_fn(|context| {
            for (refused, future) in refused.iter_mut().zip([normal.as_mut(), high.as_mut()]) {
                if !*refused && let std::task::Poll::Ready(outcome) = future.poll(context) {
                    is_refused(&outcome);
                    *refused = true;
                }
            }
            if refused == [true; 2] { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        }));
        join_last(thread);
        drop(held);
        close(&pool);
    });
}
