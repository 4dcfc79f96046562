//! Theorem: a refill takes at most the requested number of frames and only free ones, in one step,
//! during frees and claims of the same word.
#![cfg(kvpool_loom)]

use kvpool::{FrameId, Order};
use kvpool_loom_tests::{Touched, check, check_wide, run};
use loom::thread;

/// A refill during a free that would make it exceed the request.
#[test]
fn beside_free() {
    check("refill::beside_free", || {
        let pool = Touched::new(8);
        assert!(pool.frames.claim(run(0, 8)));
        pool.touch(run(0, 8));
        pool.frames.free_run(run(0, 2));
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let got = other.frames.refill(2, FrameId(0)).expect("two are free throughout");
            assert!(got.len() <= 2);
            other.put_mask(got);
        });
        pool.put(run(2, 1));
        thread.join().unwrap();
        pool.put(run(3, 5));
        pool.finish();
    });
}

/// A refill during a free and an aligned claim of the same unit, which is merged and split in
/// between.
#[test]
fn beside_claim_and_free() {
    check_wide(2, "refill::beside_claim_and_free", || {
        let pool = Touched::new(4);
        let held = pool.take(2, 0).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let got = other.frames.refill(4, FrameId(0)).expect("two are free, or in transit, throughout");
            other.put_mask(got);
        });
        pool.put(held);
        if let Some(got) = pool.frames.allocate_aligned(Order(1), FrameId(0)) {
            pool.touch(got);
            pool.put(got);
        }
        thread.join().unwrap();
        pool.finish();
    });
}
