//! Counts free frames and measures their contiguity. Exact without concurrent changes.

use std::ops::ControlFlow;

use super::map::{Level, Map};
use crate::config::{FAN, FAN_LOG2, FRAME_BITS};
use crate::ids::{FrameId, Order, Run};
use crate::sync::Ordering;

/// Number of orders distinguished.
pub const ORDERS: usize = FRAME_BITS as usize + 1;

/// Free frames and free runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Census {
    /// Order for which [`free_in_order`](Self::free_in_order) was counted.
    pub order: Order,
    /// Number of free frames.
    pub free: usize,
    /// Number of frames in free aligned runs of at least [`order`](Self::order).
    pub free_in_order: usize,
    /// Number of free frames in units reserved for growth.
    pub reserved_for_growth: usize,
    /// Number of those frames that are in free aligned runs of at least [`order`](Self::order).
    pub growth_in_order: usize,
    /// Number of frames in wholly free units (of 64).
    pub free_in_units: usize,
    /// Number of maximal free runs, at any alignment.
    pub runs: usize,
    /// Length of the longest maximal free run.
    pub longest_run: usize,
    /// Number of free aligned runs by order, with every maximal run split into as few as possible.
    pub by_order: [usize; ORDERS],
}

impl Census {
    /// Returns the share of free frames outside free aligned runs of [`order`](Self::order),
    /// including those that cannot be in one. [`outside_of_runs`] excludes the latter.
    pub fn fragmentation(&self) -> f64 {
        if self.free == 0 { 0.0 } else { 1.0 - self.free_in_order as f64 / self.free as f64 }
    }

    fn add(&mut self, run: Run) {
        self.free += run.len as usize;
        self.runs += 1;
        self.longest_run = self.longest_run.max(run.len as usize);
        self.free_in_units += aligned_part(run, FAN_LOG2);
        self.free_in_order += aligned_part(run, u32::from(self.order.0));
        let (mut at, end) = (run.start.0, run.end());
        while at < end {
            // The largest aligned run that starts here.
            let log2 = at.trailing_zeros().min((end - at).ilog2());
            self.by_order[log2 as usize] += 1;
            at += 1 << log2;
        }
    }
}

/// Returns the fragmentation rate at `order`: the share of the possible free aligned runs of
/// `2^order` frames that do not exist; 0 if none is possible.
///
/// `runs` is the number of such runs in a pool of `frames` frames, `free` the number of unowned
/// frames. The first `set_aside` frames do not move. The possible runs are limited by the free
/// frames and by the aligned positions: the rate is 0 if and only if no move can gain a run.
pub fn outside_of_runs(runs: usize, frames: usize, set_aside: usize, free: usize, order: Order) -> f64 {
    let log2 = u32::from(order.0);
    let whole = |frames: usize| frames.checked_shr(log2).unwrap_or(0);
    let broken = if log2 < usize::BITS { set_aside.div_ceil(1 << log2) } else { 0 };
    let possible = whole(free).min(whole(frames).saturating_sub(broken));
    // `runs` can exceed `possible`: frames of the reserve are elsewhere, or were freed meanwhile.
    if possible == 0 { 0.0 } else { (1.0 - runs as f64 / possible as f64).max(0.0) }
}

fn aligned_part(run: Run, log2: u32) -> usize {
    let aligned = |frame: u64| frame >> log2 << log2;
    let (start, end) = (u64::from(run.start.0), u64::from(run.end()));
    aligned(end).saturating_sub(aligned(start + (1 << log2) - 1)) as usize
}

fn in_aligned_runs(word: u64, log2: u32) -> u32 {
    if log2 > FAN_LOG2 {
        return 0;
    }
    let firsts = if log2 == FAN_LOG2 { 1 } else { !0 / ((1 << (1 << log2)) - 1) };
    let runs = (0..log2).fold(word, |runs, step| runs & runs >> (1 << step)) & firsts;
    runs.count_ones() << log2
}

impl Map<'_> {
    pub(super) fn census(self, order: Order) -> Census {
        let mut census = Census {
            order,
            free: 0,
            free_in_order: 0,
            reserved_for_growth: 0,
            growth_in_order: 0,
            free_in_units: 0,
            runs: 0,
            longest_run: 0,
            by_order: [0; ORDERS],
        };
        self.walk(false, 1, FrameId(0), |run| {
            census.add(run);
            ControlFlow::Continue(())
        });
        self.for_each_growth_unit(|unit| {
            let free = self.directory.free_in_unit(unit, false);
            census.reserved_for_growth += free.count_ones() as usize;
            census.growth_in_order += in_aligned_runs(free, u32::from(order.0)) as usize;
        });
        census
    }

    pub(super) fn for_each_growth_unit(self, mut f: impl FnMut(usize)) {
        for index in 0..self.directory.groups() {
            let Some(group) = self.directory.group(index) else { return };
            // Relaxed: the reservation is advisory.
            let mut reserved_for_growth = group.reserved_for_growth.load(Ordering::Relaxed);
            while reserved_for_growth != 0 {
                f(self.directory.shape.first_unit(index) + reserved_for_growth.trailing_zeros() as usize);
                reserved_for_growth &= reserved_for_growth - 1;
            }
        }
    }

    /// Returns the number of units reserved for growth, including those beyond the end of the pool.
    pub(super) fn growth_units_ever(self) -> usize {
        let groups = (0..self.directory.groups_ever()).filter_map(|group| self.directory.group(group));
        groups.map(|group| group.reserved_for_growth.load(Ordering::Relaxed).count_ones() as usize).sum()
    }

    pub(super) fn free_count(self) -> usize {
        let count = |bits: u64| bits.count_ones() as usize;
        let leaves = (0..self.directory.leaves()).filter_map(|leaf| self.directory.leaf(leaf));
        let groups = (0..self.directory.groups()).filter_map(|group| self.directory.group(group));
        // Relaxed: an estimate under concurrency; the caller orders a quiescent count.
        leaves.map(|leaf| count(leaf.load(Ordering::Relaxed))).sum::<usize>()
            + FAN * groups.map(|group| count(group.units.load(Ordering::Relaxed))).sum::<usize>()
    }

    pub(super) fn stranded(self) -> usize {
        let missing = |level: Level, words: usize| {
            let lacks = |word: &usize| {
                !(0..self.classes(level, *word).unwrap_or(0))
                    .all(|class| self.hints(level).is_set(*word, class))
            };
            (0..words).filter(lacks).count()
        };
        missing(Level::Leaf, self.directory.leaves()) + missing(Level::Unit, self.directory.groups())
    }

    pub(super) fn is_empty_beyond(self) -> bool {
        (self.directory.leaves()..self.directory.capacity() >> FAN_LOG2)
            .all(|unit| self.directory.free_in_unit(unit, false) == 0)
    }

    pub(super) fn is_exclusive(self) -> bool {
        (0..self.directory.leaves()).all(|unit| {
            let (group, bit) = self.directory.shape.unit_place(unit);
            let leaf = self.directory.leaf(unit).map_or(0, |leaf| leaf.load(Ordering::Acquire));
            let units = self.directory.group(group).map_or(0, |group| group.units.load(Ordering::Acquire));
            if units >> bit & 1 == 1 { leaf == 0 } else { leaf.count_ones() < FAN as u32 }
        })
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn bits_in_aligned_runs_are_counted() {
        let rng = &mut fastrand::Rng::with_seed(5);
        for _ in 0..2_000 {
            let word = rng.u64(..) | rng.u64(..) | rng.u64(..);
            for log2 in 0..=FAN_LOG2 {
                let len = 1 << log2;
                let whole =
                    (0..64 / len).filter(|run| (0..len).all(|bit| word >> (run * len + bit) & 1 == 1));
                assert_eq!(in_aligned_runs(word, log2) as usize, whole.count() * len, "{word:b}, {log2}");
            }
        }
        assert_eq!((in_aligned_runs(!0, FAN_LOG2), in_aligned_runs(!0, FAN_LOG2 + 1)), (64, 0));
    }
}
