//! Theorem: a named claim takes all of its frames or none; the frames that it rolls back are free
//! again, coalesced and hinted; it succeeds whenever its frames are free throughout.
#![cfg(kvpool_loom)]

use kvpool::FrameId;
use kvpool_loom_tests::{Touched, check, check_wide, run};
use loom::thread;

/// A claim during the free of its last frame.
#[test]
fn beside_free() {
    check("named_claim::beside_free", || {
        let pool = Touched::new(8);
        assert!(pool.frames.claim(run(5, 1)));
        pool.touch(run(5, 1));
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(run(5, 1)));
        pool.pass(run(2, 5));
        thread.join().unwrap();
        assert!(pool.pass(run(2, 5)), "its frames are free");
        pool.finish();
    });
}

/// Claims of overlapping runs, which roll back on each other.
#[test]
fn beside_another() {
    check("named_claim::beside_another", || {
        let pool = Touched::new(12);
        let other = pool.clone();
        let thread = thread::spawn(move || other.pass(run(4, 6)));
        let mine = pool.pass(run(1, 6));
        assert!(thread.join().unwrap() || mine, "one of the two claims is unobstructed");
        pool.finish();
    });
}

/// A claim of a whole unit while the unit is merged.
#[test]
fn beside_merge() {
    check("named_claim::beside_merge", || {
        let pool = Touched::new(8);
        assert!(pool.frames.claim(run(3, 1)));
        pool.touch(run(3, 1));
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(run(3, 1)));
        pool.pass(run(0, 8));
        thread.join().unwrap();
        pool.finish();
    });
}

/// A claim during an allocation of other frames, in the unit that it splits.
#[test]
fn beside_allocate() {
    check_wide(2, "named_claim::beside_allocate", || {
        let pool = Touched::new(8);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let got = other.frames.refill(1, FrameId(0)).expect("two are free throughout");
            other.put_mask(got);
        });
        pool.pass(run(1, 5));
        thread.join().unwrap();
        pool.finish();
    });
}
