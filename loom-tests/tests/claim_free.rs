//! Theorem: among threads that claim and free in the same words, no two own a frame at once, each
//! sees the previous owner's writes, and afterwards every frame is free, coalesced, hinted and
//! allocatable.
#![cfg(kvpool_loom)]

use kvpool::{FrameId, Order};
use kvpool_loom_tests::{Touched, check, run};
use loom::thread;

/// Two threads split the same unit, and merge it again.
#[test]
fn split_and_merge() {
    check("claim_free::split_and_merge", || {
        let pool = Touched::new(8);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let got = other.take(1, 0).expect("there are enough for both");
            other.put(got);
        });
        let got = pool.take(1, 0).expect("there are enough for both");
        pool.put(got);
        thread.join().unwrap();
        pool.finish();
    });
}

/// Claims of different shapes in one word.
#[test]
fn shapes_in_one_word() {
    check("claim_free::shapes_in_one_word", || {
        let pool = Touched::new(8);
        assert!(pool.frames.claim(run(4, 4)));
        let other = pool.clone();
        let thread = thread::spawn(move || {
            if let Some(got) = other.frames.allocate_aligned(Order(1), FrameId(0)) {
                other.touch(got);
                other.put(got);
            }
        });
        if let Some(got) = pool.take(3, 0) {
            pool.put(got);
        }
        pool.touch(run(4, 4));
        pool.put(run(4, 4));
        thread.join().unwrap();
        pool.finish();
    });
}

/// Three threads, one of them with whole units.
#[test]
fn three_threads() {
    check("claim_free::three_threads", || {
        let pool = Touched::new(8);
        let (one, two) = (pool.clone(), pool.clone());
        let first = thread::spawn(move || {
            if let Some(got) = one.frames.allocate_aligned(Order(2), FrameId(0)) {
                one.touch(got);
                one.put(got);
            }
        });
        let second = thread::spawn(move || {
            if let Some(got) = two.take(1, 0) {
                two.put(got);
            }
        });
        first.join().unwrap();
        second.join().unwrap();
        pool.finish();
    });
}
