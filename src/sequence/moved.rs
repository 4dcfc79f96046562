//! Persistent block tables: finding the entries that are outdated because blocks moved.
//!
//! A table that stays on a device is not rebuilt for each batch: new blocks are appended to its
//! rows, and entries whose blocks moved are patched in place. An old entry stays readable until the
//! batches in flight at the time of the move have ended, so a batch patches just before its launch.

use crate::block::{Moved, Since};
use crate::error::SequenceError;
use crate::ids::{BlockId, Ticket};
use crate::sync::Ordering::Acquire;

use super::batch::Batch;
use super::outputs::Listed;

/// Entry of a block table whose block has moved to another frame.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct MovedEntry {
    /// Row of the sequence.
    pub row: u32,
    /// Place of the block in the row.
    pub column: u32,
    /// The block's current frame.
    pub frame: i32,
}

impl Batch {
    /// Appends to `out` the blocks that moved since an earlier batch, of ticket `since`.
    ///
    /// A table built under that batch may still name the old frames. Once patched, it is valid
    /// under this batch, and the next batch asks since this one's ticket. [`Since::TooLong`], with
    /// `out` unchanged: more blocks moved than the pool remembers; rebuild the table.
    pub fn moved_since(&self, since: Ticket, out: &mut Vec<Moved>) -> Since {
        self.step.sequences.0.blocks.moved_since(since, out)
    }

    /// Lists the moved blocks as entries of the table with these rows, in row-major order, without
    /// the owners' own changes (appends, copies on write, truncations). On an error, nothing.
    pub fn moved_entries<S: Listed>(
        &self,
        sequences: impl IntoIterator<Item = S>,
        since: Ticket,
        out: &mut Vec<MovedEntry>,
    ) -> Result<Since, SequenceError> {
        let mut moved = Vec::new();
        let listed = self.moved_since(since, &mut moved);
        // A block has the same frame in every list.
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
