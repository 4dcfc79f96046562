//! Transfer of a sequence to another pool: the references held in the source, and the sequence
//! prepared in the target.
//!
//! ```text
//! depart     source: a reference on each block, so that they stay readable whatever happens to the sequence   BlockRefs
//! prepare    target: the id is registered, blocks are allocated (or shared, if cached there)                  Arrival
//! (the bytes are copied)
//! commit     target: the blocks become the list; full blocks of final tokens are sealed and registered        Sequence
//! ```
//!
//! Dropping any of these undoes it. Until the commit, views of the arriving sequence show no
//! tokens.
//!
//! # Write access during the transfer
//!
//! In the source: no thread. A departure is refused while a batch that wrote to the sequence is in
//! flight; and with a second reference on each block, a later write through the sequence goes to a
//! copy. In the target: only the copying thread, because no other thread knows the blocks; they are
//! not sealed, so nothing moves them.

use crate::block::{AllocRequest, Blocks, ListEnd};
use crate::error::{AllocError, TransferError};
use crate::ids::{BlockId, FrameId, Priority, SequenceId};
use crate::prefix::PolicyInfo;

use super::registry::Sequences;
use super::sequence::Sequence;
use super::token_hashes::{KnownTokens, TokenHashes};

/// References on blocks of sequences' lists, released when dropped, in reverse order.
pub(crate) struct BlockRefs {
    sequences: Sequences,
    pub(crate) blocks: Vec<BlockId>,
    policy_info: PolicyInfo,
}

impl BlockRefs {
    /// Creates an empty set. Blocks added to it transfer their references to it.
    pub(crate) fn new(sequences: &Sequences) -> Self {
        Self { sequences: sequences.clone(), blocks: Vec::new(), policy_info: PolicyInfo::default() }
    }

    /// Allocates up to `wanted` more blocks, as many as are available, and returns their number.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if none is available.
    pub(crate) fn allocate_up_to(&mut self, wanted: usize) -> Result<usize, AllocError> {
        let (pool, mut blocks) = (self.sequences.0.blocks.clone(), wanted);
        loop {
            let request = AllocRequest::new(blocks);
            let Err(error) = pool.allocate_guarded(&request, None, &mut |id| self.blocks.push(id)) else {
                return Ok(blocks);
            };
            let most = match error {
                AllocError::Exhausted { free, evictable, .. } => free + evictable,
                AllocError::TooLarge { total, .. } => total,
                AllocError::Reserved { total, reserve, .. } => total.saturating_sub(reserve),
                _ => 0,
            };
            // Not one less each time: the counted blocks may be unavailable for a while.
            blocks = most.min(blocks - blocks.div_ceil(8));
            if blocks == 0 {
                return Err(error);
            }
        }
    }

    fn pool(&self) -> &Blocks {
        &self.sequences.0.blocks
    }
}

impl Drop for BlockRefs {
    fn drop(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        self.blocks.reverse();
        // No fence: a view's reader may have found these blocks in the departed sequence, but if
        // ours are the last references, that sequence fenced between unlinking them and releasing
        // its own, which happens before.
        match self.sequences.cache() {
            Some(cache) => {
                let policy_info = PolicyInfo { chain: self.blocks.len() as u32, ..self.policy_info };
                let keep = |kept: &[_], tag| cache.keep(self.pool(), kept, tag, policy_info);
                self.pool().release_cached(&self.blocks, keep);
            }
            None => self.pool().release_listed(&self.blocks),
        }
    }
}

impl Sequence {
    /// Takes a reference on each block, for copying the bytes to another pool.
    ///
    /// # Errors
    ///
    /// [`TransferError::ForeignSequence`], [`TransferError::BeingWritten`],
    /// [`TransferError::Handle`].
    pub(crate) fn depart(&self, from: &Sequences) -> Result<BlockRefs, TransferError> {
        let pool = from.blocks();
        if !self.sequences.same(from) {
            return Err(TransferError::ForeignSequence { id: self.id(), pool: pool.tag() });
        }
        if let Some(batch) = self.writing() {
            return Err(TransferError::BeingWritten { id: self.id(), batch });
        }
        let mut held = BlockRefs::new(from);
        let blocks: Vec<BlockId> = self.blocks().collect();
        pool.share_listed(&blocks)?;
        held.blocks = blocks;
        held.policy_info = self.known.as_deref().map_or_else(PolicyInfo::default, |known| known.policy_info);
        Ok(held)
    }
}

/// Everything that a sequence's copy in another pool begins with, apart from the bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct Outline {
    pub(crate) id: SequenceId,
    pub(crate) priority: Priority,
    pub(crate) length: u32,
    pub(crate) committed: u32,
    pub(crate) reuses_tail: bool,
    /// `None` if nothing of it can be found in a cache.
    pub(crate) known: Option<KnownTokens>,
}

impl Sequence {
    /// Returns its outline. It must be [settled](Self::depart).
    pub(crate) fn outline(&self) -> Outline {
        let known = self.token_hashes().filter(|_| self.is_computed());
        Outline {
            id: self.id(),
            priority: self.priority(),
            length: self.len() as u32,
            committed: self.committed,
            reuses_tail: self.reuses_tail,
            known: known.and_then(|(known, cache)| known.known_tokens(cache)),
        }
    }
}

/// A sequence prepared in the target pool.
pub(crate) struct Arrival {
    /// Registered and empty.
    sequence: Sequence,
    /// Leading blocks that were cached in the target.
    shared: usize,
    length: u32,
    committed: u32,
}

impl Arrival {
    /// Prepares the target of a sequence with this outline, and allocates its blocks.
    ///
    /// The hashes of the outline, if it has some, are those of the target's cache; `era` is the
    /// era of that cache in which they are noted.
    ///
    /// # Errors
    ///
    /// [`TransferError::Sequence`] if the id is open there, [`TransferError::Alloc`] if there is no
    /// room.
    pub(crate) fn prepare(
        outline: Outline,
        target: &Sequences,
        era: u64,
    ) -> Result<(Self, BlockRefs), TransferError> {
        let Outline { id, priority, length, committed, reuses_tail, known } = outline;
        let list = target.register(id, priority)?;
        let mut sequence = Sequence::new(target.clone(), id, priority, list);
        if let (Some(known), Some(cache)) = (known, target.cache()) {
            sequence.known = Some(Box::new(TokenHashes::arrived(known, cache, era)));
        }
        sequence.reuses_tail = reuses_tail;
        let mut held = BlockRefs::new(target);
        let mut arrival = Self { sequence, shared: 0, length, committed };
        arrival.share_cached(&mut held);
        let fresh = length.div_ceil(target.0.block_tokens) as usize - arrival.shared;
        if fresh > 0 {
            let request = AllocRequest::new(fresh).sequence(id).priority(priority);
            let (pool, blocks) = (target.blocks(), &mut held.blocks);
            let next = blocks.last().map(|&last| FrameId(pool.frame(last).0 + 1));
            let end = ListEnd { next, spares: false };
            pool.allocate_guarded(&request, Some(end), &mut |id| blocks.push(id))?;
        }
        Ok((arrival, held))
    }

    /// Shares full blocks of final tokens that are cached in the target, which need not be copied.
    fn share_cached(&mut self, held: &mut BlockRefs) {
        let Some((known, cache)) = self.sequence.token_hashes() else { return };
        let target = &self.sequence.sequences.0;
        for place in 0..self.committed / target.block_tokens {
            let cached = known.hash(place).and_then(|hash| cache.take(&target.blocks, hash, known.era()));
            let Some(id) = cached else { break };
            held.blocks.push(id);
            self.shared += 1;
        }
    }

    /// Returns the id of the sequence.
    pub(crate) fn id(&self) -> SequenceId {
        self.sequence.id()
    }

    /// Returns the number of leading blocks whose bytes are present already.
    pub(crate) fn shared(&self) -> usize {
        self.shared
    }

    /// Gives up what is known of its tokens.
    pub(crate) fn forget(&mut self) {
        self.sequence.known = None;
    }

    /// Completes the sequence after the bytes of its blocks were copied.
    pub(crate) fn commit(self, mut held: BlockRefs) -> Sequence {
        let Self { mut sequence, shared, length, committed } = self;
        let blocks = std::mem::take(&mut held.blocks);
        sequence.list.reserve(blocks.len());
        blocks.iter().enumerate().for_each(|(place, &id)| sequence.list.stage(place, id));
        sequence.publish(length);
        sequence.spare_end();
        sequence.committed = committed;
        sequence.seals.adopt(shared as u32);
        // All writers have ended, so the blocks are sealed, and registered if their hashes are
        // known.
        sequence.seals.complete(committed / sequence.sequences.0.block_tokens);
        sequence.settle();
        sequence
    }
}
