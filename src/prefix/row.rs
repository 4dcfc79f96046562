//! What the cache notes of a block: a cache line a block, beside its word.
//!
//! | field | meaning | written by |
//! |---|---|---|
//! | `key` | what the block holds: the hash of its chain | its sequence, before it is cached |
//! | `check` | the second hash of the same | the same |
//! | `chain` | bits 0..27: blocks before it in its chain; bits 27..64: the cache's [era](super::events) in which it was noted | the same |
//! | `released` | low bits of a generation, and the newest batch that may have seen the block before it began | the last release |
//! | `rank`, `state` | where it waits for its eviction, and what the policy keeps with it | the last release |
//! | `queue` | the queue in which it waits | the last release |
//! | `uses` | bit 0: another block of its hash was there first; the rest: times that it was reused, a racy statistic | registrations, hits |
//! | `filed` | whether it is in some queue, or in the hands of who is about to file it | see the [queues](super::queues) |
//! | `next` | the link of the queue that it is in | the queue |
//!
//! What it holds is read under a word that says "cached", and counts only if that very word is still there
//! afterwards: Relaxed is enough, for the word's Release and Acquire publish it. `released` counts only if its generation
//! is the word's. The rest are hints.
//!
//! # Eras
//!
//! A block is found in the era in which it was noted, and a sequence can hold one through any
//! number of clears. So no era may come again: the last one that the row has bits for is no era,
//! and what is noted then, or later, is found by nobody. That is after 2^37 - 1 clears; clearing a
//! pool of a single block a hundred million times a second, and nothing else, takes 23 minutes, and
//! leaves a cache without hits.

use crate::block::{BlockWord, Bucket};
use crate::config::FRAME_BITS;
use crate::ids::Ticket;
use crate::sync::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::*};

use super::hash::BlockHash;

const DUPLICATE: u16 = 1;
const HITS_SHIFT: u32 = 1;
const HITS_MAX: u16 = u16::MAX >> HITS_SHIFT;
/// A list has no block twice, so that its places are numbered by as many bits as blocks are.
const DEPTH_BITS: u32 = FRAME_BITS;
const DEPTH_MASK: u64 = (1 << DEPTH_BITS) - 1;
/// Of no era.
const NO_ERA: u64 = u64::MAX >> DEPTH_BITS;
const TICKET_BITS: u32 = u64::BITS - BlockWord::GENERATION_BITS;

/// See the [module](self).
#[repr(align(64))]
pub(super) struct Row {
    key: [AtomicU64; 2],
    check: AtomicU64,
    released: AtomicU64,
    pub(super) rank: AtomicU64,
    pub(super) state: AtomicU64,
    chain: AtomicU64,
    pub(super) next: AtomicU32,
    uses: AtomicU16,
    queue: AtomicU8,
    pub(super) filed: AtomicBool,
}

const _: () = assert!(cfg!(kvpool_loom) || size_of::<Row>() == 64);

impl Row {
    fn new() -> Self {
        Self {
            key: [AtomicU64::new(0), AtomicU64::new(0)],
            check: AtomicU64::new(0),
            // Of no generation that a kept block can have: the first release of a block makes it 1.
            released: AtomicU64::new(0),
            rank: AtomicU64::new(0),
            state: AtomicU64::new(0),
            chain: AtomicU64::new(0),
            next: AtomicU32::new(0),
            uses: AtomicU16::new(0),
            queue: AtomicU8::new(0),
            filed: AtomicBool::new(false),
        }
    }

    /// Notes what a block will hold, of which the caller is an owner, and which is not cached.
    pub(super) fn note(&self, hash: BlockHash, era: u64, depth: u32) {
        let [low, high] = hash.words();
        self.key[0].store(low, Relaxed);
        self.key[1].store(high, Relaxed);
        self.check.store(hash.check(), Relaxed);
        debug_assert!(u64::from(depth) <= DEPTH_MASK, "place {depth} in a list");
        self.chain.store(era.min(NO_ERA) << DEPTH_BITS | u64::from(depth) & DEPTH_MASK, Relaxed);
        self.uses.store(0, Relaxed);
        self.queue.store(0, Relaxed);
        self.state.store(0, Relaxed);
    }

    /// Whether it was noted that the block holds this.
    #[inline]
    pub(super) fn holds(&self, hash: BlockHash, era: u64) -> bool {
        let [low, high] = hash.words();
        let is_key = self.key[0].load(Relaxed) == low && self.key[1].load(Relaxed) == high;
        let is_check = self.check.load(Relaxed) == hash.check() && self.is_of(era);
        is_key && (is_check || cfg!(kvpool_mutant = "unchecked_hit"))
    }

    /// What was noted.
    pub(super) fn hash(&self) -> BlockHash {
        let [low, high] = &self.key;
        let key = u128::from(low.load(Relaxed)) | u128::from(high.load(Relaxed)) << 64;
        BlockHash::new(key, self.check.load(Relaxed))
    }

    pub(super) fn depth(&self) -> u32 {
        (self.chain.load(Relaxed) & DEPTH_MASK) as u32
    }

    /// The queue that the block is to wait in.
    pub(super) fn queue(&self) -> usize {
        usize::from(self.queue.load(Relaxed))
    }

    /// Times that it was reused.
    pub(super) fn hits(&self) -> u32 {
        u32::from(self.uses.load(Relaxed) >> HITS_SHIFT)
    }

    pub(super) fn count_hit(&self) {
        let uses = self.uses.load(Relaxed);
        if uses >> HITS_SHIFT != HITS_MAX {
            self.uses.store(uses + (1 << HITS_SHIFT), Relaxed);
        }
    }

    /// The era in which it was noted; the first without a number of its own stands for all after
    /// it.
    pub(super) fn era(&self) -> u64 {
        self.chain.load(Relaxed) >> DEPTH_BITS
    }

    /// Whether it was noted in this era.
    pub(super) fn is_of(&self, era: u64) -> bool {
        self.era() == era && era != NO_ERA
    }

    /// Another block of its hash was there when it was registered.
    pub(super) fn mark_duplicate(&self) {
        self.uses.store(self.uses.load(Relaxed) | DUPLICATE, Relaxed);
    }

    pub(super) fn is_duplicate(&self) -> bool {
        self.uses.load(Relaxed) & DUPLICATE != 0
    }

    /// Where it is to wait from now on.
    pub(super) fn set_place(&self, queue: usize, rank: u64, state: u64) {
        self.rank.store(rank, Relaxed);
        self.state.store(state, Relaxed);
        self.queue.store(queue as u8, Relaxed);
    }

    /// The newest batch that may have seen the block before the release that made this word, if that was noted yet.
    #[inline]
    pub(super) fn tag(&self, word: BlockWord) -> Option<Ticket> {
        let released = self.released.load(Relaxed);
        (released >> TICKET_BITS == word.generation_low())
            .then_some(Ticket(released & ((1 << TICKET_BITS) - 1)))
    }

    /// Notes it.
    pub(super) fn set_tag(&self, word: BlockWord, tag: Ticket) {
        // A ticket has fewer bits for as long as a pool can live; a larger one would only be taken for an older.
        self.released.store(word.generation_low() << TICKET_BITS | tag.0 & ((1 << TICKET_BITS) - 1), Relaxed);
    }
}

const _: () = assert!(super::policy::QUEUES_MAX < 1 << u8::BITS);

/// Rows of consecutive blocks.
pub(super) struct RowBucket(pub(super) Box<[Row]>);

impl Bucket for RowBucket {
    fn new(_base: usize, len: usize) -> Self {
        Self((0..len).map(|_| Row::new()).collect())
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn no_era_comes_again() {
        let row = Row::new();
        let hash = BlockHash::new(7, 8);
        for era in [0, 1, u64::from(u16::MAX), 1 << 16, 1 << 32, NO_ERA - 1] {
            row.note(hash, era, 5);
            assert!(row.is_of(era) && row.holds(hash, era), "{era}");
            for other in [era + 1, era + (1 << 16), era + (1 << 32), era | 1 << 37, NO_ERA, u64::MAX] {
                assert!(!row.is_of(other) && !row.holds(hash, other), "{era} in {other}");
            }
        }
        // The eras are used up: nothing is found, neither of the era it was noted in nor of
        // another.
        for era in [NO_ERA, NO_ERA + 1, NO_ERA + (1 << 37), u64::MAX] {
            row.note(hash, era, 5);
            assert!(
                [0, 1, NO_ERA - 1, NO_ERA, era, u64::MAX].iter().all(|&other| !row.is_of(other)),
                "{era}"
            );
        }
        row.note(hash, 3, DEPTH_MASK as u32);
        assert_eq!((row.era(), row.depth()), (3, DEPTH_MASK as u32));
    }

    #[test]
    fn uses_and_queue_do_not_touch_each_other() {
        let row = Row::new();
        row.note(BlockHash::new(1, 2), 0, 0);
        row.set_place(16, 3, 4);
        (0..1 << 16).for_each(|_| row.count_hit());
        assert_eq!((row.hits(), row.is_duplicate(), row.queue()), (u32::from(HITS_MAX), false, 16));
        row.mark_duplicate();
        row.set_place(1, 3, 4);
        assert_eq!((row.hits(), row.is_duplicate(), row.queue()), (u32::from(HITS_MAX), true, 1));
    }
}
