//! Opening a sequence, with what its prompt has in the prefix cache.

use std::fmt;

use smallvec::SmallVec;

use crate::block::Priority;
use crate::error::{AllocError, PrefixError, SequenceError};
use crate::ids::{BlockId, SequenceId};
use crate::prefix::policy::{CachePriority, Millis};
use crate::prefix::{Owner, PrefixCache, PrefixKeys};
use crate::sync::Arc;

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
    pub(super) fn new(sequences: &'a Sequences, id: SequenceId) -> Self {
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

    /// At this priority; it is recorded with the sequence's blocks.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// What its blocks depend on beside its tokens: they are shared with sequences of the same keys alone.
    pub fn keys(mut self, keys: PrefixKeys<'a>) -> Self {
        self.keys = keys;
        self
    }

    /// How much its blocks are worth keeping in the prefix cache, to policies that ask.
    pub fn keep(mut self, keep: CachePriority) -> Self {
        self.keep = keep;
        self
    }

    /// Its blocks are to be kept in the prefix cache until then, by the [cache's clock](PrefixCache::now), as long as others can
    /// go; for policies that heed it.
    pub fn keep_until(mut self, until: Millis) -> Self {
        self.keep_until = Some(until);
        self
    }

    /// A block that a hit fills only in part is reused too: the last one of a prompt that is cached as a whole, and the
    /// unfinished last block of a sequence that was closed before. Its first write goes to a copy.
    pub fn reuse_tail(mut self) -> Self {
        self.reuses_tail = true;
        self
    }

    /// Opens the sequence, empty. In a pool with a prefix cache its tokens can be [announced](Sequence::announce); what is
    /// cached of them already is found by [`tokens`](Self::tokens) alone.
    ///
    /// # Errors
    ///
    /// [`SequenceError::AlreadyOpen`]; [`SequenceError::Prefix`] for a key of no bytes, or a retention that has passed.
    pub fn open(self) -> Result<Sequence, SequenceError> {
        let known = match self.sequences.cache() {
            Some(cache) => Some(Box::new(TokenHashes::new(cache, &self.keys, self.owner(cache)?)?)),
            None => None,
        };
        let list = self.sequences.register(self.id)?;
        let mut sequence = Sequence::new(self.sequences.clone(), self.id, self.priority, list);
        sequence.known = known;
        sequence.reuses_tail = self.reuses_tail;
        Ok(sequence)
    }

    /// Opens the sequence with the longest cached prefix of a prompt, whose blocks it shares from now on: as many tokens as
    /// [`Sequence::len`] then says. The last token of the prompt is never among them: it must be computed. The rest
    /// of the prompt is announced, and to be appended; all at once or in chunks.
    ///
    /// Without a prefix cache the sequence is opened empty.
    ///
    /// ```
    /// # use kvpool::{ids::SequenceId, pool::Pool, prefix::PrefixConfig, storage::KvLayout};
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
    /// As [`open`](Self::open); [`SequenceError::ZeroTokens`], [`SequenceError::TooLong`]; [`SequenceError::Alloc`] for a prompt
    /// that the whole pool could not hold.
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
        let mut sequence = self.open()?;
        sequence.announce(prompt)?;
        sequence.adopt_prefix(prompt);
        Ok(sequence)
    }

    fn owner(&self, cache: &PrefixCache) -> Result<Owner, PrefixError> {
        if let Some(until) = self.keep_until {
            let now = cache.now();
            if until <= now {
                return Err(PrefixError::RetentionPast { until: until.0, now: now.0 });
            }
        }
        Ok(Owner { priority: self.keep, keep_until: self.keep_until, ..Owner::default() })
    }
}

impl Sequence {
    /// Takes what is cached of its announced tokens, which are `prompt`, as its first blocks. It has none yet.
    fn adopt_prefix(&mut self, prompt: &[u32]) {
        let Some(known) = &mut self.known else { return };
        let cache: Arc<PrefixCache> = known.cache().clone();
        let block_tokens = self.sequences.block_tokens();
        let (whole, most) = (known.hashes(), (prompt.len() - 1) / block_tokens);
        // Room for the whole prompt, so that its list grows but once.
        self.list.reserve(prompt.len().div_ceil(block_tokens));
        let mut place = 0;
        let list = &mut self.list;
        let hits = cache.look_up(&self.sequences.0.blocks, &whole[..most], whole, known.era(), &mut |id| {
            list.stage(place, id);
            place += 1;
        });
        let mut tokens = hits.blocks * block_tokens;
        if self.reuses_tail
            && let Some((id, more)) = cached_tail(&cache, &self.sequences, known, prompt, hits.blocks)
        {
            self.list.stage(hits.blocks, id);
            tokens += more;
        }
        known.owner.context = hits.context;
        self.list.publish(tokens as u32);
        self.committed = tokens as u32;
        self.seals.adopt(hits.blocks as u32);
    }
}

/// A cached block that begins as the prompt goes on after `blocks` blocks, a reference on it, and how many of its tokens
/// are the prompt's: all but the last token of the prompt at the most.
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
    let hashes: SmallVec<[_; 16]> = known.partial_hashes(blocks, &rest[..most]).collect();
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
