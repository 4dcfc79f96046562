//! Counting what is free, and how it hangs together. Exact when nothing changes meanwhile.

use std::ops::ControlFlow;

use super::map::{Level, Map};
use crate::config::{FAN, FAN_LOG2, FRAME_BITS};
use crate::ids::{Order, Run};
use crate::sync::Ordering;

/// Orders that are told apart.
pub const ORDERS: usize = FRAME_BITS as usize + 1;

/// What is free, and how contiguous it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Census {
    /// The order that was asked about.
    pub order: Order,
    /// Free frames.
    pub free: usize,
    /// Frames in free aligned runs of at least [`order`](Self::order). The fragmentation rate is the share of
    /// [`free`](Self::free) that is not among them.
    pub free_in_order: usize,
    /// Frames in wholly free units (of 64).
    pub free_in_units: usize,
    /// Maximal free runs, at any alignment.
    pub runs: usize,
    /// The length of the longest of them.
    pub longest_run: usize,
    /// Free aligned runs by order, when every maximal run is cut into as few of them as it can be.
    pub by_order: [usize; ORDERS],
}

impl Census {
    /// Share of the free frames that are not part of a free aligned run of the order asked about; 0
    /// if none is free. Those count that could not be in one, as at the ends of a pool: see
    /// [`outside_of_runs`].
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
            // The largest aligned run that begins here: as far as the alignment of the place and the end allow.
            let log2 = at.trailing_zeros().min((end - at).ilog2());
            self.by_order[log2 as usize] += 1;
            at += 1 << log2;
        }
    }
}

/// The fragmentation rate at `order`: of the free aligned runs of `2^order` frames that there could
/// be, the share that there is not; 0 if there could be none. `runs` there are, in a pool of so
/// many `frames`, of which `set_aside` stay where they are, at the front: the null block's and the
/// reserve. `free` are all others that nobody owns, wherever they are kept.
///
/// There could be as many as are free in all, and as the pool has places for: not where it ends
/// between two multiples of `2^order`, and not where frames are set aside. So it is 0 if, and only
/// if, no move of any block could gain a run.
pub fn outside_of_runs(runs: usize, frames: usize, set_aside: usize, free: usize, order: Order) -> f64 {
    let log2 = u32::from(order.0);
    let whole = |frames: usize| frames.checked_shr(log2).unwrap_or(0);
    let broken = if log2 < usize::BITS { set_aside.div_ceil(1 << log2) } else { 0 };
    let possible = whole(free).min(whole(frames).saturating_sub(broken));
    // More than there could be: the reserve is elsewhere, or frames were freed during the count.
    if possible == 0 { 0.0 } else { (1.0 - runs as f64 / possible as f64).max(0.0) }
}

/// Frames of `run` that lie in aligned runs of 2^`log2`.
fn aligned_part(run: Run, log2: u32) -> usize {
    let aligned = |frame: u64| frame >> log2 << log2;
    let (start, end) = (u64::from(run.start.0), u64::from(run.end()));
    aligned(end).saturating_sub(aligned(start + (1 << log2) - 1)) as usize
}

impl Map<'_> {
    pub(super) fn census(self, order: Order) -> Census {
        let mut census = Census {
            order,
            free: 0,
            free_in_order: 0,
            free_in_units: 0,
            runs: 0,
            longest_run: 0,
            by_order: [0; ORDERS],
        };
        self.walk(false, 1, |run| {
            census.add(run);
            ControlFlow::Continue(())
        });
        census
    }

    pub(super) fn free_count(self) -> usize {
        let count = |bits: u64| bits.count_ones() as usize;
        let leaves = (0..self.directory.leaves()).filter_map(|leaf| self.directory.leaf(leaf));
        let groups = (0..self.directory.groups()).filter_map(|group| self.directory.group(group));
        // Relaxed: a count beside running threads is a moment's estimate, a quiescent one is ordered by the caller.
        leaves.map(|leaf| count(leaf.load(Ordering::Relaxed))).sum::<usize>()
            + FAN * groups.map(|group| count(group.units.load(Ordering::Relaxed))).sum::<usize>()
    }

    /// Words that hold a class without a hint for it.
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

    /// Whether no frame is free in the units behind the last one in use.
    pub(super) fn is_empty_beyond(self) -> bool {
        (self.directory.leaves()..self.directory.capacity() >> FAN_LOG2)
            .all(|unit| self.directory.free_in_unit(unit, false) == 0)
    }

    /// Whether no unit stands wholly free in its leaf, or in both places.
    pub(super) fn is_exclusive(self) -> bool {
        (0..self.directory.leaves()).all(|unit| {
            let (group, bit) = self.directory.shape.unit_place(unit);
            let leaf = self.directory.leaf(unit).map_or(0, |leaf| leaf.load(Ordering::Acquire));
            let units = self.directory.group(group).map_or(0, |group| group.units.load(Ordering::Acquire));
            if units >> bit & 1 == 1 { leaf == 0 } else { leaf.count_ones() < FAN as u32 }
        })
    }
}
