//! Number of free frames, counted beside the bitmaps, so that reading it needs no walk.
//!
//! Every operation of [`Frames`](super::Frames) adds the frames that it freed or claimed to one of
//! a few stripes, in one read-modify-write. Neighbouring frames share a stripe.
//!
//! | bits of a stripe | meaning |
//! |---|---|
//! | 0..32 | frames freed less frames claimed, of this stripe; a negative number borrows from the upper half |
//! | 32..64 | operations |
//!
//! Only the sum of all stripes has a meaning: the number of free frames in its lower half, and the
//! number of operations in its upper half.
//!
//! ```text
//! free       add to a stripe (Release);  then the bitmap
//! claim      the bitmap;  then subtract from a stripe (Release)
//! snapshot   read all stripes (Acquire), twice, with equal results
//! ```
//!
//! # Theorem
//!
//! *A snapshot counts every free frame*: if it is 0, no frame was free in the bitmaps. A free frame
//! adds 1, and the thread that claimed it acquired it from the thread that had counted and freed
//! it. A snapshot that read the claim's subtraction, but not the preceding addition to another
//! stripe, reads the addition the second time, and restarts. A number above 0 proves nothing:
//! callers walk. Model: `loom-tests/tests/tally.rs`.

use crate::config::{FAN_LOG2, FRAME_BITS};
use crate::ids::FrameId;
use crate::sync::{CachePadded, Ordering::*, StatisticU64};

/// A power of two: large enough that threads rarely collide on refills, small enough to read often.
const STRIPES: usize = if cfg!(kvpool_loom) { 2 } else { 16 };

const READS: usize = 3;

const ONE_CHANGE: u64 = 1 << 32;
const _: () = assert!(FRAME_BITS < u32::BITS, "a sum read concurrently may be negative: it needs a sign bit");

/// A stripe. Models of the pool do not check its accesses; the model of the tally does.
pub trait Stripe: Default {
    /// Release, modulo 2^64.
    fn add(&self, change: u64);

    /// Acquire.
    fn get(&self) -> u64;
}

impl Stripe for StatisticU64 {
    #[inline]
    fn add(&self, change: u64) {
        self.fetch_add(change, Release);
    }

    #[inline]
    fn get(&self) -> u64 {
        self.load(Acquire)
    }
}

#[cfg(kvpool_loom)]
impl Stripe for crate::sync::AtomicU64 {
    fn add(&self, change: u64) {
        self.fetch_add(change, Release);
    }

    fn get(&self) -> u64 {
        self.load(Acquire)
    }
}

/// Number of free frames, in stripes.
#[derive(Default)]
pub struct Tally<S = StatisticU64>([CachePadded<S>; STRIPES]);

impl<S: Stripe> Tally<S> {
    #[inline]
    fn stripe(&self, near: FrameId) -> &S {
        // Neighbouring units use different stripes, and so do the groups in which threads begin.
        let unit = near.index() >> FAN_LOG2;
        &self.0[(unit ^ unit >> FAN_LOG2) & (STRIPES - 1)]
    }

    /// Counts frames, then frees them by `free`.
    #[inline]
    pub fn freed<R>(&self, near: FrameId, frames: usize, free: impl FnOnce() -> R) -> R {
        self.stripe(near).add(ONE_CHANGE + frames as u64);
        free()
    }

    /// Counts frames that the caller has claimed.
    #[inline]
    pub fn took(&self, near: FrameId, frames: usize) {
        self.stripe(near).add(ONE_CHANGE.wrapping_sub(frames as u64));
    }

    fn read(&self) -> [u64; STRIPES] {
        std::array::from_fn(|stripe| self.0[stripe].get())
    }

    fn sum(&self) -> u64 {
        self.read().into_iter().fold(0, u64::wrapping_add)
    }

    /// Returns the number of free frames; exact while no thread is inside a call.
    pub fn free(&self) -> usize {
        free_of(self.sum())
    }

    /// Returns the number of operations, modulo 2^32.
    pub fn changes(&self) -> u32 {
        (self.sum() >> 32) as u32
    }

    /// Returns the count at one moment during the call. `None` if it kept changing.
    pub fn snapshot(&self) -> Option<Snapshot> {
        let mut before = self.read();
        for _ in 1..READS {
            let now = self.read();
            if now == before {
                return Some(Snapshot(now.into_iter().fold(0, u64::wrapping_add)));
            }
            before = now;
        }
        None
    }
}

/// The count at one moment. Equal ones fewer than 2^32 operations apart have none in between.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Snapshot(u64);

impl Snapshot {
    /// Returns an upper bound of the number of free frames.
    pub fn free(self) -> usize {
        free_of(self.0)
    }
}

fn free_of(sum: u64) -> usize {
    (sum as u32 as i32).max(0) as usize
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn stripes_may_be_negative_and_their_sum_is_not() {
        let tally = Tally::<StatisticU64>::default();
        let (here, there) = (FrameId(0), FrameId(64));
        tally.freed(here, 1 << FRAME_BITS, || ());
        assert_eq!((tally.free(), tally.changes()), (1 << FRAME_BITS, 1));
        tally.took(there, 1 << FRAME_BITS);
        assert_eq!((tally.free(), tally.changes()), (0, 2));
        // As read while another thread is between its two steps.
        tally.took(there, 5);
        assert_eq!(tally.free(), 0);
        tally.freed(here, 12, || ());
        assert_eq!((tally.free(), tally.changes()), (7, 4));
    }

    #[test]
    fn threads_count_together() {
        const ROUNDS: u32 = if cfg!(miri) { 50 } else { 20_000 };
        let tally = Tally::<StatisticU64>::default();
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let tally = &tally;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        tally.freed(FrameId(thread * round), 3, || ());
                        tally.took(FrameId(round), 2);
                    }
                });
            }
        });
        assert_eq!((tally.free() as u32, tally.changes()), (3 * ROUNDS, 6 * ROUNDS));
    }
}
