//! Evictions out of order that complete a unit of free frames.
//!
//! Evictions in the policy's order leave some units nearly free: a few evictable blocks in them are
//! newer than their neighbours. If the evictor tolerates it, those blocks are evicted at once. A
//! unit is completed only as a whole: if a single block in it has an owner, is moving, may be seen
//! by a batch or is too valuable, all of them stay.
//!
//! The blocks are evicted by id, as a [walk](Core::evict_any) does, so the queues need no new step:
//! their entries become stale, and are skipped.

use smallvec::SmallVec;

use crate::config::FAN;
use crate::frame::FrameMask;
use crate::ids::{BlockId, FrameId};

use crate::block::core::{Core, Evictor};
use crate::block::space::FreedFrames;

/// Maximum number of blocks that are evicted to complete one unit.
const EARLY_MAX: usize = FAN / 2;

/// First frames of units.
pub(super) type Units = SmallVec<[FrameId; 16]>;

/// Notes the units of evicted frames. Neighbours mostly come one after the other.
pub(super) fn note_units(units: &mut Units, frames: &[FrameId]) {
    for &frame in frames {
        let base = FrameMask::of(frame).base;
        if units.last() != Some(&base) {
            units.push(base);
        }
    }
}

impl Core {
    /// Evicts what is left in those of the units that are nearly free, as far as the evictor
    /// tolerates. Returns the number of evicted blocks.
    pub(super) fn complete_units(&self, evictor: &dyn Evictor, mut units: Units) -> usize {
        units.sort_unstable();
        units.dedup();
        units.into_iter().map(|unit| self.complete_unit(evictor, unit)).sum()
    }

    fn complete_unit(&self, evictor: &dyn Evictor, unit: FrameId) -> usize {
        let frames = &self.space.frames;
        let free = frames.free_in_unit(unit);
        let is_near = !free.is_empty() && free.len() as usize >= FAN - EARLY_MAX && !frames.is_spared(unit);
        if !is_near {
            return 0;
        }
        let rest = FrameMask { base: unit, bits: !free.bits };
        if rest.frames().any(|frame| frame.index() >= self.rows()) {
            // The pool ends inside this unit.
            return 0;
        }
        let blocks: SmallVec<[BlockId; EARLY_MAX]> =
            rest.frames().map(|frame| self.space.table.block_at(frame)).collect();
        let oldest = self.space.clock.oldest();
        let can_go = |&id: &BlockId| self.can_evict(id, self.word(id), oldest);
        if !blocks.iter().all(can_go) || !evictor.evicts_early(&blocks) {
            return 0;
        }
        let mut freed = FreedFrames::new(&self.space);
        // Each word decides again: an owner that was faster keeps its block, and the unit is not
        // completed.
        let evicted = blocks.iter().filter_map(|&id| self.evict(id, oldest).ok());
        evicted.map(|frame| freed.push(frame)).count()
    }
}
