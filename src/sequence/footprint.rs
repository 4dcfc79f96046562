//! Number of blocks that the close of a sequence gives back, counted from the words of its blocks.

use crate::block::Blocks;
use crate::ids::BlockId;

use super::registry::SequenceView;
use super::sequence::Sequence;

/// Blocks that the close of a sequence would give back, as of some moment.
///
/// `blocks == freed + cached + shared`
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Footprint {
    /// Number of its blocks, including reserved ones.
    pub blocks: usize,
    /// Blocks that only this sequence references and that are not cached, and reserved ones: they
    /// become free.
    pub freed: usize,
    /// Blocks that only this sequence references and that are cached: they become evictable.
    pub cached: usize,
    /// Blocks with other references.
    pub shared: usize,
    /// Leading blocks that are cached, shared or not: a sequence of the same tokens finds them.
    pub found: usize,
}

impl Footprint {
    fn of(pool: &Blocks, blocks: impl IntoIterator<Item = BlockId>, reserved: usize) -> Self {
        let mut footprint = Self::default();
        for word in blocks.into_iter().map(|block| pool.word(block)) {
            footprint.found += usize::from(word.is_cached() && footprint.found == footprint.blocks);
            footprint.blocks += 1;
            match (word.refs(), word.is_cached()) {
                (0..=1, false) => footprint.freed += 1,
                (0..=1, true) => footprint.cached += 1,
                _ => footprint.shared += 1,
            }
        }
        footprint.blocks += reserved;
        footprint.freed += reserved;
        footprint
    }
}

impl SequenceView {
    /// Counts the blocks that the close of the sequence would give back.
    ///
    /// Exact if the sequence and its blocks do not change meanwhile. Empty if it is closed.
    pub(crate) fn footprint(&self) -> Footprint {
        Footprint::of(self.sequences.blocks(), self.blocks(), self.list.reserved())
    }
}

impl Sequence {
    /// Closes the sequence, and returns the number of blocks that it gave back. The counts are
    /// exact unless other threads share or release these blocks at the same moment.
    pub(crate) fn close_counted(mut self) -> Footprint {
        self.make_findable();
        Footprint::of(self.sequences.blocks(), self.blocks(), self.reserved.len())
    }
}
