//! Bytes of blocks of one pool go to blocks of another: in pieces, and each in as few runs as the frames allow.

use crate::batch::InFlight;
use crate::block::Blocks;
use crate::error::TransferError;
use crate::frame::RunList;
use crate::ids::{BlockId, FrameId, Run};

use super::report::Carried;
use super::route::Route;

/// Bytes of a piece. A piece is copied under a lease of the source: what is freed there meanwhile is held back for so long. And a
/// transfer that nobody waits for any more stops after it.
const PIECE_BYTES: usize = 64 << 20;

/// A block that is read, and one that is written.
pub(super) type Pair = (BlockId, BlockId);

/// A lease of the source, ended also by a panic.
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
            // As at the end of every batch: frames that moves left, which it may have been the last to read.
            self.pool.reclaim_due_shared_limbo();
        }
    }
}

/// Frames as runs, in their order.
fn runs_of(frames: impl Iterator<Item = FrameId>) -> RunList {
    let mut runs = RunList::new();
    frames.for_each(|frame| runs.append(Run { start: frame, len: 1 }));
    runs
}

impl Route {
    /// Copies blocks. `is_abandoned` is asked between pieces.
    ///
    /// # Errors
    ///
    /// [`TransferError::Storage`], [`TransferError::Dropped`] once it is abandoned. What was written is of no meaning then.
    ///
    /// # Safety
    ///
    /// The caller holds a reference on each block that is read, and nobody writes them. The blocks that are written are the
    /// caller's alone, not sealed, and no two are the same.
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
            // SAFETY: the caller's.
            carried.runs += unsafe { self.carry_piece(piece) }?;
            carried.blocks += piece.len();
            carried.bytes += (piece.len() * block_bytes) as u64;
        }
        Ok(carried)
    }

    /// Copies some blocks under one lease, and says in how many runs.
    ///
    /// # Safety
    ///
    /// As [`carry`](Self::carry).
    unsafe fn carry_piece(&self, pairs: &[Pair]) -> Result<usize, TransferError> {
        let (from, to) = (self.from.sequences.blocks(), self.to.sequences.blocks());
        // Before the frames are looked up: what a move leaves from now on keeps its bytes until the lease ends.
        let lease = SourceBatch::begin(from);
        let here = runs_of(pairs.iter().map(|&(block, _)| from.frame(block)));
        let there = runs_of(pairs.iter().map(|&(_, block)| to.frame(block)));
        // SAFETY: nobody writes the blocks that are read, and the lease keeps their frames from being reused; those that are written
        // are the caller's alone, and do not move: see the floor.
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
        assert_eq!(*frames(&[3, 2, 1]), [run(3, 1), run(2, 1), run(1, 1)], "the last first is not a run");
    }
}
