//! Moving: a block's bytes go to another frame, while its owners go on.
//!
//! Block and frame are in bijection, so that a move swaps two: the block `S` goes from frame `f` to frame `t`, and the
//! free block `D`, which was at `t`, is at `f` from then on.
//!
//! # Protocol
//!
//! ```text
//! begin     t: claimed by name out of the bitmaps, and held     (free there: no batch sees it)
//!           S: sealed, unpinned, not moving, in f  ->  moving                        one compare-exchange
//! copy      f -> t                                                  by the caller; may take as long as it takes
//! publish   block_at(t) := S;  S: moving, unpinned, not free  ->  sealed, in t          one compare-exchange
//!           D := free, in f;  block_at(f) := D
//!           log;  fence(SeqCst);  f is free, or retired while a batch is in flight
//! or end    S: moving -> sealed, where it was;  t: no longer held, back into the bitmaps
//!           S released meanwhile: S := free;  f is free, or retired while a batch is in flight
//! ```
//!
//! # Invariants
//!
//! - *The source is readable.* Its owners may let go of it in mid-move. The last release of a block that is moving does not
//!   free the frame, but leaves it to the mover. So a wave holds back what it copies, and nothing else of what is freed
//!   meanwhile.
//! - *The source is not written.* It is sealed; to write to it is refused while it is moving.
//! - *The destination is the wave's alone*, from the claim to the publication.
//! - *Who saw the old frame may go on reading it* until its batch has ended: the fence pairs with the one in
//!   [`Clock::begin`](crate::batch::Clock::begin).
//! - *Conservation*: a destination is held, and so is the source of a block that was released; until they are free again.
//!
//! # Who waits for whom
//!
//! Nobody. Releases, pins and shares of a moving block take one compare-exchange as always; a release and a pin make the
//! move give way. A wave that is dropped before it is published leaves everything as it was. A thread that is stopped
//! in mid-wave holds back its destinations, and those of its sources that are released; nothing else.
//!
//! Models: `loom-tests/tests/moves.rs`, `loom-tests/tests/moved_since.rs`.

use crate::frame::RunList;
use crate::ids::{BlockId, FrameId, Run, Ticket};
use crate::sync::{Ordering::*, fence};

use crate::block::core::Core;

use super::{BlockWord, Blocks, Moved, Since};

/// Why a block was not moved.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum GaveWay {
    /// Somebody took the destination first.
    Taken,
    /// Its last owner released it, or it is elsewhere by now.
    Released,
    /// It is pinned.
    Pinned,
    /// Its bytes are not final.
    Open,
    /// Another wave moves it.
    Moving,
}

/// What can be done with a frame that somebody owns.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FrameUse {
    /// Its block is sealed, unpinned and not moving: owned, or evictable.
    Movable,
    /// Its block stays: open, pinned or moving, or the null block.
    Fixed,
}

/// A block on its way.
#[derive(Clone, Copy, Debug)]
struct Moving {
    block: BlockId,
    from: FrameId,
    to: FrameId,
}

/// Blocks that move together: marked, their destinations held. The caller copies the bytes of [`moves`](Self::moves) and
/// then [publishes](Self::publish); dropped without that, nothing has moved.
///
/// It may be sent to another thread, where a copy ends.
#[must_use = "a wave that is dropped moves nothing"]
pub struct Wave {
    blocks: Blocks,
    moving: Vec<Moving>,
}

impl Blocks {
    /// Begins to move blocks: for each pair, the block in the first frame to the second, as far as that is possible now.
    /// What is not, `gave_way` is told of.
    pub fn begin_wave(
        &self,
        moves: impl IntoIterator<Item = (FrameId, FrameId)>,
        gave_way: &mut dyn FnMut(FrameId, GaveWay),
    ) -> Wave {
        let mut wave = Wave { blocks: self.clone(), moving: Vec::new() };
        for (from, to) in moves {
            match self.begin_move(from, to) {
                Ok(moving) => wave.moving.push(moving),
                Err(why) => gave_way(from, why),
            }
        }
        wave
    }
}

impl Wave {
    /// The copies to make, from frame to frame. No destination is a source, and none stands twice.
    pub fn moves(&self) -> impl ExactSizeIterator<Item = (FrameId, FrameId)> + '_ {
        self.moving.iter().map(|moving| (moving.from, moving.to))
    }

    /// Blocks in the wave.
    pub fn len(&self) -> usize {
        self.moving.len()
    }

    /// Whether nothing is to be moved.
    pub fn is_empty(&self) -> bool {
        self.moving.is_empty()
    }

    /// The bytes have been copied: each block is in its new frame from now on, unless it gave way meanwhile, which
    /// `gave_way` is told of, when all is done. Returns how many moved.
    ///
    /// # Safety
    ///
    /// If the pool has storage, the bytes of all [moves](Self::moves) are in their new frames: what is read there from now
    /// on, in safe code, is taken for what the block's owner wrote.
    pub unsafe fn publish(mut self, gave_way: &mut dyn FnMut(FrameId, GaveWay)) -> usize {
        let (mut moved, mut left) = (Vec::with_capacity(self.moving.len()), RunList::new());
        let mut stayed = Vec::new();
        for moving in self.moving.drain(..) {
            match self.blocks.publish_move(moving) {
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
        // The last step: it is the caller's code, and may panic or move blocks itself.
        stayed.into_iter().for_each(|(from, why)| gave_way(from, why));
        moved.len()
    }
}

impl Drop for Wave {
    fn drop(&mut self) {
        for moving in self.moving.drain(..) {
            self.blocks.end_move(moving);
        }
        // Destinations that were not used, and frames that were left, may be free now.
        if !cfg!(kvpool_mutant = "silent_wave") {
            self.blocks.announce();
        }
    }
}

impl Core {
    fn begin_move(&self, from: FrameId, to: FrameId) -> Result<Moving, GaveWay> {
        if from.index() >= self.rows() {
            return Err(GaveWay::Released);
        }
        // A look at first, so that what cannot move costs no claim. Which block is there may change until it is marked.
        let block = self.space.table.block_at(from);
        movable(self.word(block), from)?;
        if !self.space.frames.claim(Run { start: to, len: 1 }) {
            return Err(GaveWay::Taken);
        }
        self.space.hold_frame(to);
        // Acquire: what was written before the block was sealed is seen by the copy. Release: goes on with
        // the order of those who shared and released it, for whoever is the last.
        let marked = self.space.table.word(block).fetch_update(AcqRel, Relaxed, |bits| {
            let word = BlockWord::from_bits(bits);
            movable(word, from).ok().map(BlockWord::to_bits)
        });
        match marked {
            Ok(_) => Ok(Moving { block, from, to }),
            // Reached by the models in `moves`.
            Err(bits) => {
                self.space.release_held(to);
                Err(movable(BlockWord::from_bits(bits), from).err().unwrap_or(GaveWay::Released))
            }
        }
    }

    /// The block is in `to` from now on.
    fn publish_move(&self, moving: Moving) -> Result<(), GaveWay> {
        let Moving { block, from, to } = moving;
        let displaced = self.space.table.block_at(to);
        // Ours until the word says otherwise; the Release below publishes it to whoever frees the block there.
        self.space.table.set_block_at(to, block);
        // Release: the copied bytes are seen by whoever reads the new frame from the word. Acquire: what those who
        // released the block meanwhile did with the old frame happens before its next owner gets it.
        let order = if cfg!(kvpool_mutant = "publish_relaxed") { Relaxed } else { AcqRel };
        let published = self.space.table.word(block).fetch_update(order, Relaxed, |bits| {
            BlockWord::from_bits(bits).publish_move(to).map(BlockWord::to_bits)
        });
        if let Err(bits) = published {
            self.space.table.set_block_at(to, displaced);
            let word = BlockWord::from_bits(bits);
            return Err(if word.is_free() { GaveWay::Released } else { GaveWay::Pinned });
        }
        // The old frame is the wave's now, and the displaced block is free, so that nobody else writes its word.
        // Relaxed: who checks a handle sees that the block is free, and no more. It is handed out with the frame.
        let word = BlockWord::from_bits(self.space.table.word(displaced).load(Relaxed));
        self.space.table.word(displaced).store(word.displaced(from).to_bits(), Relaxed);
        self.space.table.set_block_at(from, displaced);
        self.space.held.fetch_sub(1, Relaxed);
        Ok(())
    }

    /// The copy is dropped, and the destination is free again; the source too, if it was released meanwhile.
    fn end_move(&self, moving: Moving) {
        let atomic = self.space.table.word(moving.block);
        // Release: the reads of the copy happen before whatever a writer does who finds the flag gone. Acquire: what the
        // last owner did with the frame happens before its next owner gets it from us.
        let left = if cfg!(kvpool_mutant = "left_relaxed") { Relaxed } else { Acquire };
        let ended = atomic.fetch_update(Release, left, |bits| {
            BlockWord::from_bits(bits).end_move().map(BlockWord::to_bits)
        });
        if let Err(bits) = ended {
            let Some((word, carry)) = BlockWord::from_bits(bits).take_left() else {
                not_moving(moving, bits)
            };
            if carry {
                self.space.table.info(moving.block).carry_generation();
            }
            // A plain store: the frame is ours, and nobody else writes the word of a block that is free. Relaxed: as of the
            // displaced one.
            atomic.store(word.to_bits(), Relaxed);
            self.space.held.fetch_sub(1, Relaxed);
            self.free_or_retire(&[Run { start: moving.from, len: 1 }]);
        }
        if !cfg!(kvpool_mutant = "keep_destination") {
            self.space.release_held(moving.to);
        }
    }

    /// The frames that a wave's blocks left: logged, so that tables can be patched, and free, or retired while a batch is
    /// in flight.
    fn leave(&self, moved: &[BlockId], left: &[Run]) {
        self.moves.append(moved, || {
            // Pairs with the fence in `Clock::begin`: a batch sees the new frames, or we see the batch.
            if !cfg!(kvpool_mutant = "publish_no_fence") {
                fence(SeqCst);
            }
            self.space.clock.newest()
        });
        self.free_or_retire(left);
    }

    /// Frames that nobody owns: into the bitmaps, or aside if a batch may still see them.
    pub(super) fn free_or_retire(&self, runs: &[Run]) {
        match self.space.clock.idle_or_tag() {
            None => runs.iter().for_each(|&run| self.space.free_run(run)),
            Some(tag) => runs.iter().for_each(|&run| self.shared_limbo.push(run, tag)),
        }
    }

    /// Calls `f` with every frame that somebody owns, that is kept, or that is the null block's, in no order. What moves meanwhile may be
    /// met twice, or not at all.
    pub fn for_each_used_frame(&self, f: &mut dyn FnMut(FrameId, FrameUse)) {
        for block in (0..self.rows() as u32).map(BlockId) {
            let word = self.word(block);
            if self.null_block() == Some(block) {
                f(word.frame(), FrameUse::Fixed);
            } else if !word.is_free() {
                f(
                    word.frame(),
                    if word.begin_move().is_some() { FrameUse::Movable } else { FrameUse::Fixed },
                );
            }
        }
    }

    /// Lists the blocks that moved, as far as a table that was built under batch `since` may not know; oldest first. To be
    /// called under a batch: what is not listed yet stays readable in its old frame until that batch ends, and is
    /// listed for who then asks since that batch.
    pub fn moved_since(&self, since: Ticket, out: &mut Vec<Moved>) -> Since {
        // Where they are now, not where they went: of one block's moves in two waves, the earlier may be in the log behind
        // the later. The words are at least as new as the log, and what they say holds until the caller's batch ends.
        self.moves.read(since, out, |block| Moved { block, to: self.frame(block) })
    }
}

/// The word of a block that is to leave `from`, marked; or why it cannot.
fn movable(word: BlockWord, from: FrameId) -> Result<BlockWord, GaveWay> {
    if word.is_free() || word.frame() != from {
        return Err(GaveWay::Released);
    }
    word.begin_move().ok_or(if word.pins() != 0 {
        GaveWay::Pinned
    } else if word.is_moving() {
        GaveWay::Moving
    } else {
        GaveWay::Open
    })
}

#[cold]
#[inline(never)]
fn not_moving(moving: Moving, bits: u64) -> ! {
    panic!("{moving:?} is not under way: {:?}", BlockWord::from_bits(bits))
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
