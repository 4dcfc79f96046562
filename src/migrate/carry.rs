//! Copies the bytes of blocks from one pool to another: in pieces, each in as few runs as the
//! frames allow.

use crate::block::Blocks;
use crate::clock::InFlight;
use crate::error::TransferError;
use crate::frame::RunList;
use crate::ids::{BlockId, FrameId, Run};

use super::report::Carried;
use super::route::Route;

/// Bytes per piece. A piece is copied under a lease of the source, which holds back blocks freed
/// there meanwhile. An abandoned transfer stops after the current piece.
const PIECE_BYTES: usize = 64 << 20;

/// A source block and a destination block.
pub(super) type Pair = (BlockId, BlockId);

/// A lease of the source, which also ends during a panic.
struct SourceBatch<'a> {
    pool: &'a Blocks,
    batch: Option<InFlight>,
}

impl<'a> SourceBatch<'a> {
    fn begin(pool: &'a Blocks) -> Self {
        Self { pool, batch: Some(pool.begin_batch()) }
    }
}

impl Drop for SourceBatch<'_> {
    fn drop(&mut self) {
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

    /// Copies some blocks under one lease, and returns the number of runs.
    ///
    /// # Safety
    ///
    /// As [`carry`](Self::carry).
    unsafe fn carry_piece(&self, pairs: &[Pair]) -> Result<usize, TransferError> {
        let (from, to) = (self.from.sequences.blocks(), self.to.sequences.blocks());
        // Begun before the frames are looked up: frames that moves leave from now on keep their
        // bytes until the lease ends.
        let lease = SourceBatch::begin(from);
        let here = runs_of(pairs.iter().map(|&(block, _)| from.frame(block)));
        let there = runs_of(pairs.iter().map(|&(_, block)| to.frame(block)));
        // SAFETY: no thread writes the source blocks, and the lease keeps their frames from being
        // reused; the destination blocks are exclusively the caller's, and do not move: see the
        // parent module.
        let received = unsafe { self.to.storage.receive(&*self.from.storage, &here, &there) };
        drop(lease);
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
