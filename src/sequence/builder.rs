//! Opening a sequence with the cached prefix of its prompt.

use std::fmt;

use smallvec::SmallVec;

use crate::block::{Operation, Priority};
use crate::error::{AllocError, PrefixError, SequenceError};
use crate::ids::{BlockId, SequenceId};
use crate::prefix::policy::{CachePriority, Millis};
use crate::prefix::{PolicyInfo, PrefixCache, PrefixKeys};

use super::TOKENS_MAX;
use super::registry::Sequences;
use super::sequence::Sequence;
use super::token_hashes::TokenHashes;

/// Opens a [`Sequence`].
#[derive(Clone)]
#[must_use]
pub struct SequenceBuilder<'a> {
    sequences: &'a Sequences,
    id: SequenceId,
    priority: Priority,
    keys: PrefixKeys<'a>,
    keep: CachePriority,
    keep_until: Option<Millis>,
    reuses_tail: bool,
}

impl<'a> SequenceBuilder<'a> {
    fn new(sequences: &'a Sequences, id: SequenceId) -> Self {
        Self {
            sequences,
            id,
            priority: Priority::default(),
            keys: PrefixKeys::new(),
            keep: CachePriority::default(),
            keep_until: None,
            reuses_tail: false,
        }
    }

    /// Sets the priority of allocations, which is recorded with the sequence's blocks.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// Sets what its blocks depend on besides tokens. Only sequences with equal keys share blocks.
    pub fn keys(mut self, keys: PrefixKeys<'a>) -> Self {
        self.keys = keys;
        self
    }

    /// Sets the retention priority of its blocks in the prefix cache, for policies that use it.
    pub fn keep(mut self, keep: CachePriority) -> Self {
        self.keep = keep;
        self
    }

    /// Sets a time until which the prefix cache keeps its blocks while others can be evicted.
    ///
    /// In terms of the [cache's clock](PrefixCache::now). For policies that use it.
    pub fn keep_until(mut self, until: Millis) -> Self {
        self.keep_until = Some(until);
        self
    }

    /// Allows hits that fill a block only in part.
    ///
    /// These are the last block of a prompt that is cached as a whole, and the unfinished last
    /// block of a closed sequence. The first write to such a block goes to a copy.
    pub fn reuse_tail(mut self) -> Self {
        self.reuses_tail = true;
        self
    }

    /// Opens the sequence, empty.
    ///
    /// In a pool with a prefix cache its tokens can be [announced](Sequence::announce), but only
    /// [`tokens`](Self::tokens) looks up what is cached of them.
    ///
    /// # Errors
    ///
    /// [`SequenceError::AlreadyOpen`]; [`SequenceError::Prefix`] for a key of zero bytes, or a
    /// retention time that has passed.
    pub fn open(self) -> Result<Sequence, SequenceError> {
        let known = match self.sequences.cache() {
            Some(cache) => Some(Box::new(TokenHashes::new(cache, &self.keys, self.policy_info(cache)?)?)),
            None => None,
        };
        let list = self.sequences.register(self.id)?;
        let mut sequence = Sequence::new(self.sequences.clone(), self.id, self.priority, list);
        sequence.known = known;
        sequence.reuses_tail = self.reuses_tail;
        Ok(sequence)
    }

    /// Opens the sequence with the longest cached prefix of a prompt, sharing the prefix's blocks.
    ///
    /// [`Sequence::len`] then returns the number of cached tokens. The last token of the prompt is
    /// never among them, since it must be computed. The rest of the prompt is announced, and must
    /// be appended, at once or in chunks.
    ///
    /// Without a prefix cache the sequence is opened empty.
    ///
    /// ```
    /// # use kvpool::{SequenceId, Pool, prefix::PrefixConfig, storage::KvLayout};
    /// # let pool = Pool::builder(KvLayout::named("tiny")?).blocks(100).prefix_cache(PrefixConfig::new()).build()?;
    /// let prompt: Vec<u32> = (0..42).collect();
    /// for cached in [0, 40] {
    ///     let mut sequence = pool.sequence(SequenceId(7)).tokens(&prompt)?;
    ///     assert_eq!(sequence.len(), cached, "this layout has blocks of 4 tokens");
    ///     let mut batch = pool.begin_batch();
    ///     batch.append(&mut sequence, prompt.len() - cached)?;
    ///     batch.finish();
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open); [`SequenceError::ZeroTokens`], [`SequenceError::TooLong`];
    /// [`SequenceError::Alloc`] for a prompt larger than the pool.
    pub fn tokens(self, prompt: &[u32]) -> Result<Sequence, SequenceError> {
        let (id, block_tokens) = (self.id, self.sequences.block_tokens());
        if prompt.is_empty() {
            return Err(SequenceError::ZeroTokens { id });
        }
        if prompt.len() > TOKENS_MAX {
            return Err(SequenceError::TooLong { id, asked: prompt.len(), length: 0, max: TOKENS_MAX });
        }
        let (asked, total) = (prompt.len().div_ceil(block_tokens), self.sequences.blocks().total());
        if asked > total {
            return Err(AllocError::TooLarge { asked, total }.into());
        }
        let _timing = self.sequences.0.sampler.start(Operation::Admit);
        let mut sequence = self.open()?;
        sequence.announce(prompt)?;
        sequence.adopt_prefix(prompt);
        Ok(sequence)
    }

    fn policy_info(&self, cache: &PrefixCache) -> Result<PolicyInfo, PrefixError> {
        if let Some(until) = self.keep_until {
            let now = cache.now();
            if until <= now {
                return Err(PrefixError::RetentionPast { until: until.0, now: now.0 });
            }
        }
        Ok(PolicyInfo { priority: self.keep, keep_until: self.keep_until, ..PolicyInfo::default() })
    }
}

impl Sequences {
    /// Returns a builder that opens a sequence.
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
}

impl Sequence {
    /// Adopts the cached blocks of its announced tokens, which are `prompt`, as its first blocks.
    /// The sequence is empty.
    fn adopt_prefix(&mut self, prompt: &[u32]) {
        let (Some(known), Some(cache)) = (&mut self.known, self.sequences.cache()) else { return };
        let block_tokens = self.sequences.block_tokens();
        let (whole, most) = (known.hashes(), (prompt.len() - 1) / block_tokens);
        // Room for the whole prompt, so that the list grows only once.
        self.list.reserve(prompt.len().div_ceil(block_tokens));
        let mut place = 0;
        let list = &mut self.list;
        let hits = cache.look_up(&self.sequences.0.blocks, &whole[..most], whole, known.era(), &mut |id| {
            list.stage(place, id);
            place += 1;
        });
        let mut tokens = hits.blocks * block_tokens;
        if self.reuses_tail
            && let Some((id, more)) = cached_tail(cache, &self.sequences, known, prompt, hits.blocks)
        {
            self.list.stage(hits.blocks, id);
            tokens += more;
        }
        known.policy_info.context = hits.context;
        self.publish(tokens as u32);
        self.committed = tokens as u32;
        self.seals.adopt(hits.blocks as u32);
    }
}

/// Takes a reference on a cached block that continues the prompt after `blocks` blocks.
///
/// Also returns how many of its tokens belong to the prompt, excluding the prompt's last token.
fn cached_tail(
    cache: &PrefixCache,
    sequences: &Sequences,
    known: &TokenHashes,
    prompt: &[u32],
    blocks: usize,
) -> Option<(BlockId, usize)> {
    let block_tokens = sequences.block_tokens();
    let rest = &prompt[blocks * block_tokens..];
    let find = |hash| cache.take(&sequences.0.blocks, hash, known.era());
    if rest.len() == block_tokens
        && let Some(id) = known.hash(blocks as u32).and_then(find)
    {
        return Some((id, block_tokens - 1));
    }
    let most = rest.len().saturating_sub(1).min(block_tokens - 1);
    let hashes: SmallVec<[_; 16]> = known.partial_hashes(cache, blocks, &rest[..most]).collect();
    hashes.iter().enumerate().rev().find_map(|(last, &hash)| Some((find(hash)?, last + 1)))
}

impl fmt::Debug for SequenceBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SequenceBuilder")
            .field("id", &self.id)
            .field("priority", &self.priority)
            .field("keep", &self.keep)
            .field("keep_until", &self.keep_until)
            .finish_non_exhaustive()
    }
}
