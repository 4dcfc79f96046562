//! Frames for the list of a sequence, which grows.
//!
//! A block table is cheap to read and to transfer if it consists of few runs. A list is therefore
//! placed differently from a lease, which takes holes first to keep whole units whole:
//!
//! 1. behind its last block: the rest of its unit, which it [reserves](crate::frame), and whole
//!    units that follow;
//! 2. in whole units, the longest runs first; the frames behind the last block stay free for the
//!    next ones;
//! 3. if no unit is whole: evicted blocks make some. The coldest blocks mostly belong to one or two
//!    sequences that were placed in the same way, so their frames complete units;
//! 4. like a lease: in holes, in magazines, and by all other steps of the ladder.
//!
//! Lists leave holes: the unused ends of their last units. Free frames in holes cache nothing, so
//! their number has [a limit](Core::holes_max). Above it, a list evicts nothing for whole units and
//! takes only holes: otherwise a few blocks with owners, one in each unit, would empty the cache.
//! Above a [part](HOLES_SHIFT) of it, the end of a list that does not fill a unit goes into holes.

use crate::config::FAN_LOG2;
use crate::ids::{FrameId, Run};

use super::grab::Grab;
use crate::block::core::Core;
use crate::block::request::AllocRequest;

/// Number of hole frames, as a shift of the [limit](Core::holes_max), above which the end of a list
/// that does not fill a unit goes into holes.
const HOLES_SHIFT: u32 = 2;

/// The limit in a pool without a cache, as a shift.
const HOLES_POOL_SHIFT: u32 = 6;

/// Minimum of the limit in a pool with a cache, as a shift of the pool, up to [`HOLES_MIN`]: with
/// fewer, lists go into holes, and are evicted as holes later.
const HOLES_CACHE_SHIFT: u32 = 3;

/// Minimum of the limit in larger pools: the number of lists that grow at a time does not rise with
/// the pool, and each hole costs hits.
const HOLES_MIN: usize = 1_280;

/// The limit in a fully owned pool, as a shift of the owned frames. It falls with the owned share:
/// the larger the cache, the more hits a hole costs; the more lists, the more holes they leave.
const HOLES_OWNED_SHIFT: u32 = 2;

/// Maximum share of free and evictable frames that lists reserve for growth in a pool with a cache,
/// as a shift: such frames cache nothing. Without a cache, lists may reserve all.
const ROOM_SHIFT: u32 = 2;

/// Number of times that a list evicts blocks for whole units before it takes holes.
const ROUNDS: usize = 3;

/// A smaller pool, in units, evicts no more blocks than a request is missing.
const UNITS_MIN: usize = 16;

/// Place at which a list grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ListEnd {
    /// The frame behind its last block's frame; `None` for an empty list.
    pub next: Option<FrameId>,
    /// Whether its owner reserves the unit of that frame.
    pub reserves: bool,
}

/// Returns the number of the unit of a frame.
#[inline]
pub(crate) fn unit_of(frame: FrameId) -> usize {
    frame.index() >> FAN_LOG2
}

impl Core {
    /// Reserves the unit of a frame for the growth of the list that ends in it. False if it is
    /// reserved already, or [the share](ROOM_SHIFT) of reserved frames is used up.
    pub(crate) fn begin_growth_unit(&self, frame: FrameId) -> bool {
        let frames = &self.space.frames;
        let available = frames.free_counted() + self.evictable();
        let share = if self.evictor.is_some() { ROOM_SHIFT } else { 0 };
        frames.spared_about() <= available >> share && frames.begin_growth_unit(frame)
    }

    /// Ends the reservation of a unit by the caller's list.
    #[inline]
    pub(crate) fn end_growth_unit(&self, frame: FrameId) {
        self.space.frames.end_growth_unit(frame);
    }

    /// Returns the number of free frames that sequences reserve for their growth. Reads the bitmaps
    /// of the reserved units.
    pub fn reserved_for_growth(&self) -> usize {
        self.space.frames.spared_frames()
    }

    /// Takes frames for a list: behind its end, and whole units. Takes fewer than requested if the
    /// rest is better placed in holes, or must be.
    pub(in crate::block) fn gather_list(&self, end: ListEnd, request: &AllocRequest, grab: &mut Grab) {
        let (asked, frames) = (request.blocks, &self.space.frames);
        if let Some(next) = end.next {
            let len = frames.extend(next, asked as u32, end.reserves);
            grab.extend(len.map(|len| Run { start: next, len }));
        }
        for round in 0..=ROUNDS {
            let missing = (asked - grab.frames) as u32;
            if missing == 0 {
                return;
            }
            let holes = self.holes();
            let is_rest = holes > self.holes_max() >> HOLES_SHIFT;
            let whole = if is_rest { missing >> FAN_LOG2 << FAN_LOG2 } else { missing };
            let near = grab.runs.last().map(|run| FrameId(run.end())).or(end.next).unwrap_or(FrameId(0));
            if whole > 0 {
                let taken = frames.allocate_fresh(whole, near, &mut |run| grab.extend(Some(run)));
                self.took_units(taken as usize);
            }
            let missing = asked - grab.frames;
            let fits_holes = (is_rest && missing >> FAN_LOG2 == 0) || holes > self.holes_max();
            if missing == 0 || fits_holes || round == ROUNDS || !self.evicts_for_units(missing, request) {
                return;
            }
            // Where single blocks with owners are scattered, evictions make holes instead of units,
            // up to the limit.
            if self.evict_to_units(missing) == 0 {
                return;
            }
        }
    }

    /// Returns whether a list evicts blocks to get whole units, before it takes holes.
    fn evicts_for_units(&self, missing: usize, request: &AllocRequest) -> bool {
        // If all of that does not suffice, an eviction would be wasted.
        let most = self.space.frames.free_counted() + self.evictable() + self.reserved_for(request);
        self.has_units() && most >= missing && self.evicts_first(missing)
    }

    /// Returns whether the pool is large enough to evict more blocks than a request is missing.
    pub(super) fn has_units(&self) -> bool {
        self.total() >= UNITS_MIN << FAN_LOG2
    }

    /// Returns about how many frames are free in partly used units not reserved for growth.
    fn holes(&self) -> usize {
        let frames = &self.space.frames;
        frames.free_counted().saturating_sub((frames.free_units() << FAN_LOG2) + frames.spared_about())
    }

    /// Returns the number of free frames in partly used units above which lists evict nothing for
    /// whole units, and compaction is useful.
    pub(in crate::block) fn holes_max(&self) -> usize {
        let total = self.total();
        if self.evictor.is_none() {
            return total >> HOLES_POOL_SHIFT;
        }
        let owned = total.saturating_sub(self.space.frames.free_counted() + self.evictable());
        let of_owned = (owned >> HOLES_OWNED_SHIFT) * owned / total.max(1);
        of_owned.max(HOLES_MIN.min(total >> HOLES_CACHE_SHIFT))
    }
}
