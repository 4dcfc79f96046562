//! The release of one reference: a transition of the block's word, and what it leaves to do.

use crate::ids::{BlockId, FrameId};
use crate::sync::{AtomicU64, Ordering, Ordering::*};

use crate::block::core::Core;
use crate::block::state::{BlockWord, Released, TableView};

/// Release: this owner's use of the bytes happens before the next owner's. Acquire: the last
/// release sees what all other owners did, and every batch that they began.
const RELEASE_ORDER: Ordering = AcqRel;

pub(super) enum Outcome {
    Shared,
    /// The block was freed, and the mover owns its frame.
    Left,
    Freed(FrameId),
    Evictable(BlockWord),
}

/// Drops the only reference of a lease by a [private](crate::block) release. `None`: not done.
#[inline(always)]
pub(super) fn release_privately(table: TableView<'_>, id: BlockId) -> Option<FrameId> {
    let atomic = table.row(id).word;
    let next = BlockWord::from_bits(atomic.load(Relaxed)).release_private()?;
    // A plain store: see "Private release" in `block`. Release: as in `RELEASE_ORDER`. No Acquire:
    // the block had no other owner since it was allocated or reopened.
    atomic.store(next.to_bits(), Release);
    Some(next.frame())
}

/// Drops the only reference of a block that is neither moving nor cached. `None`: not done.
#[inline(always)]
pub(super) fn release_only(table: TableView<'_>, id: BlockId) -> Option<FrameId> {
    let atomic = table.row(id).word;
    let word = BlockWord::from_bits(atomic.load(Relaxed));
    let next = word.release_only()?;
    is_exchanged(atomic, word, next).then(|| next.frame())
}

#[inline(always)]
pub(super) fn release_only_in(atomic: &AtomicU64, frame: FrameId) -> bool {
    let word = BlockWord::from_bits(atomic.load(Relaxed));
    word.release_only_in(frame).is_some_and(|next| is_exchanged(atomic, word, next))
}

/// Drops the only reference of a cached block, which becomes evictable. `None`: not done.
#[inline(always)]
pub(super) fn release_kept(table: TableView<'_>, id: BlockId) -> Option<BlockWord> {
    let atomic = table.row(id).word;
    let word = BlockWord::from_bits(atomic.load(Relaxed));
    let next = word.release_kept()?;
    is_exchanged(atomic, word, next).then_some(next)
}

/// Caches a block, and drops its only reference. `None`: not done.
#[inline(always)]
pub(super) fn keep_only_in(atomic: &AtomicU64, frame: FrameId) -> Option<BlockWord> {
    let word = BlockWord::from_bits(atomic.load(Relaxed));
    // Release: also publishes the row, as in `seal_cached`.
    word.keep_only_in(frame).filter(|&next| is_exchanged(atomic, word, next))
}

#[inline(always)]
fn is_exchanged(atomic: &AtomicU64, word: BlockWord, next: BlockWord) -> bool {
    atomic.compare_exchange(word.to_bits(), next.to_bits(), RELEASE_ORDER, Relaxed).is_ok()
}

impl Core {
    /// Drops a reference if the word passes a check, else returns the word. `counts` is called
    /// before an attempt to make the block evictable.
    #[inline]
    pub(super) fn release_if(
        &self,
        id: BlockId,
        is_right: impl Fn(BlockWord) -> bool,
        mut counts: impl FnMut(),
    ) -> Result<Outcome, BlockWord> {
        let atomic = self.space.table.word(id);
        let mut word = BlockWord::from_bits(atomic.load(Relaxed));
        if let Some(next) = word.release_kept().filter(|_| is_right(word)) {
            counts();
            match atomic.compare_exchange(word.to_bits(), next.to_bits(), RELEASE_ORDER, Relaxed) {
                Ok(_) => return Ok(Outcome::Evictable(next)),
                Err(now) => word = BlockWord::from_bits(now),
            }
        }
        loop {
            if let Some(next) = word.outlived() {
                word = self.outlive(id, word, next);
                continue;
            }
            let released = word.release().filter(|_| is_right(word)).ok_or(word)?;
            if let Released::Evictable { .. } = released {
                counts();
            }
            let next = released.word().to_bits();
            match atomic.compare_exchange_weak(word.to_bits(), next, RELEASE_ORDER, Relaxed) {
                Ok(_) => return Ok(self.released(id, released)),
                // Another thread changed it. Reached by the models `share_release` and `evictable`.
                Err(now) => word = BlockWord::from_bits(now),
            }
        }
    }

    #[inline]
    fn released(&self, id: BlockId, released: Released) -> Outcome {
        match released {
            Released::Shared(_) => Outcome::Shared,
            Released::Evictable { word } => Outcome::Evictable(word),
            Released::Last { word, carry } => {
                if carry {
                    self.space.table.info(id).carry_generation();
                }
                Outcome::Freed(word.frame())
            }
            Released::ToMover { .. } => {
                self.count_left_to_mover();
                Outcome::Left
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn count_left_to_mover(&self) {
        // Relaxed: a statistic.
        self.space.held.fetch_add(1, Relaxed);
        self.counters.freed(1);
    }

    /// Uncaches a block on which the caller has the only reference. Returns its current word.
    #[cold]
    fn outlive(&self, id: BlockId, word: BlockWord, next: BlockWord) -> BlockWord {
        let atomic = self.space.table.word(id);
        // Acquire: sees what earlier owners did before they released the block. Release: that
        // happens before the accesses of the block's next owner.
        match atomic.compare_exchange(word.to_bits(), next.to_bits(), AcqRel, Relaxed) {
            Ok(_) => {
                if let Some(evictor) = &self.evictor {
                    evictor.forget(self, id);
                    self.counters.outlived();
                }
                BlockWord::from_bits(atomic.load(Relaxed))
            }
            Err(now) => BlockWord::from_bits(now),
        }
    }
}
