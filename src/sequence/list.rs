//! The list of a sequence's blocks: one owner who changes it, any number of readers who never stop the owner.
//!
//! ```text
//! BlockList { tokens, rewrites, chunk ──> [id, id, id, -, -, -, -, -] }      capacity doubles; ids are u32
//! ```
//!
//! `tokens` is the only length: `ceil(tokens / block_tokens)` ids count. So length and list cannot disagree.
//!
//! # Protocol
//!
//! ```text
//! append:    ids beyond the end := new;                          tokens := more (Release)
//! grow:      fresh chunk, ids copied; chunk := fresh (Release);  the old one goes by the epoch collector
//! replace:   one id := another (Release)
//! truncate:  tokens := fewer (Release)
//! rewrite:   a truncated place is about to be used again: rewrites += 1; fence(Release); then as append
//!
//! read:      r := rewrites (Acquire); n := tokens (Acquire); c := chunk (Acquire); ids of c (Acquire);
//!            again if rewrites is not r by now
//! ```
//!
//! # Theorem
//!
//! What a reader accepts is the list as it was at some moment during the call, up to single ids that were replaced
//! meanwhile (by copies of the same tokens):
//! - `n` came with a Release after its ids were written, and the chunk that holds them was published before: the chunk
//!   that is loaded later has all `n`.
//! - An id of a place that was used again was stored after the fence that follows the raised count. Who reads it sees
//!   the raised count, and tries again unless the count was raised when it began; then it also saw the truncation, and
//!   `n` is the truncated or a later length.
//!
//! A reader tries again only because the owner went on, and an owner that is stopped anywhere stops nobody.
//!
//! Model: `loom-tests/tests/sequences.rs`.

use crate::ids::BlockId;
use crate::sync::epoch::{self, Owned};
use crate::sync::{Arc, AtomicU32, Frozen, Ordering::*, fence};

/// Ids that a list has room for at first.
const ROOM: usize = if cfg!(kvpool_loom) { 1 } else { 8 };

type Chunk = Frozen<Box<[AtomicU32]>>;

/// What readers share with the owner; see the [module](self).
pub struct BlockList {
    block_tokens: u32,
    tokens: AtomicU32,
    rewrites: AtomicU32,
    /// Null until there is a first block.
    chunk: epoch::Atomic<Chunk>,
}

impl BlockList {
    /// Tokens at this moment.
    pub fn tokens(&self) -> u32 {
        // Relaxed: a number. Who reads the list after this reads a length that is not older.
        self.tokens.load(Relaxed)
    }

    /// Calls `f` with the ids and the tokens of one moment. If the owner rewrote some of the ids meanwhile, `f` is
    /// called again, and what it did before is void.
    pub fn read<R>(&self, mut f: impl FnMut(&[AtomicU32], u32) -> R) -> R {
        let guard = epoch::pin();
        loop {
            // Acquire, all: see the theorem.
            let rewrites = self.rewrites.load(Acquire);
            let tokens = self.tokens.load(Acquire);
            // SAFETY: a chunk that is replaced is destroyed through the epoch collector, and we are pinned.
            let ids: &[AtomicU32] = unsafe { self.chunk.load(Acquire, &guard).as_ref() }.map_or(&[], |c| c);
            let result = f(&ids[..tokens.div_ceil(self.block_tokens) as usize], tokens);
            // Relaxed: the Acquires of the ids order it after them. Tried again by `views_see_whole_lists`.
            if self.rewrites.load(Relaxed) == rewrites {
                return result;
            }
        }
    }
}

impl Drop for BlockList {
    fn drop(&mut self) {
        let chunk = std::mem::replace(&mut self.chunk, epoch::Atomic::null());
        // SAFETY: nobody else has the list any more; older chunks went to the collector.
        drop(unsafe { chunk.try_into_owned() });
    }
}

/// The owner's side: there is one for each list, and only it changes the list.
pub struct ListOwner {
    list: Arc<BlockList>,
    /// Places from here on were never in the list since `rewrites` last changed.
    untouched: usize,
}

impl ListOwner {
    /// An empty list.
    pub fn new(block_tokens: u32) -> Self {
        let list = BlockList {
            block_tokens,
            tokens: AtomicU32::new(0),
            rewrites: AtomicU32::new(0),
            chunk: epoch::Atomic::null(),
        };
        Self { list: Arc::new(list), untouched: 0 }
    }

    /// For readers.
    pub fn list(&self) -> &Arc<BlockList> {
        &self.list
    }

    /// Tokens.
    #[inline]
    pub fn tokens(&self) -> u32 {
        // Relaxed: changed through `&mut self` only.
        self.list.tokens.load(Relaxed)
    }

    /// Blocks.
    #[inline]
    pub fn len(&self) -> usize {
        self.tokens().div_ceil(self.list.block_tokens) as usize
    }

    /// The ids, in order.
    #[inline]
    pub fn ids(&self) -> &[AtomicU32] {
        &self.room()[..self.len()]
    }

    /// One block, by its place.
    #[inline]
    pub fn id(&self, place: usize) -> BlockId {
        BlockId(self.ids()[place].load(Relaxed))
    }

    /// The last block.
    #[inline]
    pub fn last(&self) -> Option<BlockId> {
        self.ids().last().map(|id| BlockId(id.load(Relaxed)))
    }

    fn room(&self) -> &[AtomicU32] {
        // SAFETY: only `reserve` replaces the chunk, through `&mut self`; we hold `&self` for as long as the slice is
        // borrowed.
        unsafe { self.list.chunk.load(Relaxed, epoch::unprotected()).as_ref() }.map_or(&[], |chunk| chunk)
    }

    /// Makes room for so many blocks in all.
    pub fn reserve(&mut self, blocks: usize) {
        let old = self.room();
        if blocks <= old.len() {
            return;
        }
        let fresh = (old.iter().map(|id| AtomicU32::new(id.load(Relaxed))))
            .chain(std::iter::repeat_with(|| AtomicU32::new(0)))
            .take(blocks.max(ROOM).next_power_of_two())
            .collect();
        let fresh: Chunk = Frozen::new(fresh);
        // Release: publishes the copied ids; pairs with the Acquire in `read`. Also of the first, of which no id counts yet: who
        // finds it sees how long it is.
        let order = if cfg!(kvpool_mutant = "chunk_relaxed") { Relaxed } else { Release };
        if old.is_empty() {
            // Nothing was there that a reader could have.
            return self.list.chunk.store(Owned::new(fresh), order);
        }
        let guard = epoch::pin();
        let old = self.list.chunk.swap(Owned::new(fresh), order, &guard);
        // SAFETY: unlinked just now, and no later reader finds it; those that have it are pinned.
        unsafe { guard.defer_destroy(old) };
    }

    /// Puts a block beyond the end, where it does not count yet. There must be room.
    #[inline]
    pub fn stage(&mut self, place: usize, id: BlockId) {
        debug_assert!(place >= self.len(), "place {place} of {} is in use", self.len());
        if place < self.untouched {
            // A truncated place is used again. Release: who sees the count sees the truncation.
            let rewrites = self.list.rewrites.load(Relaxed).wrapping_add(1);
            self.list.rewrites.store(rewrites, Release);
            // Pairs with the Acquires of ids in `read`: who reads one that is stored from here on sees the count.
            fence(Release);
            self.untouched = place;
        }
        // Relaxed: `publish` releases it; for those who read it early the fence above does.
        self.room()[place].store(id.0, Relaxed);
    }

    /// The blocks that were staged at these places.
    pub fn staged(&self, places: std::ops::Range<usize>) -> Vec<BlockId> {
        self.room()[places].iter().map(|id| BlockId(id.load(Relaxed))).collect()
    }

    /// Another block, with the same tokens, takes a place.
    pub fn replace(&mut self, place: usize, id: BlockId) {
        // Release: the block is ours and filled; pairs with the Acquires of ids in `read`.
        let order = if cfg!(kvpool_mutant = "replace_relaxed") { Relaxed } else { Release };
        self.ids()[place].store(id.0, order);
    }

    /// So many tokens count from now on: more, after their blocks were staged, or fewer.
    #[inline]
    pub fn publish(&mut self, tokens: u32) {
        // Release: pairs with the Acquire in `read`.
        self.list.tokens.store(tokens, Release);
        self.untouched = self.untouched.max(self.len());
    }
}
