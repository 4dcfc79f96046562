//! The known tokens of a sequence: block hashes, as far as token ids were announced.
//!
//! ```text
//! tokens   0 .. announced        ids are known; the hashes of the full blocks among them are stored here
//!          announced .. length   ids are unknown: once these are final, no block from there on can be reused
//! ```
//!
//! The cache whose hashes they are belongs to the [registry](super::registry), and is passed to
//! each call: a sequence holds no reference of its own on it.
//!
//! Tokens may be announced before they are appended, as a prompt is. A block is registered under
//! its hash when it is sealed.

use std::cmp::Ordering;

use crate::error::{PrefixError, SequenceError};
use crate::ids::{BlockId, SequenceId};
use crate::prefix::policy::{CachePriority, Millis};
use crate::prefix::{
    BlockHash, Chain, KvEvent, Origin, PolicyInfo, PrefixCache, PrefixKeys, Provenance, join,
};

/// Era of a sequence that came from before a clear, or whose blocks were uncached: its blocks are not
/// found. Eras do not get there.
const NO_ERA: u64 = u64::MAX;

/// The block hashes of one sequence.
#[derive(Clone)]
pub(super) struct TokenHashes {
    chain: Chain,
    root: BlockHash,
    hashes: Vec<BlockHash>,
    announced: u64,
    /// Unknown tokens became final: no block from here on has a hash.
    is_cut: bool,
    /// The era in which its blocks are noted; `NO_ERA` once one of them was uncached.
    era: u64,
    /// The newest call that uncached hashes when it looked for its own among them.
    pub(super) looked: u64,
    /// Of the blocks with which it began.
    provenance: Provenance,
    /// Mark of the blocks that are registered next.
    mark: u32,
    /// Ids of all announced tokens, while there is an event subscriber.
    tokens: Option<Vec<u32>>,
    pub(super) policy_info: PolicyInfo,
}

/// The known tokens of a sequence, as another pool continues them.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct KnownTokens {
    /// Hash from which the chain begins.
    pub(crate) root: BlockHash,
    /// Hashes of the full blocks of announced tokens.
    pub(crate) hashes: Vec<BlockHash>,
    /// Tokens after the last full block; empty if they are not known any more.
    pub(crate) tail: Vec<u32>,
    /// Number of tokens whose ids were announced.
    pub(crate) announced: u64,
    /// Whether unknown tokens became final after them.
    pub(crate) is_cut: bool,
    /// Whether the hashes predate a clear, so that nothing may be found by them.
    pub(crate) is_stale: bool,
    /// Caches and eras in which the blocks were computed; none if the hashes are stale.
    pub(crate) origins: Vec<Origin>,
    /// All announced tokens, if the source kept them.
    pub(crate) tokens: Option<Vec<u32>>,
    /// Retention priority.
    pub(crate) keep: CachePriority,
    /// Time for which the blocks are still to be kept, in milliseconds.
    pub(crate) keep_left_ms: Option<u64>,
}

impl TokenHashes {
    pub(super) fn new(
        cache: &PrefixCache,
        keys: &PrefixKeys<'_>,
        policy_info: PolicyInfo,
    ) -> Result<Self, PrefixError> {
        let root = cache.hasher().root(keys)?;
        Ok(Self {
            chain: Chain::new(root),
            root: root.hash(),
            hashes: Vec::new(),
            announced: 0,
            is_cut: false,
            era: cache.era(),
            looked: cache.uncached().newest(),
            provenance: Provenance::default(),
            mark: 0,
            tokens: cache.events().is_subscribed().then(Vec::new),
            policy_info,
        })
    }

    /// Returns the known tokens for another pool's cache. `computed`: a batch of this pool wrote to
    /// the blocks.
    pub(super) fn known_tokens(&self, cache: &PrefixCache, computed: bool) -> KnownTokens {
        let is_own = computed || self.provenance.is_own();
        let origins = self.provenance.origins(is_own.then(|| cache.origin_in(self.era)));
        let is_uncached = cache.uncached().any_since(self.looked, &self.hashes);
        let is_stale = self.era == NO_ERA || is_uncached || !cache.accepts(&origins);
        let left = self.policy_info.keep_until.map(|until| until.0.saturating_sub(cache.now().0));
        KnownTokens {
            root: self.root,
            hashes: self.hashes.clone(),
            tail: self.chain.tail().to_vec(),
            announced: self.announced,
            is_cut: self.is_cut,
            is_stale,
            origins: if is_stale { Vec::new() } else { origins },
            tokens: self.tokens.clone(),
            keep: self.policy_info.priority,
            keep_left_ms: left.filter(|&left| left > 0),
        }
    }

    /// Creates the hashes of a sequence that comes from another pool, whose cache hashes alike
    /// unless they are stale.
    ///
    /// `era` is the era of this cache in which they are noted.
    ///
    /// # Errors
    ///
    /// [`PrefixError::TailTooLong`].
    pub(super) fn arrived(known: KnownTokens, cache: &PrefixCache, era: u64) -> Result<Self, PrefixError> {
        let KnownTokens { root, hashes, tail, announced, is_cut, tokens, keep, keep_left_ms, .. } = known;
        let is_stale = known.is_stale || !cache.accepts_in(era, &known.origins);
        let provenance = if is_stale { Provenance::default() } else { cache.provenance(&known.origins) };
        let parent = hashes.last().copied().unwrap_or(root);
        // Each cache has its own clock.
        let keep_until = keep_left_ms.map(|left| Millis(cache.now().0.saturating_add(left)));
        Ok(Self {
            chain: Chain::resume(cache.hasher(), parent, hashes.len() as u64, &tail)?,
            root,
            hashes,
            announced,
            is_cut,
            era: if is_stale { NO_ERA } else { era },
            looked: cache.uncached().newest(),
            mark: provenance.mark,
            provenance,
            tokens: tokens.filter(|_| cache.events().is_subscribed()),
            // The policy has not seen this sequence.
            policy_info: PolicyInfo { priority: keep, keep_until, ..PolicyInfo::default() },
        })
    }

    pub(super) fn era(&self) -> u64 {
        self.era
    }

    /// Returns the mark of blocks that are registered.
    #[inline]
    pub(super) fn mark(&self) -> u32 {
        self.mark
    }

    /// Records that blocks are computed here from now on.
    pub(super) fn compute(&mut self) {
        self.mark = self.provenance.computing();
    }

    /// Records that nothing may be found by the hashes any more. The ids stay known.
    pub(super) fn forget(&mut self) {
        self.era = NO_ERA;
    }

    /// Returns the origins of the blocks with which it begins.
    pub(super) fn origins(&self, cache: &PrefixCache) -> Vec<Origin> {
        self.provenance.origins(self.provenance.is_own().then(|| cache.origin_in(self.era)))
    }

    /// Adds the origins of blocks of this cache with which the sequence begins, or of another source
    /// of it.
    pub(super) fn join_origins(&mut self, cache: &PrefixCache, more: &[Origin]) {
        let mut origins = self.origins(cache);
        join(&mut origins, more);
        self.provenance = cache.provenance(&origins);
        self.mark = self.provenance.mark;
    }

    /// Returns the number of tokens whose ids are known.
    pub(super) fn announced(&self) -> usize {
        self.announced as usize
    }

    /// Looks whether the first `written` blocks, some of them in part, were uncached since the last look.
    /// They, and what was computed from them, may be wrong: nothing is found by these hashes then.
    #[inline]
    pub(super) fn look_for_uncached(&mut self, cache: &PrefixCache, written: usize) {
        let newest = cache.uncached().newest();
        if newest != self.looked {
            let hashes = &self.hashes[..written.min(self.hashes.len())];
            if cache.uncached().any_since(self.looked, hashes) {
                self.era = NO_ERA;
            }
            // Tokens of a written block may be announced later.
            if self.is_cut || written <= self.hashes.len() {
                self.looked = newest;
            }
        }
    }

    /// Returns the hashes of the full blocks of a prompt of `tokens` tokens that may be reused: its
    /// last token must be computed.
    pub(super) fn usable_hashes(&self, tokens: usize, block_tokens: usize) -> &[BlockHash] {
        &self.hashes[..tokens.saturating_sub(1) / block_tokens]
    }

    /// Returns the hashes of the full blocks.
    pub(super) fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Returns an error unless the announced tokens end where the sequence does, and more can
    /// follow.
    ///
    /// Tokens announced and appended together would otherwise have their ids attributed to other
    /// tokens.
    pub(super) fn check_all_announced(&self, id: SequenceId, length: usize) -> Result<(), SequenceError> {
        let announced = self.announced();
        match announced.cmp(&length) {
            Ordering::Equal if !self.is_cut => Ok(()),
            Ordering::Equal | Ordering::Less => Err(SequenceError::TokensUnknown { id, known: announced }),
            Ordering::Greater => Err(SequenceError::TokensAhead { id, length, announced }),
        }
    }

    /// Adds the next tokens.
    pub(super) fn announce(
        &mut self,
        cache: &PrefixCache,
        id: SequenceId,
        tokens: &[u32],
    ) -> Result<(), SequenceError> {
        if self.is_cut {
            return Err(SequenceError::TokensUnknown { id, known: self.announced as usize });
        }
        let blocks = tokens.len() / cache.hasher().block_tokens();
        self.hashes.reserve(blocks + 1);
        self.announce_checked(cache, tokens);
        Ok(())
    }

    /// Adds the next tokens, none of which is final yet.
    #[inline]
    pub(super) fn announce_checked(&mut self, cache: &PrefixCache, tokens: &[u32]) {
        debug_assert!(!self.is_cut, "tokens after unknown ones");
        self.chain.extend(cache.hasher(), tokens, |hash| self.hashes.push(hash));
        if let Some(all) = &mut self.tokens {
            all.extend_from_slice(tokens);
        }
        self.announced += tokens.len() as u64;
    }

    /// Records that the first `length` tokens are final.
    #[inline]
    pub(super) fn committed(&mut self, length: u32) {
        self.is_cut |= u64::from(length) > self.announced;
    }

    /// Removes all tokens from `length` on, including announced ones.
    pub(super) fn truncate(&mut self, cache: &PrefixCache, length: u32) {
        let (length, hasher) = (u64::from(length), cache.hasher());
        let block_tokens = hasher.block_tokens() as u64;
        if length > self.announced || (length == self.announced && !self.is_cut) {
            return;
        }
        // All announced tokens up to the cut are known; unknown ones come after them.
        self.is_cut = false;
        if self.chain.truncate(hasher, length).is_err() {
            let blocks = length / block_tokens;
            let parent = blocks.checked_sub(1).map_or(self.root, |last| self.hashes[last as usize]);
            let first = (blocks * block_tokens) as usize;
            let tail = match &self.tokens {
                Some(tokens) => Some(&tokens[first..length as usize]),
                None => length.is_multiple_of(block_tokens).then_some(&[][..]),
            };
            let resumed = Chain::resume(hasher, parent, blocks, tail.unwrap_or(&[]));
            self.chain = resumed.unwrap_or_else(|error| unreachable!("less than a block: {error}"));
            self.is_cut = tail.is_none();
        }
        self.hashes.truncate((length / block_tokens) as usize);
        if let Some(tokens) = &mut self.tokens {
            tokens.truncate(length as usize);
        }
        self.announced = length;
    }

    /// Returns the hashes of an unfinished block after the first `blocks`.
    ///
    /// One for each nonempty prefix of these tokens, shortest first.
    pub(super) fn partial_hashes<'a>(
        &'a self,
        cache: &'a PrefixCache,
        blocks: usize,
        tokens: &'a [u32],
    ) -> impl Iterator<Item = BlockHash> + 'a {
        let parent = blocks.checked_sub(1).map_or(self.root, |last| self.hashes[last]);
        let hasher = cache.hasher();
        let mut chain = Chain::after(parent, blocks as u64);
        tokens.iter().filter_map(move |&token| {
            chain.extend(hasher, &[token], |_| ());
            chain.partial(hasher)
        })
    }

    /// Returns the hash of the unfinished block, if all `length` tokens of the sequence are known.
    pub(super) fn tail_hash(&self, cache: &PrefixCache, length: usize) -> Option<BlockHash> {
        let is_known = self.announced == length as u64 && !self.is_cut && self.era != NO_ERA;
        if is_known { self.chain.partial(cache.hasher()) } else { None }
    }

    /// Returns the hash of a block, if all tokens up to its end are known, and it may be found.
    #[inline]
    pub(super) fn hash(&self, place: u32) -> Option<BlockHash> {
        self.hashes.get(place as usize).copied().filter(|_| self.era != NO_ERA)
    }

    /// Returns the event for a stored block, if there is a subscriber.
    #[inline]
    pub(super) fn stored(&self, cache: &PrefixCache, block: BlockId, place: u32) -> Option<Box<KvEvent>> {
        if cache.events().is_subscribed() { self.event(cache, block, place as usize) } else { None }
    }

    #[cold]
    fn event(&self, cache: &PrefixCache, block: BlockId, place: usize) -> Option<Box<KvEvent>> {
        let block_tokens = cache.hasher().block_tokens();
        let tokens =
            self.tokens.as_ref().map(|tokens| &tokens[place * block_tokens..(place + 1) * block_tokens]);
        Some(Box::new(KvEvent::Stored {
            block,
            hash: *self.hashes.get(place)?,
            parent: place.checked_sub(1).map(|parent| self.hashes[parent]),
            tokens: tokens.unwrap_or_default().into(),
            block_tokens: block_tokens as u32,
        }))
    }
}
