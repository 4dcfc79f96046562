//! The table of blocks: word, inverse map and info of each block, by id. 28 bytes per row.
//! Append-only ([`GrowTable`]), because an id outlives its frame in a pool that shrinks.

use crate::ids::{BlockId, FrameId, Run};
use crate::sync::{AtomicU32, AtomicU64, Ordering::*};

use super::grow_table::{GrowTable, TablePart};
use super::info::InfoCell;
use super::word::BlockWord;

struct Part {
    words: Box<[AtomicU64]>,
    block_at: Box<[AtomicU32]>,
    info: Box<[InfoCell]>,
}

impl TablePart for Part {
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

pub(in crate::block) struct Table(GrowTable<Part>);

#[derive(Clone, Copy)]
pub(in crate::block) struct Row<'a> {
    pub(in crate::block) word: &'a AtomicU64,
    pub(in crate::block) info: &'a InfoCell,
}

/// A view for several accesses, which keeps the addresses of the first rows in registers.
#[derive(Clone, Copy)]
pub(in crate::block) struct TableView<'a> {
    table: &'a Table,
    first: PartView<'a>,
}

#[derive(Clone, Copy)]
struct PartView<'a> {
    words: &'a [AtomicU64],
    block_at: &'a [AtomicU32],
    info: &'a [InfoCell],
}

impl<'a> TableView<'a> {
    #[inline]
    pub(in crate::block) fn row(&self, id: BlockId) -> Row<'a> {
        match self.first_row(id) {
            Some(row) => row,
            None => self.table.row(id),
        }
    }

    /// Returns the words of the first rows.
    #[inline]
    pub(in crate::block) fn words(&self) -> &'a [AtomicU64] {
        self.first.words
    }

    #[inline]
    pub(in crate::block) fn first_row(&self, id: BlockId) -> Option<Row<'a>> {
        let word = self.first.words.get(id.index())?;
        // SAFETY: the arrays are equally long.
        Some(Row { word, info: unsafe { self.first.info.get_unchecked(id.index()) } })
    }

    /// Calls `visit` with each row of a run, in order, until it returns false. Returns the number
    /// of frames for which it returned true.
    #[inline(always)]
    pub(in crate::block) fn visit_run(
        &self,
        run: Run,
        mut visit: impl FnMut(FrameId, BlockId, Row<'a>) -> bool,
    ) -> u32 {
        // One bounds check for all frames, if the run existed from the beginning.
        if let Some(blocks) = self.first.block_at.get(run.start.index()..run.end() as usize) {
            for (at, block) in (0..).zip(blocks) {
                // Relaxed: as in `Table::block_at`.
                let id = BlockId(block.load(Relaxed));
                if !visit(FrameId(run.start.0 + at), id, self.row(id)) {
                    return at;
                }
            }
            return run.len;
        }
        for (at, frame) in (0..).zip(run.frames()) {
            let id = self.table.block_at(frame);
            if !visit(frame, id, self.table.row(id)) {
                return at;
            }
        }
        run.len
    }

    #[inline]
    pub(in crate::block) fn block_at(&self, frame: FrameId) -> BlockId {
        if frame.index() < self.first.words.len() {
            // SAFETY: the arrays are equally long. Relaxed: as in `Table::block_at`.
            BlockId(unsafe { self.first.block_at.get_unchecked(frame.index()) }.load(Relaxed))
        } else {
            self.table.block_at(frame)
        }
    }
}

impl Table {
    pub(in crate::block) fn new(rows: usize) -> Self {
        Self(GrowTable::new(rows))
    }

    pub(in crate::block) fn grow(&self, rows: usize) {
        self.0.grow(rows);
    }

    #[inline]
    pub(in crate::block) fn word(&self, id: BlockId) -> &AtomicU64 {
        let (part, row) = self.0.locate(id.index());
        // SAFETY: `locate` returns an index below the length of all three arrays, here and below.
        unsafe { part.words.get_unchecked(row) }
    }

    #[inline]
    pub(in crate::block) fn info(&self, id: BlockId) -> &InfoCell {
        let (part, row) = self.0.locate(id.index());
        // SAFETY: as above.
        unsafe { part.info.get_unchecked(row) }
    }

    #[inline]
    pub(in crate::block) fn row(&self, id: BlockId) -> Row<'_> {
        let (part, row) = self.0.locate(id.index());
        // SAFETY: as above.
        unsafe { Row { word: part.words.get_unchecked(row), info: part.info.get_unchecked(row) } }
    }

    #[inline]
    pub(in crate::block) fn view(&self) -> TableView<'_> {
        let Part { words, block_at, info } = self.0.first();
        TableView { table: self, first: PartView { words, block_at, info } }
    }

    #[inline]
    pub(in crate::block) fn block_at(&self, frame: FrameId) -> BlockId {
        let (part, row) = self.0.locate(frame.index());
        // SAFETY: as above. Relaxed: only the owner of the frame writes it; each owner passes the
        // frame to the next by a Release and an Acquire.
        BlockId(unsafe { part.block_at.get_unchecked(row) }.load(Relaxed))
    }

    #[inline]
    pub(in crate::block) fn set_block_at(&self, frame: FrameId, id: BlockId) {
        let (part, row) = self.0.locate(frame.index());
        // SAFETY: as above. Relaxed: the next owner gets the frame from the caller by an Acquire.
        unsafe { part.block_at.get_unchecked(row) }.store(id.0, Relaxed);
    }

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
