//! What the cache notes of a block: a cache line a block, beside its word.
//!
//! | field | meaning | written by |
//! |---|---|---|
//! | `key` | what the block holds: the hash of its chain | its sequence, before it is cached |
//! | `check` | the second hash of the same | the same |
//! | `era` | low bits of the cache's era in which it was noted | the same |
//! | `depth` | blocks before it in its chain | the same |
//! | `released` | low bits of a generation, and the newest batch that may have seen the block before it began | the last release |
//! | `rank`, `state` | where it waits for its eviction, and what the policy keeps with it | the last release |
//! | `place` | bits 0..8: the queue in which it waits; bit 8: another block of its hash was there first; the rest: times that it was reused, a racy statistic | releases, hits |
//! | `filed` | whether it is in some queue, or in the hands of who is about to file it | see the [queues](super::queues) |
//! | `next` | the link of the queue that it is in | the queue |
//!
//! What it holds is read under a word that says "cached", and counts only if that very word is still there
//! afterwards: Relaxed is enough, for the word's Release and Acquire publish it. `released` counts only if its generation
//! is the word's. The rest are hints.

use crate::block::{BlockWord, Bucket};
use crate::ids::Ticket;
use crate::sync::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering::*};

use super::hash::BlockHash;

const QUEUE_MASK: u32 = (1 << 8) - 1;
const DUPLICATE: u32 = 1 << 8;
const HITS_SHIFT: u32 = 9;
const HITS_MAX: u32 = u32::MAX >> HITS_SHIFT;
const TICKET_BITS: u32 = u64::BITS - BlockWord::GENERATION_BITS;

/// See the [module](self).
#[repr(align(64))]
pub(super) struct Row {
    key: [AtomicU64; 2],
    check: AtomicU64,
    released: AtomicU64,
    pub(super) rank: AtomicU64,
    pub(super) state: AtomicU64,
    depth: AtomicU32,
    pub(super) next: AtomicU32,
    /// The number of the queue in the low byte, the hits above it.
    place: AtomicU32,
    pub(super) filed: AtomicBool,
    era: AtomicU16,
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
            depth: AtomicU32::new(0),
            next: AtomicU32::new(0),
            place: AtomicU32::new(0),
            filed: AtomicBool::new(false),
            era: AtomicU16::new(0),
        }
    }

    /// Notes what a block will hold, of which the caller is an owner, and which is not cached.
    pub(super) fn note(&self, hash: BlockHash, era: u64, depth: u32) {
        let [low, high] = hash.words();
        self.key[0].store(low, Relaxed);
        self.key[1].store(high, Relaxed);
        self.check.store(hash.check(), Relaxed);
        self.era.store(era as u16, Relaxed);
        self.depth.store(depth, Relaxed);
        self.place.store(0, Relaxed);
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
        self.depth.load(Relaxed)
    }

    /// The queue that the block is to wait in.
    pub(super) fn queue(&self) -> usize {
        (self.place.load(Relaxed) & QUEUE_MASK) as usize
    }

    /// Times that it was reused.
    pub(super) fn hits(&self) -> u32 {
        self.place.load(Relaxed) >> HITS_SHIFT
    }

    pub(super) fn count_hit(&self) {
        let place = self.place.load(Relaxed);
        if place >> HITS_SHIFT != HITS_MAX {
            self.place.store(place + (1 << HITS_SHIFT), Relaxed);
        }
    }

    /// Whether it was noted in this era.
    pub(super) fn is_of(&self, era: u64) -> bool {
        self.era.load(Relaxed) == era as u16
    }

    /// Another block of its hash was there when it was registered.
    pub(super) fn mark_duplicate(&self) {
        self.place.store(self.place.load(Relaxed) | DUPLICATE, Relaxed);
    }

    pub(super) fn is_duplicate(&self) -> bool {
        self.place.load(Relaxed) & DUPLICATE != 0
    }

    /// Where it is to wait from now on.
    pub(super) fn set_place(&self, queue: usize, rank: u64, state: u64) {
        self.rank.store(rank, Relaxed);
        self.state.store(state, Relaxed);
        let rest = self.place.load(Relaxed) & !QUEUE_MASK;
        self.place.store(rest | queue as u32, Relaxed);
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
