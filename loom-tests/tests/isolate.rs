//! Theorem: frames freed into an isolated region stay free but out of the reach of allocators, and
//! are all allocatable once it is readmitted, whatever happened in between.
#![cfg(kvpool_loom)]

use kvpool::FrameId;
use kvpool_loom_tests::{Touched, check, run};
use loom::thread;

/// A region is isolated and readmitted during a free into it and an allocation.
#[test]
fn beside_free_and_allocate() {
    check("isolate::beside_free_and_allocate", || {
        let pool = Touched::new(8);
        assert!(pool.frames.claim(run(1, 3)));
        pool.touch(run(1, 3));
        let (one, two) = (pool.clone(), pool.clone());
        let first = thread::spawn(move || one.put(run(1, 3)));
        let second = thread::spawn(move || {
            let got = two.frames.refill(1, FrameId(0)).expect("four are open throughout");
            two.put_mask(got);
        });
        pool.frames.isolate(run(0, 4));
        pool.frames.readmit(run(0, 4));
        first.join().unwrap();
        second.join().unwrap();
        pool.finish();
    });
}

/// Frames freed into a region that stays isolated are available to a named claim only.
#[test]
fn freed_frames_stay() {
    check("isolate::freed_frames_stay", || {
        let pool = Touched::new(8);
        assert!(pool.frames.claim(run(0, 8)));
        pool.touch(run(0, 8));
        pool.frames.isolate(run(0, 4));
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(run(0, 4)));
        assert_eq!(pool.frames.refill(1, FrameId(0)), None);
        thread.join().unwrap();
        assert_eq!(pool.frames.refill(1, FrameId(0)), None);
        assert!(pool.pass(run(0, 4)));
        pool.frames.readmit(run(0, 4));
        pool.put(run(4, 4));
        pool.finish();
    });
}
