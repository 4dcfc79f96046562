//! Frames that go away, and come back.
//!
//! ```text
//! open      begin_shrink(to): the region [to, total) is closed; allocators avoid it
//!  | collect, again and again: what is free in the region becomes the shrinker's
//!  | all of it is? commit: the number of frames falls    not to be had? abandon: all of it back, the region opened
//! over      end: the next one may grow or shrink
//! ```
//!
//! # Invariants
//!
//! 1. The number of frames falls only while the shrinker has every frame that goes: none of them is in a bitmap, in
//!    transit or anybody else's then, so that none can be handed out, by whatever directory a thread may still look at.
//! 2. What has gone stays claimed. The bitmap words and hints remain, half a byte a frame, and no pointer is taken away
//!    from readers. Growth that finds its words there raises the number again and frees the frames.
//! 3. While a shrink is open the number does not change: growth, and another shrink, are refused.
//!
//! # The cut
//!
//! The unit in which the region begins is closed from the cut on: its other frames are handed out all the while, so that
//! no allocation is refused for a shrink that leaves it enough. When the shrink is over its lower part is what the pool
//! has left of it; the upper part stays claimed, and the unit never merges.
//!
//! Collecting takes bits as a claim does. A whole unit that is cut in two is in transit until its lower part is back.

use super::bits::{ALL, ones};
use super::frames::Frames;
use super::map::{Level, Map};
use super::segment::NO_CUT;
use crate::config::{FAN, FAN_LOG2};
use crate::error::ShrinkError;
use crate::ids::{FrameId, Run};
use crate::sync::Ordering;

/// A shrink that is open: which frames of the region are the shrinker's by now. It is to be
/// [committed](Frames::commit_shrink) or [abandoned](Frames::abandon_shrink), and then [ended](Frames::end_shrink):
/// until then the pool neither grows nor shrinks.
#[derive(Debug)]
#[must_use = "an open shrink keeps the pool from growing"]
pub struct Shrink {
    region: Run,
    /// By unit, from that of the cut on: the frames that are the shrinker's.
    collected: Box<[u64]>,
    missing: usize,
    /// By group: the units that were open before.
    closed: Vec<(usize, u64)>,
}

impl Shrink {
    /// The frames that are to go.
    pub fn region(&self) -> Run {
        self.region
    }

    /// Frames of the region that are not the shrinker's yet.
    pub fn missing(&self) -> usize {
        self.missing
    }

    /// Calls `f` with every run of frames that are the shrinker's, in pieces of one unit at most.
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
    /// Opens a shrink to `to` frames: allocators avoid those from there on, and whoever wants to grow or shrink is refused.
    ///
    /// # Errors
    /// [`ShrinkError::Busy`] while another shrink is open; [`ShrinkError::NotSmaller`]; [`ShrinkError::TooFew`] for
    /// none at all.
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
        growth.is_shrinking = !cfg!(kvpool_mutant = "shrink_beside_growth");
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
                    // Relaxed: published by the closing.
                    group.cut.store(if is_first { to } else { NO_CUT }, Ordering::Relaxed);
                    // Release: pairs with the Acquire of who sees a closed unit and asks for the cut.
                    let before = group.closed.fetch_or(bits, Ordering::Release);
                    if is_first && before & lowest(bits) != 0 {
                        // Somebody had closed the unit of the cut as a whole, and it stays so.
                        group.cut.store(NO_CUT, Ordering::Relaxed);
                    }
                    shrink.closed.push((index, bits & !before));
                }
            });
        });
        Ok(shrink)
    }

    /// Takes what is free in the region at this moment, and calls `took` with it, run by run. Returns how many frames
    /// are missing still: in magazines, retired, or owned.
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
        if cfg!(kvpool_mutant = "shrink_uncollected") {
            shrink.missing = 0;
        }
        shrink.missing
    }

    /// The pool has only so many frames as the shrink was opened for.
    ///
    /// # Panics
    /// If a frame is missing.
    pub fn commit_shrink(&self, shrink: &Shrink) {
        assert!(shrink.missing == 0, "{} of {} are not the shrinker's", shrink.missing, shrink.region);
        let region = shrink.region;
        self.with(|map| {
            // Relaxed: it bounds walks and searches. That nothing beyond is handed out is because nothing there is free.
            map.directory.frames.store(region.start.index(), Ordering::Relaxed);
            self.open_again(map, shrink);
            // Units that come back come back open, whoever closed them.
            let gone = region.start.index().div_ceil(FAN)..region.end().div_ceil(FAN as u32) as usize;
            for unit in gone.clone() {
                let (group, bit) = map.directory.shape.unit_place(unit);
                if let Some(group) = map.directory.group(group) {
                    // Relaxed: advice.
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

    /// Puts everything back that was collected.
    pub fn abandon_shrink(&self, shrink: &Shrink) {
        self.with(|map| self.open_again(map, shrink));
        shrink.for_each_collected(|run| self.free_run(run));
    }

    /// The last step: the pool may grow and shrink again.
    pub fn end_shrink(&self, shrink: Shrink) {
        drop(shrink);
        self.growth().is_shrinking = false;
    }

    fn open_again(&self, map: Map<'_>, shrink: &Shrink) {
        for &(index, bits) in &shrink.closed {
            if let Some(group) = map.directory.group(index) {
                group.closed.fetch_and(!bits, Ordering::Relaxed);
                // Release: whoever finds no cut any more finds the unit open.
                group.cut.store(NO_CUT, Ordering::Release);
            }
        }
    }
}

const fn lowest(bits: u64) -> u64 {
    bits & bits.wrapping_neg()
}

/// The region, and the unit that it begins in as a whole.
fn whole_units(region: Run) -> Run {
    let start = region.start.0 >> FAN_LOG2 << FAN_LOG2;
    Run { start: FrameId(start), len: region.end() - start }
}

impl Map<'_> {
    /// Takes those of a unit's frames that are free, wherever they are represented, closed or not.
    fn collect_unit(self, unit: usize, wanted: u64) -> u64 {
        let (group, bit) = self.directory.shape.unit_place(unit);
        let (Some(leaf), Some(group)) = (self.directory.leaf(unit), self.directory.group(group)) else {
            return 0;
        };
        // The loads, here and below, keep a collection that finds nothing from writing.
        if group.units.load(Ordering::Relaxed) >> bit & 1 == 1 {
            let is_split = wanted != ALL && !cfg!(kvpool_mutant = "cut_no_passage");
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
        if cfg!(kvpool_mutant = "collect_store") {
            leaf.store(free & !wanted, Ordering::Release);
            return free & wanted;
        }
        leaf.fetch_and(!wanted, Ordering::Acquire) & wanted
    }

    /// Withdraws the hints of a word that has gone, so that no search probes it in vain.
    fn withdraw_all(self, level: Level, index: usize) {
        for class in 0..level.classes() {
            if self.hints(level).is_set(index, class) {
                self.withdraw(level, index, class);
            }
        }
    }
}
