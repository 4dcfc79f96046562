//! The known tokens of a sequence: announced ids, and block hashes.
//!
//! ```text
//! tokens   0 .. announced        ids are known; they and the hashes of the full blocks among them are stored here
//!          announced .. length   ids are unknown: once these are final, no block from there on can be reused
//! ```
//!
//! The [registry](super::registry) owns the cache, which is passed to each call. A block is
//! registered under its hash when it is sealed. All ids are kept, 4 bytes a token, for events and
//! for sequences that are truncated into a block.
//!
//! ```text
//! hashes.len() == tokens.len() / block_tokens        full_at == (hashes.len() + 1) * block_tokens
//! ```

use std::cmp::Ordering;

use smallvec::SmallVec;

use crate::error::{Invalid, PrefixError, SequenceError};
use crate::ids::{BlockId, SequenceId, SessionId};
use crate::prefix::policy::{CachePriority, Millis};
use crate::prefix::{
    BlockHash, ChainHash, ExtraKey, KvEvent, Origin, PolicyInfo, PrefixCache, PrefixHasher, PrefixKeys,
    Provenance, Weights, WeightsStamp, in_group, join,
};

use super::TOKENS_MAX;
use super::hinted::Standing;
use super::versions::{KnownVersions, Versions};

/// Returns the room for a prompt and some of its answer, so that decoded tokens seldom move it.
#[inline]
pub(super) fn with_answer(prompt: usize) -> usize {
    prompt + prompt / 4
}

/// Era of a sequence whose blocks are not found: from before a clear, uncached, or computed with
/// other weights than hashed.
const NO_ERA: u64 = u64::MAX;

#[derive(Clone)]
pub(super) struct TokenHashes {
    /// Its list, which determines the tokens of a block.
    list: u32,
    /// Its group of layers: the list, or behind all lists a state.
    group: u32,
    chain: ChainHash,
    root: BlockHash,
    hashes: Vec<BlockHash>,
    tokens: Vec<u32>,
    /// Number of tokens that complete the next block.
    full_at: usize,
    extra_keys: Vec<ExtraKey>,
    /// Unknown tokens became final: no block from here on has a hash.
    is_cut: bool,
    /// The era in which its blocks are noted; `NO_ERA` once one of them was uncached, or computed
    /// with other weights.
    era: u64,
    /// The newest uncache call at the last look.
    pub(super) looked: u64,
    /// [Salt](PrefixCache::salt_of) of the first call.
    first_salt: u64,
    /// The newest uncache call when no block of the sequence, in any group, was uncached.
    pub(super) checked: u64,
    /// Whether batches may have left out blocks that they were promised.
    pub(super) is_left_out: bool,
    /// Of the blocks with which it began.
    provenance: Provenance,
    /// [Mark](Provenance) of the blocks that are registered next.
    mark: u32,
    pub(super) versions: Versions,
    pub(super) policy_info: PolicyInfo,
    /// Hints on its tokens, once it is closed.
    pub(super) standing: Vec<Standing>,
}

/// The known tokens of a sequence, as another pool continues them.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct KnownTokens {
    pub(crate) root: BlockHash,
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) extra_keys: Vec<ExtraKey>,
    /// Whether unknown tokens became final after them.
    pub(crate) is_cut: bool,
    /// Whether the hashes predate a clear, so that nothing is found by them.
    pub(crate) is_stale: bool,
    /// Caches and eras in which the blocks were computed; none if the hashes are stale.
    pub(crate) origins: Vec<Origin>,
    pub(crate) versions: KnownVersions,
    pub(crate) keep: CachePriority,
    /// Remaining retention of the blocks, in milliseconds.
    pub(crate) keep_left_ms: Option<u64>,
    pub(crate) session: Option<SessionId>,
    /// Time until its session is expected to continue, in milliseconds.
    pub(crate) returns_in_ms: Option<u64>,
}

impl KnownTokens {
    /// Takes over what all lists of a sequence share, besides the tokens, from its first list.
    pub(super) fn follow(&mut self, first: &Self) {
        self.is_stale = first.is_stale;
        self.versions.clone_from(&first.versions);
        (self.keep, self.keep_left_ms) = (first.keep, first.keep_left_ms);
        (self.session, self.returns_in_ms) = (first.session, first.returns_in_ms);
        self.drop_stale();
    }

    /// Drops the origins of stale hashes.
    pub(super) fn drop_stale(&mut self) {
        if self.is_stale {
            self.origins.clear();
        }
    }

    /// Returns what differs from the first list of the same sequence: all but hashes and origins
    /// must be the same.
    pub(crate) fn differs(&self, first: &Self) -> Option<&'static str> {
        let differs = [
            ("tokens", self.tokens != first.tokens),
            ("extra keys", self.extra_keys != first.extra_keys),
            ("unknown tokens", self.is_cut != first.is_cut),
            ("stale hashes", self.is_stale != first.is_stale),
            ("versions", self.versions != first.versions),
            ("retention", (self.keep, self.keep_left_ms) != (first.keep, first.keep_left_ms)),
            ("session", (self.session, self.returns_in_ms) != (first.session, first.returns_in_ms)),
        ];
        differs.into_iter().find_map(|(what, differs)| differs.then_some(what))
    }
}

impl TokenHashes {
    pub(super) fn new(
        cache: &PrefixCache,
        keys: &PrefixKeys<'_>,
        (list, root_group): (u32, u32),
        policy_info: PolicyInfo,
        now: (Weights, WeightsStamp),
    ) -> Result<Self, Invalid> {
        let hasher = cache.hasher_of(list);
        let root = cache.root_of(list, keys, now.0)?.of_group(root_group);
        keys.check_extra(TOKENS_MAX)?;
        let (extra_keys, looked) = (keys.extra().to_vec(), cache.uncached().newest());
        Ok(Self {
            list,
            group: list,
            chain: ChainHash::after(root, 0).with(hasher, &extra_keys),
            extra_keys,
            root,
            hashes: Vec::new(),
            tokens: Vec::new(),
            full_at: hasher.block_tokens(),
            is_cut: false,
            era: cache.era(),
            looked,
            checked: looked,
            first_salt: cache.salt_of(1),
            is_left_out: false,
            provenance: Provenance::default(),
            mark: 0,
            versions: Versions::new(keys.adapter_name(), now),
            policy_info,
            standing: Vec::new(),
        })
    }

    /// Returns the hashes of the blocks of a state behind this many blocks of tokens, all known, in a
    /// pool of `lists` lists.
    pub(super) fn of_state(&self, lists: usize, behind: usize, state: usize, blocks: usize) -> Option<Self> {
        let last = behind.checked_sub(1).and_then(|last| self.hash(last as u32))?;
        Some(Self {
            list: self.list,
            group: (lists + state) as u32,
            chain: ChainHash::after(last, 0),
            root: last,
            hashes: (0..blocks).map(|block| last.of_state(state, block, self.salt())).collect(),
            tokens: Vec::new(),
            full_at: usize::MAX,
            extra_keys: Vec::new(),
            is_cut: true,
            era: self.era,
            looked: self.looked,
            first_salt: self.first_salt,
            checked: self.checked,
            is_left_out: false,
            provenance: self.provenance.clone(),
            mark: self.mark,
            versions: self.versions.clone(),
            policy_info: self.policy_info,
            standing: Vec::new(),
        })
    }

    /// Returns the [salt](PrefixCache::salt_of) of the newest uncache call at the last look.
    pub(super) fn salt(&self) -> u64 {
        if self.looked == 0 { 0 } else { self.first_salt.wrapping_add(self.looked - 1) }
    }

    /// Returns what another pool's cache needs. `computed`: a batch here wrote to the blocks.
    pub(super) fn known_tokens(&self, cache: &PrefixCache, computed: bool, length: usize) -> KnownTokens {
        let is_own = computed || self.provenance.is_own();
        let origins = self.provenance.origins(is_own.then(|| cache.origin_in(self.era)));
        let is_uncached = cache.uncached().any_since(self.looked, &self.hashes);
        let is_stale = self.era == NO_ERA || is_uncached || !cache.accepts(&origins);
        let PolicyInfo { priority, keep_until, session, returns_at, .. } = self.policy_info;
        let left = |time: Option<Millis>| time.map(|time| time - cache.now());
        KnownTokens {
            root: self.root,
            hashes: self.hashes.clone(),
            is_stale,
            origins: if is_stale { Vec::new() } else { origins },
            tokens: self.tokens.clone(),
            extra_keys: self.extra_keys.clone(),
            is_cut: self.is_cut,
            versions: self.versions.known(length),
            keep: priority,
            keep_left_ms: left(keep_until).filter(|&left| left > 0),
            session,
            returns_in_ms: left(returns_at),
        }
    }

    /// Creates the hashes of a sequence from another pool, one for each full block. The other cache
    /// hashes alike, unless they are stale. `era`: the era of this cache in which they are noted.
    pub(super) fn arrived(known: KnownTokens, cache: &PrefixCache, list: u32, era: u64) -> Self {
        let KnownTokens { root, hashes, tokens, extra_keys, is_cut, versions, .. } = known;
        let is_stale = known.is_stale || !cache.accepts_in(era, &known.origins);
        let provenance = if is_stale { Provenance::default() } else { cache.provenance(&known.origins) };
        let looked = cache.uncached().newest();
        // Each cache has its own clock.
        let after = |left: Option<u64>| left.map(|left| cache.now() + left);
        let policy_info = PolicyInfo {
            priority: known.keep,
            keep_until: after(known.keep_left_ms),
            session: known.session,
            returns_at: after(known.returns_in_ms),
            // The policy has not seen this sequence.
            ..PolicyInfo::default()
        };
        let mut arrived = Self {
            list,
            group: list,
            chain: ChainHash::after(root, 0),
            root,
            hashes,
            tokens,
            full_at: 0,
            extra_keys,
            is_cut,
            era: if is_stale { NO_ERA } else { era },
            looked,
            checked: looked,
            first_salt: cache.salt_of(1),
            is_left_out: false,
            mark: provenance.mark,
            provenance,
            versions: Versions::arrived(versions),
            policy_info,
            standing: Vec::new(),
        };
        arrived.resume(cache.hasher_of(list));
        arrived
    }

    fn resume(&mut self, hasher: &PrefixHasher) {
        self.chain = self.chain_after(hasher, self.hashes.len());
        self.full_at = (self.hashes.len() + 1) * hasher.block_tokens();
    }

    fn chain_after(&self, hasher: &PrefixHasher, blocks: usize) -> ChainHash {
        let parent = blocks.checked_sub(1).map_or(self.root, |last| self.hashes[last]);
        ChainHash::after(parent, blocks as u64)
            .with(hasher, ExtraKey::touching(&self.extra_keys, blocks * hasher.block_tokens()..usize::MAX))
    }

    pub(super) fn extra_key(&mut self, cache: &PrefixCache, key: ExtraKey) -> Result<(), PrefixError> {
        key.check(self.announced(), TOKENS_MAX)?;
        self.chain.add(cache.hasher_of(self.list), &key);
        if !self.extra_keys.contains(&key) {
            self.extra_keys.push(key);
        }
        Ok(())
    }

    pub(super) fn era(&self) -> u64 {
        self.era
    }

    #[inline]
    pub(super) fn mark(&self) -> u32 {
        in_group(self.mark, self.group)
    }

    pub(super) fn compute(&mut self) {
        self.mark = self.provenance.computing();
    }

    /// Returns whether it is hashed in the current era, with the current versions of the weights.
    pub(super) fn is_current(&self, cache: &PrefixCache) -> bool {
        self.era == cache.era() && self.versions.are_current(cache)
    }

    /// Records that a batch with this stamp writes; `appended`: the tokens from this position on,
    /// which it appends.
    pub(super) fn written(&mut self, cache: &PrefixCache, stamp: WeightsStamp, appended: Option<usize>) {
        if self.versions.write(cache, stamp, appended) {
            self.forget();
        }
    }

    pub(super) fn is_forgotten(&self) -> bool {
        self.era == NO_ERA
    }

    /// Records that nothing is found by the hashes any more. The ids stay known.
    pub(super) fn forget(&mut self) {
        self.era = NO_ERA;
    }

    pub(super) fn origins(&self, cache: &PrefixCache) -> Vec<Origin> {
        self.provenance.origins(self.provenance.is_own().then(|| cache.origin_in(self.era)))
    }

    /// Adds the origins of blocks with which it begins, of this cache or another source.
    pub(super) fn join_origins(&mut self, cache: &PrefixCache, more: &[Origin]) {
        let mut origins = self.origins(cache);
        join(&mut origins, more);
        self.provenance = cache.provenance(&origins);
        self.mark = self.provenance.mark;
    }

    #[inline]
    pub(super) fn announced(&self) -> usize {
        self.tokens.len()
    }

    /// Returns whether no block of the sequence was uncached up to the newest call.
    pub(super) fn is_checked(&self, cache: &PrefixCache) -> bool {
        self.checked == cache.uncached().newest()
    }

    /// Looks for newly uncached blocks among the first `written` (the last may be partial). They,
    /// and what was computed from them, may be wrong: then nothing is found by these hashes.
    /// Returns the newest call.
    #[inline]
    pub(super) fn look_for_uncached(&mut self, cache: &PrefixCache, written: usize) -> u64 {
        let newest = cache.uncached().newest();
        if newest != self.looked {
            self.is_left_out = true;
            let hashes = &self.hashes[..written.min(self.hashes.len())];
            if cache.uncached().any_since(self.looked, hashes) {
                self.era = NO_ERA;
            }
            // Tokens of a written block may be announced later.
            if self.is_cut || written <= self.hashes.len() {
                self.looked = newest;
            }
        }
        newest
    }

    /// Returns the hashes of a prompt's reusable full blocks: its last token must be computed.
    pub(super) fn usable_hashes(&self, tokens: usize, block_tokens: usize) -> &[BlockHash] {
        &self.hashes[..tokens.saturating_sub(1) / block_tokens]
    }

    pub(super) fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Returns an error unless the announced tokens end where the sequence does and more can
    /// follow: ids announced with an append would otherwise be attributed to other tokens.
    pub(super) fn check_all_announced(&self, id: SequenceId, length: usize) -> Result<(), SequenceError> {
        let announced = self.announced();
        match announced.cmp(&length) {
            Ordering::Equal if !self.is_cut => Ok(()),
            Ordering::Equal | Ordering::Less => Err(SequenceError::TokensUnknown { id, known: announced }),
            Ordering::Greater => Err(SequenceError::TokensAhead { id, length, announced }),
        }
    }

    /// Returns whether one more id can be [pushed](Self::push) to these tokens of a sequence.
    #[inline(always)]
    pub(super) fn takes_one(&self, length: usize) -> bool {
        self.tokens.len() == length && !self.is_cut
    }

    /// Announces an id that completes no block.
    #[inline(always)]
    pub(super) fn push(&mut self, token: u32) {
        self.tokens.push(token);
        debug_assert!(self.tokens.len() < self.full_at && !self.is_cut, "a full block, or a cut");
    }

    pub(super) fn announce(
        &mut self,
        cache: &PrefixCache,
        id: SequenceId,
        tokens: &[u32],
    ) -> Result<(), SequenceError> {
        if self.is_cut {
            return Err(SequenceError::TokensUnknown { id, known: self.announced() });
        }
        let block_tokens = cache.hasher_of(self.list).block_tokens();
        let room = with_answer(tokens.len() + block_tokens);
        self.hashes.reserve(room / block_tokens);
        self.tokens.reserve(room);
        self.announce_checked(cache, tokens);
        Ok(())
    }

    #[inline(always)]
    pub(super) fn announce_checked(&mut self, cache: &PrefixCache, tokens: &[u32]) {
        debug_assert!(!self.is_cut, "tokens after unknown ones");
        match *tokens {
            // A decoded token, usually.
            [token] => self.tokens.push(token),
            _ => self.tokens.extend_from_slice(tokens),
        }
        if self.tokens.len() >= self.full_at {
            self.fill(cache.hasher_of(self.list));
        }
    }

    fn fill(&mut self, hasher: &PrefixHasher) {
        let first = self.full_at - hasher.block_tokens();
        let (blocks, _) =
            self.tokens.split_at(self.tokens.len() / hasher.block_tokens() * hasher.block_tokens());
        self.chain.fill(hasher, &blocks[first..], |hash| self.hashes.push(hash));
        self.full_at = blocks.len() + hasher.block_tokens();
    }

    #[inline]
    pub(super) fn committed(&mut self, length: u32) {
        self.is_cut |= length as usize > self.tokens.len();
    }

    /// Removes the tokens from `length` on, and the extra keys of ranges from `keys_to` or later.
    pub(super) fn truncate(&mut self, cache: &PrefixCache, length: usize, keys_to: usize) {
        let before = self.extra_keys.len();
        self.extra_keys.retain(|key| key.tokens.start < keys_to);
        if self.extra_keys.len() < before {
            self.resume(cache.hasher_of(self.list));
        }
        if length > self.tokens.len() || (length == self.tokens.len() && !self.is_cut) {
            return;
        }
        // All announced tokens up to the cut are known; unknown ones come after them.
        self.is_cut = false;
        self.tokens.truncate(length);
        let hasher = cache.hasher_of(self.list);
        self.hashes.truncate(length / hasher.block_tokens());
        self.resume(hasher);
    }

    /// Returns the hashes of an unfinished block: one per nonempty prefix of the tokens, in order.
    pub(super) fn partial_hashes<'a>(
        &'a self,
        cache: &'a PrefixCache,
        blocks: usize,
        tokens: &'a [u32],
    ) -> impl Iterator<Item = BlockHash> + 'a {
        let hasher = cache.hasher_of(self.list);
        let chain = self.chain_after(hasher, blocks);
        (1..=tokens.len()).filter_map(move |end| chain.partial(hasher, &tokens[..end]))
    }

    /// Returns the hash of the unfinished block, if all `length` tokens of the sequence are known.
    pub(super) fn tail_hash(&self, cache: &PrefixCache, length: usize) -> Option<BlockHash> {
        let is_known = self.tokens.len() == length && !self.is_cut && self.era != NO_ERA;
        let hasher = cache.hasher_of(self.list);
        let tail = &self.tokens[self.hashes.len() * hasher.block_tokens()..];
        if is_known { self.chain.partial(hasher, tail) } else { None }
    }

    /// Returns the hash of a block, if all tokens up to its end are known and it may be found.
    #[inline]
    pub(super) fn hash(&self, place: u32) -> Option<BlockHash> {
        self.hashes.get(place as usize).copied().filter(|_| self.era != NO_ERA)
    }

    #[inline]
    pub(super) fn stored(&self, cache: &PrefixCache, block: BlockId, place: u32) -> Option<Box<KvEvent>> {
        if cache.events().is_subscribed() { self.event(cache, block, place as usize) } else { None }
    }

    #[cold]
    fn event(&self, cache: &PrefixCache, block: BlockId, place: usize) -> Option<Box<KvEvent>> {
        let block_tokens = cache.hasher_of(self.list).block_tokens();
        let tokens = place * block_tokens..(place + 1) * block_tokens;
        let parent = place.checked_sub(1).map(|parent| self.hashes[parent]);
        let (parent, known) = match self.group == self.list {
            true => (parent, self.tokens.get(tokens.clone())?.into()),
            false => (Some(self.root), SmallVec::new()),
        };
        Some(Box::new(KvEvent::Stored {
            block,
            hash: *self.hashes.get(place)?,
            parent,
            tokens: known,
            block_tokens: block_tokens as u32,
            group: self.group,
            extra_keys: ExtraKey::of_block(&self.extra_keys, tokens),
        }))
    }
}
