//! Reclaim ahead of need. In a pool with a prefix cache nearly every block is owned or evictable,
//! so a list that needs hundreds of blocks would evict as many first. Instead, the ends of batches
//! and sequences evict in small slices, up to a watermark of free frames in whole units.
//!
//! ```text
//! list     took whole units:  reclaim_debt += their frames
//! slice    reclaim_awaits is not the oldest batch in flight;
//!          reclaim_debt: swap 0, was above 0;  some block is evictable;  below the watermark
//!              =>  evict up to SLICE_MAX blocks;  announce;
//!                  more are missing, and whole units were gained: reclaim_debt += rest
//!                  none was evicted, and a batch is in flight: reclaim_debt += rest;
//!                      reclaim_awaits := the oldest batch
//! ```
//!
//! `reclaim_awaits`, a ticket, is a hint: while the same batch is the oldest, it may also see all
//! blocks that are released meanwhile. Without it, each of many threads would search the queues in
//! vain at the end of every sequence, for as long as that batch is in flight.
//!
//! `reclaim_debt` is a hint, too: without consumption since the last slice, a batch's end costs one
//! load. The swap gives the work to one thread; if lists take more units meanwhile, two slices may
//! overlap. A batch that ends with a stream of a device runs its slice when finished, on the
//! engine's thread. While no batch begins, [the background task](crate::compact) settles the debt:
//! if it ran all slices, p99 of an append rose from 26 to 31 us. Model:
//! `loom-tests/tests/reclaim.rs`.

use crate::config::FAN_LOG2;
use crate::sync::Ordering::Relaxed;

use crate::block::core::Core;
use crate::block::tenants::Tenant;

/// Share of the pool that slices keep free in whole units, as a shift.
const WATERMARK_SHIFT: u32 = 5;

const WATERMARK_MAX: usize = 256;

/// Maximum number of blocks per slice, excluding those that [complete units](super::complete).
const SLICE_MAX: usize = 128;

impl Core {
    #[inline]
    pub(super) fn took_units(&self, frames: usize) {
        if frames > 0 && self.evictor.is_some() {
            // Relaxed, here and below: a hint.
            self.reclaim_debt.fetch_add(frames, Relaxed);
        }
    }

    /// Evicts a slice of blocks if lists took whole units since the last one and too few are left.
    #[inline]
    pub(crate) fn reclaim_slice(&self) -> usize {
        if self.reclaim_debt.load(Relaxed) > 0 && self.has_units() {
            self.settle_reclaim_debt(WATERMARK_MAX.min(self.total() >> WATERMARK_SHIFT))
        } else {
            0
        }
    }

    #[cold]
    pub(in crate::block) fn settle_reclaim_debt(&self, watermark: usize) -> usize {
        let oldest = self.space.clock.oldest_in_flight();
        if oldest.is_some_and(|oldest| self.reclaim_awaits.load(Relaxed) == oldest.0) {
            return 0;
        }
        // A prompt that fills the pool exactly stays cached. Reached by `prefix_edges`.
        if self.reclaim_debt.swap(0, Relaxed) == 0 || self.evictable() == 0 {
            return 0;
        }
        let frames = &self.space.frames;
        let units = frames.free_units();
        let missing = watermark.saturating_sub(units << FAN_LOG2);
        // Otherwise evictions that complete no units would continue until nothing is cached.
        let most = watermark + self.holes_max() + frames.growth_frames_about();
        let missing = missing.min(most.saturating_sub(frames.free_counted()));
        if missing == 0 {
            return 0;
        }
        let evicted = self.evict_to_units(missing.min(SLICE_MAX), Tenant::NONE);
        let gained = frames.free_units().saturating_sub(units) << FAN_LOG2;
        let goes_on = if evicted == 0 {
            // Reached by `reclaim_task`: batches may see all evictable blocks, until they end.
            if let Some(oldest) = oldest {
                self.reclaim_awaits.store(oldest.0, Relaxed);
            }
            self.space.clock.in_flight() > 0
        } else {
            gained >= evicted.div_ceil(2)
        };
        if goes_on {
            self.took_units(missing.saturating_sub(evicted));
        }
        if evicted > 0 {
            self.announce();
        }
        evicted
    }
}
