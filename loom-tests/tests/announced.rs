//! Theorem: a thread that held free blocks out of reach of a search announces them: a request that
//! searched meanwhile, and fell asleep, is woken. And while the reserve is below its mark, every
//! free is announced, so that the reserve is filled again.
//!
//! (How requests wait, and in which order, is covered by `waiters`.)
#![cfg(kvpool_loom)]

use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, FrameId, Pool, Priority, flush_thread};
use kvpool_loom_tests::{block_on, check_wide, conclude, join_last};
use loom::thread;

fn open(blocks: usize, magazine_blocks: usize, reserve: usize) -> Pool {
    let layout = KvLayout::named("tiny").unwrap();
    Pool::builder(layout)
        .blocks(blocks)
        .reserve(reserve)
        .without_null_block()
        .segment_blocks(4)
        .without_storage()
        .magazine_blocks(magazine_blocks)
        .build()
        .unwrap()
}

fn one() -> AllocRequest {
    AllocRequest::new(1)
}

fn two_in_a_row() -> AllocRequest {
    AllocRequest::new(2).contiguous()
}

/// Nothing is owned and no request waits: frees take the short path again.
fn close(pool: &Pool) {
    conclude(pool.blocks());
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, pool.stats().waiting), (0, 0), "{report:?}");
    assert!(!pool.blocks().is_awaited());
}

/// A wave holds the only free frame, and is dropped.
#[test]
fn a_wave_that_is_dropped() {
    check_wide(2, "announced::a_wave_that_is_dropped", || {
        let pool = open(2, 0, 0);
        let mut held = pool.allocate(one()).unwrap();
        let from = held.frames().next().unwrap();
        held.seal(0..1);
        let blocks = pool.blocks();
        let wave = blocks.begin_wave([(from, FrameId(1 - from.0))], &mut |_, why| panic!("{why:?}"));
        let thread = thread::spawn(move || drop(wave));
        drop(block_on(pool.allocate_async(one())).unwrap());
        join_last(thread);
        drop(held);
        close(&pool);
    });
}

/// A wave holds the only free frame, and is published: another frame is free then.
#[test]
fn a_wave_that_is_published() {
    check_wide(2, "announced::a_wave_that_is_published", || {
        let pool = open(2, 0, 0);
        let mut held = pool.allocate(one()).unwrap();
        let from = held.frames().next().unwrap();
        held.seal(0..1);
        let blocks = pool.blocks();
        let wave = blocks.begin_wave([(from, FrameId(1 - from.0))], &mut |_, why| panic!("{why:?}"));
        // SAFETY: frames without bytes.
        let thread = thread::spawn(move || unsafe { wave.publish(&mut |_, why| panic!("{why:?}")) });
        drop(block_on(pool.allocate_async(one())).unwrap());
        assert_eq!(join_last(thread), 1);
        drop(held);
        close(&pool);
    });
}

/// Half of a run is freed into a magazine before a request waits for the whole, and flushed while
/// that request searches: it reaches the bitmaps between the request's search there and its visit
/// to the magazines, which finds nothing. (A request that needs no run counts once more in that
/// case.)
#[test]
fn magazines_that_are_flushed() {
    check_wide(3, "announced::magazines_that_are_flushed", || {
        let pool = open(2, 1, 0);
        let taken = pool.allocate_owned(one()).unwrap();
        let thread = thread::spawn(move || {
            drop(taken);
            flush_thread();
        });
        drop(block_on(pool.allocate_async(two_in_a_row())).unwrap());
        join_last(thread);
        close(&pool);
    });
}

/// The queue is empty and the reserve full, so that the bit is about to be cleared, when an urgent
/// request takes from the reserve.
#[test]
fn the_reserve_is_filled_again() {
    check_wide(2, "announced::the_reserve_is_filled_again", || {
        let pool = open(2, 0, 1);
        let urgent = one().priority(Priority::Urgent);
        let held = pool.allocate(one()).unwrap();
        let first = pool.allocate_owned(urgent).unwrap();
        assert!(pool.blocks().is_awaited(), "the block came from the reserve");
        // Fills the reserve, and finds no waiting request.
        let thread = thread::spawn(move || drop(first));
        let second = pool.allocate(urgent);
        join_last(thread);
        drop(second);
        assert_eq!(pool.stats().reserved, 1, "every free refilled it while it was short");
        drop(held);
        close(&pool);
    });
}
