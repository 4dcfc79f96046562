//! How many frames are free, counted beside the bitmaps, so that asking costs no walk.
//!
//! Every operation of [`Frames`](super::Frames) adds what it put back or took in one
//! read-modify-write, on one of a few stripes, which frames that lie near each other share. What a
//! thread has in its hands within a call counts as before it. The count decides nothing: an
//! operation that must not overlook a frame walks the bitmaps. The [audit](super::Frames::audit)
//! compares it with them.
//!
//! | bits of a stripe | meaning |
//! |---|---|
//! | 0..32 | frames put back less frames taken, of this stripe; a negative number borrows from the upper half |
//! | 32..64 | operations |
//!
//! Alone a stripe's halves mean nothing. The sum of all stripes has the free frames in its lower
//! half, which are never negative where nobody is inside a call, and the operations in the upper
//! one.

use crate::config::{FAN_LOG2, FRAME_BITS};
use crate::ids::FrameId;
use crate::sync::{CachePadded, Ordering::Relaxed, StatisticU64};

/// A power of two: enough that threads which refill at once rarely meet, few enough to be read
/// often.
const STRIPES: usize = 16;

const ONE_CHANGE: u64 = 1 << 32;
const _: () = assert!(FRAME_BITS < u32::BITS, "the sign of a sum that is read beside running threads");

/// See the [module](self).
#[derive(Default)]
pub(super) struct Tally([CachePadded<StatisticU64>; STRIPES]);

impl Tally {
    #[inline]
    fn stripe(&self, near: FrameId) -> &StatisticU64 {
        // Neighbouring units have stripes of their own, and so have the groups that threads begin
        // in.
        let unit = near.index() >> FAN_LOG2;
        &self.0[(unit ^ unit >> FAN_LOG2) & (STRIPES - 1)]
    }

    /// So many frames are free again.
    #[inline]
    pub(super) fn put_back(&self, near: FrameId, frames: usize) {
        // Relaxed, here and below: nothing is decided by it.
        self.stripe(near).fetch_add(ONE_CHANGE + frames as u64, Relaxed);
    }

    /// So many frames are free no more.
    #[inline]
    pub(super) fn took(&self, near: FrameId, frames: usize) {
        self.stripe(near).fetch_add(ONE_CHANGE.wrapping_sub(frames as u64), Relaxed);
    }

    fn sum(&self) -> u64 {
        self.0.iter().fold(0, |sum, stripe| sum.wrapping_add(stripe.load(Relaxed)))
    }

    /// Free frames; exact when nobody is inside a call.
    pub(super) fn free(&self) -> usize {
        (self.sum() as u32 as i32).max(0) as usize
    }

    /// Operations, modulo 2^32: another number than before says that something has changed.
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
        // Taken from another stripe than put back to.
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
