//! The table of blocks: word, inverse map and info of each, by id.
//!
//! Append-only ([`Rows`]): a block's id lives on in a pool that shrinks (its bytes move elsewhere), so that rows are never
//! taken away before the pool goes, and reading one needs no epoch. 28 bytes a row.

use crate::ids::{BlockId, FrameId};
use crate::sync::{AtomicU32, AtomicU64, Ordering::*};

use super::info::InfoCell;
use super::rows::{Bucket, Rows};
use super::word::BlockWord;

/// The three arrays are of one length.
struct Part {
    words: Box<[AtomicU64]>,
    block_at: Box<[AtomicU32]>,
    info: Box<[InfoCell]>,
}

impl Bucket for Part {
    /// Block and frame numbers agree, and everything is free.
    fn new(base: usize, len: usize) -> Self {
        let ids = || base as u32..(base + len) as u32;
        Self {
            words: ids().map(|id| AtomicU64::new(BlockWord::free(FrameId(id)).to_bits())).collect(),
            block_at: ids().map(AtomicU32::new).collect(),
            info: ids().map(|_| InfoCell::new()).collect(),
        }
    }

    #[inline]
    fn len(&self) -> usize {
        self.words.len()
    }
}

/// See the [module](self).
pub(in crate::block) struct Table(Rows<Part>);

impl Table {
    pub(in crate::block) fn new(rows: usize) -> Self {
        Self(Rows::new(rows))
    }

    /// Makes the rows up to `rows` exist. Concurrent calls are fine.
    pub(in crate::block) fn grow(&self, rows: usize) {
        self.0.grow(rows);
    }

    #[inline]
    pub(in crate::block) fn word(&self, id: BlockId) -> &AtomicU64 {
        let (part, row) = self.0.locate(id.index());
        // SAFETY: `locate` gives a place below the length of all three arrays, here and below.
        unsafe { part.words.get_unchecked(row) }
    }

    #[inline]
    pub(in crate::block) fn info(&self, id: BlockId) -> &InfoCell {
        let (part, row) = self.0.locate(id.index());
        // SAFETY: as above.
        unsafe { part.info.get_unchecked(row) }
    }

    /// The block whose bytes are, or would be, in a frame.
    #[inline]
    pub(in crate::block) fn block_at(&self, frame: FrameId) -> BlockId {
        let (part, row) = self.0.locate(frame.index());
        // SAFETY: as above. Relaxed: written only by whoever has the frame, who got it by an Acquire from whoever had
        // it before.
        BlockId(unsafe { part.block_at.get_unchecked(row) }.load(Relaxed))
    }

    /// Says which block's bytes are, or would be, in a frame that is the caller's.
    #[inline]
    pub(in crate::block) fn set_block_at(&self, frame: FrameId, id: BlockId) {
        let (part, row) = self.0.locate(frame.index());
        // SAFETY: as above. Relaxed: whoever gets the frame from the caller gets it by an Acquire.
        unsafe { part.block_at.get_unchecked(row) }.store(id.0, Relaxed);
    }

    /// Bytes of metadata that the table takes.
    pub(in crate::block) fn bytes(&self) -> usize {
        const ROW: usize = size_of::<AtomicU64>() + size_of::<AtomicU32>() + size_of::<InfoCell>();
        self.0.len() * ROW
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
}
