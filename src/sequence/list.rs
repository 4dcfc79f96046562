//! The list of a sequence's blocks: changed by one owner, and read concurrently by any threads.
//!
//! ```text
//! BlockList { tokens, rewrites, chunk ──> [id, id, id, -, -, -, -, -] }      capacity doubles; ids are u32
//! ```
//!
//! `tokens` is the only length: the first `ceil(tokens / block_tokens)` ids are valid.
//!
//! # Protocol
//!
//! ```text
//! append:    ids beyond the end := new;                          tokens := more (Release)
//! grow:      fresh chunk, ids copied; chunk := fresh (Release);  the epoch collector frees the old one
//! replace:   one id := another (Release)
//! truncate:  tokens := fewer (Release)
//! rewrite:   before a truncated place is reused: rewrites += 1; fence(Release); then as append
//!
//! read:      r := rewrites (Acquire); n := tokens (Acquire); c := chunk (Acquire); ids of c (Acquire);
//!            repeat if rewrites has changed from r
//! ```
//!
//! # Theorem
//!
//! An accepted read returns the list as it was at some moment during the call, except that single
//! ids may have been replaced meanwhile (by copies of the same tokens, or by the null block):
//! - `n` was stored with a Release after its ids were written, and the chunk that holds them was
//!   published before: the chunk loaded later has all `n`.
//! - The id of a reused place was stored after the fence that follows the increment of `rewrites`.
//!   A reader of that id sees the increment and retries, unless the increment preceded its first
//!   load; then it also saw the truncation, and `n` is the truncated length or a later one.
//!
//! A reader retries only because the owner made progress; a stopped owner blocks no reader. Model:
//! `loom-tests/tests/sequences.rs`.

use std::time::{Duration, Instant};

use crate::ids::BlockId;
use crate::sync::epoch::{self, Owned};
use crate::sync::{Arc, AtomicU32, Frozen, Ordering::*, fence};

/// Initial capacity, in ids.
const ROOM: usize = if cfg!(kvpool_loom) { 1 } else { 8 };

type Chunk = Frozen<Box<[AtomicU32]>>;

/// The part of a list that readers share with its owner.
pub struct BlockList {
    opened: Instant,
    block_tokens: u32,
    tokens: AtomicU32,
    rewrites: AtomicU32,
    /// Number of blocks reserved beyond the list; a statistic.
    reserved: AtomicU32,
    /// Null until the first block.
    chunk: epoch::Atomic<Chunk>,
}

impl BlockList {
    /// Returns the time since the sequence was opened.
    pub fn age(&self) -> Duration {
        self.opened.elapsed()
    }

    /// Returns the number of tokens per block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Returns the current number of tokens.
    pub fn tokens(&self) -> u32 {
        // Relaxed: a plain number. A later read of the list sees a length at least as new.
        self.tokens.load(Relaxed)
    }

    /// Returns the number of blocks reserved beyond the list.
    pub fn reserved(&self) -> usize {
        // Relaxed: a statistic.
        self.reserved.load(Relaxed) as usize
    }

    /// Calls `f` with the ids and the number of tokens as of one moment; again if the owner
    /// rewrites ids meanwhile. Discard the results of earlier calls.
    pub fn read<R>(&self, mut f: impl FnMut(&[AtomicU32], u32) -> R) -> R {
        let guard = epoch::pin();
        loop {
            // All Acquire: see the theorem.
            let rewrites = self.rewrites.load(Acquire);
            let tokens = self.tokens.load(Acquire);
            // SAFETY: a replaced chunk is destroyed through the epoch collector, and we are pinned.
            let ids: &[AtomicU32] = unsafe { self.chunk.load(Acquire, &guard).as_ref() }.map_or(&[], |c| c);
            let result = f(&ids[..tokens.div_ceil(self.block_tokens) as usize], tokens);
            // Relaxed: ordered by the Acquires of the ids. Retry tested by `views_see_whole_lists`.
            if self.rewrites.load(Relaxed) == rewrites {
                return result;
            }
        }
    }
}

impl Drop for BlockList {
    fn drop(&mut self) {
        let chunk = std::mem::replace(&mut self.chunk, epoch::Atomic::null());
        // SAFETY: no other reference to the list exists; older chunks went to the collector.
        drop(unsafe { chunk.try_into_owned() });
    }
}

/// The owner's side of a list.
pub struct ListOwner {
    list: Arc<BlockList>,
    /// Copies of the list's length, which need not be read and divided.
    tokens: u32,
    blocks: u32,
    last: BlockId,
    /// Places from here on were not in the list since `rewrites` last changed.
    untouched: u32,
}

impl ListOwner {
    /// Creates an empty list.
    pub fn new(block_tokens: u32) -> Self {
        let list = BlockList {
            opened: Instant::now(),
            block_tokens,
            tokens: AtomicU32::new(0),
            rewrites: AtomicU32::new(0),
            reserved: AtomicU32::new(0),
            chunk: epoch::Atomic::null(),
        };
        Self { list: Arc::new(list), tokens: 0, blocks: 0, last: BlockId(0), untouched: 0 }
    }

    /// Returns the shared part, for readers.
    pub fn list(&self) -> &Arc<BlockList> {
        &self.list
    }

    /// Publishes the number of reserved blocks to readers.
    #[inline]
    pub fn note_reserved(&self, blocks: usize) {
        // Relaxed: a statistic.
        self.list.reserved.store(blocks as u32, Relaxed);
    }

    /// Returns the number of tokens.
    #[inline]
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Returns the number of blocks.
    #[inline]
    pub fn len(&self) -> usize {
        self.blocks as usize
    }

    /// Returns the ids, in order.
    #[inline]
    pub fn ids(&self) -> &[AtomicU32] {
        &self.places()[..self.len()]
    }

    /// Returns the block at a place.
    #[inline]
    pub fn id(&self, place: usize) -> BlockId {
        BlockId(self.ids()[place].load(Relaxed))
    }

    /// Returns the last block, if there is one.
    #[inline]
    pub fn last(&self) -> Option<BlockId> {
        (self.blocks > 0).then_some(self.last)
    }

    /// Returns the number of tokens for which the last block has room.
    #[inline]
    pub fn room(&self) -> u64 {
        u64::from(self.blocks) * u64::from(self.list.block_tokens) - u64::from(self.tokens)
    }

    fn places(&self) -> &[AtomicU32] {
        // SAFETY: only `reserve` replaces the chunk, through `&mut self`; the slice has `&self`.
        unsafe { self.list.chunk.load(Relaxed, epoch::unprotected()).as_ref() }.map_or(&[], |chunk| chunk)
    }

    /// Ensures room for `blocks` blocks in total.
    pub fn reserve(&mut self, blocks: usize) {
        let old = self.places();
        if blocks <= old.len() {
            return;
        }
        let room = blocks.max(ROOM).next_power_of_two();
        let fresh = (0..room).map(|i| AtomicU32::new(old.get(i).map_or(0, |id| id.load(Relaxed)))).collect();
        let fresh: Chunk = Frozen::new(fresh);
        // Release: publishes the copied ids; pairs with the Acquire in `read`. Also for the first
        // chunk, which has no valid id yet: its reader sees the length of the chunk.
        if old.is_empty() {
            // No reader can have an earlier chunk.
            return self.list.chunk.store(Owned::new(fresh), Release);
        }
        let guard = epoch::pin();
        let old = self.list.chunk.swap(Owned::new(fresh), Release, &guard);
        // SAFETY: unlinked, so later readers do not find it; readers that have it are pinned.
        unsafe { guard.defer_destroy(old) };
    }

    /// Stores a block beyond the end, where it is not valid yet. There must be room.
    #[inline]
    pub fn stage(&mut self, place: usize, id: BlockId) {
        debug_assert!(place >= self.len(), "place {place} of {} is in use", self.len());
        if place < self.untouched as usize {
            // A truncated place is reused. Release: a reader of the count sees the truncation.
            let rewrites = self.list.rewrites.load(Relaxed).wrapping_add(1);
            self.list.rewrites.store(rewrites, Release);
            // Pairs with the Acquires of ids in `read`: a reader of an id stored from here on sees
            // the count.
            fence(Release);
            self.untouched = place as u32;
        }
        // Relaxed: `publish` releases it; for early readers the fence above does.
        self.places()[place].store(id.0, Relaxed);
    }

    /// Returns the block staged at a place.
    #[inline]
    pub fn staged_at(&self, place: usize) -> BlockId {
        BlockId(self.places()[place].load(Relaxed))
    }

    /// Returns the blocks staged at these places.
    pub fn staged(&self, places: std::ops::Range<usize>) -> Vec<BlockId> {
        self.places()[places].iter().map(|id| BlockId(id.load(Relaxed))).collect()
    }

    /// Replaces the block at a place by another with the same tokens, or by the null block.
    pub fn replace(&mut self, place: usize, id: BlockId) {
        // Release: the block is ours and filled; pairs with the Acquires of ids in `read`.
        self.ids()[place].store(id.0, Release);
        if place + 1 == self.len() {
            self.last = id;
        }
    }

    /// Adds a token to the last block, which has room.
    #[inline]
    pub fn push(&mut self) {
        self.tokens += 1;
        // Release: as in `publish`.
        self.list.tokens.store(self.tokens, Release);
    }

    /// Sets the number of tokens. The blocks of additional tokens must be staged.
    #[inline]
    pub fn publish(&mut self, tokens: u32) {
        // Release: pairs with the Acquire in `read`.
        self.list.tokens.store(tokens, Release);
        self.tokens = tokens;
        let block_tokens = self.list.block_tokens;
        let room = u64::from(self.blocks) * u64::from(block_tokens);
        // Usually the last block stays the last one.
        if !(room.saturating_sub(block_tokens as u64) + 1..=room).contains(&(tokens as u64)) {
            self.blocks = tokens.div_ceil(block_tokens);
            self.last = self.ids().last().map_or(BlockId(0), |id| BlockId(id.load(Relaxed)));
        }
        self.untouched = self.untouched.max(self.blocks);
    }
}
