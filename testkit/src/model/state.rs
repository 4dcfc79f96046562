//! Ownership: the state from which a pool must be indistinguishable.

use std::collections::{BTreeMap, BTreeSet};

use kvpool::{AllocError, BlockId, FrameId, Generation, GrowError, SequenceId, ShrinkError};

/// A block in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owned {
    /// Number of references.
    pub refs: u32,
    /// Number of pins.
    pub pins: u32,
    /// Sequence for which it was allocated.
    pub sequence: Option<SequenceId>,
}

/// Naive model of a pool. Every block is in exactly one of `owned`, `free` and `retired`, or in a
/// removed frame.
#[derive(Clone, Debug)]
pub struct Model {
    /// Maximum number of blocks.
    max: usize,
    /// Largest number of blocks so far.
    ever: usize,
    /// Blocks in use.
    owned: BTreeMap<BlockId, Owned>,
    /// Allocatable blocks.
    free: BTreeSet<BlockId>,
    /// Freed blocks, with the batches that were in flight at that time and still are.
    retired: BTreeMap<BlockId, BTreeSet<u64>>,
    /// Batches in flight.
    batches: BTreeSet<u64>,
    batches_begun: u64,
    /// Number of times that each block has been freed.
    generations: BTreeMap<BlockId, u64>,
    /// Frames of blocks that have moved, or that were displaced by a move. All others are in the
    /// frame with their own number.
    elsewhere: BTreeMap<BlockId, FrameId>,
}

impl Model {
    /// Creates a model of blocks `1 ..= blocks`, all free: block 0 is the null block.
    pub fn new(blocks: usize, max: usize) -> Self {
        Self {
            max,
            ever: blocks,
            owned: BTreeMap::new(),
            free: (1..=blocks as u32).map(BlockId).collect(),
            retired: BTreeMap::new(),
            batches: BTreeSet::new(),
            batches_begun: 0,
            generations: BTreeMap::new(),
            elsewhere: BTreeMap::new(),
        }
    }

    /// Returns the number of blocks, without the null block.
    pub fn total(&self) -> usize {
        self.owned.len() + self.free.len() + self.retired.len()
    }

    /// Returns the largest number of blocks so far: ids up to it may have been handed out.
    pub fn ever(&self) -> usize {
        self.ever
    }

    /// Returns the number of allocatable blocks.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of freed blocks that wait for a batch to end.
    pub fn retired(&self) -> usize {
        self.retired.len()
    }

    /// Returns the free blocks, ascending.
    pub fn free_ids(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.free.iter().copied()
    }

    /// Returns the block, if it is in use.
    pub fn owned(&self, id: BlockId) -> Option<&Owned> {
        self.owned.get(&id)
    }

    /// Returns the number of times that a block has been freed.
    pub fn generation(&self, id: BlockId) -> Generation {
        Generation(self.generations.get(&id).copied().unwrap_or(0))
    }

    /// Returns the frame of a block.
    pub fn frame(&self, id: BlockId) -> FrameId {
        self.elsewhere.get(&id).copied().unwrap_or(FrameId(id.get()))
    }

    /// Returns the length of the longest run of free frames.
    pub fn longest_run(&self) -> usize {
        let free: BTreeSet<FrameId> = self.free.iter().map(|&id| self.frame(id)).collect();
        let (mut longest, mut run, mut last) = (0, 0, None);
        for frame in free {
            run = if last.is_some_and(|last: u32| last + 1 == frame.0) { run + 1 } else { 1 };
            last = Some(frame.0);
            longest = longest.max(run);
        }
        longest
    }

    /// Records moves: `frame` gives the current frame of each block. Vacated frames are free when
    /// the batches in flight have ended. Returns the number of blocks in use that moved.
    ///
    /// # Errors
    ///
    /// A block that moved although it must not.
    pub fn moved(&mut self, frame: impl Fn(BlockId) -> FrameId) -> Result<usize, String> {
        let mut in_use = 0;
        for id in (1..=self.ever as u32).map(BlockId) {
            let (was, is) = (self.frame(id), frame(id));
            if was == is {
                continue;
            }
            if let Some(owned) = self.owned.get(&id) {
                in_use += 1;
                if owned.pins > 0 {
                    return Err(format!("block {id} was pinned in frame {was}, but is in {is}"));
                }
            } else if !self.free.remove(&id) {
                return Err(format!("block {id} was not free, but moved from frame {was} to {is}"));
            } else if self.batches.is_empty() {
                self.free.insert(id);
            } else {
                self.retired.insert(id, self.batches.clone());
            }
            self.elsewhere.insert(id, is);
        }
        let places: BTreeSet<FrameId> = (1..=self.ever as u32).map(|id| self.frame(BlockId(id))).collect();
        let all = places.len() == self.ever && places.last().is_none_or(|last| last.index() == self.ever);
        if all { Ok(in_use) } else { Err("two blocks are in one frame".to_owned()) }
    }

    /// Returns the expected result of an allocation.
    pub fn may_allocate(&self, asked: usize, contiguous: bool) -> Result<(), AllocError> {
        let (free, retired, total) = (self.free(), self.retired(), self.total());
        if asked == 0 {
            Err(AllocError::Zero)
        } else if asked > total {
            Err(AllocError::TooLarge { asked, total })
        } else if asked > free {
            // The model does not know which batch that is, nor what is held.
            let (evictable, held, in_transfer) = (0, 0, 0);
            Err(AllocError::Exhausted {
                asked,
                free,
                retired,
                evictable,
                held,
                in_transfer,
                oldest_batch: None,
            })
        } else if contiguous && self.longest_run() < asked {
            Err(AllocError::NoRun { asked, longest_run: self.longest_run(), free, evictable: 0 })
        } else {
            Ok(())
        }
    }

    /// Records an allocated block. Returns false if it was not allocatable.
    pub fn allocate(&mut self, id: BlockId, sequence: Option<SequenceId>, pinned: bool) -> bool {
        self.free.remove(&id)
            && self.owned.insert(id, Owned { refs: 1, pins: u32::from(pinned), sequence }).is_none()
    }

    /// Adds a reference to a block in use.
    pub fn share(&mut self, id: BlockId) {
        self.owned.get_mut(&id).expect("a block in use").refs += 1;
    }

    /// Releases a reference; the last one removes the pins, and waits for the batches in flight.
    pub fn release(&mut self, id: BlockId) {
        let owned = self.owned.get_mut(&id).expect("a block in use");
        owned.refs -= 1;
        if owned.refs != 0 {
            return;
        }
        self.owned.remove(&id);
        *self.generations.entry(id).or_default() += 1;
        if self.batches.is_empty() {
            self.free.insert(id);
        } else {
            self.retired.insert(id, self.batches.clone());
        }
    }

    /// Adds a pin to a block in use.
    pub fn pin(&mut self, id: BlockId) {
        self.owned.get_mut(&id).expect("a block in use").pins += 1;
    }

    /// Removes a pin.
    pub fn unpin(&mut self, id: BlockId) {
        self.owned.get_mut(&id).expect("a block in use").pins -= 1;
    }

    /// Begins a batch, and returns its number.
    pub fn begin(&mut self) -> u64 {
        self.batches_begun += 1;
        self.batches.insert(self.batches_begun);
        self.batches_begun
    }

    /// Ends a batch: blocks that waited for it alone are free.
    pub fn end(&mut self, batch: u64) {
        self.batches.remove(&batch);
        self.retired.retain(|id, waits_for| {
            waits_for.remove(&batch);
            if waits_for.is_empty() {
                self.free.insert(*id);
            }
            !waits_for.is_empty()
        });
    }

    /// Returns the expected result of growth.
    pub fn may_grow(&self, asked: usize) -> Result<(), GrowError> {
        let (total, max) = (self.total(), self.max);
        if asked == 0 {
            Err(GrowError::Zero)
        } else if total + asked > max {
            Err(GrowError::TooLarge { asked, total, max })
        } else {
            Ok(())
        }
    }

    /// Adds frames, and the blocks in them.
    pub fn grow(&mut self, blocks: usize) {
        let total = self.total() + blocks;
        self.ever = self.ever.max(total);
        let known = |id: &BlockId| self.owned.contains_key(id) || self.retired.contains_key(id);
        let there = (1..=self.ever as u32).map(BlockId).filter(|&id| self.frame(id).index() <= total);
        let fresh: Vec<BlockId> = there.filter(|id| !known(id)).collect();
        self.free.extend(fresh);
    }

    /// Returns the expected result of beginning a shrink.
    pub fn may_shrink(&self, asked: usize) -> Result<(), ShrinkError> {
        let total = self.total();
        if asked == 0 {
            Err(ShrinkError::TooFew { asked, min: 1 })
        } else if asked >= total {
            Err(ShrinkError::NotSmaller { asked, total })
        } else {
            Ok(())
        }
    }

    /// Returns the blocks in use in frames beyond the first `to`.
    pub fn owned_beyond(&self, to: usize) -> impl Iterator<Item = (BlockId, &Owned)> + '_ {
        self.owned.iter().map(|(&id, owned)| (id, owned)).filter(move |&(id, _)| self.frame(id).index() > to)
    }

    /// Returns the freed blocks in frames beyond the first `to` that a batch may see.
    pub fn retired_beyond(&self, to: usize) -> usize {
        self.retired.keys().filter(|&&id| self.frame(id).index() > to).count()
    }

    /// Returns the frames beyond the first `to` that are in use, or that a batch may see.
    pub fn in_the_way(&self, to: usize) -> usize {
        self.owned_beyond(to).count() + self.retired_beyond(to)
    }

    /// Returns the last frame that is in use, or that a batch may see; the null block's if there is
    /// none.
    pub fn last_in_the_way(&self) -> FrameId {
        let used = self.owned.keys().chain(self.retired.keys());
        used.map(|&id| self.frame(id)).max().unwrap_or(FrameId(0))
    }

    /// Returns the blocks in use.
    pub fn used(&self) -> usize {
        self.owned.len()
    }

    /// Returns the number of batches in flight.
    pub fn in_flight(&self) -> usize {
        self.batches.len()
    }

    /// Removes the frames beyond the first `to`; all of them are free.
    pub fn shrink(&mut self, to: usize) {
        let elsewhere = &self.elsewhere;
        let frame = |id: BlockId| elsewhere.get(&id).map_or(id.index(), |frame| frame.index());
        self.free.retain(|&id| frame(id) <= to);
    }
}
