//! Number of free frames, counted beside the bitmaps, so that reading it needs no walk.
//!
//! Every operation of [`Frames`](super::Frames) adds the frames it freed or claimed in one
//! read-modify-write, to one of a few stripes, which neighbouring frames share. Frames in the hands
//! of a call in progress count as before the call. No decision depends on the count: an operation
//! that must not overlook a frame walks the bitmaps. The [audit](super::Frames::audit) compares the
//! count with them.
//!
//! | bits of a stripe | meaning |
//! |---|---|
//! | 0..32 | frames freed less frames claimed, of this stripe; a negative number borrows from the upper half |
//! | 32..64 | operations |
//!
//! The halves of a single stripe mean nothing. The sum of all stripes has the number of free frames
//! in its lower half, which is never negative while no thread is inside a call, and the number of
//! operations in the upper half.

use crate::config::{FAN_LOG2, FRAME_BITS};
use crate::ids::FrameId;
use crate::sync::{CachePadded, Ordering::Relaxed, StatisticU64};

/// A power of two: enough that threads rarely collide on refills, few enough to read often.
const STRIPES: usize = 16;

const ONE_CHANGE: u64 = 1 << 32;
const _: () = assert!(FRAME_BITS < u32::BITS, "a sum read concurrently may be negative: it needs a sign bit");

/// Number of free frames, in stripes.
#[derive(Default)]
pub(super) struct Tally([CachePadded<StatisticU64>; STRIPES]);

impl Tally {
    #[inline]
    fn stripe(&self, near: FrameId) -> &StatisticU64 {
        // Neighbouring units use different stripes, and so do the groups in which threads begin.
        let unit = near.index() >> FAN_LOG2;
        &self.0[(unit ^ unit >> FAN_LOG2) & (STRIPES - 1)]
    }

    /// Counts frames as freed.
    #[inline]
    pub(super) fn put_back(&self, near: FrameId, frames: usize) {
        // Relaxed, here and below: no decision depends on it.
        self.stripe(near).fetch_add(ONE_CHANGE + frames as u64, Relaxed);
    }

    /// Counts frames as claimed.
    #[inline]
    pub(super) fn took(&self, near: FrameId, frames: usize) {
        self.stripe(near).fetch_add(ONE_CHANGE.wrapping_sub(frames as u64), Relaxed);
    }

    fn sum(&self) -> u64 {
        self.0.iter().fold(0, |sum, stripe| sum.wrapping_add(stripe.load(Relaxed)))
    }

    /// Returns the number of free frames; exact while no thread is inside a call.
    pub(super) fn free(&self) -> usize {
        (self.sum() as u32 as i32).max(0) as usize
    }

    /// Returns the number of operations, modulo 2^32: if it changed, some operation ran in between.
    pub(super) fn changes(&self) -> u32 {
        (self.sum() >> 32) as u32
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn stripes_may_be_negative_and_their_sum_is_not() {
        let tally = Tally::default();
        let (here, there) = (FrameId(0), FrameId(64));
        tally.put_back(here, 1 << FRAME_BITS);
        assert_eq!((tally.free(), tally.changes()), (1 << FRAME_BITS, 1));
        // Claimed from another stripe than freed to.
        tally.took(there, 1 << FRAME_BITS);
        assert_eq!((tally.free(), tally.changes()), (0, 2));
        // As read while another thread is between its two steps.
        tally.took(there, 5);
        assert_eq!(tally.free(), 0);
        tally.put_back(here, 12);
        assert_eq!((tally.free(), tally.changes()), (7, 4));
    }

    #[test]
    fn threads_count_together() {
        const ROUNDS: u32 = if cfg!(miri) { 50 } else { 20_000 };
        let tally = Tally::default();
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let tally = &tally;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        tally.put_back(FrameId(thread * round), 3);
                        tally.took(FrameId(round), 2);
                    }
                });
            }
        });
        assert_eq!((tally.free() as u32, tally.changes()), (3 * ROUNDS, 6 * ROUNDS));
    }
}
