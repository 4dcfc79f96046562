//! Pinned prefixes: cached blocks that stay cached without an open sequence.
//!
//! A pinned prefix is a set of references: referenced blocks are not evicted, but may be moved.

use std::fmt;

use crate::block::BlockWord;
use crate::error::{HandleError, PrefixError, SequenceError};
use crate::ids::{BlockId, SequenceId};
use crate::prefix::PrefixKeys;

use super::TOKENS_MAX;
use super::admit::AdmitRequest;
use super::registry::Sequences;
use super::transfer::BlockRefs;

/// Keeps a cached prefix from eviction until dropped: one of at most 8,191 references on a block.
#[must_use = "dropping it unpins the prefix"]
pub struct PinnedPrefix {
    held: BlockRefs,
    sequences: Sequences,
    number: u64,
    tokens: usize,
}

impl Sequences {
    /// Pins the cached prefix of these tokens: their full blocks up to the first uncached one; with
    /// several groups, what the longest hit needs in each.
    pub(crate) fn pin_prefix(
        &self,
        keys: &PrefixKeys<'_>,
        tokens: &[u32],
    ) -> Result<PinnedPrefix, SequenceError> {
        let cache = self.cache().ok_or(PrefixError::NoCache)?;
        if tokens.len() >= TOKENS_MAX {
            return Err(PrefixError::NotCached { tokens: tokens.len() }.into());
        }
        if !self.has_one_list() {
            // A hit leaves the last token of a prompt.
            let prompt: Vec<u32> = tokens.iter().copied().chain([0]).collect();
            let request = AdmitRequest::new(SequenceId(0), &prompt).keys(*keys);
            let mut held = BlockRefs::new(self);
            return match self.grouped_lookup(&request)?.into_hit(&mut held.blocks) {
                Ok(hit) => Ok(self.pinned(held, hit)),
                Err(Some(id)) => Err(HandleError::TooManyReferences { id, max: BlockWord::REFS_MAX }.into()),
                Err(None) => Err(PrefixError::NotCached { tokens: tokens.len() }.into()),
            };
        }
        // Before the hashes: a later clear makes them unfindable.
        let era = cache.era();
        let hashes = cache.hashes(keys, tokens).map_err(PrefixError::from)?;
        let mut held = BlockRefs::new(self);
        let full = cache.take_prefix(&self.0.blocks, &hashes, era, &mut |id| held.blocks.push(id));
        let blocks = held.blocks.len();
        if blocks == 0 {
            return Err(match full {
                Some(id) => HandleError::TooManyReferences { id, max: BlockWord::REFS_MAX }.into(),
                None => PrefixError::NotCached { tokens: tokens.len() }.into(),
            });
        }
        Ok(self.pinned(held, blocks * self.block_tokens()))
    }

    fn pinned(&self, held: BlockRefs, tokens: usize) -> PinnedPrefix {
        let number = self.list_pinned(tokens, &held.blocks);
        PinnedPrefix { held, sequences: self.clone(), number, tokens }
    }
}

impl PinnedPrefix {
    /// Returns the number of pinned tokens: those of the full blocks that were cached.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns its blocks, in order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.held.blocks
    }

    /// Returns its number in [`Pool::pinned_prefixes`](crate::Pool::pinned_prefixes).
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for PinnedPrefix {
    fn drop(&mut self) {
        self.sequences.unlist_pinned(self.number);
    }
}

impl fmt::Debug for PinnedPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blocks = self.held.blocks.len();
        f.debug_struct("PinnedPrefix").field("tokens", &self.tokens).field("blocks", &blocks).finish()
    }
}
