//! Frames for the list of a sequence, which grows.
//!
//! A block table is cheap to read and to transfer if it consists of few runs. A list is therefore
//! placed differently from a lease, which takes holes first so that whole units stay whole:
//!
//! 1. behind its last block: the rest of its unit, which it [spares](crate::frame), and whole units
//!    that follow;
//! 2. in whole units, the longest runs first; the frames behind the last block stay free for the next
//!    ones;
//! 3. if no unit is whole: evicted blocks make some. The coldest blocks are mostly the blocks of one
//!    or two sequences that were placed in the same way, so their frames complete units;
//! 4. as a lease: in holes, in magazines, and by all other steps of the ladder.
//!
//! What lists leave behind are holes: the unused ends of their last units. Free frames in holes cache
//! nothing, so there is a limit to them: above [`HOLES_SHIFT`], the end of a list that does not fill
//! a unit goes into a hole.

use crate::config::FAN_LOG2;
use crate::ids::{FrameId, Run};

use super::Grab;
use crate::block::core::Core;

/// Free frames outside of whole units that are kept for the growth of lists: at most this share of
/// the pool, as a shift.
const HOLES_SHIFT: u32 = 8;

/// Number of times that a list evicts blocks for whole units before it takes holes.
const ROUNDS: usize = 3;

/// A pool of fewer units evicts no more blocks than a request is missing.
const UNITS_MIN: usize = 16;

/// Place at which a list grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ListEnd {
    /// The frame behind its last block's frame; `None` for an empty list.
    pub next: Option<FrameId>,
    /// Whether its owner spares the unit of its last block.
    pub spares: bool,
}

/// Returns the number of the unit of a frame.
#[inline]
pub(crate) fn unit_of(frame: FrameId) -> usize {
    frame.index() >> FAN_LOG2
}

impl Core {
    /// Spares the unit of a frame for the list that ends in it; false if it is spared already.
    #[inline]
    pub(crate) fn spare_unit(&self, frame: FrameId) -> bool {
        self.space.frames.spare_unit(frame)
    }

    /// Ends the sparing of a unit by the caller's list.
    #[inline]
    pub(crate) fn unspare_unit(&self, frame: FrameId) {
        self.space.frames.unspare_unit(frame);
    }

    /// Returns the number of free frames that sequences spare for their growth. Walks the bitmaps.
    pub fn spared(&self) -> usize {
        self.space.frames.spared_frames()
    }

    /// Takes frames for a list: behind its end, and whole units. Takes fewer than `asked` if the
    /// rest is better placed in holes.
    pub(in crate::block) fn gather_list(&self, end: ListEnd, asked: usize, grab: &mut Grab) {
        let frames = &self.space.frames;
        if let Some(next) = end.next {
            let len = frames.extend(next, asked as u32, end.spares);
            grab.extend(len.map(|len| Run { start: next, len }));
        }
        for round in 0..=ROUNDS {
            let missing = (asked - grab.frames) as u32;
            if missing == 0 {
                return;
            }
            let is_rest = self.has_many_holes();
            let whole = if is_rest { missing >> FAN_LOG2 << FAN_LOG2 } else { missing };
            let near = grab.runs.last().map(|run| FrameId(run.end())).or(end.next).unwrap_or(FrameId(0));
            if whole > 0 {
                let taken = frames.allocate_fresh(whole, near, &mut |run| grab.extend(Some(run)));
                self.took_units(taken as usize);
            }
            let missing = asked - grab.frames;
            let is_small = is_rest && missing >> FAN_LOG2 == 0;
            let may_evict = !is_small && round < ROUNDS && self.evicts_for_units(missing);
            if missing == 0 || !may_evict || self.evict_to_units(missing) == 0 {
                return;
            }
        }
    }

    /// Returns whether a list evicts blocks to get whole units, before it takes holes.
    fn evicts_for_units(&self, missing: usize) -> bool {
        self.total() >= UNITS_MIN << FAN_LOG2 && self.evicts_first(missing)
    }

    /// Returns whether more than a small share of the pool lies free in partly used units.
    fn has_many_holes(&self) -> bool {
        let frames = &self.space.frames;
        let holes = frames.free_counted().saturating_sub(frames.free_units() << FAN_LOG2);
        holes > self.total() >> HOLES_SHIFT
    }
}
