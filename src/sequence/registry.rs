//! What is open: sequences by id, and views of them.

use std::fmt;

use crate::block::{Blocks, Sampler};
use crate::error::{SequenceError, StorageError};
use crate::ids::{BlockId, SequenceId};
use crate::prefix::PrefixCache;
use crate::storage::{DeviceStream, Storage};
use crate::sync::{Arc, Map, Ordering::*};

use super::builder::SequenceBuilder;
use super::list::{BlockList, ListOwner};
use super::sequence::Sequence;

/// The sequences of one pool. Cloning gives another reference to the same ones.
#[derive(Clone)]
pub struct Sequences(pub(super) Arc<Shared>);

/// What every sequence and batch of a pool shares.
pub(super) struct Shared {
    pub(super) blocks: Blocks,
    pub(super) storage: Option<std::sync::Arc<dyn Storage>>,
    pub(super) block_tokens: u32,
    pub(super) cache: Option<Arc<PrefixCache>>,
    pub(super) sampler: Sampler,
    open: Map<SequenceId, Arc<BlockList>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Threads that used the pool keep its blocks, and the cache with them, for as long as they
        // live. But nobody can reach a cached block any more: what was told of the cache is all.
        if let Some(cache) = &self.cache {
            cache.events().close();
        }
    }
}

impl Sequences {
    /// No sequence is open yet. `storage` holds the bytes of `blocks`, if the pool keeps any.
    ///
    /// # Panics
    ///
    /// If a block is to hold zero tokens, or more than a sequence may have.
    ///
    /// # Safety
    ///
    /// The frames of `storage` are given out by `blocks` alone: [stores](super::Batch::store) rely on it.
    pub unsafe fn new(
        blocks: Blocks,
        storage: Option<std::sync::Arc<dyn Storage>>,
        block_tokens: usize,
    ) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::with_cache(blocks, storage, block_tokens, None) }
    }

    /// As [`new`](Self::new), with the prefix cache that keeps these blocks.
    ///
    /// # Panics
    ///
    /// As [`new`](Self::new).
    ///
    /// # Safety
    ///
    /// As [`new`](Self::new).
    pub unsafe fn with_cache(
        blocks: Blocks,
        storage: Option<std::sync::Arc<dyn Storage>>,
        block_tokens: usize,
        cache: Option<Arc<PrefixCache>>,
    ) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::sampled(blocks, storage, block_tokens, cache, Sampler::new(0)) }
    }

    /// As [`with_cache`](Self::with_cache), with what times allocations.
    ///
    /// # Panics
    ///
    /// As [`new`](Self::new).
    ///
    /// # Safety
    ///
    /// As [`new`](Self::new).
    pub(crate) unsafe fn sampled(
        blocks: Blocks,
        storage: Option<std::sync::Arc<dyn Storage>>,
        block_tokens: usize,
        cache: Option<Arc<PrefixCache>>,
        sampler: Sampler,
    ) -> Self {
        assert!(block_tokens > 0 && block_tokens <= super::TOKENS_MAX, "a block of {block_tokens} tokens");
        let block_tokens = block_tokens as u32;
        Self(Arc::new(Shared { blocks, storage, block_tokens, cache, sampler, open: Map::new() }))
    }

    pub(super) fn check_stream(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        match &self.0.storage {
            Some(storage) => self.noting_loss(storage.check_stream(stream)),
            None => {
                Err(StorageError::ForeignStream { stream: stream.device(), storage: self.0.blocks.device() })
            }
        }
    }

    /// Once the device is lost, the pool hands out no blocks any more.
    pub(super) fn noting_loss<T>(&self, outcome: Result<T, StorageError>) -> Result<T, StorageError> {
        if outcome.as_ref().is_err_and(StorageError::is_lost) {
            self.0.blocks.poison();
        }
        outcome
    }

    /// A sequence to be opened.
    pub fn sequence(&self, id: SequenceId) -> SequenceBuilder<'_> {
        SequenceBuilder::new(self, id)
    }

    /// Opens an empty sequence at normal priority.
    ///
    /// # Errors
    ///
    /// [`SequenceError::AlreadyOpen`].
    pub fn open(&self, id: SequenceId) -> Result<Sequence, SequenceError> {
        self.sequence(id).open()
    }

    /// A view of an open sequence, for another thread than its owner's.
    pub fn view(&self, id: SequenceId) -> Option<SequenceView> {
        let list = self.0.open.get(&id)?;
        Some(SequenceView { sequences: self.clone(), id, list })
    }

    /// How many sequences are open.
    pub fn count(&self) -> usize {
        self.0.open.len()
    }

    internal! {
        /// The blocks that the sequences are made of.
        fn blocks(&self) -> &Blocks {
            &self.0.blocks
        }
    }

    /// A view of every sequence that is open, in the order of their ids.
    pub fn views(&self) -> Vec<SequenceView> {
        let mut open = self.0.open.entries();
        open.sort_unstable_by_key(|(id, _)| *id);
        open.into_iter().map(|(id, list)| SequenceView { sequences: self.clone(), id, list }).collect()
    }

    /// The prefix cache, if there is one.
    pub fn cache(&self) -> Option<&Arc<PrefixCache>> {
        self.0.cache.as_ref()
    }

    /// Tokens in a block.
    pub fn block_tokens(&self) -> usize {
        self.0.block_tokens as usize
    }

    /// Where the bytes are, if the pool keeps any.
    pub fn storage(&self) -> Option<&std::sync::Arc<dyn Storage>> {
        self.0.storage.as_ref()
    }

    /// Whether the other are the sequences of the same pool.
    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The owner's side of a new, registered list.
    pub(super) fn register(&self, id: SequenceId) -> Result<ListOwner, SequenceError> {
        let owner = ListOwner::new(self.0.block_tokens);
        if self.0.open.insert_new(id, owner.list().clone()) {
            Ok(owner)
        } else {
            Err(SequenceError::AlreadyOpen { id })
        }
    }

    pub(super) fn unregister(&self, id: SequenceId) {
        self.0.open.remove(&id);
    }
}

impl fmt::Debug for Sequences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sequences")
            .field("pool", &self.0.blocks.tag())
            .field("block_tokens", &self.0.block_tokens)
            .finish_non_exhaustive()
    }
}

/// A sequence as other threads than its owner's see it. What is read from it is the sequence as it was at some moment
/// during the call. Of a sequence that was closed, nothing is left to see: it has no tokens.
#[derive(Clone)]
pub struct SequenceView {
    pub(super) sequences: Sequences,
    id: SequenceId,
    pub(super) list: Arc<BlockList>,
}

impl SequenceView {
    /// The sequence.
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// Its tokens, drafted ones among them.
    pub fn len(&self) -> usize {
        self.list.tokens() as usize
    }

    /// Whether it has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its blocks, in order. They may be gone by the time that this returns.
    pub fn blocks(&self) -> Vec<BlockId> {
        // Acquire: see `BlockList::read`.
        self.list.read(|ids, _| ids.iter().map(|id| BlockId(id.load(Acquire))).collect())
    }

    /// Calls `f` with each block, in order, and its place. It is called again from the first on if the owner rewrote the
    /// list meanwhile.
    pub fn for_each_block(&self, mut f: impl FnMut(u32, BlockId)) {
        self.list.read(|ids, _| (0..).zip(ids).for_each(|(place, id)| f(place, BlockId(id.load(Acquire)))));
    }
}

impl fmt::Debug for SequenceView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SequenceView").field("id", &self.id).field("len", &self.len()).finish()
    }
}
