//! Metadata of a block, beside its word: one cache line, and its links in the eviction queues.
//!
//! | field | meaning | written by |
//! |---|---|---|
//! | `key` | the key of the hash of its contents | its sequence, before it is cached |
//! | `check` | the check of the same hash | the same |
//! | `chain` | bits 0..27: number of blocks before it in its chain; bits 27..64: the cache's [era](super::events) in which it was noted | the same |
//! | `released` | low bits of a generation, whether the rest is assumed, and the newest batch that may have seen the block before that generation began | the last release; another thread that found it outdated |
//! | `rank`, `state` | its rank in its eviction queue, and the policy's state; of a [retained](super::retention) block, the order of its release | the last release, or a hint |
//! | `queue` | its eviction queue, or its class beside the policy's order | the same |
//! | `uses` | bit 0: it duplicates a block with the same hash; bits 1..8: number of hits; bits 8..16: its [users](super::user); racy statistics | registrations, hits, closes |
//! | `mark` | whether it has a checksum, its group of layers, and its [origins](super::origin) | its sequence or import, before it is cached |
//! | checksum | beside the row: of the bytes that arrived from another pool | an import, before the block is cached |
//! | `enqueued` | whether it is in an entry of a queue, or held by a thread that is about to enqueue it | see the [queues](super::queues) |
//!
//! | link | meaning | written by |
//! |---|---|---|
//! | `rank` | the rank under which it was enqueued, which may be older than its row's | the thread that enqueues it |
//! | `below` | the block that follows it in its entry | the same |
//! | `next` | of the first block of an entry: link of the rank queue that contains it | the rank queue |
//!
//! Contents are read under a word that says "cached", and count only if that exact word is still
//! there afterwards. Relaxed suffices, because the Release and Acquire of the word publish them.
//! `released` counts only if its generation is the word's. The remaining fields are hints.
//!
//! `mark` is separate from `uses`: a duplicate is marked without a reference, so its row may hold
//! other contents by then, which must not inherit bits of a mark.
//!
//! # Eras
//!
//! A block is found only in the era in which it was noted, and a sequence may hold it through any
//! number of clears, so era numbers must not repeat. The last number that fits is no era: blocks
//! noted then or later are never found. It is reached after 2^37 - 1 clears, which take 23 minutes
//! at a hundred million a second; the cache has no hits from then on.

use crate::block::{BlockWord, TablePart};
use crate::config::FRAME_BITS;
use crate::ids::{BlockId, Ticket};
use crate::sync::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::*};

use super::hash::BlockHash;
use super::origin::group_of;
use super::retention::{CLASSES, QUEUE};
use super::user::Users;

const DUPLICATE: u16 = 1;
const HAS_SUM: u32 = 1;
const HITS_SHIFT: u32 = 1;
const USERS_SHIFT: u32 = u16::BITS - Users::BITS;
const HITS_MAX: u16 = (1 << (USERS_SHIFT - HITS_SHIFT)) - 1;
/// A list contains each block at most once, so a place in a list fits the bits of a block id.
const DEPTH_BITS: u32 = FRAME_BITS;
const DEPTH_MASK: u64 = (1 << DEPTH_BITS) - 1;
/// Never matches an era.
const NO_ERA: u64 = u64::MAX >> DEPTH_BITS;
const TICKET_BITS: u32 = u64::BITS - BlockWord::GENERATION_BITS;
/// Bit of `released`: another thread than the releaser assumed the ticket.
const ASSUMED: u64 = 1 << (TICKET_BITS - 1);
const TICKET_MASK: u64 = ASSUMED - 1;

#[repr(align(64))]
pub(super) struct Row {
    key: [AtomicU64; 2],
    check: AtomicU64,
    released: AtomicU64,
    pub(super) rank: AtomicU64,
    pub(super) state: AtomicU64,
    chain: AtomicU64,
    uses: AtomicU16,
    queue: AtomicU8,
    pub(super) enqueued: AtomicBool,
    mark: AtomicU32,
}

const _: () = assert!(cfg!(kvpool_loom) || size_of::<Row>() == 64);

impl Row {
    fn new() -> Self {
        Self {
            key: [AtomicU64::new(0), AtomicU64::new(0)],
            check: AtomicU64::new(0),
            // No generation of a kept block: the first release of a block makes it 1.
            released: AtomicU64::new(0),
            rank: AtomicU64::new(0),
            state: AtomicU64::new(0),
            chain: AtomicU64::new(0),
            uses: AtomicU16::new(0),
            queue: AtomicU8::new(0),
            enqueued: AtomicBool::new(false),
            mark: AtomicU32::new(0),
        }
    }

    #[inline]
    pub(super) fn prefetch(&self) {
        crate::sync::prefetch(self);
    }

    /// Notes the future contents of the caller's uncached block, and its mark without a checksum.
    pub(super) fn note(&self, hash: BlockHash, era: u64, depth: u32, mark: u32) {
        let [low, high] = hash.words();
        self.key[0].store(low, Relaxed);
        self.key[1].store(high, Relaxed);
        self.check.store(hash.check(), Relaxed);
        debug_assert!(u64::from(depth) <= DEPTH_MASK, "place {depth} in a list");
        self.chain.store(era.min(NO_ERA) << DEPTH_BITS | u64::from(depth) & DEPTH_MASK, Relaxed);
        self.uses.store(0, Relaxed);
        self.mark.store(mark, Relaxed);
        self.queue.store(0, Relaxed);
        // Not one beside the policy's order, which would keep it from being enqueued.
        self.rank.store(0, Relaxed);
        self.state.store(0, Relaxed);
    }

    /// Takes a note back, so that the block is not found; returns the chain, to restore it.
    pub(super) fn unnote(&self) -> u64 {
        self.chain.fetch_or(NO_ERA << DEPTH_BITS, Relaxed)
    }

    pub(super) fn note_again(&self, chain: u64) {
        self.chain.store(chain, Relaxed);
    }

    #[inline]
    pub(super) fn holds(&self, hash: &BlockHash, era: u64) -> bool {
        let [low, high] = hash.words();
        // Without branches: nearly all rows that are compared are equal.
        let differs = (self.key[0].load(Relaxed) ^ low)
            | (self.key[1].load(Relaxed) ^ high)
            | (self.check.load(Relaxed) ^ hash.check())
            | (self.era() ^ era);
        differs == 0 && era != NO_ERA
    }

    pub(super) fn hash(&self) -> BlockHash {
        let [low, high] = &self.key;
        let key = u128::from(low.load(Relaxed)) | u128::from(high.load(Relaxed)) << 64;
        BlockHash::new(key, self.check.load(Relaxed))
    }

    pub(super) fn depth(&self) -> u32 {
        (self.chain.load(Relaxed) & DEPTH_MASK) as u32
    }

    #[inline]
    pub(super) fn place(&self) -> (usize, u64) {
        (self.queue(), self.rank.load(Relaxed))
    }

    pub(super) fn queue(&self) -> usize {
        usize::from(self.queue.load(Relaxed))
    }

    /// Returns the state that the policy stored; 0 beside its order.
    pub(super) fn policy_state(&self) -> u64 {
        if self.queue() < QUEUE { self.state.load(Relaxed) } else { 0 }
    }

    pub(super) fn hits(&self) -> u32 {
        u32::from(self.uses.load(Relaxed) >> HITS_SHIFT & HITS_MAX)
    }

    pub(super) fn count_hit(&self) {
        let uses = self.uses.load(Relaxed);
        if uses >> HITS_SHIFT & HITS_MAX != HITS_MAX {
            self.uses.store(uses + (1 << HITS_SHIFT), Relaxed);
        }
    }

    /// Takes back a hit that was given back.
    pub(super) fn uncount_hit(&self) {
        let uses = self.uses.load(Relaxed);
        if uses >> HITS_SHIFT & HITS_MAX > 0 {
            self.uses.store(uses - (1 << HITS_SHIFT), Relaxed);
        }
    }

    pub(super) fn users(&self) -> Users {
        Users::from_bits(self.uses.load(Relaxed) >> USERS_SHIFT)
    }

    pub(super) fn add_user(&self, user: Users) {
        let uses = self.uses.load(Relaxed);
        let users = Users::from_bits(uses >> USERS_SHIFT).and(user).bits() << USERS_SHIFT;
        let next = uses & !(u16::MAX << USERS_SHIFT) | users;
        // Mostly the same: no write to a shared line.
        if next != uses {
            self.uses.store(next, Relaxed);
        }
    }

    /// Returns the era in which the block was noted, or `NO_ERA`.
    pub(super) fn era(&self) -> u64 {
        self.chain.load(Relaxed) >> DEPTH_BITS
    }

    pub(super) fn is_of(&self, era: u64) -> bool {
        self.era() == era && era != NO_ERA
    }

    pub(super) fn mark_duplicate(&self) {
        self.uses.store(self.uses.load(Relaxed) | DUPLICATE, Relaxed);
    }

    fn note_sum(&self) {
        self.mark.store(self.mark() | HAS_SUM, Relaxed);
    }

    fn has_sum(&self) -> bool {
        self.mark() & HAS_SUM != 0
    }

    pub(super) fn mark(&self) -> u32 {
        self.mark.load(Relaxed)
    }

    pub(super) fn group(&self) -> u32 {
        group_of(self.mark())
    }

    pub(super) fn is_duplicate(&self) -> bool {
        self.uses.load(Relaxed) & DUPLICATE != 0
    }

    pub(super) fn set_place(&self, queue: usize, rank: u64, state: u64) {
        self.rank.store(rank, Relaxed);
        self.state.store(state, Relaxed);
        self.queue.store(queue as u8, Relaxed);
    }

    /// Returns the newest batch that may have seen the block before the release that made `word`;
    /// `None` if that release has not noted it yet.
    #[inline]
    pub(super) fn tag(&self, word: BlockWord) -> Option<Ticket> {
        let released = self.released.load(Relaxed);
        (released >> TICKET_BITS == word.generation_low()).then_some(Ticket(released & TICKET_MASK))
    }

    /// Returns the [tag](Self::tag) unless it is assumed.
    pub(super) fn noted_tag(&self, word: BlockWord) -> Option<Ticket> {
        let released = self.released.load(Relaxed);
        (released >> TICKET_BITS == word.generation_low() && released & ASSUMED == 0)
            .then_some(Ticket(released & TICKET_MASK))
    }

    /// Sets the tag of a word that the caller made by a release.
    pub(super) fn set_tag(&self, word: BlockWord, tag: Ticket) {
        // The bits last longer than a pool can live; a larger ticket would only look older.
        self.released.store(word.generation_low() << TICKET_BITS | tag.0 & TICKET_MASK, Relaxed);
    }

    /// Sets the tag of a release that has not noted it.
    pub(super) fn assume_tag(&self, word: BlockWord, tag: Ticket) {
        let assumed = word.generation_low() << TICKET_BITS | ASSUMED | tag.0 & TICKET_MASK;
        self.released.store(assumed, Relaxed);
    }
}

const _: () = assert!(super::policy::QUEUES_MAX + 2 <= QUEUE && QUEUE + CLASSES <= 1 << u8::BITS);

/// Links of a block in the eviction queues. Apart from the rows, which a queue rarely reads.
#[derive(Default)]
pub(super) struct QueueLinks {
    pub(super) rank: AtomicU64,
    pub(super) next: AtomicU32,
    /// Block id plus one; 0 at the end of an entry.
    below: AtomicU32,
}

const _: () = assert!(cfg!(kvpool_loom) || size_of::<QueueLinks>() == 16);

impl QueueLinks {
    /// Returns the next block of the entry, which the caller holds.
    #[inline]
    pub(super) fn below(&self) -> Option<BlockId> {
        // Relaxed: the entry came to us by an Acquire.
        self.below.load(Relaxed).checked_sub(1).map(BlockId)
    }

    #[inline]
    pub(super) fn set_below(&self, below: Option<BlockId>) {
        self.below.store(below.map_or(0, |id| id.0 + 1), Relaxed);
    }
}

pub(super) struct RowPart {
    pub(super) rows: Box<[Row]>,
    pub(super) links: Box<[QueueLinks]>,
    /// Checksums of contents that arrived from other pools.
    sums: Box<[AtomicU64]>,
}

impl RowPart {
    pub(super) fn note_sum(&self, at: usize, sum: u64) {
        self.sums[at].store(sum, Relaxed);
        self.rows[at].note_sum();
    }

    pub(super) fn sum(&self, at: usize) -> Option<u64> {
        self.rows[at].has_sum().then(|| self.sums[at].load(Relaxed))
    }
}

impl TablePart for RowPart {
    fn new(_base: usize, len: usize) -> Self {
        let links = (0..len).map(|_| QueueLinks::default()).collect();
        let sums = (0..len).map(|_| AtomicU64::new(0)).collect();
        Self { rows: (0..len).map(|_| Row::new()).collect(), links, sums }
    }

    fn len(&self) -> usize {
        self.rows.len()
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
            row.note(hash, era, 5, 0);
            assert!(row.is_of(era) && row.holds(&hash, era), "{era}");
            for other in [era + 1, era + (1 << 16), era + (1 << 32), era | 1 << 37, NO_ERA, u64::MAX] {
                assert!(!row.is_of(other) && !row.holds(&hash, other), "{era} in {other}");
            }
        }
        for era in [NO_ERA, NO_ERA + 1, NO_ERA + (1 << 37), u64::MAX] {
            row.note(hash, era, 5, 0);
            assert!(
                [0, 1, NO_ERA - 1, NO_ERA, era, u64::MAX].iter().all(|&other| !row.is_of(other)),
                "{era}"
            );
        }
        row.note(hash, 3, DEPTH_MASK as u32, 0);
        assert_eq!((row.era(), row.depth()), (3, DEPTH_MASK as u32));
    }

    #[test]
    fn uses_and_queue_do_not_touch_each_other() {
        let row = Row::new();
        row.note(BlockHash::new(1, 2), 0, 0, 0);
        row.set_place(16, 3, 4);
        (0..1 << 16).for_each(|_| row.count_hit());
        assert_eq!((row.hits(), row.is_duplicate(), row.queue()), (u32::from(HITS_MAX), false, 16));
        row.mark_duplicate();
        row.set_place(1, 3, 4);
        assert_eq!((row.hits(), row.is_duplicate(), row.queue()), (u32::from(HITS_MAX), true, 1));
    }

    #[test]
    fn a_checksum_is_that_of_the_contents() {
        let part = RowPart::new(0, 2);
        let note = |at: usize| part.rows[at].note(BlockHash::new(1, 2), 0, 0, 4);
        note(0);
        assert_eq!(part.sum(0), None, "computed here");
        for sum in [0, 7, u64::MAX] {
            note(0);
            part.note_sum(0, sum);
            part.rows[0].mark_duplicate();
            (0..1 << 16).for_each(|_| part.rows[0].count_hit());
            assert_eq!((part.sum(0), part.sum(1), part.rows[0].is_duplicate()), (Some(sum), None, true));
        }
        note(0);
        assert_eq!((part.sum(0), part.rows[0].hits()), (None, 0), "of the former contents");
        part.note_sum(0, 1);
        assert_eq!(part.rows[0].mark(), 5, "the origins stay");
    }
}
