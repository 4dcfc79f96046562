//! The number of blocks that the close of a sequence gives back.

use crate::ids::BlockId;
use crate::prefix::WindowBlocks;
use crate::sync::AtomicU32;
use crate::sync::Ordering::Acquire;

use super::grouped::GroupedSequence;
use super::list::BlockList;
use super::registry::{SequenceView, Sequences};
use super::sequence::Sequence;
use super::state::State;
use super::window::ListKind;

/// Blocks that the close of a sequence would give back. `blocks == freed + cached + shared`
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Footprint {
    /// Number of its blocks, including reserved ones.
    pub blocks: usize,
    /// Reserved blocks, and uncached ones that only this sequence references: they become free.
    pub freed: usize,
    /// Blocks that only this sequence references and that are cached: they become evictable.
    pub cached: usize,
    /// Blocks with other references.
    pub shared: usize,
    /// Leading tokens in blocks that a sequence of the same tokens finds, shared or not. With a
    /// window, those before the last boundary that it hits.
    pub found: usize,
}

/// The longest hit among blocks of which some are found.
#[derive(Default)]
struct Hit {
    /// Blocks that were looked at.
    blocks: usize,
    /// Leading blocks that are found.
    first: usize,
    /// The last blocks, all found.
    last: usize,
    boundary: usize,
}

impl Hit {
    fn look_at(&mut self, is_found: bool, needs: Option<WindowBlocks>) {
        self.first += usize::from(is_found && self.first == self.blocks);
        self.blocks += 1;
        self.last = if is_found { self.last + 1 } else { 0 };
        let is_hit = needs.is_some_and(|WindowBlocks { sinks, window }| {
            self.last >= window.min(self.blocks.saturating_sub(sinks)) && self.first >= sinks.min(self.blocks)
        });
        if is_found && (is_hit || self.first == self.blocks) {
            self.boundary = self.blocks;
        }
    }
}

impl Footprint {
    fn of(
        sequences: &Sequences,
        kind: ListKind,
        blocks: impl IntoIterator<Item = BlockId>,
        reserved: usize,
    ) -> Self {
        let (pool, mut footprint) = (sequences.blocks(), Self::default());
        let (needs, mut hit) = (kind.needs(), Hit::default());
        for block in blocks {
            if sequences.is_null(block) {
                hit.look_at(false, needs);
                continue;
            }
            let word = pool.word(block);
            // A block cached before a clear is not found.
            let is_found = sequences.cache().is_some_and(|cache| cache.is_found(pool, block));
            hit.look_at(is_found, needs);
            footprint.blocks += 1;
            match (word.refs(), word.is_cached()) {
                (0..=1, false) => footprint.freed += 1,
                (0..=1, true) => footprint.cached += 1,
                _ => footprint.shared += 1,
            }
        }
        footprint.found = hit.boundary * kind.block_tokens as usize;
        footprint.blocks += reserved;
        footprint.freed += reserved;
        footprint
    }
}

impl Footprint {
    /// Adds another group of layers: found is what all groups have.
    fn beside(self, other: Self) -> Self {
        Self {
            blocks: self.blocks + other.blocks,
            freed: self.freed + other.freed,
            cached: self.cached + other.cached,
            shared: self.shared + other.shared,
            found: self.found.min(other.found),
        }
    }
}

impl SequenceView {
    /// Counts the blocks that the close would give back: exact if nothing changes meanwhile.
    pub(crate) fn footprint(&self) -> Footprint {
        // Acquire: see `BlockList::read`.
        let id = |id: &AtomicU32| BlockId(id.load(Acquire));
        let of_list = |(list, kind): (&BlockList, ListKind)| {
            let blocks: Vec<_> = list.read(|ids, _| ids.iter().map(id).collect());
            Footprint::of(&self.sequences, kind, blocks, list.reserved())
        };
        let kinds = self.sequences.kinds();
        let of_state = ListKind { window: None, ..kinds[0] };
        let kinds = kinds.iter().copied().chain(std::iter::repeat(of_state));
        let footprints = self.lists().zip(kinds).map(of_list);
        footprints.reduce(Footprint::beside).unwrap_or_default()
    }
}

impl GroupedSequence {
    /// Closes the sequence, and returns what it gave back, in all groups and states. `comes_back`: it
    /// is preempted, and will look up its prompt again. Found is at most what all of them have: what is behind a window may be gone at a checkpoint.
    pub(crate) fn close_counted(mut self, comes_back: bool) -> Footprint {
        self.catch_up();
        let sequences = self.parts[0].sequences.clone();
        let kind = ListKind { window: None, ..sequences.kinds()[0] };
        let sources = self.states.iter().flat_map(State::source);
        let sources = Footprint::of(&sequences, kind, sources, 0);
        let runs: Vec<BlockId> = self.states.iter().flat_map(|state| state.run.blocks()).collect();
        // A run has one reference. Where it ends with a full block, it becomes a checkpoint.
        self.close_states();
        self.parts.iter_mut().for_each(Sequence::make_findable);
        let is_cached = |&id: &BlockId| sequences.blocks().word(id).is_cached();
        let (blocks, cached) = (runs.len(), runs.iter().filter(|&id| is_cached(id)).count());
        let runs = Footprint { blocks, cached, freed: blocks - cached, ..Footprint::default() };
        let first = &self.parts[0];
        if comes_back && first.lookup.is_none() {
            sequences.note_preempted(self.id());
        }
        let of = |part: &Sequence| Footprint::of(&sequences, part.kind, part.blocks(), part.reserved.len());
        let groups = self.parts.iter().map(of).reduce(Footprint::beside).unwrap_or_default();
        let (block_tokens, mut found) = (sequences.block_tokens(), groups.found);
        loop {
            let before = found;
            for state in 0..sequences.states().len() {
                found = first.token_hashes().map_or(0, |(known, _)| {
                    sequences.find_checkpoint(known, state, found / block_tokens).0 * block_tokens
                });
            }
            if found == before {
                return Footprint { found, ..groups.beside(sources).beside(runs) };
            }
        }
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
        Footprint::of(&self.sequences, self.kind, self.blocks(), self.reserved.len())
    }
}
