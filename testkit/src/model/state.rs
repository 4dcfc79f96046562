//! Who owns what: the state that a pool must be indistinguishable from.

use std::collections::{BTreeMap, BTreeSet};

use kvpool::error::{AllocError, GrowError, ShrinkError};
use kvpool::ids::{BlockId, Generation, SequenceId};

/// A block in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owned {
    /// References.
    pub refs: u32,
    /// Pins.
    pub pins: u32,
    /// The sequence that it was allocated for.
    pub sequence: Option<SequenceId>,
}

/// A pool, naively. Every block is in exactly one of `owned`, `free` and `retired`.
#[derive(Clone, Debug)]
pub struct Model {
    /// Blocks that the pool may grow to.
    max: usize,
    /// The most that there ever were.
    ever: usize,
    /// Blocks in use.
    owned: BTreeMap<BlockId, Owned>,
    /// Blocks that can be handed out.
    free: BTreeSet<BlockId>,
    /// Freed blocks, with the batches that were in flight then and still are.
    retired: BTreeMap<BlockId, BTreeSet<u64>>,
    /// Batches in flight.
    batches: BTreeSet<u64>,
    batches_begun: u64,
    /// How often each block has been freed.
    generations: BTreeMap<BlockId, u64>,
}

impl Model {
    /// Blocks `1 ..= blocks`, all free: block 0 is the null block.
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
        }
    }

    /// Blocks, the null block not counted.
    pub fn total(&self) -> usize {
        self.owned.len() + self.free.len() + self.retired.len()
    }

    /// The most blocks that there ever were: ids up to it have been handed out, or might have been.
    pub fn ever(&self) -> usize {
        self.ever
    }

    /// Blocks that can be handed out.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Freed blocks that wait for a batch to end.
    pub fn retired(&self) -> usize {
        self.retired.len()
    }

    /// The free blocks, ascending.
    pub fn free_ids(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.free.iter().copied()
    }

    /// The block, if it is in use.
    pub fn owned(&self, id: BlockId) -> Option<&Owned> {
        self.owned.get(&id)
    }

    /// How often a block has been freed.
    pub fn generation(&self, id: BlockId) -> Generation {
        Generation(self.generations.get(&id).copied().unwrap_or(0))
    }

    /// Blocks in the longest run of consecutive free blocks. Blocks are frames as long as nothing has moved.
    pub fn longest_run(&self) -> usize {
        let (mut longest, mut run, mut last) = (0, 0, None);
        for id in &self.free {
            run = if last.is_some_and(|last: u32| last + 1 == id.get()) { run + 1 } else { 1 };
            last = Some(id.get());
            longest = longest.max(run);
        }
        longest
    }

    /// What an allocation must come to.
    pub fn may_allocate(&self, asked: usize, contiguous: bool) -> Result<(), AllocError> {
        let (free, retired, total) = (self.free(), self.retired(), self.total());
        if asked == 0 {
            Err(AllocError::Zero)
        } else if asked > total {
            Err(AllocError::TooLarge { asked, total })
        } else if asked > free {
            Err(AllocError::Exhausted { asked, free, retired })
        } else if contiguous && self.longest_run() < asked {
            Err(AllocError::NoRun { asked, longest_run: self.longest_run(), free })
        } else {
            Ok(())
        }
    }

    /// A block was handed out. `false`: it was not there to be handed out.
    pub fn allocate(&mut self, id: BlockId, sequence: Option<SequenceId>, pinned: bool) -> bool {
        self.free.remove(&id)
            && self.owned.insert(id, Owned { refs: 1, pins: u32::from(pinned), sequence }).is_none()
    }

    /// One more reference to a block in use.
    pub fn share(&mut self, id: BlockId) {
        self.owned.get_mut(&id).expect("a block in use").refs += 1;
    }

    /// One reference less; the last takes the pins with it, and waits for the batches in flight.
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

    /// One more pin on a block in use.
    pub fn pin(&mut self, id: BlockId) {
        self.owned.get_mut(&id).expect("a block in use").pins += 1;
    }

    /// One pin less.
    pub fn unpin(&mut self, id: BlockId) {
        self.owned.get_mut(&id).expect("a block in use").pins -= 1;
    }

    /// A batch begins; gives its number.
    pub fn begin(&mut self) -> u64 {
        self.batches_begun += 1;
        self.batches.insert(self.batches_begun);
        self.batches_begun
    }

    /// A batch ends: what waited for it alone is free.
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

    /// What growth must come to.
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

    /// More blocks, numbered on.
    pub fn grow(&mut self, blocks: usize) {
        let next = self.total() as u32 + 1;
        self.free.extend((next..next + blocks as u32).map(BlockId));
        self.ever = self.ever.max(self.total());
    }

    /// What the beginning of a shrink must come to.
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

    /// Blocks beyond the first `to` that somebody has, or a batch may see.
    pub fn in_the_way(&self, to: usize) -> usize {
        let beyond = BlockId(to as u32 + 1)..;
        self.owned.range(beyond.clone()).count() + self.retired.range(beyond).count()
    }

    /// The last block that somebody has, or a batch may see; the null block if there is none.
    pub fn last_in_the_way(&self) -> BlockId {
        let last = |ids: Option<&BlockId>| ids.copied().unwrap_or(BlockId(0));
        last(self.owned.keys().next_back()).max(last(self.retired.keys().next_back()))
    }

    /// The blocks beyond the first `to` are gone; all of them are free.
    pub fn shrink(&mut self, to: usize) {
        self.free.split_off(&BlockId(to as u32 + 1));
    }
}
