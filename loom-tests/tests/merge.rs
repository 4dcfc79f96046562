//! Theorem: a unit whose last frames are freed by several threads is merged exactly once, even if
//! other threads allocate from it meanwhile.
#![cfg(kvpool_loom)]

use kvpool_loom_tests::{Touched, check, check_wide, run};
use loom::thread;

/// Two threads complete a unit.
#[test]
fn two_free() {
    check("merge::two_free", || {
        let pool = Touched::new(8);
        assert!(pool.frames.claim(run(0, 4)));
        pool.touch(run(0, 4));
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(run(0, 2)));
        pool.put(run(2, 2));
        thread.join().unwrap();
        pool.finish();
    });
}

/// A thread completes a unit while another allocates from it.
#[test]
fn free_beside_allocate() {
    check("merge::free_beside_allocate", || {
        let pool = Touched::new(4);
        let held = pool.take(3, 0).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(held));
        let got = pool.take(1, 0).expect("one frame is free throughout");
        pool.put(got);
        thread.join().unwrap();
        pool.finish();
    });
}

/// A thread completes a unit while another allocates its last frame and frees it.
#[test]
fn two_free_beside_allocate() {
    check_wide(2, "merge::two_free_beside_allocate", || {
        let pool = Touched::new(4);
        assert!(pool.frames.claim(run(0, 4)));
        pool.touch(run(0, 4));
        let (one, two) = (pool.clone(), pool.clone());
        let first = thread::spawn(move || one.put(run(0, 2)));
        let second = thread::spawn(move || two.put(run(2, 2)));
        if let Some(got) = pool.take(1, 0) {
            pool.put(got);
        }
        first.join().unwrap();
        second.join().unwrap();
        pool.finish();
    });
}
