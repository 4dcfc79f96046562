//! Removal of frames from the end of a pool.
//!
//! ```text
//! open      begin_shrink(to): the region [to, total) is closed; allocators avoid it
//!  | collect, again and again: free frames of the region become the shrinker's
//!  | all of it: commit, the number of frames falls    impossible: abandon, all of it is freed, the region opened
//! over      end: the next one may grow or shrink
//! ```
//!
//! # Invariants
//!
//! 1. The number of frames is lowered only while the shrink owns every frame of the region, so that
//!    none can be allocated through any directory.
//! 2. Removed frames stay claimed, with their words and hints. Growth raises the number and frees
//!    them.
//! 3. While a shrink is open the number does not change: growth and other shrinks fail.
//!
//! # The cut
//!
//! The unit in which the region begins is closed only from the cut on: its other frames remain
//! allocatable. After the shrink the upper part stays claimed, and the unit never merges. A whole
//! unit that is cut in two is in transit until its lower part is free again.

use super::bits::{ALL, ones};
use super::frames::Frames;
use super::map::{Level, Map};
use super::segment::NO_CUT;
use crate::config::{FAN, FAN_LOG2};
use crate::error::ShrinkError;
use crate::ids::{FrameId, Run};
use crate::sync::Ordering;

/// An open shrink, with the frames collected so far. It must be [committed](Frames::commit_shrink)
/// or [abandoned](Frames::abandon_shrink), and then [ended](Frames::end_shrink).
#[derive(Debug)]
#[must_use = "an open shrink keeps the pool from growing"]
pub struct Shrink {
    region: Run,
    /// Collected frames by unit, starting with the unit of the cut.
    collected: Box<[u64]>,
    missing: usize,
    closed: Vec<(usize, u64)>,
}

impl Shrink {
    /// Returns the frames to be removed.
    pub fn region(&self) -> Run {
        self.region
    }

    /// Returns the number of frames of the region that are not collected yet.
    pub fn missing(&self) -> usize {
        self.missing
    }

    /// Calls `f` with every run of collected frames, in pieces of at most one unit.
    pub fn for_each_collected(&self, mut f: impl FnMut(Run)) {
        let first = self.region.start.index() >> FAN_LOG2;
        for (unit, &mask) in (first..).zip(&self.collected) {
            for_each_run(unit, mask, &mut f);
        }
    }

    fn units(&self) -> impl Iterator<Item = (usize, usize, u64)> + use<> {
        let (start, end) = (self.region.start.index(), self.region.end() as usize);
        let first = start >> FAN_LOG2;
        (0..).zip(first..end.div_ceil(FAN)).map(move |(index, unit)| {
            let from = start.max(unit << FAN_LOG2);
            let to = end.min((unit + 1) << FAN_LOG2);
            (index, unit, ones((from & (FAN - 1)) as u32, (to - from) as u32))
        })
    }
}

fn for_each_run(unit: usize, mask: u64, f: &mut impl FnMut(Run)) {
    for (pos, len) in super::bits::runs(mask) {
        f(Run { start: FrameId((unit << FAN_LOG2) as u32 + pos), len });
    }
}

impl Frames {
    /// Opens a shrink to `to` frames: allocators skip the others; growth and other shrinks fail.
    pub fn begin_shrink(&self, to: usize) -> Result<Shrink, ShrinkError> {
        let mut growth = self.growth();
        if growth.is_shrinking {
            return Err(ShrinkError::Busy);
        }
        let total = self.total();
        if to == 0 {
            return Err(ShrinkError::TooFew { asked: to, min: 1 });
        }
        if to >= total {
            return Err(ShrinkError::NotSmaller { asked: to, total });
        }
        growth.is_shrinking = true;
        drop(growth);
        let region = Run { start: FrameId(to as u32), len: (total - to) as u32 };
        let first = to >> FAN_LOG2;
        let mut shrink = Shrink {
            region,
            collected: vec![0; total.div_ceil(FAN) - first].into(),
            missing: total - to,
            closed: Vec::new(),
        };
        self.with(|map| {
            map.for_each_group(whole_units(region), |index, bits| {
                if let Some(group) = map.directory.group(index) {
                    let is_first = shrink.closed.is_empty();
                    // Relaxed: published by closing the units.
                    group.cut.store(if is_first { to } else { NO_CUT }, Ordering::Relaxed);
                    // Release: pairs with the Acquire of a thread that sees a closed unit.
                    let before = group.closed.fetch_or(bits, Ordering::Release);
                    if is_first && before & lowest(bits) != 0 {
                        // The unit of the cut was already closed as a whole, and stays closed.
                        group.cut.store(NO_CUT, Ordering::Relaxed);
                    }
                    shrink.closed.push((index, bits & !before));
                }
            });
        });
        Ok(shrink)
    }

    /// Claims the region's free frames, and calls `took` with each run. Returns the number missing.
    pub fn collect(&self, shrink: &mut Shrink, mut took: impl FnMut(Run)) -> usize {
        let missing = shrink.missing;
        self.with(|map| {
            for (index, unit, mask) in shrink.units() {
                let wanted = mask & !shrink.collected[index];
                if wanted != 0 {
                    let got = map.collect_unit(unit, wanted);
                    shrink.collected[index] |= got;
                    shrink.missing -= got.count_ones() as usize;
                    for_each_run(unit, got, &mut took);
                }
            }
        });
        if shrink.missing < missing {
            self.tally.took(shrink.region.start, missing - shrink.missing);
        }
        shrink.missing
    }

    /// Lowers the number of frames to that of the shrink. Panics if a frame is missing.
    pub fn commit_shrink(&self, shrink: &Shrink) {
        assert!(shrink.missing == 0, "{} of {} are not the shrinker's", shrink.missing, shrink.region);
        let region = shrink.region;
        self.with(|map| {
            // Relaxed: a bound for walks and searches; none of the frames beyond it is free.
            map.directory.frames.store(region.start.index(), Ordering::Relaxed);
            self.open_again(map, shrink);
            // Units that a later growth adds back are open.
            let gone = region.start.index().div_ceil(FAN)..region.end().div_ceil(FAN as u32) as usize;
            for unit in gone.clone() {
                let (group, bit) = map.directory.shape.unit_place(unit);
                if let Some(group) = map.directory.group(group) {
                    // Relaxed: advisory.
                    group.closed.fetch_and(!(1 << bit), Ordering::Relaxed);
                }
                map.withdraw_all(Level::Leaf, unit);
            }
            let units = map.directory.shape.units_in_group();
            for group in gone.start.div_ceil(units)..gone.end.div_ceil(units) {
                map.withdraw_all(Level::Unit, group);
            }
        });
    }

    /// Frees all collected frames again.
    pub fn abandon_shrink(&self, shrink: &Shrink) {
        self.with(|map| self.open_again(map, shrink));
        shrink.for_each_collected(|run| self.free_run(run));
    }

    /// Ends the shrink: the pool may grow and shrink again.
    pub fn end_shrink(&self, shrink: Shrink) {
        drop(shrink);
        self.growth().is_shrinking = false;
    }

    fn open_again(&self, map: Map<'_>, shrink: &Shrink) {
        for &(index, bits) in &shrink.closed {
            if let Some(group) = map.directory.group(index) {
                group.closed.fetch_and(!bits, Ordering::Relaxed);
                // Release: a thread that reads no cut also reads the unit as open.
                group.cut.store(NO_CUT, Ordering::Release);
            }
        }
    }
}

const fn lowest(bits: u64) -> u64 {
    bits & bits.wrapping_neg()
}

fn whole_units(region: Run) -> Run {
    let start = region.start.0 >> FAN_LOG2 << FAN_LOG2;
    Run { start: FrameId(start), len: region.end() - start }
}

impl Map<'_> {
    fn collect_unit(self, unit: usize, wanted: u64) -> u64 {
        let (group, bit) = self.directory.shape.unit_place(unit);
        let (Some(leaf), Some(group)) = (self.directory.leaf(unit), self.directory.group(group)) else {
            return 0;
        };
        // The loads, here and below, keep a collection that finds nothing from writing.
        if group.units.load(Ordering::Relaxed) >> bit & 1 == 1 {
            let is_split = wanted != ALL;
            let _passage = is_split.then(|| group.transit.enter());
            // Acquire pairs with the Release of the free; Release publishes the passage.
            if group.units.fetch_and(!(1 << bit), Ordering::AcqRel) >> bit & 1 == 1 {
                let rest = ALL & !wanted;
                if rest != 0 {
                    self.free_mask(unit, rest);
                }
                return wanted;
            }
        }
        let free = leaf.load(Ordering::Relaxed);
        if free & wanted == 0 {
            return 0;
        }
        leaf.fetch_and(!wanted, Ordering::Acquire) & wanted
    }

    fn withdraw_all(self, level: Level, index: usize) {
        for class in 0..level.classes() {
            if self.hints(level).is_set(index, class) {
                self.withdraw(level, index, class);
            }
        }
    }
}
