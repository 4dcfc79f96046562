//! A magazine (Bonwick). Stored inline, 260 bytes: a transfer to the depot copies it.

use crate::config::{FAN, FAN_LOG2, MAGAZINE_BLOCKS_MAX};
use crate::ids::FrameId;

use super::{FrameMask, Frames};

/// A stack of up to [`MAGAZINE_BLOCKS_MAX`] free frames.
#[derive(Clone)]
pub struct Magazine {
    len: u32,
    frames: [u32; MAGAZINE_BLOCKS_MAX],
}

const _: () = assert!(MAGAZINE_BLOCKS_MAX.is_power_of_two(), "indices are masked to elide the bounds check");

impl Default for Magazine {
    fn default() -> Self {
        Self { len: 0, frames: [0; MAGAZINE_BLOCKS_MAX] }
    }
}

impl Magazine {
    /// Returns the number of frames.
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns whether the magazine is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Removes and returns the frame pushed last.
    #[inline]
    pub fn pop(&mut self) -> Option<FrameId> {
        self.len = self.len.checked_sub(1)?;
        Some(FrameId(self.frames[self.len as usize & (MAGAZINE_BLOCKS_MAX - 1)]))
    }

    /// Pushes a frame. The caller respects the capacity.
    #[inline]
    pub fn push(&mut self, frame: FrameId) {
        debug_assert!(self.len() < MAGAZINE_BLOCKS_MAX);
        self.frames[self.len as usize & (MAGAZINE_BLOCKS_MAX - 1)] = frame.0;
        self.len += 1;
    }

    /// Fills `out` with the frames pushed last, the newest first, or takes none.
    #[inline]
    pub fn pop_all(&mut self, out: &mut [FrameId]) -> bool {
        if self.len() < out.len() {
            return false;
        }
        // One by one: vectors of frames would wait for the single stores of a recent push.
        out.iter_mut().for_each(|out| *out = self.pop().unwrap_or_default());
        true
    }

    /// Pushes frames so that a run freed in order pops in order; none if `capacity` is exceeded.
    #[inline]
    pub fn push_all(&mut self, frames: &[FrameId], capacity: usize) -> bool {
        if self.len() + frames.len() > capacity {
            return false;
        }
        frames.iter().rev().for_each(|&frame| self.push(frame));
        true
    }

    /// Pushes the frames of a mask, so that they pop in ascending order.
    pub fn push_mask(&mut self, mask: FrameMask) {
        let mut bits = mask.bits;
        while bits != 0 {
            let top = u64::BITS - 1 - bits.leading_zeros();
            self.push(FrameId(mask.base.0 + top));
            bits &= !(1 << top);
        }
    }

    /// Frees every frame into `frames`, with one atomic operation for all frames of the same word.
    pub fn flush(&mut self, frames: &Frames) {
        // Direct-mapped by word. A collision only costs a second operation on the evicted word.
        const ENTRIES: usize = FAN;
        let mut words = [FrameMask { base: FrameId(0), bits: 0 }; ENTRIES];
        frames.free_masks(|free| {
            for &frame in &self.frames[..self.len()] {
                let base = FrameId(frame & !(FAN as u32 - 1));
                let entry = &mut words[(frame >> FAN_LOG2) as usize & (ENTRIES - 1)];
                if entry.bits != 0 && entry.base != base {
                    free(*entry);
                    entry.bits = 0;
                }
                entry.base = base;
                entry.bits |= 1 << (frame - base.0);
            }
            words.into_iter().filter(|entry| entry.bits != 0).for_each(free);
        });
        self.len = 0;
    }

    /// Returns the frames, in the order in which they were pushed.
    pub fn iter(&self) -> impl Iterator<Item = FrameId> + '_ {
        self.frames[..self.len()].iter().map(|&frame| FrameId(frame))
    }
}
