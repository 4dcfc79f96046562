//! The blocks of one pool that a transfer reads or writes, and what keeps them.
//!
//! ```text
//! Export, Import  ->  HeldBlocks: references on all blocks        released by the last holder
//!                        ^
//! transport       ->  Hold: a piece; also its pins, in the source
//! ```
//!
//! The last of these to be dropped releases the references. If an export or import is aborted
//! while a transport has a hold, the blocks stay owned, and are reported as quarantined.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::clock::InFlight;
use crate::error::{Invalid, TransferError};
use crate::frame::RunList;
use crate::ids::{BlockHandle, BlockId, FrameId, Run, SequenceId};
use crate::prefix::ColdBlock;
use crate::sequence::BlockRefs;

use super::checksum::Checksum;
use super::route::End;
use super::transfers::TransferDirection;
use super::transport::Hold;

pub(super) fn not_transferred(place: u32) -> Invalid {
    Invalid::new("place of a block", place, "one that is transferred")
}

/// Some blocks of a transfer, which stay in their frames while the hold lives.
pub struct Piece {
    /// Frames of the blocks in the requested order; neighbours are joined.
    pub runs: Vec<Run>,
    /// Keeps the blocks in their frames, which no other thread writes or, in an import, reads.
    pub hold: Hold,
}

/// Evictable blocks held for copying. A drop returns them to their former places, or evicts them.
pub(super) struct ColdBlocks {
    end: End,
    pub(super) cold: Vec<ColdBlock>,
}

/// Numbers of blocks that left a cache, will leave it, or stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Finished {
    /// Blocks evicted from the source's cache.
    pub evicted_blocks: usize,
    /// Blocks that a batch in flight may see or that are being moved, evicted before all others,
    /// and blocks that a transport holds, evicted when it drops its hold.
    pub leaving_blocks: usize,
    /// Blocks that were looked up during the transfer, and stay.
    pub warm_blocks: usize,
}

impl ColdBlocks {
    /// Takes up to `wanted` evictable blocks, in eviction order, but each hash only once: two
    /// sequences may have computed the same block at the same time.
    pub(super) fn coldest(end: &End, wanted: usize) -> Result<Self, TransferError> {
        let cold = end.cache()?.take_coldest(end.sequences.blocks(), wanted);
        let mut hashes = HashSet::with_capacity(cold.len());
        let (cold, repeated): (Vec<_>, Vec<_>) =
            cold.into_iter().partition(|block| hashes.insert(block.hash));
        let taken = Self { end: end.clone(), cold };
        taken.put_back(&repeated);
        Ok(taken)
    }

    fn put_back(&self, cold: &[ColdBlock]) {
        if let Ok(cache) = self.end.cache() {
            cache.put_back(self.end.sequences.blocks(), cold);
        }
    }

    fn give_up(&mut self) -> Finished {
        let cold = std::mem::take(&mut self.cold);
        let Ok(cache) = self.end.cache() else { return Finished::default() };
        let (evicted_blocks, leaving_blocks) = cache.give_up(self.end.sequences.blocks(), &cold);
        let warm_blocks = cold.len() - evicted_blocks - leaving_blocks;
        Finished { evicted_blocks, leaving_blocks, warm_blocks }
    }
}

impl Drop for ColdBlocks {
    fn drop(&mut self) {
        let cold = std::mem::take(&mut self.cold);
        self.put_back(&cold);
    }
}

pub(super) enum Refs {
    Listed(BlockRefs),
    Cold(ColdBlocks),
    Released,
}

pub(super) struct HeldBlocks {
    end: End,
    number: u64,
    /// The block at each place of the manifest; `None` if it is not transferred.
    ids: Vec<Option<BlockId>>,
    refs: Refs,
    /// Set when the cold blocks are to be evicted at the end.
    gives_up: OnceLock<()>,
    /// Checksums of what a transport has received, by frame.
    arrived: Mutex<HashMap<FrameId, u64>>,
}

/// Checksums of a grant's frames, computed while a transport writes their bytes. Optional: without
/// a call of [`finish`](Self::finish), the import reads the frames.
pub struct Arriving {
    run: Run,
    sums: Vec<Checksum>,
}

impl Arriving {
    /// Begins before frames of a grant are written, and voids their earlier checksums, which a
    /// write that is aborted half-way would make wrong: a transport that computes checksums calls
    /// this before every write. `None` for a hold that keeps no blocks of an import.
    pub fn begin(hold: &Hold, run: Run) -> Option<Self> {
        let mut arrived = hold.downcast_ref::<HeldBlocks>()?.arrived();
        for frame in run.frames() {
            arrived.remove(&frame);
        }
        Some(Self { run, sums: Vec::new() })
    }

    /// Adds bytes now in memory of the run's `index`th frame, in the order of its packed form.
    ///
    /// # Panics
    /// If the run has no such frame.
    pub fn add(&mut self, index: usize, bytes: &[u8]) {
        assert!(index < self.run.len as usize, "frame {index} of a run of {}", self.run.len);
        // Not before bytes arrive: a peer could promise many small frames.
        if index >= self.sums.len() {
            self.sums.resize_with(index + 1, Checksum::new);
        }
        self.sums[index].add(bytes);
    }

    /// Ends after all bytes of all frames were written and added, for the hold of the beginning.
    pub fn finish(self, hold: &Hold) {
        let Some(held) = hold.downcast_ref::<HeldBlocks>() else { return };
        debug_assert_eq!(self.sums.len(), self.run.len as usize, "bytes of all frames");
        held.arrived().extend(self.run.frames().zip(self.sums.into_iter().map(Checksum::finish)));
    }
}

impl End {
    /// Keeps cached blocks that others will join until the result is dropped; listed as an import.
    pub(super) fn keep(&self, refs: BlockRefs) -> HeldBlocks {
        let ids = refs.blocks.iter().copied().map(Some).collect();
        HeldBlocks::new(self, TransferDirection::Import, None, ids, Refs::Listed(refs))
    }
}

impl HeldBlocks {
    pub(super) fn new(
        end: &End,
        direction: TransferDirection,
        sequence: Option<SequenceId>,
        ids: Vec<Option<BlockId>>,
        refs: Refs,
    ) -> Self {
        let number = end.transfers.list(
            end.sequences.blocks(),
            direction,
            sequence,
            ids.iter().flatten().copied().collect(),
        );
        Self { end: end.clone(), number, ids, refs, gives_up: OnceLock::new(), arrived: Mutex::default() }
    }

    pub(super) fn end(&self) -> &End {
        &self.end
    }

    fn arrived(&self) -> MutexGuard<'_, HashMap<FrameId, u64>> {
        // Every state between two calls is valid.
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the checksums of those places whose bytes a transport has received completely.
    pub(super) fn take_arrived(&self, places: &[u32]) -> Vec<Option<u64>> {
        let arrived = std::mem::take(&mut *self.arrived());
        let frame = |&place: &u32| Some(self.end.sequences.blocks().frame((*self.ids.get(place as usize)?)?));
        places.iter().map(|place| arrived.get(&frame(place)?).copied()).collect()
    }

    pub(super) fn ids(&self) -> &[Option<BlockId>] {
        &self.ids
    }

    fn blocks_at(&self, places: &[u32]) -> Result<Vec<BlockId>, TransferError> {
        let at = |&place: &u32| {
            let id = self.ids.get(place as usize).copied().flatten();
            id.ok_or_else(|| not_transferred(place).into())
        };
        places.iter().map(at).collect()
    }

    fn runs_of(&self, blocks: &[BlockId]) -> Vec<Run> {
        let pool = self.end.sequences.blocks();
        runs_of(blocks.iter().map(|&block| pool.frame(block))).to_vec()
    }

    /// Returns blocks that are written, which are open and therefore do not move.
    pub(super) fn open_piece(self: &Arc<Self>, places: &[u32]) -> Result<Piece, TransferError> {
        let blocks = self.blocks_at(places)?;
        Ok(Piece { runs: self.runs_of(&blocks), hold: self.clone() })
    }

    /// Returns blocks that are read, pinned.
    pub(super) fn pinned_piece(self: &Arc<Self>, places: &[u32]) -> Result<Piece, TransferError> {
        let blocks = self.blocks_at(places)?;
        let hold = Arc::new(Pinned::new(self.clone(), &blocks));
        // After the pins: from now on the bytes stay in their frames.
        Ok(Piece { runs: self.runs_of(&blocks), hold })
    }

    /// Keeps only these places, ascending, of cold blocks, and returns the others to the queue.
    pub(super) fn retain(&mut self, places: &[u32]) -> Result<(), TransferError> {
        let Refs::Cold(cold) = &mut self.refs else { return Ok(()) };
        if let Some(&place) =
            places.iter().find(|&&place| self.ids.get(place as usize).is_none_or(Option::is_none))
        {
            return Err(not_transferred(place).into());
        }
        let stays: std::collections::HashSet<u32> = places.iter().copied().collect();
        for (place, id) in (0..).zip(&mut self.ids) {
            id.take_if(|_| !stays.contains(&place));
        }
        let ids: Vec<BlockId> = self.ids.iter().flatten().copied().collect();
        let kept: std::collections::HashSet<BlockId> = ids.iter().copied().collect();
        let (stay, back): (Vec<_>, Vec<_>) =
            std::mem::take(&mut cold.cold).into_iter().partition(|cold| kept.contains(&cold.id));
        cold.cold = stay;
        cold.put_back(&back);
        self.end.transfers.relist(self.end.sequences.blocks(), self.number, ids);
        Ok(())
    }

    pub(super) fn take_refs(&mut self) -> BlockRefs {
        self.end.transfers.relist(self.end.sequences.blocks(), self.number, Vec::new());
        match std::mem::replace(&mut self.refs, Refs::Released) {
            Refs::Listed(refs) => refs,
            Refs::Cold(_) | Refs::Released => BlockRefs::new(&self.end.sequences),
        }
    }

    /// Evicts cold blocks now, or once no transport holds them.
    pub(super) fn give_up(self: &mut Arc<Self>) -> Finished {
        match Arc::get_mut(self) {
            Some(held) => match &mut held.refs {
                Refs::Cold(cold) => cold.give_up(),
                Refs::Listed(_) | Refs::Released => Finished::default(),
            },
            None => {
                let _ = self.gives_up.set(());
                let cold = if let Refs::Cold(cold) = &self.refs { cold.cold.len() } else { 0 };
                Finished { leaving_blocks: cold, ..Finished::default() }
            }
        }
    }

    /// Returns exclusive access, unless a transport has a hold.
    pub(super) fn exclusive(self: &mut Arc<Self>) -> Result<&mut Self, TransferError> {
        // One of them is the caller's.
        let holds = Arc::strong_count(self) - 1;
        Arc::get_mut(self).ok_or(TransferError::InTransfer { holds: holds.max(1) })
    }

    /// Records that the export or import is gone, so that only transports hold the blocks.
    pub(super) fn quarantine(self: &Arc<Self>) {
        // Otherwise the caller has the last reference, and is about to drop it.
        if Arc::strong_count(self) > 1 {
            self.end.transfers.quarantine(self.end.sequences.blocks(), self.number);
        }
    }
}

impl Drop for HeldBlocks {
    fn drop(&mut self) {
        if let (Some(()), Refs::Cold(cold)) = (self.gives_up.get(), &mut self.refs) {
            cold.give_up();
        }
        // Released first: until then they are reported.
        self.refs = Refs::Released;
        self.end.transfers.unlist(self.end.sequences.blocks(), self.number);
    }
}

/// Keeps source blocks in their frames until it is dropped, also during a panic.
///
/// A pinned block does not move, and the transfer's reference keeps it from being freed. Frames of
/// other blocks freed meanwhile can be reused at once. If a block has no pin left
/// ([`BlockWord::PINS_MAX`](crate::block::BlockWord); many transfers may send a shared prefix), the
/// piece is copied under a batch: a block that moves keeps its bytes in the old frame until the
/// batch ends. The batch also holds back all frames that other threads free.
struct Pinned {
    held: Arc<HeldBlocks>,
    pinned: Vec<BlockHandle>,
    batch: Option<InFlight>,
}

impl Pinned {
    fn new(held: Arc<HeldBlocks>, blocks: &[BlockId]) -> Self {
        let mut all = Self { held, pinned: Vec::with_capacity(blocks.len()), batch: None };
        for &block in blocks {
            let pool = all.held.end.sequences.blocks();
            let handle = pool.handle(block);
            if pool.pin(handle).is_ok() {
                all.pinned.push(handle);
            } else if all.batch.is_none() {
                all.batch = Some(pool.begin_batch());
            }
        }
        all
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let pool = self.held.end.sequences.blocks();
        self.pinned.iter().for_each(|&handle| pool.unpin(handle));
        if let Some(in_flight) = self.batch.take() {
            let batch = in_flight.batch();
            pool.end_batch(in_flight);
            // Frames left by moves, which this batch may have been the last to read.
            pool.reclaim_due_retired();
            self.held.end.sequences.batch_ended(batch);
        }
    }
}

fn runs_of(frames: impl Iterator<Item = FrameId>) -> RunList {
    let mut runs = RunList::new();
    frames.for_each(|frame| runs.append(Run { start: frame, len: 1 }));
    runs
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
