//! The owner's side of a sequence: fork, commit, truncate, and its end.

use std::fmt;
use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{BlockWord, Blocks, Priority};
use crate::error::SequenceError;
use crate::ids::{BlockId, SequenceId, Ticket};
use crate::prefix::Owner;
use crate::sync::{Ordering::*, fence, panicking};

use super::list::ListOwner;
use super::registry::Sequences;
use super::seals::Seals;
use super::token_hashes::TokenHashes;

/// One request's tokens, and the blocks that hold them. Grows through [`Batch::append`](super::Batch::append). Dropping it
/// closes it and releases its blocks, the end of the sequence first.
pub struct Sequence {
    pub(super) sequences: Sequences,
    id: SequenceId,
    priority: Priority,
    pub(super) list: ListOwner,
    pub(super) committed: u32,
    pub(super) seals: Seals,
    /// In a pool that caches: what its blocks hold.
    pub(super) known: Option<Box<TokenHashes>>,
    /// Its unfinished last block is registered when it is closed.
    pub(super) reuses_tail: bool,
}

/// What a write into a block that has tokens already must do first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Access {
    /// Nothing: the block is this sequence's alone, and open.
    Open,
    /// Reopen it: it is this sequence's alone.
    Reopen,
    /// Take the promise to seal it back from this very batch.
    Withdraw,
    /// Copy it: it is shared, or promised to another batch.
    Copy,
}

impl Sequence {
    pub(super) fn new(sequences: Sequences, id: SequenceId, priority: Priority, list: ListOwner) -> Self {
        Self {
            sequences,
            id,
            priority,
            list,
            committed: 0,
            seals: Seals::default(),
            known: None,
            reuses_tail: false,
        }
    }

    /// The id that it was opened under.
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// The priority that it was opened at.
    pub fn priority(&self) -> Priority {
        self.priority
    }

    /// Its tokens, drafted ones among them.
    #[inline]
    pub fn len(&self) -> usize {
        self.list.tokens() as usize
    }

    /// Whether it has no tokens.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens that are final.
    #[inline]
    pub fn committed(&self) -> usize {
        self.committed as usize
    }

    /// Blocks that hold its tokens.
    #[inline]
    pub fn block_count(&self) -> usize {
        self.list.len()
    }

    /// Its blocks, in order.
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = BlockId> + DoubleEndedIterator {
        self.list.ids().iter().map(|id| BlockId(id.load(Relaxed)))
    }

    /// Tokens whose ids are known: those that it was [opened with](super::SequenceBuilder::tokens) and those that were
    /// [announced](Self::announce) since; perhaps more than it has, if they are not all appended yet. 0 in a pool without
    /// a prefix cache.
    pub fn announced(&self) -> usize {
        self.known.as_ref().map_or(0, |known| known.announced())
    }

    /// Says which tokens come next, before they are appended, or before drafted ones are made final: blocks that are full
    /// of known tokens can be reused. In a pool without a prefix cache nothing is done.
    ///
    /// Constant time a token. Tokens that become final without being announced end this: neither their blocks nor any
    /// after them can be reused, unless they are [taken back](Self::truncate).
    ///
    /// # Errors
    ///
    /// [`SequenceError::TokensUnknown`] if there are final tokens that were not announced; nothing is changed.
    pub fn announce(&mut self, tokens: &[u32]) -> Result<(), SequenceError> {
        match &mut self.known {
            Some(known) => known.announce(self.id, tokens),
            None => Ok(()),
        }
    }

    /// Another sequence with the same tokens in the same blocks. Whichever writes to a shared block first writes to a
    /// copy. What is shared is what has been written: a batch's tokens should be stored (on a device: enqueued) before
    /// the sequence is forked.
    ///
    /// # Errors
    ///
    /// [`SequenceError::AlreadyOpen`], or [`SequenceError::Handle`] if a block has as many owners as it can. Nothing is
    /// shared then.
    pub fn fork(&self, id: SequenceId) -> Result<Self, SequenceError> {
        let mut list = self.sequences.register(id)?;
        let ids: SmallVec<[BlockId; 64]> = self.blocks().collect();
        if let Err(error) = self.pool().share_listed(&ids) {
            self.sequences.unregister(id);
            return Err(error.into());
        }
        list.reserve(ids.len());
        ids.iter().enumerate().for_each(|(place, &id)| list.stage(place, id));
        list.publish(self.list.tokens());
        Ok(Self {
            sequences: self.sequences.clone(),
            id,
            priority: self.priority,
            list,
            committed: self.committed,
            seals: self.seals.forked(),
            known: self.known.clone(),
            reuses_tail: self.reuses_tail,
        })
    }

    /// Says that the first `length` tokens are final: they will not be rolled back. Full blocks of final tokens are sealed
    /// once the batches that wrote them have ended: at once, or at a later operation on the sequence. What is final
    /// stays so: a `length` below [`committed`](Self::committed) changes nothing.
    ///
    /// # Errors
    ///
    /// [`SequenceError::CommitBeyondLength`].
    pub fn commit(&mut self, length: usize) -> Result<(), SequenceError> {
        if length > self.len() {
            return Err(SequenceError::CommitBeyondLength { id: self.id, asked: length, length: self.len() });
        }
        self.committed = self.committed.max(length as u32);
        if let Some(known) = &mut self.known {
            known.committed(self.committed);
        }
        self.seals.complete(self.committed / self.sequences.0.block_tokens);
        self.settle();
        Ok(())
    }

    /// Takes back all tokens but the first `length`, and releases the blocks that are no longer needed, the last first.
    ///
    /// What was announced and not appended is taken back too; a `length` that is the sequence's changes nothing.
    ///
    /// Rejected drafts are what this is for, but final tokens can be taken back too. The next append then writes into
    /// a block that was final: reopened if it is this sequence's alone, copied if it is shared or some batch is about to
    /// seal it. Batches in flight that still read the old tokens, on a device, must come before it there.
    ///
    /// # Errors
    ///
    /// [`SequenceError::TruncateBeyondLength`].
    pub fn truncate(&mut self, length: usize) -> Result<(), SequenceError> {
        if length > self.len() {
            return Err(SequenceError::TruncateBeyondLength {
                id: self.id,
                asked: length,
                length: self.len(),
            });
        }
        let takes_back = length < self.len();
        self.cut(length as u32);
        if let Some(known) = self.known.as_mut().filter(|_| takes_back) {
            known.truncate(length as u32);
        }
        self.settle();
        Ok(())
    }

    pub(super) fn pool(&self) -> &Blocks {
        &self.sequences.0.blocks
    }

    /// Seals the full blocks of final tokens that nobody promised to seal, if all who wrote to them are done.
    #[inline]
    pub(super) fn settle(&mut self) {
        while let Some((full, writer)) = self.seals.due() {
            if !self.seal_due(full, writer) {
                return;
            }
        }
    }

    #[cold]
    fn seal_due(&mut self, full: u32, writer: Ticket) -> bool {
        let ended = self.pool().clock().ended(writer);
        if ended {
            self.seal_blocks(self.seals.settled()..full);
            self.seals.sealed();
        }
        ended
    }

    /// Seals blocks, and registers those whose hashes are known.
    fn seal_blocks(&self, places: Range<u32>) {
        let pool = self.pool();
        for place in places {
            let handle = pool.handle(self.list.id(place as usize));
            match self.known.as_deref().and_then(|known| Some((known, known.hash(place)?))) {
                // A fork may have been faster.
                Some(_) if pool.word(handle.id).is_cached() => {}
                Some((known, hash)) => {
                    known.cache().note(handle.id, hash, known.era(), place);
                    known.cache().register(pool, [(handle, known.stored(handle.id, place))]);
                }
                None => pool.seal_guarded(handle),
            }
        }
    }

    /// Registers the unfinished last block, if its tokens are final and known, all who wrote them are done, and what comes before
    /// it was computed.
    fn register_tail(&mut self) {
        let Some(known) = self.known.as_deref().filter(|_| self.reuses_tail) else { return };
        let (length, pool) = (self.len(), self.pool());
        let is_done = pool.clock().ended(self.seals.last_writer_but(Ticket(0)));
        let place = length as u32 / self.sequences.0.block_tokens;
        if let Some(hash) = known.tail_hash(length)
            && self.committed as usize == length
            && place >= self.seals.settled()
            && is_done
            && self.is_computed()
        {
            let handle = pool.handle(self.list.id(place as usize));
            let word = pool.word(handle.id);
            if word.refs() == 1 && !word.is_cached() {
                known.cache().note(handle.id, hash, known.era(), place);
                known.cache().register(pool, [(handle, None)]);
            }
        }
    }

    /// What a write by this batch into a block that has tokens must do first.
    #[inline]
    pub(super) fn access(&self, place: u32, word: BlockWord, batch: Ticket) -> Access {
        if word.refs() != 1 || word.is_cached() {
            Access::Copy
        } else if place >= self.seals.settled() {
            if word.is_sealed() { Access::Reopen } else { Access::Open }
        } else if self.seals.is_promised_to(place, batch) {
            Access::Withdraw
        } else if word.is_sealed() {
            Access::Reopen
        } else {
            // Promised to a batch that may end at any moment. Reached by `a_promised_block_is_copied`.
            Access::Copy
        }
    }

    /// Unlinks everything after `length` tokens, then releases it.
    fn cut(&mut self, length: u32) {
        let block_tokens = self.sequences.0.block_tokens;
        let keep = length.div_ceil(block_tokens) as usize;
        let gone: SmallVec<[BlockId; 64]> = self.blocks().skip(keep).rev().collect();
        self.list.publish(length);
        self.committed = self.committed.min(length);
        self.seals.truncate(keep as u32, length / block_tokens);
        self.release_unlinked(&gone);
    }

    /// Releases blocks that were in the list until just now.
    pub(super) fn release_unlinked(&self, gone: &[BlockId]) {
        if !gone.is_empty() {
            // Pairs with the fence in `Clock::begin`: of a view's reader that still found these blocks, the release
            // sees the batch.
            if !cfg!(kvpool_mutant = "unlinked_no_fence") {
                fence(SeqCst);
            }
            match &self.known {
                Some(known) => {
                    let owner = Owner { chain: (self.list.len() + gone.len()) as u32, ..known.owner };
                    let (pool, cache) = (self.pool(), known.cache());
                    pool.release_cached(gone, |kept, tag| cache.keep(pool, kept, tag, owner));
                }
                None => self.pool().release_listed(gone),
            }
        }
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        self.sequences.unregister(self.id);
        // Of what a thread that panics leaves behind, nobody knows whether it was stored.
        if !panicking() {
            self.settle();
            self.register_tail();
        }
        self.cut(0);
    }
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sequence")
            .field("id", &self.id)
            .field("len", &self.len())
            .field("committed", &self.committed)
            .field("blocks", &self.block_count())
            .field("seals", &self.seals)
            .finish()
    }
}
