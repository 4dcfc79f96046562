//! The open sequences of a pool by id, and views of them.

use std::fmt;
use std::time::Duration;

use crate::block::{Blocks, Sampler};
use crate::error::{SequenceError, StorageError};
use crate::ids::{BlockId, SequenceId};
use crate::prefix::PrefixCache;
use crate::storage::{DeviceStream, Storage};
use crate::sync::{Arc, Map, Ordering::*};

use super::list::{BlockList, ListOwner};

/// The sequences of one pool. A clone refers to the same sequences.
#[derive(Clone)]
pub struct Sequences(pub(super) Arc<Shared>);

/// State shared by all sequences and batches of a pool.
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
        // Threads that used the pool keep its blocks and cache alive until they end. But cached
        // blocks are unreachable now, so no more events can follow.
        if let Some(cache) = &self.cache {
            cache.events().close();
        }
    }
}

impl Sequences {
    /// Creates a registry without open sequences. `storage` holds the bytes of `blocks`, if the
    /// pool keeps any.
    ///
    /// # Panics
    ///
    /// If `block_tokens` is zero or exceeds the maximum length of a sequence.
    ///
    /// # Safety
    ///
    /// Only `blocks` hands out the frames of `storage`: [stores](super::Batch::store) rely on it.
    pub unsafe fn new(
        blocks: Blocks,
        storage: Option<std::sync::Arc<dyn Storage>>,
        block_tokens: usize,
    ) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::with_cache(blocks, storage, block_tokens, None) }
    }

    /// Like [`new`](Self::new), with the prefix cache that keeps these blocks.
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
        let sampler = Sampler::new(0, blocks.latencies().clone());
        // SAFETY: guaranteed by the caller.
        unsafe { Self::sampled(blocks, storage, block_tokens, cache, sampler) }
    }

    /// Like [`with_cache`](Self::with_cache), with a sampler of allocation times.
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
        assert!(
            block_tokens > 0 && block_tokens <= super::TOKENS_MAX,
            "invalid block size: {block_tokens} tokens"
        );
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

    /// Poisons the pool if the outcome reports a lost device: it hands out no blocks any more.
    pub(super) fn noting_loss<T>(&self, outcome: Result<T, StorageError>) -> Result<T, StorageError> {
        if outcome.as_ref().is_err_and(StorageError::is_lost) {
            self.0.blocks.poison();
        }
        outcome
    }

    /// Returns a view of an open sequence, for threads other than its owner's.
    pub fn view(&self, id: SequenceId) -> Option<SequenceView> {
        let list = self.0.open.get(&id)?;
        Some(SequenceView { sequences: self.clone(), id, list })
    }

    /// Returns the number of open sequences.
    pub fn count(&self) -> usize {
        self.0.open.len()
    }

    internal! {
        /// Returns the blocks of the pool.
        fn blocks(&self) -> &Blocks {
            &self.0.blocks
        }
    }

    /// Returns a view of every open sequence, ordered by id.
    pub fn views(&self) -> Vec<SequenceView> {
        let mut open = self.0.open.entries();
        open.sort_unstable_by_key(|(id, _)| *id);
        open.into_iter().map(|(id, list)| SequenceView { sequences: self.clone(), id, list }).collect()
    }

    /// Returns the prefix cache, if there is one.
    pub fn cache(&self) -> Option<&Arc<PrefixCache>> {
        self.0.cache.as_ref()
    }

    /// Returns the number of tokens per block.
    pub fn block_tokens(&self) -> usize {
        self.0.block_tokens as usize
    }

    /// Returns the storage, if the pool keeps bytes.
    pub fn storage(&self) -> Option<&std::sync::Arc<dyn Storage>> {
        self.0.storage.as_ref()
    }

    /// Returns whether both refer to the same pool.
    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Registers an id, and returns the owner's side of its new list.
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

/// A view of a sequence, for threads other than its owner's.
///
/// Each read returns the sequence as of some moment during the call. The view of a closed sequence
/// is empty.
#[derive(Clone)]
pub struct SequenceView {
    pub(super) sequences: Sequences,
    id: SequenceId,
    pub(super) list: Arc<BlockList>,
}

impl SequenceView {
    /// Returns the id of the sequence.
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// Returns the number of its tokens, including drafted ones.
    pub fn len(&self) -> usize {
        self.list.tokens() as usize
    }

    /// Returns whether it has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the time since it was opened.
    pub fn age(&self) -> Duration {
        self.list.age()
    }

    /// Returns its blocks, in order. They may have been released by the time this returns.
    pub fn blocks(&self) -> Vec<BlockId> {
        // Acquire: see `BlockList::read`.
        self.list.read(|ids, _| ids.iter().map(|id| BlockId(id.load(Acquire))).collect())
    }

    /// Calls `f` with the place and id of each block, in order.
    ///
    /// Starts again from the first block if the owner rewrites the list meanwhile.
    pub fn for_each_block(&self, mut f: impl FnMut(u32, BlockId)) {
        self.list.read(|ids, _| (0..).zip(ids).for_each(|(place, id)| f(place, BlockId(id.load(Acquire)))));
    }
}

impl fmt::Debug for SequenceView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SequenceView").field("id", &self.id).field("len", &self.len()).finish()
    }
}
