//! The number of blocks that the close of a sequence gives back.

use crate::ids::BlockId;

use super::registry::{SequenceView, Sequences};
use super::sequence::Sequence;

/// Blocks that the close of a sequence would give back. `blocks == freed + cached + shared`
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Footprint {
    /// Number of its blocks, including reserved ones.
    pub blocks: usize,
    /// Reserved blocks, and uncached ones that only this sequence references: they become free.
    pub freed: usize,
    /// Blocks that only this sequence references and that are cached: they become evictable.
    pub cached: usize,
    /// Blocks with other references.
    pub shared: usize,
    /// Leading blocks that a sequence of the same tokens finds, shared or not.
    pub found: usize,
}

impl Footprint {
    fn of(sequences: &Sequences, blocks: impl IntoIterator<Item = BlockId>, reserved: usize) -> Self {
        let (pool, mut footprint) = (sequences.blocks(), Self::default());
        for block in blocks.into_iter().filter(|&block| !sequences.is_null(block)) {
            let word = pool.word(block);
            // A block cached before a clear is not found.
            let is_found = sequences.cache().is_some_and(|cache| cache.is_found(pool, block));
            footprint.found += usize::from(is_found && footprint.found == footprint.blocks);
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
    /// Counts the blocks that the close would give back: exact if nothing changes meanwhile.
    pub(crate) fn footprint(&self) -> Footprint {
        Footprint::of(&self.sequences, self.blocks(), self.list.reserved())
    }
}

impl Sequence {
    /// Closes the sequence, and returns what it gave back: exact unless other threads share or
    /// release these blocks. `comes_back`: it is preempted, and will look up its prompt again.
    pub(crate) fn close_counted(mut self, comes_back: bool) -> Footprint {
        self.make_findable();
        // One that was never appended to was not counted yet.
        if comes_back && self.lookup.is_none() {
            self.sequences.note_preempted(self.id());
        }
        Footprint::of(&self.sequences, self.blocks(), self.reserved.len())
    }
}
