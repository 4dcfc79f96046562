//! Placement: chooses the frames to claim. Holes first, whole units last, to preserve contiguity:
//!
//! 1. the word of `near`, which continues the caller's last allocation;
//! 2. words of the same group, those too fragmented for larger requests first;
//! 3. such words in the next few groups;
//! 4. a whole unit, which is split, from a partly used group before an untouched one;
//! 5. any hinted word;
//! 6. a walk over the bitmap (`scan`), which alone can conclude that there is none.
//!
//! Steps 1 to 4 are bounded: an unbounded search for the best hole costs more than the hole saves.
//! Threads stay in groups of their own, since `near` is where each allocated last.

use std::ops::ControlFlow;

use super::FrameMask;
use super::bits::{
    LEAF_CLASSES, best_aligned, best_run, class_that_holds, class_that_may_hold, longest_run, ones, runs,
};
use super::claim::Claimed;
use super::map::{Level, Map};
use super::scan::Attempt;
use crate::config::{FAN, FAN_LOG2};
use crate::ids::{FrameId, Order, Run};
use crate::sync::Ordering;

const GROUPS_MAX: usize = 8;

const WORDS_MAX: usize = 16;

/// Up to this length, the rest of a request is put into several holes instead of splitting a unit.
const REST_IN_PIECES: u32 = 16;

#[derive(Clone, Copy)]
struct Wanted {
    level: Level,
    class: usize,
    /// Class that a word must not have, to preserve larger runs.
    spare: Option<usize>,
    groups: usize,
    words: usize,
}

impl Wanted {
    const fn all(level: Level, class: usize) -> Self {
        Self { level, class, spare: None, groups: usize::MAX, words: usize::MAX }
    }

    const fn own(self) -> Self {
        Self { groups: 1, ..self }
    }

    const fn some(self) -> Self {
        Self { groups: GROUPS_MAX, words: WORDS_MAX, ..self }
    }

    fn sparing(self, class: usize) -> Self {
        Self { spare: (class < self.level.classes()).then_some(class), ..self }
    }
}

#[derive(Clone, Copy)]
struct Fit {
    len: u32,
    /// Whether the run starts at a multiple of its length, which is then a power of two.
    is_aligned: bool,
}

impl Fit {
    fn sure(self) -> usize {
        class_that_holds(self.len)
    }

    fn any(self) -> usize {
        if self.is_aligned { self.sure() } else { class_that_may_hold(self.len) }
    }

    #[inline]
    fn pick(self, word: u64) -> Option<u64> {
        let pos = if self.is_aligned { best_aligned(word, self.sure()) } else { best_run(word, self.len) };
        pos.map(|pos| ones(pos, self.len))
    }
}

impl<'a> Map<'a> {
    /// Tries the hinted words, from the group of `near` onwards and around. Clears false hints.
    fn probe<T>(self, wanted: Wanted, near: usize, mut attempt: impl FnMut(usize) -> Option<T>) -> Option<T> {
        let Wanted { level, class, spare, .. } = wanted;
        let hints = self.hints(level);
        let home = near >> FAN_LOG2;
        let (mut group, mut wrapped, mut words) = (home, false, wanted.words);
        for _ in 0..wanted.groups {
            let mut bits = hints.group(group, class) & !spare.map_or(0, |spare| hints.group(group, spare));
            if let Level::Leaf = level {
                bits &= !self.reserved_for_growth(group);
            }
            while bits != 0 {
                let word = group << FAN_LOG2 | bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if let Some(found) = attempt(word) {
                    return Some(found);
                }
                // Skips words that only a newer directory has. Reached by the models in `growth`.
                if self.classes(level, word).is_some_and(|has| has <= class) {
                    self.withdraw(level, word, class);
                }
                words -= 1;
                if words == 0 {
                    return None;
                }
            }
            if wanted.groups == 1 {
                return None;
            }
            group = match hints.next_group(class, group + 1) {
                Some(next) if !wrapped || next < home => next,
                None if !wrapped => {
                    wrapped = true;
                    hints.next_group(class, 0).filter(|&next| next < home)?
                }
                _ => return None,
            };
        }
        None
    }

    /// Returns the leaves of a group of hints that this search skips as reserved for growth.
    #[inline]
    fn reserved_for_growth(self, group: usize) -> u64 {
        // In smaller groups, the claim of a word checks it.
        if !self.reserves || self.directory.shape.units_in_group() < FAN {
            return 0;
        }
        self.directory.group(group).map_or(0, |group| group.reserved_for_growth.load(Ordering::Relaxed))
    }

    pub(super) fn allocate_aligned(self, order: Order, near: FrameId) -> Option<Run> {
        let log2 = u32::from(order.0);
        if log2 >= 31 || order.frames() > self.directory.frames() {
            return None;
        }
        let (len, near) = (1 << log2, self.directory.unit_near(near.index()));
        let placed = if log2 < FAN_LOG2 {
            self.place_frames(Fit { len, is_aligned: true }, near)
        } else {
            self.place_units(Fit { len: len >> FAN_LOG2, is_aligned: true }, len, near)
        };
        placed.or_else(|| self.with_reserved().scan_run(len, len))
    }

    pub(super) fn allocate_run(self, len: u32, near: FrameId) -> Option<Run> {
        if len == 0 || len as usize > self.directory.frames() {
            return None;
        }
        let near = self.directory.unit_near(near.index());
        let placed = if len < FAN as u32 {
            self.place_frames(Fit { len, is_aligned: false }, near)
        } else {
            self.place_units(Fit { len: len.div_ceil(FAN as u32), is_aligned: false }, len, near)
        };
        placed.or_else(|| self.with_reserved().scan_run(len, 1))
    }

    fn place_frames(self, fit: Fit, near: usize) -> Option<Run> {
        let claim = |leaf| self.claim_word(Level::Leaf, leaf, false, |word| fit.pick(word));
        let run = |claimed: Claimed<'_>| Self::run_of_frames(claimed.index, claimed.mask);
        if let Some(claimed) = claim(near) {
            return Some(run(claimed));
        }
        if fit.sure() < LEAF_CLASSES {
            let sure = Wanted::all(Level::Leaf, fit.sure());
            let snug = sure.sparing(fit.sure() + 1);
            let claimed = self
                .probe(snug.own(), near, claim)
                .or_else(|| self.probe(sure.own(), near, claim))
                .or_else(|| self.probe(snug.some(), near, claim));
            if let Some(claimed) = claimed {
                return Some(run(claimed));
            }
        }
        if let Some(run) = self.probe(Wanted::all(Level::Leaf, fit.any()).own().some(), near, claim).map(run)
        {
            return Some(run);
        }
        self.split_any(fit.len, near)
            .or_else(|| self.probe(Wanted::all(Level::Leaf, fit.any()), near, claim).map(run))
    }

    fn place_units(self, fit: Fit, len: u32, near: usize) -> Option<Run> {
        if fit.len as usize > self.directory.shape.units_in_group() {
            return None;
        }
        let gives_back = fit.len << FAN_LOG2 != len;
        let claim = |group| self.claim_word(Level::Unit, group, gives_back, |word| fit.pick(word));
        let (near, _) = self.directory.shape.unit_place(near);
        let (sure, any) = (Wanted::all(Level::Unit, fit.sure()), Wanted::all(Level::Unit, fit.any()));
        let claimed = claim(near)
            .or_else(|| self.probe(sure.sparing(fit.sure() + 1).some(), near, claim))
            .or_else(|| self.probe(any.sparing(FAN_LOG2 as usize), near, claim))
            .or_else(|| self.probe(any, near, claim))?;
        Some(self.keep(claimed, len))
    }

    fn split_any(self, len: u32, near: usize) -> Option<Run> {
        self.place_units(Fit { len: 1, is_aligned: true }, len, near)
    }

    pub(super) fn split(self, unit: usize, len: u32) -> Option<Run> {
        let (group, bit) = self.directory.shape.unit_place(unit);
        let one = 1 << bit;
        let claimed =
            self.claim_word(Level::Unit, group, len < FAN as u32, |word| (word & one != 0).then_some(one))?;
        Some(self.keep(claimed, len))
    }

    /// Claims up to `want` frames of one leaf in one read-modify-write; walks if `thorough`.
    pub(super) fn refill(self, want: u32, near: FrameId, thorough: bool) -> Option<FrameMask> {
        if want == 0 {
            return None;
        }
        let near = self.directory.unit_near(near.index());
        let any = self.with_reserved();
        let walk = || any.place_refill(want, near).or_else(|| any.scan_frames(want));
        let (leaf, bits) = self.place_refill(want, near).or_else(|| if thorough { walk() } else { None })?;
        Some(FrameMask { base: FrameId((leaf << FAN_LOG2) as u32), bits })
    }

    fn place_refill(self, want: u32, near: usize) -> Option<(usize, u64)> {
        let drain = |leaf| self.drain(leaf, want).map(|bits| (leaf, bits));
        let hole = Wanted::all(Level::Leaf, 0);
        // Words without a run of 8, then without a run of 32: the least useful for other requests.
        let fragments = hole.sparing(LEAF_CLASSES / 2);
        let pieces = hole.sparing(LEAF_CLASSES - 1);
        drain(near)
            .or_else(|| self.probe(fragments.own(), near, drain))
            .or_else(|| self.probe(pieces.own(), near, drain))
            .or_else(|| self.probe(fragments.some(), near, drain))
            .or_else(|| self.probe(hole.some(), near, drain))
            .or_else(|| {
                let run = self.split_any(want.min(FAN as u32), near)?;
                Some((run.start.index() >> FAN_LOG2, ones(run.start.0 & (FAN as u32 - 1), run.len)))
            })
            .or_else(|| self.probe(hole, near, drain))
    }

    /// Claims `count` frames in as few runs as possible: whole units in the longest runs, then the
    /// hole that fits the rest, then the longest holes. Returns the number claimed.
    pub(super) fn allocate_many(self, count: u32, near: FrameId, take: &mut dyn FnMut(Run)) -> u32 {
        let any = self.with_reserved();
        let mut left = count - self.allocate_hinted(count, near, take);
        if left > 0 {
            left -= any.allocate_hinted(left, near, take);
        }
        while left > 0 {
            let Some((leaf, mask)) = any.scan_frames(left) else { break };
            for (pos, len) in runs(mask) {
                left -= len;
                take(Run { start: FrameId((leaf << FAN_LOG2) as u32 + pos), len });
            }
        }
        count - left
    }

    pub(super) fn allocate_hinted(self, count: u32, near: FrameId, take: &mut dyn FnMut(Run)) -> u32 {
        let mut left = count;
        let mut near = self.directory.unit_near(near.index());
        let mut whole = left >> FAN_LOG2 << FAN_LOG2;
        left -= whole;
        near = self.allocate_units(&mut whole, near, take);
        left += whole;
        // Put the rest into a hole that fits. Otherwise spread a small rest over several holes, and
        // split a unit for a large one.
        while left > 0 {
            let want = left.min(FAN as u32);
            // Often all free frames are reserved for growth: found out once, not for each class.
            let has_holes = self.probe(Wanted::all(Level::Leaf, 0), near, Some).is_some();
            let hole = if has_holes { self.place_hole(want, near) } else { None };
            let run = hole.or_else(|| {
                let pieces = || if has_holes { self.place_piece(want, near) } else { None };
                let split = || self.split_any(want, near);
                if want > REST_IN_PIECES { split().or_else(pieces) } else { pieces().or_else(split) }
            });
            let Some(run) = run else { break };
            left -= run.len;
            near = self.directory.unit_near(run.end() as usize);
            take(run);
        }
        count - left
    }

    pub(super) fn allocate_fresh(self, count: u32, near: FrameId, take: &mut dyn FnMut(Run)) -> u32 {
        let mut left = count;
        self.allocate_units(&mut left, self.directory.unit_near(near.index()), take);
        count - left
    }

    /// As [`allocate_fresh`](Self::allocate_fresh), at the end of the pool.
    pub(super) fn allocate_last(self, count: u32, take: &mut dyn FnMut(Run)) -> u32 {
        let mut left = count;
        let mut units = left.div_ceil(FAN as u32);
        while units > 0 && left > 0 {
            let len = (units << FAN_LOG2).min(left);
            match self.place_last(units, len) {
                Some(run) => {
                    left -= run.len;
                    take(run);
                    units = units.min(left.div_ceil(FAN as u32));
                }
                None => units /= 2,
            }
        }
        count - left
    }

    /// Claims `len` frames at the start of the last run of so many whole units.
    fn place_last(self, units: u32, len: u32) -> Option<Run> {
        if units == 1 {
            let gives_back = len < FAN as u32;
            let pick = |word: u64| word.checked_ilog2().map(|bit| 1 << bit);
            let claim = |group| self.claim_word(Level::Unit, group, gives_back, pick);
            let claimed = (0..self.directory.groups()).rev().find_map(claim)?;
            return Some(self.keep(claimed, len));
        }
        let mut last = None;
        self.walk(true, units << FAN_LOG2, FrameId(0), |free| {
            let start = (free.end() >> FAN_LOG2).checked_sub(units).map(|unit| unit << FAN_LOG2);
            last = start.filter(|&start| start >= free.start.0).or(last);
            ControlFlow::Continue(())
        });
        let run = Run { start: FrameId(last?), len };
        matches!(self.claim_run(run), Attempt::Found(())).then_some(run)
    }

    /// Claims up to `count` frames in partly used units, those at the end of the pool first.
    pub(super) fn fill_last(self, count: u32, take: &mut dyn FnMut(Run)) -> u32 {
        let mut left = count;
        while left > 0 {
            let longest = |word: u64| longest_run(word).map(|(pos, len)| ones(pos, len.min(left)));
            let claim = |leaf| self.claim_word(Level::Leaf, leaf, false, longest);
            let Some(claimed) = self.probe_last(claim) else { break };
            left -= claimed.mask.count_ones();
            take(Self::run_of_frames(claimed.index, claimed.mask));
        }
        count - left
    }

    /// Tries the hinted leaves, the last one first. Clears false hints.
    fn probe_last<T>(self, mut attempt: impl FnMut(usize) -> Option<T>) -> Option<T> {
        for group in (0..self.directory.leaves().div_ceil(FAN)).rev() {
            let mut bits = self.hints.leaf.group(group, 0) & !self.reserved_for_growth(group);
            while let Some(bit) = bits.checked_ilog2() {
                let leaf = group << FAN_LOG2 | bit as usize;
                bits ^= 1 << bit;
                if let Some(found) = attempt(leaf) {
                    return Some(found);
                }
                if self.classes(Level::Leaf, leaf) == Some(0) {
                    self.withdraw(Level::Leaf, leaf, 0);
                }
            }
        }
        None
    }

    /// Claims the first `len` consecutive frames.
    pub(super) fn allocate_first(self, len: u32) -> Option<Run> {
        if len == 0 || len as usize > self.directory.frames() {
            return None;
        }
        self.with_reserved().scan_run(len, 1)
    }

    /// Claims `left` frames in whole units of one run, or of the longest runs, by halving the
    /// length; frees the rest of the last unit. Returns the unit near which to continue.
    fn allocate_units(self, left: &mut u32, mut near: usize, take: &mut dyn FnMut(Run)) -> usize {
        let mut units = left.div_ceil(FAN as u32);
        while units > 0 && *left > 0 {
            let len = (units << FAN_LOG2).min(*left);
            match self.place_units(Fit { len: units, is_aligned: false }, len, near) {
                Some(run) => {
                    *left -= run.len;
                    near = self.directory.unit_near(run.end() as usize);
                    take(run);
                    units = units.min(left.div_ceil(FAN as u32));
                }
                None => units = (units / 2).min(self.directory.shape.units_in_group() as u32),
            }
        }
        near
    }

    fn place_hole(self, want: u32, near: usize) -> Option<Run> {
        let fit = Fit { len: want, is_aligned: false };
        let claim = |leaf| self.claim_word(Level::Leaf, leaf, false, |word| fit.pick(word));
        let any = Wanted::all(Level::Leaf, fit.any());
        let claimed = if fit.sure() < LEAF_CLASSES {
            let sure = Wanted::all(Level::Leaf, fit.sure());
            self.probe(sure.sparing(fit.sure() + 1).some(), near, claim)
                .or_else(|| self.probe(sure.some(), near, claim))
                .or_else(|| self.probe(any.some(), near, claim))
        } else {
            self.probe(any.some(), near, claim)
        };
        claimed.map(|claimed| Self::run_of_frames(claimed.index, claimed.mask))
    }

    fn place_piece(self, want: u32, near: usize) -> Option<Run> {
        let longest = |word: u64| longest_run(word).map(|(pos, len)| ones(pos, len.min(want)));
        let claim = |leaf| self.claim_word(Level::Leaf, leaf, false, longest);
        let classes = 0..LEAF_CLASSES.min(class_that_holds(want) + 1);
        let claimed =
            classes.rev().find_map(|class| self.probe(Wanted::all(Level::Leaf, class), near, claim))?;
        Some(Self::run_of_frames(claimed.index, claimed.mask))
    }
}
