//! Two magazines per thread (Bonwick), so that a thread that alternates between frees and
//! allocations at a magazine's boundary does not access the depot each time. Plain memory, inside
//! an [`OwnerCell`](super::OwnerCell).

use crate::ids::FrameId;

use super::{Depot, Frames, Magazine};

/// A thread's stock of free frames.
pub struct MagazinePair {
    /// The one in use, a separate field so that its address needs no computation.
    loaded: Magazine,
    other: Magazine,
    /// Capacity of a magazine; 0 disables stocking.
    capacity: usize,
    /// Start of the last refill: the next one searches there first.
    near: FrameId,
}

impl MagazinePair {
    /// Creates an empty pair whose magazines hold `capacity` frames, refilled from around `near`.
    pub fn new(capacity: usize, near: FrameId) -> Self {
        Self { loaded: Magazine::default(), other: Magazine::default(), capacity, near }
    }

    /// Returns the number of frames in both magazines.
    #[inline]
    pub fn len(&self) -> usize {
        self.loaded.len() + self.other.len()
    }

    /// Returns whether both magazines are empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the capacity of a magazine.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the frame near which this thread allocates.
    #[inline]
    pub fn near(&self) -> FrameId {
        self.near
    }

    /// Takes a free frame from the loaded magazine, the other one, the depot, or hinted words.
    #[inline]
    pub fn allocate(&mut self, frames: &Frames, depot: &Depot) -> Option<FrameId> {
        match self.loaded.pop() {
            Some(frame) => Some(frame),
            None => self.allocate_slow(frames, depot),
        }
    }

    /// Takes a frame from the loaded magazine, if it has one.
    #[inline]
    pub fn pop_loaded(&mut self) -> Option<FrameId> {
        self.loaded.pop()
    }

    /// Pushes a frame to the loaded magazine. Returns false if it is full.
    #[inline]
    pub fn push_loaded(&mut self, frame: FrameId) -> bool {
        let fits = self.loaded.len() < self.capacity;
        if fits {
            self.loaded.push(frame);
        }
        fits
    }

    /// Fills `out` from the loaded magazine, then from the other one, or takes none.
    #[inline]
    pub fn pop_all(&mut self, out: &mut [FrameId]) -> bool {
        self.loaded.pop_all(out) || self.pop_across(out)
    }

    /// Pushes frames to the loaded magazine, then to the other one, in pop order; all or nothing.
    #[inline]
    pub fn push_all(&mut self, frames: &[FrameId]) -> bool {
        self.loaded.push_all(frames, self.capacity) || self.push_across(frames)
    }

    #[cold]
    #[inline(never)]
    fn pop_across(&mut self, out: &mut [FrameId]) -> bool {
        if self.len() < out.len() {
            return false;
        }
        let (first, rest) = out.split_at_mut(self.loaded.len());
        // No swap: the list fits into the loaded magazine when it is freed.
        self.loaded.pop_all(first) && self.other.pop_all(rest)
    }

    #[cold]
    #[inline(never)]
    fn push_across(&mut self, frames: &[FrameId]) -> bool {
        if self.len() + frames.len() > 2 * self.capacity {
            return false;
        }
        let (first, rest) = frames.split_at(frames.len() - (self.capacity - self.loaded.len()));
        let is_pushed =
            self.loaded.push_all(rest, self.capacity) && self.other.push_all(first, self.capacity);
        self.swap();
        is_pushed
    }

    #[cold]
    #[inline(never)]
    fn allocate_slow(&mut self, frames: &Frames, depot: &Depot) -> Option<FrameId> {
        self.swap();
        if self.loaded.is_empty() {
            match depot.pop() {
                Some(magazine) => self.loaded = magazine,
                None => self.refill(frames),
            }
        }
        self.loaded.pop()
    }

    fn refill(&mut self, frames: &Frames) {
        let want = self.capacity.max(1);
        while self.loaded.len() < want.div_ceil(2) {
            let Some(mask) = frames.refill_some((want - self.loaded.len()) as u32, self.near) else { break };
            self.near = mask.base;
            self.loaded.push_mask(mask);
        }
    }

    /// Frees a frame into the magazines.
    #[inline]
    pub fn free(&mut self, frame: FrameId, frames: &Frames, depot: &Depot) {
        if self.loaded.len() >= self.capacity {
            return self.free_slow(frame, frames, depot);
        }
        self.loaded.push(frame);
    }

    #[cold]
    #[inline(never)]
    fn free_slow(&mut self, frame: FrameId, frames: &Frames, depot: &Depot) {
        if self.capacity == 0 {
            return frames.free_run(crate::ids::Run { start: frame, len: 1 });
        }
        self.swap();
        if self.loaded.len() >= self.capacity
            && let Err(mut full) = depot.push(std::mem::take(&mut self.loaded))
        {
            full.flush(frames);
        }
        self.loaded.push(frame);
    }

    fn swap(&mut self) {
        std::mem::swap(&mut self.loaded, &mut self.other);
    }

    /// Frees every frame into `frames`.
    pub fn flush(&mut self, frames: &Frames) {
        for magazine in [&mut self.loaded, &mut self.other] {
            if !magazine.is_empty() {
                magazine.flush(frames);
            }
        }
    }

    /// Returns the frames of both magazines.
    pub fn iter(&self) -> impl Iterator<Item = FrameId> + '_ {
        self.loaded.iter().chain(self.other.iter())
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    fn frames(range: std::ops::Range<u32>) -> Vec<FrameId> {
        range.map(FrameId).collect()
    }

    #[test]
    fn lists_span_both_magazines_in_order() {
        for before in 0..=4 {
            let mut pair = MagazinePair::new(4, FrameId(0));
            assert!(pair.push_all(&frames(0..before)));
            assert!(!pair.push_all(&frames(10..19 - before)), "more than both hold");
            assert!(pair.push_all(&frames(10..18 - before)), "{before} before");
            assert_eq!(pair.len(), 8);
            let mut out = vec![FrameId(0); 9];
            assert!(!pair.pop_all(&mut out), "more than both have");
            assert!(pair.pop_all(&mut out[..8 - before as usize]));
            assert_eq!(out[..8 - before as usize], frames(10..18 - before));
            assert!(pair.pop_all(&mut out[..before as usize]));
            assert_eq!(out[..before as usize], frames(0..before));
            assert!(pair.is_empty());
        }
        assert!(!MagazinePair::new(0, FrameId(0)).push_all(&frames(0..1)), "no magazines");
    }
}
