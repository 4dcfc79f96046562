//! States: layers that keep one state of a sequence, whatever its length.
//!
//! ```text
//! run          consecutive frames, which kernels overwrite; never sealed: neither moved nor found
//! checkpoint   a copy behind a boundary of blocks: cached blocks like others, anywhere
//! ```
//!
//! The blocks of a checkpoint are found by hashes that follow from that of the last block of tokens
//! before the boundary, so a state is never found behind other tokens than those it was computed
//! from. They also follow from the number of uncache calls: after one, no earlier checkpoint is
//! found, because it may be wrong too. It is a hit only if all of its blocks are cached. A sequence
//! that was hit holds them until its first append, which names the copies to its own run.
//!
//! A state cannot be taken back: it is valid at one length, `at`. If an abandoned batch wrote to
//! the sequence, it begins again with no tokens. Drafts are not in it before they are accepted:
//!
//! ```text
//! append, final    at == committed == length          over accepted drafts and the new tokens
//! append, drafts   at == committed <  length          over drafts that were accepted before
//! accept           at <= committed == length          no checkpoint until an append
//! ```
//!
//! # Theorem
//!
//! No checkpoint is found that holds the effect of a batch that was abandoned.
//!
//! A run notes each batch that appends to its sequence, and its checkpoint takes over these notes
//! and adds the batch that copies. It is registered like blocks that all of them wrote: see
//! [`abandoned`](super::abandoned). A run that becomes a checkpoint, when its sequence is closed, is
//! registered by the same rule. Model: `loom-tests/tests/grouped.rs`.

use std::ops::Range;

use smallvec::SmallVec;

use crate::ids::BlockId;
use crate::storage::FrameMove;
use crate::sync::Ordering::Relaxed;

use super::list::ListOwner;
use super::registry::Sequences;
use super::sequence::Sequence;
use super::token_hashes::TokenHashes;

/// Number of tokens of a state that an abandoned batch wrote to.
const LOST: u32 = u32::MAX;

/// Copies of frames of one group of layers: of a shared last block, or of all frames of a state.
///
/// A pool with storage makes or enqueues them. Without storage the engine makes them; the old frames
/// keep their bytes until the batch ends.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct GroupCopy {
    /// Number of the group, as in [`Pool::cache_groups`](crate::Pool::cache_groups): a list, or
    /// behind all lists a state.
    pub group: usize,
    /// Each frame, in order: where it is, and where it is copied to.
    pub frames: SmallVec<[FrameMove; 1]>,
}

/// The state of a sequence in one group of layers.
pub(super) struct State {
    /// Number of its group, behind those of all lists.
    group: usize,
    /// Its blocks have unfinished tokens, so that nothing seals them.
    pub(super) run: Sequence,
    /// The checkpoint with which it begins, until that is copied; otherwise without blocks.
    source: Sequence,
    /// Number of tokens that it was computed from; at most those that are final.
    pub(super) at: u32,
}

impl State {
    /// Creates the state of a sequence without tokens, and without blocks.
    pub(super) fn new(group: usize, run: Sequence, source: Sequence) -> Self {
        Self { group, run, source, at: 0 }
    }

    /// Returns its frames, also while an abandoned batch is not yet noticed.
    pub(super) fn frames(&self) -> Range<usize> {
        // A block that is not sealed keeps its frame.
        let first = self.run.listed().next();
        let first = first.map_or(0, |id| self.run.pool_blocks().frame(id).index());
        first..first + self.run.list.len()
    }

    /// Returns the blocks with its bytes: the checkpoint with which it begins, or its run.
    pub(super) fn latest(&self) -> impl ExactSizeIterator<Item = BlockId> {
        if self.is_to_be_restored() { self.source.listed() } else { self.run.listed() }
    }

    /// Returns the blocks of the checkpoint with which it begins.
    pub(super) fn source(&self) -> impl Iterator<Item = BlockId> {
        self.source.blocks()
    }

    /// Returns the number of blocks of the checkpoint with which it begins.
    pub(super) fn source_blocks(&self) -> usize {
        self.source.list.len()
    }

    /// Returns whether an abandoned batch wrote to it, so that it will begin again.
    pub(super) fn is_lost(&self) -> bool {
        self.run.block_count() < self.run.list.len()
    }

    /// Makes these consecutive blocks its run.
    pub(super) fn adopt_run(&mut self, blocks: &[BlockId]) {
        self.run.hold(blocks);
        debug_assert!(
            blocks.windows(2).all(|two| {
                let pool = self.run.pool_blocks();
                pool.frame(two[0]).0 + 1 == pool.frame(two[1]).0
            }),
            "a run in pieces"
        );
    }

    /// Begins with a checkpoint behind `tokens` tokens, on whose blocks it has references.
    pub(super) fn adopt_checkpoint(&mut self, tokens: usize, known: TokenHashes, blocks: &[BlockId]) {
        self.source.hold(blocks);
        self.source.committed = self.source.list.tokens();
        self.source.seals.adopt(blocks.len() as u32);
        self.source.known = Some(Box::new(known));
        self.at = tokens as u32;
    }

    /// Returns whether the run is still to be copied from a checkpoint.
    pub(super) fn is_to_be_restored(&self) -> bool {
        self.source.known.is_some()
    }

    fn release_source(&mut self) {
        let gone = self.source.unlink(0);
        self.source.release_unlinked(&gone);
        self.source.known = None;
    }

    /// Finds out whether a batch that wrote to it was abandoned.
    pub(super) fn look_for_abandoned(&mut self) {
        if self.run.withdrawn().is_some() {
            self.at = LOST;
        }
    }

    /// Begins again, without tokens: its earlier writes no longer matter.
    pub(super) fn restart(&mut self) {
        // Before the notes are dropped: one of an abandoned batch may be among them.
        let count = self.run.sequences.0.abandoned.count();
        self.run.writes.clear();
        // Relaxed: only this thread looks.
        self.run.seen.store(count, Relaxed);
        self.release_source();
        self.at = 0;
    }

    /// Returns the copies that restore it, before the first append.
    pub(super) fn copies_of_source(&self) -> Option<GroupCopy> {
        self.is_to_be_restored().then(|| self.copies(&self.source, &self.run))
    }

    /// Releases the checkpoint with which it began, after its copies were made or named.
    pub(super) fn restored(&mut self) {
        if self.is_to_be_restored() {
            // The frames stay until this batch has ended.
            self.release_source();
        }
    }

    /// Returns the first block of its run, if a transfer may still read it.
    pub(super) fn shared(&self) -> Option<BlockId> {
        // One for all. Acquire, inside: what was read comes before what is written from now on.
        self.run.listed().next().filter(|&id| self.run.pool_blocks().word(id).refs() != 1)
    }

    fn copies(&self, from: &Sequence, to: &Sequence) -> GroupCopy {
        let pool = self.run.pool_blocks();
        let frame = |id: BlockId| pool.frame(id);
        let frames = from.listed().zip(to.listed()).map(|(from, to)| FrameMove::new(frame(from), frame(to)));
        GroupCopy { group: self.group, frames: frames.collect() }
    }

    /// Returns a copy of the state, not yet written, and the copies that the engine makes. The blocks
    /// are those of a checkpoint.
    pub(super) fn checkpoint(&self, known: TokenHashes, blocks: &[BlockId]) -> (Sequence, GroupCopy) {
        let mut copy = Sequence::unlisted(&self.run);
        copy.hold(blocks);
        copy.known = Some(Box::new(known));
        copy.take_notes(&self.run);
        let copies = self.copies(&self.run, &copy);
        (copy, copies)
    }

    /// Makes the run a checkpoint, to be closed.
    pub(super) fn into_checkpoint(mut self, known: TokenHashes) {
        self.run.known = Some(Box::new(known));
        self.run.committed = self.run.list.tokens();
        self.run.complete(self.run.list.len() as u32);
    }
}

impl Sequences {
    /// Returns the longest of these prefixes, by the hashes of its blocks, behind which a checkpoint
    /// of a state is cached, and the number of its evictable blocks.
    pub(super) fn find_checkpoint(&self, known: &TokenHashes, state: usize, most: usize) -> (usize, usize) {
        let Some(cache) = self.cache() else { return (0, 0) };
        let (core, blocks) = (&self.0.blocks, self.states()[state]);
        // Only there can all groups be hit.
        let step = self.boundary_tokens() / self.block_tokens();
        for behind in (1..=most / step).rev().map(|boundary| boundary * step) {
            let Some(last) = known.hash(behind as u32 - 1) else { continue };
            if cache.count_prefix(core, &[last.of_state(state, 0, known.salt())], known.era()).0 == 0 {
                continue;
            }
            let hashes = (0..blocks).map(|block| last.of_state(state, block, known.salt()));
            let hashes: Vec<_> = hashes.collect();
            let (found, evictable) = cache.count_prefix(core, &hashes, known.era());
            if found == blocks {
                return (behind, evictable);
            }
        }
        (0, 0)
    }

    /// Takes references on the blocks of a checkpoint: all, or none.
    pub(super) fn take_checkpoint(&self, hashes: &TokenHashes, is_in_line: bool) -> Option<Vec<BlockId>> {
        let cache = self.cache()?;
        let (core, wanted) = (&self.0.blocks, hashes.hashes());
        let mut taken = Vec::with_capacity(wanted.len());
        cache.take_prefix(core, wanted, hashes.era(), &mut |id| taken.push(id));
        if taken.len() == wanted.len() {
            return Some(taken);
        }
        cache.untake(core, &taken, is_in_line);
        None
    }
}

impl Sequence {
    /// Creates a sequence for blocks that are in no list of the registry.
    fn unlisted(like: &Self) -> Self {
        let list = ListOwner::new(like.kind.block_tokens);
        let mut unlisted =
            Self::new(like.sequences.clone(), like.id(), like.priority(), list).in_group(u32::MAX);
        unlisted.is_closed = true;
        unlisted
    }

    /// Makes these its blocks, full of unfinished tokens.
    fn hold(&mut self, blocks: &[BlockId]) {
        self.list.reserve(blocks.len());
        blocks.iter().enumerate().for_each(|(place, &id)| self.list.stage(place, id));
        self.publish(blocks.len() as u32 * self.kind.block_tokens);
    }

    /// Takes over the notes of batches that wrote to another sequence.
    fn take_notes(&mut self, other: &Self) {
        self.writers = other.writers;
        self.writes = SmallVec::from_slice(&other.writes);
        self.writes.iter_mut().for_each(|write| (write.from, write.announced) = (0, 0));
        // Relaxed: both are of this thread.
        self.seen.store(other.seen.load(Relaxed), Relaxed);
    }
}
