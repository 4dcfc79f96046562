//! The frames of a sequence's blocks, so that tables are copied, not translated block by block.
//!
//! ```text
//! list      [id, id, id]          the truth: which blocks; readers share it
//! frames    [ f,  f,  f]  seen    the owner's copy of where they are, after the first `seen` moves of the pool
//! ```
//!
//! Only the owner has frames: plain memory, changed through `&mut`. Views read the block words.
//!
//! # Invariants
//!
//! 1. One frame per block of the list.
//! 2. Each block was in its frame at some moment, and each of its moves since then has a number of
//!    at least `seen` in the [log](crate::block::MoveCount), or none yet.
//! 3. An open block is in its frame, or each of its moves since it was there has such a number.
//!
//! # Protocol
//!
//! ```text
//! append     seen != log's count?  catch up;  new blocks: frame := word
//! catch up   n := log's count (Acquire);  read the moves seen .. n;  frames of these blocks := word;  seen := n
//!            too many moves, or overwritten ones:                    all frames := word;              seen := n
//! copy       the copy is new, and open;  frame := word
//! table      seen == log's count?  copy the frames;  otherwise translate each id through its word
//! ```
//!
//! *2 holds.* A word is read after `seen`, by an Acquire. The first `seen` moves were published
//! before they were logged, so the word is at least as new as each of them. Reading a move of this
//! block from the log refreshes its frame; other moves do not affect it.
//!
//! *3 holds.* A new block is open, and its frame is read then. An open block does not move, and no
//! sealed one is opened while a move of it is published and not in the log (see `block::moving`).
//!
//! # Theorem
//!
//! A frame that a batch copies into a table holds the block's bytes until that batch ends, exactly
//! as a frame that the batch reads from the block's word.
//!
//! The batch has begun, and finds that the log counts `seen` moves. By 2, a move by which the block
//! leaves its frame is logged after this look. Its mover's fence follows, and so comes after the
//! batch's; the mover sees the batch, and keeps the frame until the batch ends. See the
//! [log](crate::block::Moved). No token is written to a frame that its block has left: a batch
//! writes to open blocks only, and by 3 one that has left its frame is in the log beyond `seen`.
//!
//! Model: `loom-tests/tests/kept_frames.rs`.

use smallvec::SmallVec;

use crate::block::{Core, MoveCount, Since};
use crate::ids::{BlockId, FrameId};
use crate::sync::{AtomicU32, Ordering::*};

use super::list::ListOwner;
use super::token_hashes::with_answer;

const INLINE: usize = 12;

/// Moves since the last look that are read one by one. Beyond that, reading all words is cheaper.
const MOVES_MAX: u64 = 256;

#[derive(Clone, Default)]
pub(super) struct Frames {
    /// As in tables. Frame numbers have 27 bits.
    frames: SmallVec<[i32; INLINE]>,
    seen: MoveCount,
}

impl Frames {
    /// Returns the frames, if they are current as of `logged` moves.
    #[inline]
    pub(super) fn as_of(&self, logged: MoveCount) -> Option<&[i32]> {
        (self.seen == logged).then_some(&self.frames[..])
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    /// Returns the frame of the last block, which it may have left.
    #[inline]
    pub(super) fn last(&self) -> Option<FrameId> {
        self.frames.last().map(|&frame| FrameId(frame as u32))
    }

    #[inline]
    pub(super) fn set(&mut self, place: usize, frame: FrameId) {
        self.frames[place] = frame.0 as i32;
    }

    pub(super) fn follow(&mut self, ids: &[AtomicU32], blocks: &Core) {
        if self.frames.is_empty() {
            // Before the words are read.
            self.seen = blocks.moves_logged();
        }
        let old = self.frames.len().min(ids.len());
        if old == 0 {
            self.frames.reserve(with_answer(ids.len()));
        }
        // Resized first, because extending checks the capacity for each entry.
        self.frames.resize(ids.len(), 0);
        for (entry, id) in self.frames[old..].iter_mut().zip(&ids[old..]) {
            *entry = frame(blocks, id);
        }
    }

    #[inline]
    pub(super) fn catch_up(&mut self, list: &ListOwner, blocks: &Core) {
        if blocks.moves_logged() != self.seen {
            self.read_moves(list.ids(), blocks);
        }
    }

    #[cold]
    #[inline(never)]
    fn read_moves(&mut self, ids: &[AtomicU32], blocks: &Core) {
        let mut moved = BlockSet::default();
        let (seen, since) = blocks.visit_moved(self.seen, MOVES_MAX, |block| moved.insert(block));
        if since == Since::TooLong {
            moved = BlockSet::all();
        }
        for (entry, id) in self.frames.iter_mut().zip(ids) {
            if moved.may_contain(BlockId(id.load(Relaxed))) {
                *entry = frame(blocks, id);
            }
        }
        self.seen = seen;
    }
}

#[inline]
pub(super) fn frame(blocks: &Core, id: &AtomicU32) -> i32 {
    // Acquire: pairs with the owner's stores, see `BlockList::read`. Frame numbers have 27 bits.
    blocks.frame(BlockId(id.load(Acquire))).0 as i32
}

/// A superset of some blocks: a bit for each residue of ids.
#[derive(Clone, Default)]
struct BlockSet([u64; Self::WORDS]);

impl BlockSet {
    const WORDS: usize = 16;

    fn all() -> Self {
        Self([u64::MAX; Self::WORDS])
    }

    fn insert(&mut self, id: BlockId) {
        self.0[id.index() / 64 % Self::WORDS] |= 1 << (id.index() % 64);
    }

    fn may_contain(&self, id: BlockId) -> bool {
        self.0[id.index() / 64 % Self::WORDS] >> (id.index() % 64) & 1 != 0
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_blocks_contains_what_was_inserted() {
        let mut set = BlockSet::default();
        let ids = [0, 1, 63, 64, 1_023, 1_024 + 77, u32::MAX].map(BlockId);
        assert!(ids.iter().all(|&id| !set.may_contain(id) && BlockSet::all().may_contain(id)));
        ids.iter().for_each(|&id| set.insert(id));
        assert!(ids.iter().all(|&id| set.may_contain(id)));
        assert!(!set.may_contain(BlockId(2)) && set.may_contain(BlockId(77)));
    }
}
