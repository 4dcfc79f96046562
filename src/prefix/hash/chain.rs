//! Block hashes of a growing sequence.

use smallvec::SmallVec;

use super::keys::{Extra, ExtraKey};
use super::{BlockHash, PrefixHasher, PrefixKeys, PrefixRoot};
use crate::error::Invalid;

/// Incremental hash of a token sequence: the hash of its last full block, and the tokens after it.
///
/// Each token costs constant time. Clone it to fork. Every call must receive the hasher that made
/// the chain's root; with another one, the hashes are meaningless.
///
/// ```
/// use kvpool::prefix::{Chain, HashKey, Hashing, PrefixHasher, PrefixKeys};
///
/// let hasher = PrefixHasher::new(Hashing::Fast, &HashKey::random()?, 16)?;
/// let mut chain = Chain::new(hasher.root(&PrefixKeys::new().salt(b"tenant 7"))?);
/// let mut hashes = Vec::new();
/// chain.extend(&hasher, &[1; 40], |hash| hashes.push(hash));
/// assert_eq!((hashes.len(), chain.tail().len()), (2, 8));
/// # Ok::<(), kvpool::PrefixError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Chain {
    hashed: ChainHash,
    tail: SmallVec<[u32; 16]>,
}

/// The hashed part of a chain: all but the tokens of the unfinished block.
#[derive(Clone, Debug)]
pub(crate) struct ChainHash {
    /// Hash of the last full block; of the root before the first.
    parent: BlockHash,
    blocks: u64,
    /// Extra keys that touch the next block or later ones, sorted and unique.
    extras: Vec<Extra>,
}

impl ChainHash {
    pub(crate) fn after(hash: BlockHash, blocks: u64) -> Self {
        Self { parent: hash, blocks, extras: Vec::new() }
    }

    pub(crate) fn with<'a>(
        mut self,
        hasher: &PrefixHasher,
        keys: impl IntoIterator<Item = &'a ExtraKey>,
    ) -> Self {
        keys.into_iter().for_each(|key| self.add(hasher, key));
        self
    }

    pub(crate) fn add(&mut self, hasher: &PrefixHasher, ExtraKey { tokens, key }: &ExtraKey) {
        let extra = hasher.extra(tokens.start as u64, tokens.end as u64, key);
        if extra.end > self.hashed_tokens(hasher)
            && let Err(place) = self.extras.binary_search(&extra)
        {
            self.extras.insert(place, extra);
        }
    }

    #[inline]
    pub(crate) fn fill(&mut self, hasher: &PrefixHasher, tokens: &[u32], mut full: impl FnMut(BlockHash)) {
        let block_tokens = hasher.block_tokens();
        if self.extras.is_empty() {
            self.parent = hasher.blocks(self.parent, tokens, full);
            self.blocks += (tokens.len() / block_tokens) as u64;
            return;
        }
        for block in tokens.chunks_exact(block_tokens) {
            self.parent = hasher.block(self.entered(hasher, block_tokens), block);
            self.blocks += 1;
            let hashed = self.hashed_tokens(hasher);
            // Each key is removed once, and read only by the blocks that it touches.
            let begun = self.extras.partition_point(|extra| extra.start < hashed);
            if self.extras[..begun].iter().any(|extra| extra.end <= hashed) {
                self.extras.retain(|extra| extra.end > hashed);
            }
            full(self.parent);
        }
    }

    pub(crate) fn partial(&self, hasher: &PrefixHasher, tokens: &[u32]) -> Option<BlockHash> {
        (!tokens.is_empty()).then(|| hasher.partial(self.entered(hasher, tokens.len()), tokens))
    }

    #[inline]
    fn entered(&self, hasher: &PrefixHasher, tokens: usize) -> BlockHash {
        if self.extras.is_empty() {
            return self.parent;
        }
        let end = self.hashed_tokens(hasher) + tokens as u64;
        let mut touching = self.extras.iter().copied().take_while(|extra| extra.start < end).peekable();
        if touching.peek().is_none() { self.parent } else { hasher.enter(self.parent, touching) }
    }

    fn hashed_tokens(&self, hasher: &PrefixHasher) -> u64 {
        self.blocks * hasher.block_tokens() as u64
    }
}

impl PrefixHasher {
    /// Returns the hashes of the full blocks of tokens with these keys.
    ///
    /// # Errors
    /// As for [`root`](Self::root); an extra key without bytes or tokens, or beyond the tokens.
    pub fn hashes(&self, keys: &PrefixKeys<'_>, tokens: &[u32]) -> Result<Vec<BlockHash>, Invalid> {
        keys.check_extra(tokens.len())?;
        let mut chain = ChainHash::after(self.root(keys)?.hash(), 0).with(self, keys.extra());
        let whole = tokens.len() / self.block_tokens() * self.block_tokens();
        let mut hashes = Vec::with_capacity(whole / self.block_tokens());
        chain.fill(self, &tokens[..whole], |hash| hashes.push(hash));
        Ok(hashes)
    }
}

impl Chain {
    /// Creates a chain without tokens.
    pub fn new(root: PrefixRoot) -> Self {
        Self::after(root.hash(), 0)
    }

    /// Creates a chain that continues after a block with this hash, the `blocks`th of its chain.
    /// Extra keys that reach beyond that block must be [added](Self::extra_key) again.
    pub fn after(hash: BlockHash, blocks: u64) -> Self {
        Self { hashed: ChainHash::after(hash, blocks), tail: SmallVec::new() }
    }

    /// Like [`after`](Self::after), followed by tokens; an error if they fill a block.
    pub fn resume(
        hasher: &PrefixHasher,
        hash: BlockHash,
        blocks: u64,
        tail: &[u32],
    ) -> Result<Self, Invalid> {
        let block_tokens = hasher.block_tokens();
        if tail.len() >= block_tokens {
            let limit = format_args!("less than a block of {block_tokens}");
            return Err(Invalid::new("tokens of an unfinished block", tail.len(), limit));
        }
        Ok(Self { tail: tail.into(), ..Self::after(hash, blocks) })
    }

    /// Appends tokens, and calls `full` with the hash of each block that they fill, in order.
    #[inline]
    pub fn extend(&mut self, hasher: &PrefixHasher, mut tokens: &[u32], mut full: impl FnMut(BlockHash)) {
        let block_tokens = hasher.block_tokens();
        if let [token] = *tokens
            && self.tail.len() + 1 < block_tokens
        {
            // A decoded token, usually.
            return self.tail.push(token);
        }
        if !self.tail.is_empty() {
            let (head, rest) = tokens.split_at(tokens.len().min(block_tokens - self.tail.len()));
            self.tail.extend_from_slice(head);
            if self.tail.len() < block_tokens {
                return;
            }
            self.hashed.fill(hasher, &self.tail, &mut full);
            self.tail.clear();
            tokens = rest;
        }
        let (blocks, rest) = tokens.split_at(tokens.len() / block_tokens * block_tokens);
        self.tail.extend_from_slice(rest);
        self.hashed.fill(hasher, blocks, full);
    }

    /// Adds the [extra key](ExtraKey) of tokens, before the first block that it touches is full.
    ///
    /// # Errors
    /// The key has no bytes, its range has no tokens, or the range begins in a hashed block.
    pub fn extra_key(
        &mut self,
        hasher: &PrefixHasher,
        tokens: std::ops::Range<u64>,
        key: &[u8],
    ) -> Result<(), Invalid> {
        let key = ExtraKey::new(tokens.start as usize..tokens.end as usize, key);
        key.check(self.hashed.hashed_tokens(hasher) as usize, usize::MAX)?;
        self.hashed.add(hasher, &key);
        Ok(())
    }

    /// Cuts the chain to its first `tokens` tokens, and removes extra keys that begin after the
    /// cut. To cut before the unfinished block, [resume](Self::resume) from a block's hash.
    ///
    /// # Errors
    /// `tokens` is before the unfinished block or after the last token.
    pub fn truncate(&mut self, hasher: &PrefixHasher, tokens: u64) -> Result<(), Invalid> {
        let (hashed, length) = (self.hashed.hashed_tokens(hasher), self.tokens(hasher));
        if !(hashed..=length).contains(&tokens) {
            let limit = format_args!("{hashed} to {length}, the tokens of the unfinished block");
            return Err(Invalid::new("tokens to keep", tokens, limit));
        }
        self.tail.truncate((tokens - hashed) as usize);
        self.hashed.extras.retain(|extra| extra.start < tokens);
        Ok(())
    }

    /// Returns the hash of the unfinished block, if any; it differs from those of full blocks.
    pub fn partial(&self, hasher: &PrefixHasher) -> Option<BlockHash> {
        self.hashed.partial(hasher, &self.tail)
    }

    /// Returns the hash of the last full block; before the first, the hash of the root.
    #[inline]
    pub fn parent(&self) -> BlockHash {
        self.hashed.parent
    }

    /// Returns the number of full blocks.
    #[inline]
    pub fn blocks(&self) -> u64 {
        self.hashed.blocks
    }

    /// Returns the tokens of the unfinished block.
    #[inline]
    pub fn tail(&self) -> &[u32] {
        &self.tail
    }

    /// Returns the total number of tokens.
    pub fn tokens(&self, hasher: &PrefixHasher) -> u64 {
        self.hashed.hashed_tokens(hasher) + self.tail.len() as u64
    }
}
