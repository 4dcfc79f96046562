//! Block tables that live on across batches: which of their entries are out of date because blocks moved.
//!
//! A table that stays on a device is not built anew for each batch: new blocks are added at its rows' ends, and entries
//! whose blocks moved are patched in place. An old entry stays readable until the batches that were in flight when the
//! block moved have ended, so that a batch patches its table before it is launched, and no earlier.

use crate::block::{Moved, Since};
use crate::error::SequenceError;
use crate::ids::{BlockId, Ticket};
use crate::sync::Ordering::Acquire;

use super::batch::Batch;
use super::outputs::Listed;

/// An entry of a block table that names a frame which its block has left.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct MovedEntry {
    /// The sequence's row.
    pub row: u32,
    /// The block's place in the row.
    pub column: u32,
    /// Where the block is now.
    pub frame: i32,
}

impl Batch {
    /// Lists the blocks that moved to other frames, as far as a block table that was built under an earlier batch, of
    /// ticket `since`, may still name the old ones; appended to `out`. With the table patched so, it is as good under this
    /// batch as a new one, and the next batch asks since this one's ticket.
    ///
    /// [`Since::TooLong`]: more moved than is remembered, and the table must be built anew; `out` is unchanged.
    pub fn moved_since(&self, since: Ticket, out: &mut Vec<Moved>) -> Since {
        self.step.sequences.0.blocks.moved_since(since, out)
    }

    /// The same, as entries of the table whose rows are these sequences, in this order: row by row, ascending.
    ///
    /// Only what moved is listed. What the sequences did themselves (appends, copies on write, truncations) their owners
    /// know.
    ///
    /// # Errors
    ///
    /// [`SequenceError::ForeignSequence`]; `out` is unchanged.
    pub fn moved_entries<S: Listed>(
        &self,
        sequences: impl IntoIterator<Item = S>,
        since: Ticket,
        out: &mut Vec<MovedEntry>,
    ) -> Result<Since, SequenceError> {
        let mut moved = Vec::new();
        let listed = self.moved_since(since, &mut moved);
        // The frame is the same wherever a block stands in the list.
        moved.sort_unstable_by_key(|moved| moved.block);
        let begin = out.len();
        for (row, sequence) in (0..).zip(sequences) {
            if let Err(error) = self.check(sequence.sequences(), sequence.sequence_id()) {
                out.truncate(begin);
                return Err(error);
            }
            if moved.is_empty() {
                continue;
            }
            let here = out.len();
            sequence.read(|ids, _| {
                out.truncate(here);
                for (column, id) in (0..).zip(ids) {
                    // Acquire: pairs with the owner's stores, see `BlockList::read`.
                    let block = BlockId(id.load(Acquire));
                    if let Ok(at) = moved.binary_search_by_key(&block, |moved| moved.block) {
                        out.push(MovedEntry { row, column, frame: moved[at].to.0 as i32 });
                    }
                }
            });
        }
        Ok(listed)
    }
}
