//! A thread's cache of free frames: two magazines, so that a thread that alternates at a magazine's edge does not
//! go to the depot each time (Bonwick).
//!
//! Plain memory: whoever has the [`OwnerCell`](super::OwnerCell) around it has it alone.

use crate::ids::FrameId;

use super::{Depot, Frames, Magazine};

/// See the [module](self).
pub struct MagazinePair {
    magazines: [Magazine; 2],
    loaded: usize,
    /// Frames in a full magazine; 0 bypasses the cache.
    capacity: usize,
    /// Where the last refill came from: the next one looks there first.
    near: FrameId,
}

impl MagazinePair {
    /// An empty cache whose magazines hold `capacity` frames (at most
    /// [`MAGAZINE_BLOCKS_MAX`](crate::config::MAGAZINE_BLOCKS_MAX)), refilled from around `near`.
    pub fn new(capacity: usize, near: FrameId) -> Self {
        Self { magazines: Default::default(), loaded: 0, capacity, near }
    }

    /// Frames in both magazines.
    #[inline]
    pub fn len(&self) -> usize {
        self.magazines[0].len() + self.magazines[1].len()
    }

    /// Whether both magazines are empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Frames in a full magazine.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Where this thread's allocations gather.
    #[inline]
    pub fn near(&self) -> FrameId {
        self.near
    }

    /// A free frame: from the loaded magazine, the other one, the depot, or the global structure. `None`: all of
    /// these are empty, or hints lead to none of the last one's frames: it is not walked.
    #[inline]
    pub fn allocate(&mut self, frames: &Frames, depot: &Depot) -> Option<FrameId> {
        match self.magazines[self.loaded & 1].pop() {
            Some(frame) => Some(frame),
            None => self.allocate_slow(frames, depot),
        }
    }

    /// A frame from the loaded magazine, if there is one.
    #[inline]
    pub fn pop_loaded(&mut self) -> Option<FrameId> {
        self.magazines[self.loaded & 1].pop()
    }

    /// Puts a frame into the loaded magazine, if it fits.
    #[inline]
    pub fn push_loaded(&mut self, frame: FrameId) -> bool {
        let magazine = &mut self.magazines[self.loaded & 1];
        let fits = magazine.len() < self.capacity;
        if fits {
            magazine.push(frame);
        }
        fits
    }

    /// Fills `out` from the loaded magazine, if it has as many; else nothing is taken.
    #[inline]
    pub fn pop_all(&mut self, out: &mut [FrameId]) -> bool {
        self.magazines[self.loaded & 1].pop_all(out)
    }

    /// Puts frames into the loaded magazine, if they all fit; else none.
    #[inline]
    pub fn push_all(&mut self, frames: &[FrameId]) -> bool {
        self.magazines[self.loaded & 1].push_all(frames, self.capacity)
    }

    #[cold]
    #[inline(never)]
    fn allocate_slow(&mut self, frames: &Frames, depot: &Depot) -> Option<FrameId> {
        self.loaded ^= 1;
        if self.magazines[self.loaded].is_empty() {
            match depot.pop() {
                Some(magazine) => self.magazines[self.loaded] = magazine,
                None => self.refill(frames),
            }
        }
        self.magazines[self.loaded].pop()
    }

    /// Takes words' worths of frames until the loaded magazine, which is empty, is at least half full.
    fn refill(&mut self, frames: &Frames) {
        let want = self.capacity.max(1);
        let magazine = &mut self.magazines[self.loaded];
        while magazine.len() < want.div_ceil(2) {
            let Some(mask) = frames.refill_some((want - magazine.len()) as u32, self.near) else { break };
            self.near = mask.base;
            magazine.push_mask(mask);
        }
    }

    /// Takes a free frame back.
    #[inline]
    pub fn free(&mut self, frame: FrameId, frames: &Frames, depot: &Depot) {
        if self.magazines[self.loaded & 1].len() >= self.capacity {
            return self.free_slow(frame, frames, depot);
        }
        self.magazines[self.loaded & 1].push(frame);
    }

    #[cold]
    #[inline(never)]
    fn free_slow(&mut self, frame: FrameId, frames: &Frames, depot: &Depot) {
        if self.capacity == 0 {
            return frames.free_run(crate::ids::Run { start: frame, len: 1 });
        }
        self.loaded ^= 1;
        let magazine = &mut self.magazines[self.loaded];
        if magazine.len() >= self.capacity
            && let Err(mut full) = depot.push(std::mem::take(magazine))
            && !cfg!(kvpool_mutant = "refused_by_depot")
        {
            full.flush(frames);
        }
        self.magazines[self.loaded].push(frame);
    }

    /// Gives every frame back to the global structure.
    pub fn flush(&mut self, frames: &Frames) {
        for magazine in &mut self.magazines {
            if !magazine.is_empty() {
                magazine.flush(frames);
            }
        }
    }

    /// The frames in it.
    pub fn iter(&self) -> impl Iterator<Item = FrameId> + '_ {
        self.magazines.iter().flat_map(Magazine::iter)
    }
}
