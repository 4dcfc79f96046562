//! Frames for the list of a sequence, which grows. Few runs make a block table cheap to read and to
//! transfer. A lease takes holes first, to keep whole units whole; a list takes frames:
//!
//! 1. behind its last block: the rest of its unit, which it [reserves](crate::frame), and whole
//!    units that follow;
//! 2. in whole units, the longest runs first;
//! 3. if no unit is whole: evicted blocks make some. The coldest blocks mostly belong to one or two
//!    sequences that were placed in the same way, so their frames complete units;
//! 4. like a lease: in holes, in magazines, and by all other steps of the ladder.
//!
//! A list that gives its blocks up soon, behind a short window, grows into holes and reserves no unit,
//! if the sequence has others: it would leave units in pieces to them. Its admission takes units.
//!
//! Lists leave holes: the unused ends of their last units. Free frames in holes cache nothing, so
//! their number has [a limit](Core::holes_max). Above it, a list evicts nothing for whole units:
//! otherwise a few blocks with owners, one in each unit, would empty the cache.
//!
//! Where each sequence takes a run beside its list, of [a fixed number](Core::run_frames) of frames,
//! a hole is lost for runs. There runs fill the pool from its start, one next to the other, and
//! lists from its end; and all holes count, also of units reserved for growth. Their limit is
//! [a small share](HOLES_RUNS_SHIFT), and more while most of the pool is available. When whole units
//! become [scarce](WHOLE_FOR_HOLES), lists take nothing but holes, also reserved ones.

use crate::config::{FAN, FAN_LOG2};
use crate::ids::{FrameId, Run};

use super::grab::Grab;
use crate::block::core::Core;
use crate::block::request::AllocRequest;
use crate::block::tenants::Tenant;

/// Share of the [limit](Core::holes_max) of holes, as a shift, above which a list's end fills
/// holes.
const HOLES_SHIFT: u32 = 2;

/// The limit in a pool without a cache, as a shift.
const HOLES_POOL_SHIFT: u32 = 6;

/// Minimum of the limit in a pool with a cache, as a shift of the pool, up to [`HOLES_MIN`]: with
/// fewer, lists go into holes, and are evicted as holes later.
const HOLES_CACHE_SHIFT: u32 = 3;

/// Minimum of the limit in larger pools: the number of growing lists does not scale with the pool.
const HOLES_MIN: usize = 1_280;

/// The limit in a fully owned pool, as a shift of the owned frames. It falls with the owned share:
/// in a larger cache a hole costs more hits; more lists leave more holes.
const HOLES_OWNED_SHIFT: u32 = 2;

/// The limit in a pool of runs, as a shift.
const HOLES_RUNS_SHIFT: u32 = 6;

/// Whole frames per frame in a hole below which a list takes only holes. A sequence of 600 tokens of
/// Qwen3.5-35B has five times as many frames in its run as in its list: with fewer whole frames,
/// holes would be left when no run fits any more.
const WHOLE_FOR_HOLES: usize = 6;

/// Maximum share of available frames reserved for growth in a pool with a cache, as a shift.
const ROOM_SHIFT: u32 = 2;

/// Evictions of blocks for whole units before a list takes holes.
const ROUNDS: usize = 3;

/// In a pool of fewer units, a list evicts no more blocks than it needs.
const UNITS_MIN: usize = 16;

/// In a pool of fewer runs, lists leave few holes beside them.
const RUNS_MIN: usize = 64;

/// Place at which a list grows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ListEnd {
    /// The frame behind its last block's frame; `None` for an empty list.
    pub next: Option<FrameId>,
    /// Whether its owner reserves the unit of that frame.
    pub reserves: bool,
    /// The first so many frames form one run, which is not part of the list; 0: none.
    pub run: usize,
    /// Whether it gives its blocks up soon, so that it takes holes instead of whole units.
    pub is_short: bool,
    /// Whose quota the blocks count for.
    pub tenant: Tenant,
}

#[inline]
pub(crate) fn unit_of(frame: FrameId) -> usize {
    frame.index() >> FAN_LOG2
}

impl Core {
    /// Reserves a unit for a list. False: it is reserved, or [the share](ROOM_SHIFT) is used up.
    pub(crate) fn begin_growth_unit(&self, frame: FrameId) -> bool {
        let frames = &self.space.frames;
        let available = || frames.free_counted() + self.evictable();
        let most = match () {
            () if self.config.run_frames > 0 => self.holes_max() >> HOLES_SHIFT,
            () if self.evictor.is_some() => available() >> ROOM_SHIFT,
            () => available(),
        };
        frames.growth_frames_about() <= most && frames.begin_growth_unit(frame)
    }

    #[inline]
    pub(crate) fn end_growth_unit(&self, frame: FrameId) {
        self.space.frames.end_growth_unit(frame);
    }

    /// Returns the number of free frames that sequences reserve for growth. Reads the bitmaps.
    pub fn reserved_for_growth(&self) -> usize {
        self.space.frames.growth_frames()
    }

    /// Takes frames for a list that needs `blocks` of the request's: behind its end, and whole units.
    /// The rest goes into holes.
    // Always inline: most requests are for one list.
    #[inline(always)]
    pub(in crate::block) fn gather_list(
        &self,
        end: ListEnd,
        blocks: usize,
        request: &AllocRequest,
        grab: &mut Grab,
    ) {
        let (asked, frames) = (grab.frames + blocks, &self.space.frames);
        if let Some(next) = end.next {
            let rest = FAN - next.index() % FAN;
            let want = if end.is_short { blocks.min(rest) } else { blocks };
            let len = frames.extend(next, want as u32, end.reserves);
            grab.extend(len.map(|len| Run { start: next, len }));
        }
        if self.config.run_frames > 0 {
            return self.gather_beside_runs(asked, (end.tenant, request), grab);
        }
        if end.is_short {
            return;
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
            let evicts = || {
                !fits_holes && round < ROUNDS && self.evicts_for_units(missing, (end.tenant, request), grab)
            };
            if missing == 0 || !evicts() {
                return;
            }
            // Where single owned blocks are scattered, evictions make holes, up to the limit.
            if self.evict_to_units(missing, end.tenant) == 0 {
                return;
            }
        }
    }

    /// Takes frames for a list in a pool of runs: whole units at its end, or holes if these are many.
    /// While blocks are evictable, a run is left free: the next sequence would evict a window for it.
    #[cold]
    fn gather_beside_runs(&self, asked: usize, by: (Tenant, &AllocRequest), grab: &mut Grab) {
        let frames = &self.space.frames;
        let spare = if self.evictable() > 0 { self.config.run_frames.div_ceil(FAN) + 1 } else { 0 };
        let holes = self.holes();
        let is_rest = holes > self.holes_max() >> HOLES_SHIFT;
        let take_units = |want: usize, grab: &mut Grab| {
            let units = frames.free_units().saturating_sub(spare) << FAN_LOG2;
            let taken = frames.allocate_last(want.min(units) as u32, &mut |run| grab.extend(Some(run)));
            self.took_units(taken as usize);
        };
        if is_rest {
            let whole = frames.free_counted().saturating_sub(holes) + self.evictable();
            // Of what was reserved while more was available. Holes that sequences leave by ending are
            // filled by the rests of lists.
            let is_scarce = whole < WHOLE_FOR_HOLES * holes.min(frames.growth_frames_about());
            if !is_scarce {
                take_units((asked - grab.frames) >> FAN_LOG2 << FAN_LOG2, grab);
            }
            let missing = (asked - grab.frames) as u32;
            frames.fill_last(missing, &mut |run| grab.extend(Some(run)));
        }
        for round in 0..=ROUNDS {
            take_units(asked - grab.frames, grab);
            let missing = asked - grab.frames;
            let fits_holes = round == ROUNDS || !self.has_ample_runs() || self.holes() > self.holes_max();
            let evicts = || !fits_holes && self.evicts_for_units(missing, by, grab);
            if missing == 0 || !evicts() || self.evict_to_units(missing, by.0) == 0 {
                return;
            }
        }
    }

    fn evicts_for_units(
        &self,
        missing: usize,
        (tenant, request): (Tenant, &AllocRequest),
        grab: &Grab,
    ) -> bool {
        // Otherwise an eviction would be wasted.
        let evictable = self.evictable_for(tenant);
        let most = self.space.frames.free_counted() + evictable + self.reserved_for(request);
        self.has_units() && most >= request.blocks - grab.frames && self.evicts_first(missing)
    }

    /// Returns whether the pool is large enough to evict more blocks than a request is missing.
    pub(super) fn has_units(&self) -> bool {
        self.total() >= UNITS_MIN << FAN_LOG2
    }

    /// Returns whether a hole is not soon the place that a run needed.
    fn has_ample_runs(&self) -> bool {
        self.has_units() && self.total() >= self.config.run_frames * RUNS_MIN
    }

    /// Returns about how many frames are free in partly used units that count as holes.
    fn holes(&self) -> usize {
        let frames = &self.space.frames;
        let reserved = if self.config.run_frames > 0 { 0 } else { frames.growth_frames_about() };
        frames.free_counted().saturating_sub((frames.free_units() << FAN_LOG2) + reserved)
    }

    /// Returns the maximum number of frames in holes, see the [module](super::growth).
    pub(in crate::block) fn holes_max(&self) -> usize {
        let total = self.total();
        if self.config.run_frames > 0 {
            let available = self.space.frames.free_counted() + self.evictable();
            // Half of what is available beyond half of the pool, after `HOLES_SHIFT`.
            let ample = available.saturating_sub(total >> 1) << (HOLES_SHIFT - 1);
            return (total >> HOLES_RUNS_SHIFT) + if self.has_ample_runs() { ample } else { 0 };
        }
        if self.evictor.is_none() {
            return total >> HOLES_POOL_SHIFT;
        }
        let owned = total.saturating_sub(self.space.frames.free_counted() + self.evictable());
        let of_owned = (owned >> HOLES_OWNED_SHIFT) * owned / total.max(1);
        of_owned.max(HOLES_MIN.min(total >> HOLES_CACHE_SHIFT))
    }
}
