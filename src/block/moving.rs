//! Moves: a block's bytes are copied to another frame while its owners use it. A move swaps two
//! blocks: `S` goes from frame `f` to frame `t`, and the free block `D` from `t` to `f`.
//!
//! # Protocol
//!
//! ```text
//! begin     t: claimed by name out of the bitmaps, and held     (free there: no batch sees it)
//!              or the evictable block in it is evicted           (unseen by batches)
//!           S: sealed, unpinned, not moving, in f  ->  moving                        one compare-exchange
//! copy      f -> t                                                  by the caller; may take any time
//! publish   block_at(t) := S;  S: moving, unpinned, not free  ->  sealed, in t          one compare-exchange
//!           D := free, in f;  block_at(f) := D
//!           log;  fence(SeqCst);  f is free, or retired while a batch is in flight
//! or end    S: moving -> sealed, where it was;  t: no longer held, back into the bitmaps
//!           S released meanwhile: S := free;  f is free, or retired while a batch is in flight
//! ```
//!
//! # Invariants
//!
//! - *The source is readable.* The last release of a moving block leaves its frame to the mover. So
//!   a wave withholds only the frames that it copies.
//! - *The source is not written.* It is sealed, and writes to it are refused while it is moving, and
//!   until the move is in the log: a table that is patched by the log may still name the old frame.
//! - *Only the wave accesses the destination*, from the claim to the publication.
//! - *A reader of the old frame may continue* until its batch has ended: the fence pairs with the
//!   one in [`Clock::begin`](crate::clock::Clock::begin).
//! - *Conservation*: destinations, and sources of released blocks, are held until they are freed.
//!
//! No thread waits for another; a release or pin cancels the move. Models:
//! `loom-tests/tests/moves.rs`, `loom-tests/tests/moved_since.rs`.

use crate::frame::RunList;
use crate::ids::{BlockId, FrameId, Run, Ticket};
use crate::sync::{Ordering::*, fence};

use super::core::{Blocks, Core};
use super::state::{BlockWord, MoveCount, Moved, Since};
use super::tenants::Tenant;

/// Why a block was not moved.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum MoveCancelled {
    /// The destination was not free.
    Taken,
    /// Its last owner released it, or it is in another frame.
    Released,
    /// It is pinned or, in a frame pool, was pinned during the copy.
    Pinned,
    /// Its bytes are not final.
    Open,
    /// Another wave is moving it.
    Moving,
}

/// What a compaction can do with a frame in use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FrameUse {
    /// Its block is owned, sealed, unpinned and not moving.
    Movable,
    /// Its block is evictable and not moving.
    Evictable,
    /// Its block is open, pinned or moving, or is the null block.
    Fixed,
}

#[derive(Clone, Copy, Debug)]
struct Moving {
    block: BlockId,
    from: FrameId,
    to: FrameId,
    /// Low bits of its generation when it was marked.
    generation: u64,
}

/// Blocks that move together, with their destinations held. The caller copies the bytes and then
/// [publishes](Self::publish) them.
#[must_use = "a wave that is dropped moves nothing"]
pub struct Wave {
    blocks: Blocks,
    moving: Vec<Moving>,
    dropped: usize,
}

impl Blocks {
    /// Begins to move blocks from the first frames of the pairs to the second, evicting evictable
    /// blocks there. Reports blocks that cannot move now.
    pub fn begin_wave(
        &self,
        moves: impl IntoIterator<Item = (FrameId, FrameId)>,
        cancelled: &mut dyn FnMut(FrameId, MoveCancelled),
    ) -> Wave {
        let mut wave = Wave { blocks: self.clone(), moving: Vec::new(), dropped: 0 };
        for (from, to) in moves {
            match self.begin_move(from, to, &mut wave.dropped) {
                Ok(moving) => wave.moving.push(moving),
                Err(why) => cancelled(from, why),
            }
        }
        wave
    }
}

impl Wave {
    /// Returns the copies to make, from frame to frame. No destination is a source or occurs twice.
    pub fn moves(&self) -> impl ExactSizeIterator<Item = (FrameId, FrameId)> + '_ {
        self.moving.iter().map(|moving| (moving.from, moving.to))
    }

    /// Returns the number of blocks in the wave.
    pub fn len(&self) -> usize {
        self.moving.len()
    }

    /// Returns the number of blocks that were evicted from destinations.
    pub fn dropped(&self) -> usize {
        self.dropped
    }

    /// Returns whether the wave has no blocks.
    pub fn is_empty(&self) -> bool {
        self.moving.is_empty()
    }

    /// Publishes the moves, reports the cancelled ones, and returns the number of moved blocks.
    ///
    /// # Safety
    ///
    /// If the pool has storage, the bytes of all [moves](Self::moves) must be in their new frames:
    /// safe code treats them as the bytes that the block's owner wrote.
    pub unsafe fn publish(self, cancelled: &mut dyn FnMut(FrameId, MoveCancelled)) -> usize {
        self.publish_if(cancelled, |_, _| true)
    }

    /// Like [`publish`](Self::publish), for blocks that are written in place: one that has lost all
    /// references since it was marked stays, because its contents may differ.
    ///
    /// # Safety
    ///
    /// As for [`publish`](Self::publish).
    pub(crate) unsafe fn publish_in_place(self, cancelled: &mut dyn FnMut(FrameId, MoveCancelled)) -> usize {
        // Does not recur: the release that would wrap it around leaves the frame to the wave.
        self.publish_if(cancelled, |moving, word| word.generation_low() == moving.generation)
    }

    fn publish_if(
        mut self,
        cancelled: &mut dyn FnMut(FrameId, MoveCancelled),
        is_copied: impl Fn(&Moving, BlockWord) -> bool,
    ) -> usize {
        let (mut moved, mut left) = (Vec::with_capacity(self.moving.len()), RunList::new());
        let mut stayed = Vec::new();
        let publishing = self.blocks.moves.publishing();
        for moving in self.moving.drain(..) {
            match self.blocks.publish_move(moving, |word| is_copied(&moving, word)) {
                Ok(()) => {
                    moved.push(moving.block);
                    left.push(moving.from);
                }
                Err(why) => {
                    self.blocks.end_move(moving);
                    stayed.push((moving.from, why));
                }
            }
        }
        if !moved.is_empty() {
            self.blocks.leave(&moved, &left);
        }
        drop(publishing);
        // Last, because the caller's code may panic or move blocks itself.
        stayed.into_iter().for_each(|(from, why)| cancelled(from, why));
        moved.len()
    }
}

impl Drop for Wave {
    fn drop(&mut self) {
        for moving in self.moving.drain(..) {
            self.blocks.end_move(moving);
        }
        self.blocks.announce();
    }
}

impl Core {
    fn begin_move(&self, from: FrameId, to: FrameId, dropped: &mut usize) -> Result<Moving, MoveCancelled> {
        if from.index() >= self.rows() {
            return Err(MoveCancelled::Released);
        }
        // An immovable block costs no claim. The block in the frame may change until it is marked.
        let block = self.space.table.block_at(from);
        movable(self.word(block), from)?;
        if to.index() >= self.rows() || !self.evict_or_claim(to, dropped) {
            return Err(MoveCancelled::Taken);
        }
        self.space.hold_frame(to);
        // Acquire: the copy sees the bytes written before the seal. Release: extends this order to
        // the thread that drops the last reference.
        let marked = self.space.table.word(block).fetch_update(AcqRel, Relaxed, |bits| {
            let word = BlockWord::from_bits(bits);
            movable(word, from).ok().map(BlockWord::to_bits)
        });
        match marked {
            Ok(bits) => {
                Ok(Moving { block, from, to, generation: BlockWord::from_bits(bits).generation_low() })
            }
            Err(bits) => {
                self.space.release_held(to);
                Err(movable(BlockWord::from_bits(bits), from).err().unwrap_or(MoveCancelled::Released))
            }
        }
    }

    /// Takes a frame whose block is evictable and unseen, or free, without a step in the bitmaps.
    fn evict_or_claim(&self, to: FrameId, dropped: &mut usize) -> bool {
        let id = self.space.table.block_at(to);
        let word = self.word(id);
        if word.is_free() {
            return self.space.frames.claim(Run { start: to, len: 1 });
        }
        let is_evicted = word.is_evictable() && self.evict_in(to, self.space.clock.oldest(), Tenant::NONE);
        *dropped += usize::from(is_evicted);
        is_evicted
    }

    fn publish_move(
        &self,
        moving: Moving,
        is_copied: impl Fn(BlockWord) -> bool,
    ) -> Result<(), MoveCancelled> {
        let Moving { block, from, to, .. } = moving;
        let displaced = self.space.table.block_at(to);
        // Ours until the word names `to`; the Release below publishes it to the freeing thread.
        self.space.table.set_block_at(to, block);
        // Release: readers that get the new frame from the word see the copied bytes. Acquire:
        // accesses to the old frame by earlier owners happen before its next owner's.
        let published = self.space.table.word(block).fetch_update(AcqRel, Relaxed, |bits| {
            let word = BlockWord::from_bits(bits);
            word.publish_move(to).filter(|_| is_copied(word)).map(BlockWord::to_bits)
        });
        if let Err(bits) = published {
            self.space.table.set_block_at(to, displaced);
            let word = BlockWord::from_bits(bits);
            return Err(if word.is_free() { MoveCancelled::Released } else { MoveCancelled::Pinned });
        }
        // The displaced block is free and its frame ours, so no other thread writes its word.
        // Relaxed: a handle check only sees that it is free; it is handed out with its frame.
        let word = BlockWord::from_bits(self.space.table.word(displaced).load(Relaxed));
        self.space.table.word(displaced).store(word.displaced(from).to_bits(), Relaxed);
        self.space.table.set_block_at(from, displaced);
        self.space.held.fetch_sub(1, Relaxed);
        Ok(())
    }

    /// Ends a move: frees the destination, and the source too if it was released meanwhile.
    fn end_move(&self, moving: Moving) {
        let atomic = self.space.table.word(moving.block);
        // Release: the copy's reads happen before the accesses of a writer that finds the flag
        // cleared. Acquire: the last owner's accesses to the frame happen before its next owner's.
        let ended = atomic.fetch_update(Release, Acquire, |bits| {
            BlockWord::from_bits(bits).end_move().map(BlockWord::to_bits)
        });
        if let Err(bits) = ended {
            let Some((word, carry)) = BlockWord::from_bits(bits).take_left() else {
                not_moving(moving, bits)
            };
            if carry {
                self.space.table.info(moving.block).carry_generation();
            }
            // A plain store, Relaxed: as for the displaced block.
            atomic.store(word.to_bits(), Relaxed);
            self.count_freed(moving.block, self.tenant_of(moving.block));
            self.space.held.fetch_sub(1, Relaxed);
            self.free_or_retire(&[Run { start: moving.from, len: 1 }]);
        }
        self.space.release_held(moving.to);
    }

    fn leave(&self, moved: &[BlockId], left: &[Run]) {
        self.moves.append(moved, || {
            // Pairs with the fence in `Clock::begin`: a batch sees the new frames, or we see it.
            fence(SeqCst);
            self.space.clock.newest()
        });
        self.free_or_retire(left);
    }

    pub(super) fn free_or_retire(&self, runs: &[Run]) {
        match self.space.clock.idle_or_tag() {
            None => runs.iter().for_each(|&run| self.space.free_run(run)),
            Some(tag) => runs.iter().for_each(|&run| self.shared_retire_list.push(run, tag)),
        }
    }

    /// Calls `f` with each frame in use. May miss or repeat a block that moves meanwhile.
    pub fn for_each_used_frame(&self, f: &mut dyn FnMut(FrameId, FrameUse)) {
        for block in (0..self.rows() as u32).map(BlockId) {
            let word = self.word(block);
            if self.null_block() == Some(block) {
                f(word.frame(), FrameUse::Fixed);
            } else if !word.is_free() {
                let used = match word.begin_move() {
                    None => FrameUse::Fixed,
                    Some(_) if word.is_evictable() => FrameUse::Evictable,
                    Some(_) => FrameUse::Movable,
                };
                f(word.frame(), used);
            }
        }
    }

    /// Lists the moves that a table built under batch `since` may miss, oldest first. Must be
    /// called under a batch, which keeps the old frames of moves that are not listed yet.
    pub fn moved_since(&self, since: Ticket, out: &mut Vec<Moved>) -> Since {
        // Current frames, not those of the log: two waves may log a block's moves in either order.
        self.moves.read(since, out, |block| Moved { block, to: self.frame(block) })
    }

    #[inline]
    pub(crate) fn moves_logged(&self) -> MoveCount {
        self.moves.count()
    }

    pub(crate) fn visit_moved(
        &self,
        from: MoveCount,
        most: u64,
        moved: impl FnMut(BlockId),
    ) -> (MoveCount, Since) {
        self.moves.visit(from, most, moved)
    }
}

/// Returns the marked word of a block in `from`, or the reason that it cannot move.
fn movable(word: BlockWord, from: FrameId) -> Result<BlockWord, MoveCancelled> {
    if word.is_free() || word.frame() != from {
        return Err(MoveCancelled::Released);
    }
    word.begin_move().ok_or(if word.pins() != 0 {
        MoveCancelled::Pinned
    } else if word.is_moving() {
        MoveCancelled::Moving
    } else {
        MoveCancelled::Open
    })
}

#[cold]
#[inline(never)]
fn not_moving(moving: Moving, bits: u64) -> ! {
    panic!("{moving:?} is not under way: {:?}", BlockWord::from_bits(bits))
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
