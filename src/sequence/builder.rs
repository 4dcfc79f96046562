//! Opening a sequence with the cached prefix of its prompt.

use std::fmt;

use smallvec::SmallVec;

use crate::block::{Operation, Priority, Tenant};
use crate::error::{AllocError, Invalid, PrefixError, SequenceError, TenantError};
use crate::ids::{BlockId, SequenceId, SessionId, TenantId};
use crate::prefix::policy::{CachePriority, Millis};
use crate::prefix::{PolicyInfo, PrefixCache, PrefixKeys, Weights, WeightsStamp};
use crate::sync::call;

use super::TOKENS_MAX;
use super::plan::{too_long, zero_tokens};
use super::registry::Sequences;
use super::sequence::Sequence;
use super::token_hashes::{TokenHashes, with_answer};
use super::window::{ListKind, NULL};

#[derive(Clone, Debug)]
pub(super) struct Options<'a> {
    pub(super) id: SequenceId,
    pub(super) priority: Priority,
    pub(super) keys: PrefixKeys<'a>,
    pub(super) keep: CachePriority,
    pub(super) keep_until: Option<Millis>,
    pub(super) session: Option<SessionId>,
    pub(super) tenant: Option<TenantId>,
    pub(super) reuses_tail: bool,
}

macro_rules! option_setters {
    () => {
        /// Sets the priority of allocations, recorded with the sequence's blocks.
        pub fn priority(mut self, priority: Priority) -> Self {
            self.options.priority = priority;
            self
        }

        /// Sets what its blocks depend on besides tokens. Only sequences with equal keys share
        /// blocks; [extra keys](PrefixKeys::extra_keys) apply from their ranges in the prompt on.
        pub fn keys(mut self, keys: PrefixKeys<'a>) -> Self {
            self.options.keys = keys;
            self
        }

        /// Sets the retention priority of its blocks in the prefix cache, for policies that use it.
        pub fn keep(mut self, keep: CachePriority) -> Self {
            self.options.keep = keep;
            self
        }

        /// Sets a time, on the [cache's clock](crate::prefix::PrefixCache::now), until which the
        /// prefix cache keeps its blocks while others can be evicted, with every policy.
        pub fn keep_until(mut self, until: Millis) -> Self {
            self.options.keep_until = Some(until);
            self
        }

        /// Sets the session whose last request this one continues, for policies that learn from it.
        ///
        /// In a pool with [states](crate::pool::PoolBuilder::states), of a session's
        /// [checkpoints](crate::Batch::checkpoint) all but the last two are evicted before other
        /// cached blocks, except those that other sessions hit too. Without a session, only the
        /// last checkpoint before the one that was hit is evicted early, if memory is short and it
        /// was hit at most once.
        ///
        /// A branch that goes on beside the conversation (a sub-agent) is a session of its own.
        pub fn session(mut self, session: SessionId) -> Self {
            self.options.session = Some(session);
            self
        }

        /// Sets the [tenant](crate::tenants) whose quota its new blocks count for: those that it,
        /// and its forks, allocate. Opening it fails with
        /// [`SequenceError::Tenant`](crate::SequenceError::Tenant) if the pool does not know it.
        pub fn tenant(mut self, tenant: $crate::ids::TenantId) -> Self {
            self.options.tenant = Some(tenant);
            self
        }

        /// Allows hits that fill a block in part: the last block of a fully cached prompt, and the
        /// unfinished last block of a closed sequence. The first write to it goes to a copy.
        pub fn reuse_tail(mut self) -> Self {
            self.options.reuses_tail = true;
            self
        }
    };
}
pub(super) use option_setters;

impl<'a> Options<'a> {
    pub(super) fn new(id: SequenceId) -> Self {
        Self {
            id,
            priority: Priority::default(),
            keys: PrefixKeys::new(),
            keep: CachePriority::default(),
            keep_until: None,
            session: None,
            tenant: None,
            reuses_tail: false,
        }
    }

    pub(super) fn open(&self, sequences: &Sequences) -> Result<Sequence, SequenceError> {
        let _call = call();
        sequences.check_one_group(self.id)?;
        let tenant = self.tenant_in(sequences)?;
        let known = self.hashes(sequences, 0, self.weights_now(sequences))?;
        let list = sequences.register(self.id, self.priority)?;
        let mut sequence = Sequence::new(sequences.clone(), self.id, self.priority, list).of_tenant(tenant);
        sequence.known = known;
        sequence.reuses_tail = self.reuses_tail;
        Ok(sequence)
    }

    pub(super) fn tenant_in(&self, sequences: &Sequences) -> Result<(Tenant, Option<TenantId>), TenantError> {
        let Some(id) = self.tenant else { return Ok((Tenant::NONE, None)) };
        let tenants = sequences.blocks().tenants().ok_or(TenantError::Disabled { tenant: id })?;
        Ok((tenants.find(id).ok_or(TenantError::Unknown { tenant: id })?, Some(id)))
    }

    /// Returns the current versions of its weights. All groups of a sequence are hashed with the
    /// same.
    pub(super) fn weights_now(&self, sequences: &Sequences) -> (Weights, WeightsStamp) {
        let adapter = self.keys.adapter_name();
        sequences.cache().map(|cache| cache.weights_now(adapter)).unwrap_or_default()
    }

    /// Returns the hashes of its tokens in a group of layers.
    pub(super) fn hashes(
        &self,
        sequences: &Sequences,
        group: u32,
        now: (Weights, WeightsStamp),
    ) -> Result<Option<Box<TokenHashes>>, PrefixError> {
        let Some(cache) = sequences.cache() else { return Ok(None) };
        let root = sequences.root_group(group);
        let policy_info = self.policy_info(cache)?;
        Ok(Some(Box::new(TokenHashes::new(cache, &self.keys, (group, root), policy_info, now)?)))
    }

    fn policy_info(&self, cache: &PrefixCache) -> Result<PolicyInfo, PrefixError> {
        if let Some(until) = self.keep_until {
            let now = cache.now();
            if until <= now {
                let limit = format_args!("after {} ms, the cache's time", now.0);
                return Err(
                    Invalid::new("end of the retention", format_args!("{} ms", until.0), limit).into()
                );
            }
        }
        Ok(PolicyInfo {
            priority: self.keep,
            keep_until: self.keep_until,
            session: self.session,
            ..PolicyInfo::default()
        })
    }

    /// Checks the length of a prompt with `headroom`. Returns the number of blocks that hold both.
    pub(super) fn check_prompt(
        &self,
        sequences: &Sequences,
        prompt: &[u32],
        headroom: usize,
        kind: ListKind,
    ) -> Result<usize, SequenceError> {
        let id = self.id;
        if prompt.is_empty() {
            return Err(zero_tokens(id));
        }
        if sequences.cache().is_some() {
            self.keys.check_extra(prompt.len()).map_err(PrefixError::from)?;
        }
        let asked = prompt.len().saturating_add(headroom);
        if asked > TOKENS_MAX {
            return Err(too_long(id, asked, 0));
        }
        let (asked, total) = (asked.div_ceil(kind.block_tokens as usize), sequences.blocks().total());
        // With a window, a prompt larger than the pool can be appended in chunks.
        let is_too_large = asked > total && kind.window.is_none();
        if is_too_large { Err(AllocError::TooLarge { asked, total }.into()) } else { Ok(asked) }
    }
}

/// Opens a [`Sequence`].
#[derive(Clone)]
#[must_use]
pub struct SequenceBuilder<'a> {
    sequences: &'a Sequences,
    options: Options<'a>,
}

impl<'a> SequenceBuilder<'a> {
    option_setters!();

    /// Opens the sequence, empty. Only [`tokens`](Self::tokens) looks up cached blocks.
    ///
    /// # Errors
    /// [`SequenceError::AlreadyOpen`]; [`SequenceError::Prefix`] for empty keys, or a past
    /// retention.
    pub fn open(self) -> Result<Sequence, SequenceError> {
        self.options.open(self.sequences)
    }

    /// Opens the sequence with the longest cached prefix of a prompt, sharing the prefix's blocks.
    ///
    /// [`Sequence::len`] then returns the number of cached tokens, 0 without a prefix cache. The
    /// prompt's last token is never among them, since it must be computed. The rest of the prompt
    /// is announced, and must be appended, at once or in chunks.
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
    /// Also [`SequenceError::Invalid`] for no or too many tokens, [`SequenceError::Prefix`] for an
    /// extra key past the prompt, [`SequenceError::Alloc`] for a prompt larger than the pool.
    pub fn tokens(self, prompt: &[u32]) -> Result<Sequence, SequenceError> {
        let _call = call();
        self.options.check_prompt(self.sequences, prompt, 0, self.sequences.kinds()[0])?;
        let _timing = self.sequences.0.sampler.start(Operation::Admit);
        let mut sequence = self.open()?;
        sequence.announce(prompt)?;
        sequence.adopt_prefix(prompt);
        Ok(sequence)
    }
}

impl Sequences {
    /// Returns a builder that opens a sequence.
    pub fn sequence(&self, id: SequenceId) -> SequenceBuilder<'_> {
        SequenceBuilder { sequences: self, options: Options::new(id) }
    }

    /// Opens an empty sequence at normal priority.
    pub fn open(&self, id: SequenceId) -> Result<Sequence, SequenceError> {
        self.sequence(id).open()
    }
}

/// The cached prefix of a prompt, staged in the sequence's list, with a reference on each block.
pub(super) struct Prefix {
    pub(super) whole: usize,
    /// One more if the last block is cached in part.
    pub(super) blocks: usize,
    tokens: usize,
}

impl Sequence {
    /// Sets whose quota its new blocks count for.
    pub(super) fn of_tenant(mut self, (tenant, id): (Tenant, Option<TenantId>)) -> Self {
        (self.tenant, self.tenant_id) = (tenant, id);
        self
    }

    pub(super) fn announced_now(&self) -> usize {
        self.known.as_ref().map_or(0, |known| known.announced())
    }

    fn adopt_prefix(&mut self, prompt: &[u32]) {
        // The whole prompt, so that the list grows only once.
        self.list.reserve(with_answer(prompt.len()).div_ceil(self.kind.block_tokens as usize));
        if let Some(prefix) = self.find_prefix(prompt, usize::MAX, self.reuses_tail, false) {
            self.adopt(prefix);
        }
    }

    /// Takes references on the cached blocks of the announced `prompt`, at most of its first
    /// `most`; with `takes_tail` also on a partial one. The sequence is empty, and its list has
    /// room.
    pub(super) fn find_prefix(
        &mut self,
        prompt: &[u32],
        most: usize,
        takes_tail: bool,
        is_in_line: bool,
    ) -> Option<Prefix> {
        self.look_for_uncached(0);
        let (known, cache) = (self.known.as_deref()?, self.sequences.cache()?);
        let block_tokens = self.kind.block_tokens as usize;
        let (whole, list) = (known.usable_hashes(prompt.len(), block_tokens), &mut self.list);
        let whole = &whole[..whole.len().min(most)];
        let (blocks, era) = (&self.sequences.0.blocks, known.era());
        let place = match self.kind.needs() {
            None => {
                let mut place = 0;
                cache.take_prefix(blocks, whole, era, &mut |id| {
                    list.stage(place, id);
                    place += 1;
                });
                place
            }
            Some(needs) => {
                let mut taken = SmallVec::<[(usize, BlockId); 32]>::new();
                let boundary = cache.take_window(blocks, whole, era, needs, is_in_line, &mut |place, id| {
                    taken.push((place, id))
                });
                let gap = needs.gap(boundary);
                self.front = if gap.is_empty() { 0 } else { gap.end as u32 };
                gap.for_each(|place| list.stage(place, NULL));
                taken.into_iter().for_each(|(place, id)| list.stage(place, id));
                boundary
            }
        };
        let mut prefix = Prefix { whole: place, blocks: place, tokens: place * block_tokens };
        if takes_tail && let Some((id, more)) = cached_tail(cache, &self.sequences, known, prompt, place) {
            self.list.stage(place, id);
            (prefix.blocks, prefix.tokens) = (place + 1, prefix.tokens + more);
        }
        Some(prefix)
    }

    /// Adopts a prefix as the first blocks, and reports the lookup to the policy.
    pub(super) fn adopt(&mut self, prefix: Prefix) {
        let last = (prefix.whole > 0).then(|| self.list.staged_at(prefix.whole - 1));
        if let (Some(known), Some(cache)) = (&mut self.known, self.sequences.cache()) {
            // A request counts once, not in each of its groups of layers.
            if self.group == 0 {
                let session = known.policy_info.session;
                known.policy_info.context = cache.looked_up(known.hashes(), prefix.whole, last, session);
                self.lookup = Some((known.hashes().len(), prefix.whole));
            }
            if cache.has_origins() {
                let mut blocks = self.list.staged(0..prefix.blocks);
                blocks.retain(|&id| !self.sequences.is_null(id));
                known.join_origins(cache, &cache.joined_origins(&blocks));
            }
        }
        self.publish(prefix.tokens as u32);
        self.committed = prefix.tokens as u32;
        self.seals.adopt(prefix.whole as u32);
    }

    /// Returns the longest hit of at most `tokens` tokens of a prompt, and its evictable blocks.
    pub(super) fn longest_hit(&self, prompt: &[u32], tokens: usize) -> (usize, usize) {
        let Some((known, cache)) = self.token_hashes() else { return (0, 0) };
        let block_tokens = self.kind.block_tokens as usize;
        let hashes = known.usable_hashes(prompt.len(), block_tokens);
        let hashes = &hashes[..hashes.len().min(tokens / block_tokens)];
        let (hits, evictable) = self.sequences.count_hits(cache, hashes, known.era(), self.kind);
        (hits * block_tokens, evictable)
    }

    /// Takes references on the blocks of the longest hit of at most `tokens` tokens, and returns
    /// its tokens. [Adopt](Self::adopt_hit) it, or [give it back](Self::give_back_hit).
    pub(super) fn take_hit(&mut self, prompt: &[u32], tokens: usize, is_in_line: bool) -> usize {
        let block_tokens = self.kind.block_tokens as usize;
        self.list.reserve(with_answer(prompt.len()).div_ceil(block_tokens));
        let prefix = self.find_prefix(prompt, tokens / block_tokens, false, is_in_line);
        prefix.map_or(0, |prefix| prefix.tokens)
    }

    pub(super) fn give_back_hit(&mut self, tokens: usize, is_in_line: bool) {
        let mut staged = self.list.staged(0..tokens / self.kind.block_tokens as usize);
        staged.retain(|&id| !self.sequences.is_null(id));
        self.front = 0;
        if let Some(cache) = self.sequences.cache().filter(|_| !staged.is_empty()) {
            cache.untake(self.pool_blocks(), &staged, is_in_line);
        }
    }

    /// Adopts a hit, and makes these blocks its reservation, except the last `leave`.
    pub(super) fn adopt_hit(&mut self, tokens: usize, fresh: Vec<BlockId>, leave: usize) {
        let blocks = tokens / self.kind.block_tokens as usize;
        if self.known.is_some() {
            self.adopt(Prefix { whole: blocks, blocks, tokens });
        }
        self.reserve_but(fresh, leave);
        self.reserve_end();
    }

    #[cold]
    pub(super) fn count_lookup(&self, (prompt, hits): (usize, usize)) {
        let comes_back = self.sequences.take_preempted(self.id());
        if let Some(tenants) = self.pool_blocks().tenants() {
            tenants.count_lookup(self.tenant, prompt, hits);
        }
        self.sequences.cache().into_iter().for_each(|cache| cache.count_lookup(prompt, hits, comes_back));
    }
}

/// Takes a reference on a cached block that continues the prompt after `blocks` blocks. Also
/// returns how many of its tokens belong to the prompt without its last token, at least one.
fn cached_tail(
    cache: &PrefixCache,
    sequences: &Sequences,
    known: &TokenHashes,
    prompt: &[u32],
    blocks: usize,
) -> Option<(BlockId, usize)> {
    let block_tokens = sequences.block_tokens();
    let rest = &prompt[blocks * block_tokens..];
    let most = rest.len().saturating_sub(1).min(block_tokens - 1);
    if most == 0 {
        return None;
    }
    let find = |hash| cache.take(&sequences.0.blocks, hash, known.era());
    if rest.len() == block_tokens
        && let Some(id) = known.hash(blocks as u32).and_then(find)
    {
        return Some((id, most));
    }
    // The block of an identical prompt holds the last token too.
    let held = &rest[..rest.len().min(block_tokens - 1)];
    let hashes: SmallVec<[_; 16]> = known.partial_hashes(cache, blocks, held).collect();
    hashes.iter().enumerate().rev().find_map(|(last, &hash)| Some((find(hash)?, most.min(last + 1))))
}

impl fmt::Debug for SequenceBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SequenceBuilder").field("options", &self.options).finish_non_exhaustive()
    }
}
