//! Copies the bytes of blocks from one pool to another: in pieces, each in as few runs as the
//! frames allow.

use crate::block::Blocks;
use crate::clock::InFlight;
use crate::error::TransferError;
use crate::frame::RunList;
use crate::ids::{BlockHandle, BlockId, FrameId, Run};

use super::report::Carried;
use super::route::Route;

/// Bytes per piece. Its source blocks are pinned while it is copied. An abandoned transfer stops
/// after the current piece.
const PIECE_BYTES: usize = 64 << 20;

/// A source block and a destination block.
pub(super) type Pair = (BlockId, BlockId);

/// Keeps source blocks in their frames, also during a panic, until it is dropped.
///
/// A pinned block does not move, and the transfer's reference keeps it from being freed. Other
/// blocks that are freed meanwhile are reusable at once, as if there were no transfer.
///
/// A block has few pins ([`BlockWord::PINS_MAX`](crate::block::BlockWord)), and a prefix that many
/// sequences share may be sent by more transfers than that. For a block without a pin to spare, the
/// piece is copied under a batch: if the block moves, its old frame keeps the bytes until the batch
/// ends. Only then are frames held back that other threads free.
struct Held<'a> {
    pool: &'a Blocks,
    pinned: Vec<BlockHandle>,
    batch: Option<InFlight>,
}

impl<'a> Held<'a> {
    /// Holds blocks on which the caller has references. Their frames must be looked up afterwards.
    fn new(pool: &'a Blocks, blocks: impl Iterator<Item = BlockId>) -> Self {
        let mut held = Self { pool, pinned: Vec::new(), batch: None };
        for handle in blocks.map(|block| pool.handle(block)) {
            if pool.pin_any(handle).is_ok() {
                held.pinned.push(handle);
            } else if held.batch.is_none() {
                held.batch = Some(pool.begin_batch());
            }
        }
        held
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.pinned.iter().for_each(|&handle| self.pool.unpin_any(handle));
        if let Some(batch) = self.batch.take() {
            self.pool.end_batch(batch);
            // As at the end of every batch: frames left by moves, which it may have been the last
            // to read.
            self.pool.reclaim_due_shared_limbo();
        }
    }
}

/// Groups consecutive frames into runs, preserving their order.
fn runs_of(frames: impl Iterator<Item = FrameId>) -> RunList {
    let mut runs = RunList::new();
    frames.for_each(|frame| runs.append(Run { start: frame, len: 1 }));
    runs
}

impl Route {
    /// Copies blocks. Calls `is_abandoned` between pieces.
    ///
    /// # Errors
    ///
    /// [`TransferError::Storage`]; [`TransferError::Dropped`] once it is abandoned. The written
    /// bytes are then meaningless.
    ///
    /// # Safety
    ///
    /// The caller holds a reference on each source block, and no thread writes them. The
    /// destination blocks are exclusively the caller's, not sealed, and distinct.
    pub(super) unsafe fn carry(
        &self,
        pairs: &[Pair],
        is_abandoned: &dyn Fn() -> bool,
    ) -> Result<Carried, TransferError> {
        let block_bytes = self.block_bytes();
        let mut carried = Carried::default();
        for piece in pairs.chunks((PIECE_BYTES / block_bytes.max(1)).max(1)) {
            if is_abandoned() {
                return Err(TransferError::Dropped);
            }
            // SAFETY: guaranteed by the caller.
            carried.runs += unsafe { self.carry_piece(piece) }?;
            carried.blocks += piece.len();
            carried.bytes += (piece.len() * block_bytes) as u64;
        }
        Ok(carried)
    }

    /// Copies some blocks, and returns the number of runs.
    ///
    /// # Safety
    ///
    /// As [`carry`](Self::carry).
    unsafe fn carry_piece(&self, pairs: &[Pair]) -> Result<usize, TransferError> {
        let (from, to) = (self.from.sequences.blocks(), self.to.sequences.blocks());
        // Before the frames are looked up: from now on the bytes stay in them.
        let held = Held::new(from, pairs.iter().map(|&(block, _)| block));
        let here = runs_of(pairs.iter().map(|&(block, _)| from.frame(block)));
        let there = runs_of(pairs.iter().map(|&(_, block)| to.frame(block)));
        // SAFETY: no thread writes the source blocks, and they stay in their frames, or these keep
        // their bytes, while the blocks are held; the destination blocks are exclusively the
        // caller's, and do not move: see the parent module.
        let received = unsafe { self.to.storage.receive(&*self.from.storage, &here, &there) };
        drop(held);
        received.inspect_err(|error| self.note_loss(error))?;
        Ok(here.len().max(there.len()))
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_run_and_order_is_kept() {
        let frames = |numbers: &[u32]| runs_of(numbers.iter().map(|&number| FrameId(number)));
        let run = |start, len| Run { start: FrameId(start), len };
        assert_eq!(*frames(&[]), []);
        assert_eq!(*frames(&[4, 5, 6, 2, 3, 9]), [run(4, 3), run(2, 2), run(9, 1)]);
        assert_eq!(*frames(&[3, 2, 1]), [run(3, 1), run(2, 1), run(1, 1)], "descending frames are not a run");
    }
}
