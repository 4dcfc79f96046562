//! The table of blocks: word, inverse map and info of each, by id.
//!
//! Append-only: a block's id lives on in a pool that shrinks (its bytes move elsewhere), so that rows are never taken
//! away before the pool goes, and reading one needs no epoch. 28 bytes a row.
//!
//! Rows stand in buckets, the first as large as the pool at its start, each further one as large as all before it
//! together. Growing adds a bucket; nothing that was there moves.

use std::ptr;

use crate::ids::{BlockId, FRAMES_MAX, FrameId};
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering::*};

use super::BlockWord;
use super::info::InfoCell;

/// Doublings after the first bucket: enough for any pool that a frame number can address. A model's pools are small.
const BUCKETS_MORE: usize = if cfg!(kvpool_loom) { 3 } else { crate::config::FRAME_BITS as usize };

struct Bucket {
    words: Box<[AtomicU64]>,
    block_at: Box<[AtomicU32]>,
    info: Box<[InfoCell]>,
}

impl Bucket {
    /// Rows `base .. base + len`: block and frame numbers agree, and everything is free.
    fn new(base: usize, len: usize) -> Self {
        let ids = || base as u32..(base + len) as u32;
        Self {
            words: ids().map(|id| AtomicU64::new(BlockWord::free(FrameId(id)).to_bits())).collect(),
            block_at: ids().map(AtomicU32::new).collect(),
            info: ids().map(|_| InfoCell::new()).collect(),
        }
    }
}

/// See the [module](self).
pub(super) struct Table {
    first: Bucket,
    more: [AtomicPtr<Bucket>; BUCKETS_MORE],
}

impl Table {
    pub(super) fn new(rows: usize) -> Self {
        let first = rows.max(1);
        Self { first: Bucket::new(0, first), more: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())) }
    }

    /// Makes the rows up to `rows` exist. Concurrent calls are fine.
    pub(super) fn grow(&self, rows: usize) {
        let mut have = self.first.words.len();
        for slot in &self.more {
            if have >= rows {
                return;
            }
            if slot.load(Relaxed).is_null() {
                let bucket = Box::into_raw(Box::new(Bucket::new(have, have.min(FRAMES_MAX - have))));
                // Release: publishes the rows; pairs with the Acquire in `bucket`.
                if slot.compare_exchange(ptr::null_mut(), bucket, Release, Relaxed).is_err() {
                    // SAFETY: ours; another thread was faster, and nobody has seen this one.
                    drop(unsafe { Box::from_raw(bucket) });
                }
            }
            have *= 2;
        }
    }

    #[inline]
    pub(super) fn word(&self, id: BlockId) -> &AtomicU64 {
        let (bucket, row) = self.locate(id.index());
        // SAFETY: `locate` gives a row of the bucket, here and below.
        unsafe { bucket.words.get_unchecked(row) }
    }

    #[inline]
    pub(super) fn info(&self, id: BlockId) -> &InfoCell {
        let (bucket, row) = self.locate(id.index());
        // SAFETY: as above.
        unsafe { bucket.info.get_unchecked(row) }
    }

    /// The block whose bytes are, or would be, in a frame.
    #[inline]
    pub(super) fn block_at(&self, frame: FrameId) -> BlockId {
        let (bucket, row) = self.locate(frame.index());
        // SAFETY: as above. Relaxed: written only by whoever has the frame, who got it by an Acquire from whoever had
        // it before.
        BlockId(unsafe { bucket.block_at.get_unchecked(row) }.load(Relaxed))
    }

    /// Says which block's bytes are, or would be, in a frame that is the caller's.
    #[inline]
    pub(super) fn set_block_at(&self, frame: FrameId, id: BlockId) {
        let (bucket, row) = self.locate(frame.index());
        // SAFETY: as above. Relaxed: whoever gets the frame from the caller gets it by an Acquire.
        unsafe { bucket.block_at.get_unchecked(row) }.store(id.0, Relaxed);
    }

    /// A bucket and a row that is within it, in each of its three arrays, which are of one length.
    #[inline]
    fn locate(&self, row: usize) -> (&Bucket, usize) {
        if row < self.first.words.len() { (&self.first, row) } else { self.locate_grown(row) }
    }

    #[cold]
    #[inline(never)]
    fn locate_grown(&self, row: usize) -> (&Bucket, usize) {
        let first = self.first.words.len();
        // A row in [first * 2^k, first * 2^(k + 1)) is in the bucket of first * 2^k rows that begins there.
        let log2 = (row / first).ilog2();
        // SAFETY: a row is asked for only after `grow` has made it; buckets live as long as the table. Acquire: pairs
        // with the Release in `grow`.
        let bucket = unsafe { self.more[log2 as usize].load(Acquire).as_ref() };
        let row = row - (first << log2);
        // The last bucket may be cut off by the most that there can be.
        let bucket = bucket.filter(|bucket| row < bucket.words.len());
        (bucket.expect("a row of this pool"), row)
    }

    /// Bytes of metadata that the table takes.
    pub(super) fn bytes(&self) -> usize {
        const ROW: usize = size_of::<AtomicU64>() + size_of::<AtomicU32>() + size_of::<InfoCell>();
        let more: usize = (self.more.iter().enumerate())
            .filter(|(_, slot)| !slot.load(Relaxed).is_null())
            .map(|(i, _)| self.first.words.len() << i)
            .sum();
        (self.first.words.len() + more) * ROW
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        for slot in &self.more {
            let bucket = slot.load(Relaxed);
            if !bucket.is_null() {
                // SAFETY: made by `Box::into_raw` in `grow`, published once, freed once.
                drop(unsafe { Box::from_raw(bucket) });
            }
        }
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn rows_begin_free_in_the_frame_of_their_own_number_also_after_growth() {
        let table = Table::new(5);
        table.grow(70);
        for id in 0..70 {
            let word = BlockWord::from_bits(table.word(BlockId(id)).load(Relaxed));
            assert_eq!(word, BlockWord::free(FrameId(id)));
            assert_eq!(table.block_at(FrameId(id)), BlockId(id));
        }
        assert_eq!(table.bytes(), 80 * 28, "5, then 5, 10, 20 and 40");
    }

    /// A pool that grows to the most that there can be has a last bucket that is shorter than its place.
    #[test]
    #[should_panic(expected = "a row of this pool")]
    fn a_row_behind_a_bucket_that_is_cut_off_is_no_row() {
        let table = Table::new(5);
        table.more[0].store(Box::into_raw(Box::new(Bucket::new(5, 2))), Release);
        assert_eq!(table.block_at(FrameId(6)), BlockId(6));
        table.word(BlockId(8));
    }
}
