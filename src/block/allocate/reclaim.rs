//! Reclaim ahead of need: whole units are made free before a list asks for them.
//!
//! In a pool with a prefix cache nearly every block is owned or evictable, so a list that needs
//! hundreds of blocks would evict as many, at the moment when its sequence waits for them. Instead,
//! the ends of batches and of sequences evict in small slices, up to a watermark of free frames in
//! whole units. (Operating systems reclaim pages in the same way.) What a slice cannot provide, an
//! allocation evicts itself.
//!
//! # Protocol
//!
//! ```text
//! list     took whole units:  owed += their frames
//! slice    owed: swap 0, was above 0;  some block is evictable;  below the watermark
//!              =>  evict up to SLICE_MAX blocks;  announce;
//!                  more are missing, and whole units were gained, or a batch saw all: owed += rest
//! ```
//!
//! `owed` is a hint that says when to look at the bitmaps: without consumption since the last
//! slice, a batch's end costs one load. The swap gives the work to one thread, unless lists take
//! more units meanwhile: then two slices may overlap, and evict up to a slice too many. A thread
//! that is stopped in a slice withholds what it was about to do, one step of its eviction and the
//! frames of one leaf; others evict as if there were no slices.
//!
//! Everything else is an [eviction](super::evict), against hits, shares, batches and moves as any
//! other. Free frames in the hands of a slice are announced at its end.
//!
//! # Who does it
//!
//! The ends of batches and of sequences, while there are any. A batch that ends with a stream of a
//! device does its slice when it is finished, on the engine's thread and while the device computes:
//! at its end it would delay the thread that reports the ends of other streams. While no batch
//! begins, because the engine is idle or a step takes long, [the background task](crate::compact)
//! does what is owed.
//!
//! The task does not do all slices. Measured in a replay of Mooncake's conversations with a prefix
//! cache, with the ends of batches waking the task instead of evicting (medians of four):
//!
//! | us | ends of batches evict | they wake the task | the task looks every 2 ms |
//! |---|---|---|---|
//! | two threads on two cores: p99 of an append / p99.9 | 26 / 54 | 31 / 62 | 54 / 97 |
//! | p99 of a batch's end / p99.9 | 36 / 51 | 28 / 107 | 16 / 21 |
//! | one thread and an idle core: p99 of an append / p99.9 | 27 / 39 | 28 / 53 | |
//! | p99 of a batch's end / p99.9 | 41 / 62 | 53 / 76 | |
//!
//! A wake costs as much as a small slice, and an append that comes before the slice evicts by
//! itself. Processor time grew by 5 % with one thread.
//!
//! Model: `loom-tests/tests/reclaim.rs`.

use crate::config::FAN_LOG2;
use crate::sync::Ordering::Relaxed;

use crate::block::core::Core;

/// Free frames in whole units that slices restore: this share of the pool, as a shift.
const WATERMARK_SHIFT: u32 = 5;

/// Maximum of the watermark, in frames.
const WATERMARK_MAX: usize = 256;

/// Maximum number of blocks that one slice evicts in the order of the policy. What
/// [completes units](super::complete) comes on top.
const SLICE_MAX: usize = 128;

impl Core {
    /// Notes that a list took frames of whole units.
    #[inline]
    pub(super) fn took_units(&self, frames: usize) {
        if frames > 0 && self.evictor.is_some() {
            // Relaxed: a hint.
            self.owed.fetch_add(frames, Relaxed);
        }
    }

    /// Evicts a slice of blocks if lists have taken whole units since the last slice, and too few
    /// are left. Returns the number of evicted blocks.
    #[inline]
    pub(crate) fn reclaim_slice(&self) -> usize {
        // Relaxed: a hint.
        if self.owed.load(Relaxed) > 0 && self.has_units() {
            self.reclaim_owed(WATERMARK_MAX.min(self.total() >> WATERMARK_SHIFT))
        } else {
            0
        }
    }

    /// Evicts up to a slice of blocks while fewer than `watermark` frames are free in whole units,
    /// and not many more in holes. Returns the number of evicted blocks.
    #[cold]
    pub(in crate::block) fn reclaim_owed(&self, watermark: usize) -> usize {
        // Nothing is owed while nothing is evictable: a prompt that fills the pool exactly stays
        // cached. Reached by `prefix_edges`.
        if self.owed.swap(0, Relaxed) == 0 || self.evictable() == 0 {
            return 0;
        }
        let frames = &self.space.frames;
        let units = frames.free_units();
        let missing = watermark.saturating_sub(units << FAN_LOG2);
        // Holes are limited, or evictions that complete no units would go on until nothing is
        // cached.
        let most = watermark + self.holes_max() + frames.spared_about();
        let missing = missing.min(most.saturating_sub(frames.free_counted()));
        if missing == 0 {
            return 0;
        }
        let evicted = self.evict_to_units(missing.min(SLICE_MAX));
        let gained = frames.free_units().saturating_sub(units) << FAN_LOG2;
        let goes_on = if evicted == 0 {
            // Reached by `reclaim_task`: batches may see all evictable blocks, until they end.
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
