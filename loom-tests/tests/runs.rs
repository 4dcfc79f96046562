//! Theorem: a run that no single word holds is claimed whole or not at all, during claims and frees
//! inside it; and a search reports "there is none" only if there is none, not for frames that are
//! merely in transit.
#![cfg(kvpool_loom)]

use kvpool::FrameId;
use kvpool_loom_tests::{Touched, check, run};
use loom::thread;

/// A run across two units, whose end is freed meanwhile.
#[test]
fn straddling_beside_free() {
    check("runs::straddling_beside_free", || {
        let pool = Touched::new(8);
        assert!(pool.frames.claim(run(0, 8)));
        pool.touch(run(0, 8));
        pool.frames.free_run(run(2, 3));
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(run(5, 1)));
        let early = pool.take(4, 0);
        thread.join().unwrap();
        let got = early.or_else(|| pool.take(4, 0)).expect("the run is free now");
        assert_eq!(got, run(2, 4));
        pool.put(got);
        pool.frames.free_run(run(0, 2));
        pool.frames.free_run(run(6, 2));
        pool.finish();
    });
}

/// A run of three units in two segments, of which another thread takes and frees a frame.
#[test]
fn long_beside_claim() {
    check("runs::long_beside_claim", || {
        let pool = Touched::growing(12, 12, 8);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            if let Some(got) = other.take(1, 8) {
                other.put(got);
            }
        });
        if let Some(got) = pool.take(11, 0) {
            pool.put(got);
        }
        thread.join().unwrap();
        pool.finish();
    });
}

/// One unit for two threads: while one of them splits or merges it, all four frames are hidden, and
/// still the other one must get one.
#[test]
fn hidden_frames_are_not_missing() {
    check("runs::hidden_frames_are_not_missing", || {
        let pool = Touched::new(4);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let got = other.take(1, 0).expect("three are free throughout");
            other.put(got);
        });
        let got = pool.frames.refill(1, FrameId(0)).expect("three are free throughout");
        pool.put_mask(got);
        thread.join().unwrap();
        pool.finish();
    });
}
