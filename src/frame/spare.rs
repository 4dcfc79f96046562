//! Units reserved for growth.
//!
//! Hundreds of sequences grow concurrently by one block at a time. A sequence stays in one run if
//! the frame after its last block is still free. The owner of a growing list therefore *reserves*
//! the unit in which it ends: searches for other owners take the free frames of that leaf last.
//!
//! `Group::reserved_for_growth` has one bit per unit of the group:
//!
//! | bit | transition | by |
//! |---|---|---|
//! | 0 -> 1 | [`begin_growth_unit`](Frames::begin_growth_unit): a `fetch_or` that saw 0 | the owner of a growing list; it *owns the bit* from then on |
//! | 1 -> 0 | [`end_growth_unit`](Frames::end_growth_unit): a `fetch_and` | the owner of the bit |
//!
//! # Theorem
//!
//! 1. *A bit has one owner.* Of several threads that reserve a unit, exactly one reads 0.
//! 2. *A reservation hides no frame.* The frames stay in the leaf, counted and hinted as free. A
//!    search that would fail is repeated without regard to the bits: a request fails only if no
//!    frame is free, reserved or not.
//!
//! Every access to the bit is Relaxed: it is advisory. A search that reads an old value takes a
//! frame of a reserved unit, or skips a unit that is no longer reserved. Reserved frames hold no
//! cached blocks, so their number is limited; concurrent callers may exceed the limit by one unit
//! each. A wholly free unit cannot be reserved: its frames are in the unit word.
//!
//! Models: `loom-tests/tests/spare.rs`.

use super::bits::{ALL, ones};
use super::frames::{FrameMask, Frames};
use super::map::{Level, Map};
use super::segment::Group;
use crate::config::{FAN, FAN_LOG2};
use crate::ids::{FrameId, Run};
use crate::sync::Ordering::Relaxed;

/// The limit of reserved units, as a share of all units: `units >> GROWTH_SHIFT`.
const GROWTH_SHIFT: u32 = if cfg!(kvpool_loom) { 0 } else { 2 };

impl Frames {
    /// Reserves the unit of a frame for the caller's [extensions](Self::extend). Returns false if
    /// the unit is already reserved or beyond the pool, or a quarter of all units is reserved.
    pub fn begin_growth_unit(&self, frame: FrameId) -> bool {
        self.with(|map| {
            let (group, bit) = map.directory.shape.unit_place(frame.index() >> FAN_LOG2);
            let Some(group) = map.directory.group(group) else { return false };
            let is_full = self.growth_units.load(Relaxed) >= map.directory.leaves() >> GROWTH_SHIFT;
            let is_ours = !is_full
                && !group.is_reserved_for_growth(bit)
                && group.reserved_for_growth.fetch_or(1 << bit, Relaxed) >> bit & 1 == 0;
            if is_ours {
                self.growth_units.fetch_add(1, Relaxed);
            }
            is_ours
        })
    }

    /// Ends the caller's reservation of a unit.
    pub fn end_growth_unit(&self, frame: FrameId) {
        self.with(|map| {
            let (group, bit) = map.directory.shape.unit_place(frame.index() >> FAN_LOG2);
            if let Some(group) = map.directory.group(group) {
                group.reserved_for_growth.fetch_and(!(1 << bit), Relaxed);
                self.growth_units.fetch_sub(1, Relaxed);
            }
        });
    }

    /// Claims up to `want` consecutive frames of a leaf from `from`, and then whole units of one
    /// group if the leaf ends there; in a reserved unit only if the caller `reserves` it.
    pub fn extend(&self, from: FrameId, want: u32, reserves: bool) -> Option<u32> {
        self.with(|map| if reserves { map.with_reserved() } else { map }.extend(from, want))
            .inspect(|&len| self.count_taken(Run { start: from, len }))
    }

    /// Claims up to `count` frames of whole units in as few runs as possible. Returns the number.
    pub fn allocate_fresh(&self, count: u32, near: FrameId, take: &mut dyn FnMut(Run)) -> u32 {
        let taken = self.with(|map| map.allocate_fresh(count, near, take));
        self.count_many(near, taken)
    }

    /// As [`allocate_fresh`](Self::allocate_fresh), at the end of the pool.
    pub fn allocate_last(&self, count: u32, take: &mut dyn FnMut(Run)) -> u32 {
        let taken = self.with(|map| map.allocate_last(count, take));
        self.count_many(FrameId(0), taken)
    }

    /// Claims up to `count` frames in partly used units, reserved for growth or not, those at the end
    /// of the pool first. Returns the number.
    pub fn fill_last(&self, count: u32, take: &mut dyn FnMut(Run)) -> u32 {
        let taken = self.with(|map| map.with_reserved().fill_last(count, take));
        self.count_many(FrameId(0), taken)
    }

    /// Claims the first `len` consecutive frames, reserved for growth or not.
    pub fn allocate_first(&self, len: u32) -> Option<Run> {
        self.with(|map| map.allocate_first(len)).inspect(|run| self.count_taken(*run))
    }

    /// As [`allocate_some`](Self::allocate_some), then from units reserved for growth.
    pub fn allocate_with_reserved(&self, count: u32, near: FrameId, take: &mut dyn FnMut(Run)) -> u32 {
        let taken = self.with(|map| {
            let taken = map.allocate_hinted(count, near, take);
            taken + map.with_reserved().allocate_hinted(count - taken, near, take)
        });
        self.count_many(near, taken)
    }

    /// Estimates the free frames in units reserved for growth, in O(1): half of each unit.
    pub fn growth_frames_about(&self) -> usize {
        self.growth_units.load(Relaxed) * FAN / 2
    }

    /// Returns the number of wholly free units that allocators may take, from the hinted groups.
    pub fn free_units(&self) -> usize {
        // Most groups are whole or have few units: this check is faster than counting bits.
        let free = |group: &Group| match group.units.load(Relaxed) & !group.closed.load(Relaxed) {
            u64::MAX => u64::BITS,
            units => units.count_ones(),
        };
        self.with(|map| {
            let (hints, mut units, mut from) = (map.hints(Level::Unit), 0, 0);
            while let Some(hinted) = hints.next_group(0, from) {
                let groups = ones_of(hints.group(hinted, 0)).map(|bit| hinted << FAN_LOG2 | bit);
                let groups = groups.filter_map(|group| map.directory.group(group));
                units += groups.map(|group| free(group) as usize).sum::<usize>();
                from = hinted + 1;
            }
            units
        })
    }

    /// Returns the number of free frames in units reserved for growth. Reads one word per group.
    pub fn growth_frames(&self) -> usize {
        self.with(|map| {
            let mut frames = 0;
            map.for_each_growth_unit(|unit| {
                frames += map.directory.free_in_unit(unit, false).count_ones() as usize;
            });
            frames
        })
    }

    /// Returns the number of units reserved for growth, in O(1).
    pub fn growth_units(&self) -> usize {
        self.growth_units.load(Relaxed)
    }

    /// Calls `f` with each unit reserved for growth, ascending.
    pub fn for_each_growth_unit(&self, f: &mut dyn FnMut(Run)) {
        self.with(|map| {
            map.for_each_growth_unit(|unit| {
                f(Run { start: FrameId((unit << FAN_LOG2) as u32), len: FAN as u32 });
            });
        });
    }

    /// Returns whether a frame's unit is wholly free and open.
    pub fn is_unit_free(&self, frame: FrameId) -> bool {
        self.with(|map| map.directory.free_in_unit(frame.index() >> FAN_LOG2, true)) == ALL
    }

    /// Returns the free frames of a partly used unit that allocators may take.
    pub fn free_in_unit(&self, frame: FrameId) -> FrameMask {
        let base = FrameMask::of(frame).base;
        let bits =
            self.with(|map| map.word(Level::Leaf, frame.index() >> FAN_LOG2).map_or(0, |word| word.open()));
        FrameMask { base, bits }
    }

    /// Returns all free frames of a frame's unit, in either level, including closed ones.
    pub fn all_free_in_unit(&self, frame: FrameId) -> FrameMask {
        let bits = self.with(|map| map.directory.free_in_unit(frame.index() >> FAN_LOG2, false));
        FrameMask { base: FrameMask::of(frame).base, bits }
    }

    /// Returns the frames of a frame's unit that a shrink has closed.
    pub fn closed_in_unit(&self, frame: FrameId) -> FrameMask {
        let bits = self.with(|map| {
            let unit = frame.index() >> FAN_LOG2;
            let (group, bit) = map.directory.shape.unit_place(unit);
            map.directory.group(group).map_or(0, |group| group.closed_in_unit(bit, unit))
        });
        FrameMask { base: FrameMask::of(frame).base, bits }
    }

    /// Returns whether the unit of a frame is reserved for growth.
    pub fn is_reserved_for_growth(&self, frame: FrameId) -> bool {
        self.with(|map| {
            let (group, bit) = map.directory.shape.unit_place(frame.index() >> FAN_LOG2);
            map.directory.group(group).is_some_and(|group| group.is_reserved_for_growth(bit))
        })
    }
}

impl Map<'_> {
    fn extend(self, from: FrameId, want: u32) -> Option<u32> {
        let (leaf, pos) = (from.index() >> FAN_LOG2, from.0 & (FAN as u32 - 1));
        let claimed = self.claim_word(Level::Leaf, leaf, false, |open| {
            let len = (open >> pos).trailing_ones().min(want);
            (len != 0).then(|| ones(pos, len))
        });
        let len = claimed.map_or(0, |claimed| claimed.mask.count_ones());
        // From the start of a leaf whose frames are not in the leaf word, or from its end.
        let unit = if pos + len == 0 { leaf } else { leaf + 1 };
        let is_at_unit = pos + len == 0 || pos + len == FAN as u32;
        let len = if is_at_unit && len < want { len + self.extend_units(unit, want - len) } else { len };
        (len > 0).then_some(len)
    }

    fn extend_units(self, unit: usize, want: u32) -> u32 {
        let (group, bit) = self.directory.shape.unit_place(unit);
        let gives_back = !want.is_multiple_of(FAN as u32);
        let claimed = self.claim_word(Level::Unit, group, gives_back, |open| {
            let len = (open >> bit).trailing_ones().min(want.div_ceil(FAN as u32));
            (len != 0).then(|| ones(bit, len))
        });
        claimed.map_or(0, |claimed| {
            let len = want.min(claimed.mask.count_ones() << FAN_LOG2);
            self.keep(claimed, len).len
        })
    }
}

fn ones_of(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let pos = (word != 0).then(|| word.trailing_zeros() as usize)?;
        word &= word - 1;
        Some(pos)
    })
}
