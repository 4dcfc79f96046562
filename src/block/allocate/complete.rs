//! Evictions out of order that complete a unit of free frames. If the evictor tolerates it, the few
//! newer blocks in a nearly free unit are evicted at once: all or none. Because lists take runs of
//! units, up to [`BESIDE`] units in each direction follow, if they contain only free and evictable
//! frames, at a multiple of the tolerance.

use smallvec::SmallVec;

use crate::config::{FAN, FAN_LOG2};
use crate::frame::FrameMask;
use crate::ids::{BlockId, FrameId};

use crate::block::core::{Core, Evictor};
use crate::block::space::FreedFrames;

const EARLY_MAX: usize = FAN / 2;

const BESIDE: usize = 4;

/// Maximum number of blocks that one call evicts in these units.
const BESIDE_BLOCKS: usize = 512;

/// Multiple of the tolerance for the blocks of these units.
const BESIDE_TOLERANCE: u32 = 2;

pub(super) type Units = SmallVec<[FrameId; 16]>;

pub(super) fn note_units(units: &mut Units, frames: &[FrameId]) {
    for &frame in frames {
        let base = FrameMask::of(frame).base;
        if units.last() != Some(&base) {
            units.push(base);
        }
    }
}

impl Core {
    pub(super) fn complete_units(&self, evictor: &dyn Evictor, mut units: Units) -> usize {
        units.sort_unstable();
        units.dedup();
        let completed = units.iter().map(|&unit| self.complete_unit(evictor, unit, EARLY_MAX, 1));
        let completed: usize = completed.sum();
        let mut left = BESIDE_BLOCKS;
        units.into_iter().for_each(|unit| self.complete_beside(evictor, unit, &mut left));
        completed + BESIDE_BLOCKS - left
    }

    fn complete_beside(&self, evictor: &dyn Evictor, unit: FrameId, left: &mut usize) {
        let is_free = |unit| self.space.frames.is_unit_free(unit);
        if !is_free(unit) {
            return;
        }
        let by = |units: usize| (units << FAN_LOG2) as u32;
        let up = (1..=BESIDE).map_while(|units| unit.0.checked_add(by(units)));
        let down = (1..=BESIDE).map_while(|units| unit.0.checked_sub(by(units)));
        let mut follows = |unit: FrameId| {
            if unit.index() >= self.rows() || is_free(unit) {
                return is_free(unit);
            }
            let evicted = self.complete_unit(evictor, unit, FAN.min(*left), BESIDE_TOLERANCE);
            *left -= evicted;
            evicted > 0
        };
        let _ = up.map(FrameId).all(&mut follows);
        let _ = down.map(FrameId).all(&mut follows);
    }

    /// Evicts a unit's remaining blocks, if these are at most `most` and the evictor tolerates it.
    fn complete_unit(&self, evictor: &dyn Evictor, unit: FrameId, most: usize, tolerance: u32) -> usize {
        let frames = &self.space.frames;
        let free = frames.free_in_unit(unit);
        if FAN - free.len() as usize > most || frames.is_reserved_for_growth(unit) {
            return 0;
        }
        let rest = FrameMask { base: unit, bits: !free.bits };
        if rest.frames().any(|frame| frame.index() >= self.rows()) {
            return 0;
        }
        let blocks: SmallVec<[BlockId; FAN]> =
            rest.frames().map(|frame| self.space.table.block_at(frame)).collect();
        let oldest = self.space.clock.oldest();
        let can_go = |&id: &BlockId| self.can_evict(id, self.word(id), oldest);
        if !blocks.iter().all(can_go) || !evictor.evicts_early(&blocks, tolerance) {
            return 0;
        }
        let mut freed = FreedFrames::new(&self.space);
        // Each word decides again: if an owner was faster, the unit is not completed.
        let evicted = blocks.iter().filter_map(|&id| self.evict(id, oldest).ok());
        evicted.map(|frame| freed.push(frame)).count()
    }
}
