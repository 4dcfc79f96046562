//! Theorem: a snapshot of the count of free frames counts every frame that is free throughout,
//! whatever other threads free and claim meanwhile, and in whichever stripes they count it.
//!
//! The model has a count of two stripes and a word that stands for the bitmap. Elsewhere, models do
//! not see the stripes' accesses.
#![cfg(kvpool_loom)]

use kvpool::FrameId;
use kvpool::frame::Tally;
use kvpool_loom_tests::{check, join_last};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering::*};
use loom::thread;

/// Frames of different stripes.
const HERE: FrameId = FrameId(0);
const THERE: FrameId = FrameId(4);

#[derive(Default)]
struct Counted {
    tally: Tally<AtomicU64>,
    /// Bit 0: a frame that no thread claims; bit 1: one that goes from hand to hand.
    bits: AtomicU64,
}

impl Counted {
    fn free(&self, near: FrameId, bit: u64) {
        self.tally.freed(near, 1, || self.bits.fetch_or(bit, Release));
    }

    /// Claims the second frame if it is free, and counts it near another one.
    fn claim(&self, near: FrameId) -> bool {
        let is_ours = self.bits.fetch_and(!2, Acquire) & 2 != 0;
        if is_ours {
            self.tally.took(near, 1);
        }
        is_ours
    }

    fn check(&self) {
        let counted = self.tally.snapshot().map(|snapshot| snapshot.free());
        assert!(counted.is_none_or(|free| free > 0), "a free frame is not counted");
    }
}

/// A frame is freed by one thread, and claimed by another, which counts it in the other stripe.
#[test]
fn freed_here_and_claimed_there() {
    for (freed, claimed) in [(HERE, THERE), (THERE, HERE)] {
        check("tally::freed_here_and_claimed_there", move || {
            let counted = Arc::new(Counted::default());
            counted.free(HERE, 1);
            let (one, two) = (counted.clone(), counted.clone());
            let first = thread::spawn(move || one.free(freed, 2));
            let second = thread::spawn(move || two.claim(claimed));
            counted.check();
            first.join().unwrap();
            let was_claimed = join_last(second);
            let free = counted.tally.snapshot().expect("nothing changes").free();
            assert_eq!(free, if was_claimed { 1 } else { 2 });
        });
    }
}

/// A frame is claimed and freed again by one thread.
#[test]
fn claimed_and_freed_again() {
    check("tally::claimed_and_freed_again", || {
        let counted = Arc::new(Counted::default());
        counted.free(THERE, 1);
        counted.free(THERE, 2);
        let other = counted.clone();
        let thread = thread::spawn(move || {
            assert!(other.claim(HERE));
            other.free(THERE, 2);
        });
        counted.check();
        join_last(thread);
        assert_eq!(counted.tally.snapshot().expect("nothing changes").free(), 2);
    });
}
