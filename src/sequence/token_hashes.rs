//! What is known of a sequence's tokens: the hashes of its blocks, as far as it was told the ids.
//!
//! ```text
//! tokens   0 .. announced        their ids were given; of the full blocks among them the hashes are here
//!          announced .. length   appended without: nothing from there on can be reused, once it is final
//! ```
//!
//! Tokens can be announced before they are appended, as a prompt is. A block is registered under its hash when it is sealed.

use std::cmp::Ordering;

use crate::error::{PrefixError, SequenceError};
use crate::ids::{BlockId, SequenceId};
use crate::prefix::policy::Millis;
use crate::prefix::{BlockHash, Chain, KvEvent, Owner, PrefixCache, PrefixKeys};
use crate::sync::Arc;

/// See the [module](self).
#[derive(Clone)]
pub(super) struct TokenHashes {
    cache: Arc<PrefixCache>,
    chain: Chain,
    root: BlockHash,
    hashes: Vec<BlockHash>,
    announced: u64,
    /// Final tokens are unknown: no block from here on has a hash.
    is_cut: bool,
    era: u64,
    /// Ids of all announced tokens, while somebody listens to events.
    tokens: Option<Vec<u32>>,
    pub(super) owner: Owner,
}

/// What was announced at some moment.
pub(super) struct Mark {
    chain: Chain,
    announced: u64,
}

impl TokenHashes {
    pub(super) fn new(
        cache: &Arc<PrefixCache>,
        keys: &PrefixKeys<'_>,
        owner: Owner,
    ) -> Result<Self, PrefixError> {
        let root = cache.hasher().root(keys)?;
        Ok(Self {
            cache: cache.clone(),
            chain: Chain::new(root),
            root: root.hash(),
            hashes: Vec::new(),
            announced: 0,
            is_cut: false,
            era: cache.era(),
            tokens: cache.events().is_subscribed().then(Vec::new),
            owner,
        })
    }

    /// The same, of a sequence that goes to another pool. `None`: that one's cache hashes differently, or the hashes are of before
    /// a clear, so that nothing is to be found by them.
    pub(super) fn in_cache(&self, cache: &Arc<PrefixCache>) -> Option<Self> {
        // Before the other is read: what is cleared here, and then there, is not found there.
        let era = cache.era();
        if self.era != self.cache.era() || !cache.hasher().agrees_with(self.cache.hasher()) {
            return None;
        }
        // Each cache has a clock of its own.
        let left = self.owner.keep_until.map(|until| until.0.saturating_sub(self.cache.now().0));
        let keep_until = left.filter(|&left| left > 0).map(|left| Millis(cache.now().0.saturating_add(left)));
        Some(Self {
            cache: cache.clone(),
            era,
            tokens: self.tokens.clone().filter(|_| cache.events().is_subscribed()),
            // Of a policy that has not seen this sequence.
            owner: Owner { context: 0, keep_until, ..self.owner },
            ..self.clone()
        })
    }

    pub(super) fn cache(&self) -> &Arc<PrefixCache> {
        &self.cache
    }

    pub(super) fn era(&self) -> u64 {
        self.era
    }

    /// Tokens whose ids were given.
    pub(super) fn announced(&self) -> usize {
        self.announced as usize
    }

    /// The hashes of the full blocks.
    pub(super) fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Refuses tokens that are to be announced and appended at once, if what is announced does not end where the sequence
    /// does: their ids would be taken for those of others.
    pub(super) fn is_told_all(&self, id: SequenceId, length: usize) -> Result<(), SequenceError> {
        let announced = self.announced();
        match announced.cmp(&length) {
            Ordering::Equal => Ok(()),
            Ordering::Less => Err(SequenceError::TokensUnknown { id, known: announced }),
            Ordering::Greater => Err(SequenceError::TokensAhead { id, length, announced }),
        }
    }

    /// These tokens come next.
    pub(super) fn announce(&mut self, id: SequenceId, tokens: &[u32]) -> Result<(), SequenceError> {
        if self.is_cut {
            return Err(SequenceError::TokensUnknown { id, known: self.announced as usize });
        }
        let hasher = self.cache.hasher();
        self.hashes.reserve(tokens.len() / hasher.block_tokens() + 1);
        self.chain.extend(hasher, tokens, |hash| self.hashes.push(hash));
        if let Some(all) = &mut self.tokens {
            all.extend_from_slice(tokens);
        }
        self.announced += tokens.len() as u64;
        Ok(())
    }

    /// What to [restore](Self::restore) if the tokens that are announced next do not come.
    pub(super) fn mark(&self) -> Mark {
        Mark { chain: self.chain.clone(), announced: self.announced }
    }

    pub(super) fn restore(&mut self, mark: Mark) {
        (self.chain, self.announced) = (mark.chain, mark.announced);
        self.hashes.truncate(self.announced as usize / self.cache.hasher().block_tokens());
        if let Some(tokens) = &mut self.tokens {
            tokens.truncate(self.announced as usize);
        }
    }

    /// So many tokens are final.
    #[inline]
    pub(super) fn committed(&mut self, length: u32) {
        self.is_cut |= u64::from(length) > self.announced;
    }

    /// All tokens from here on are taken back, announced ones among them.
    pub(super) fn truncate(&mut self, length: u32) {
        let (length, hasher) = (u64::from(length), self.cache.hasher());
        let block_tokens = hasher.block_tokens() as u64;
        if length > self.announced || (length == self.announced && !self.is_cut) {
            return;
        }
        // Of tokens that were announced, all until the cut are known; it begins with the first that is not.
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

    /// The hashes of an unfinished block after the first `blocks`: with the first of these tokens, with two, and so on.
    pub(super) fn partial_hashes<'a>(
        &'a self,
        blocks: usize,
        tokens: &'a [u32],
    ) -> impl Iterator<Item = BlockHash> + 'a {
        let parent = blocks.checked_sub(1).map_or(self.root, |last| self.hashes[last]);
        let hasher = self.cache.hasher();
        let mut chain = Chain::after(parent, blocks as u64);
        tokens.iter().filter_map(move |&token| {
            chain.extend(hasher, &[token], |_| ());
            chain.partial(hasher)
        })
    }

    /// The hash of the unfinished block, if all `length` tokens of the sequence are known.
    pub(super) fn tail_hash(&self, length: usize) -> Option<BlockHash> {
        let is_known = self.announced == length as u64 && !self.is_cut;
        if is_known { self.chain.partial(self.cache.hasher()) } else { None }
    }

    /// The hash of a block, if all tokens up to its end are known.
    #[inline]
    pub(super) fn hash(&self, place: u32) -> Option<BlockHash> {
        self.hashes.get(place as usize).copied()
    }

    /// What those who listen to events are told of a block.
    #[inline]
    pub(super) fn stored(&self, block: BlockId, place: u32) -> Option<Box<KvEvent>> {
        if self.cache.events().is_subscribed() { self.event(block, place as usize) } else { None }
    }

    #[cold]
    fn event(&self, block: BlockId, place: usize) -> Option<Box<KvEvent>> {
        let block_tokens = self.cache.hasher().block_tokens();
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
