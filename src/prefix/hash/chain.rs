//! The hashes of a sequence as it grows.

use smallvec::SmallVec;

use super::keys::Extra;
use super::{BlockHash, PrefixHasher, PrefixRoot};
use crate::error::PrefixError;

/// A sequence of tokens on its way through a [`PrefixHasher`]: the hash of its last full block, and the tokens after that.
///
/// A token costs a constant time, however long the sequence is. A clone goes its own way: a fork. All calls are to be given
/// the hasher that the chain's root is of; with another one the hashes are nobody's.
///
/// ```
/// use kvpool::prefix::{Chain, HashKey, Hashing, PrefixHasher, PrefixKeys};
///
/// let hasher = PrefixHasher::new(Hashing::Fast, &HashKey::random()?, 16)?;
/// let mut chain = Chain::new(hasher.root(&PrefixKeys::new().salt(b"tenant 7"))?);
/// let mut hashes = Vec::new();
/// chain.extend(&hasher, &[1; 40], |hash| hashes.push(hash));
/// assert_eq!((hashes.len(), chain.tail().len()), (2, 8));
/// # Ok::<(), kvpool::error::PrefixError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Chain {
    /// Of the last full block; of the root before there is one.
    parent: BlockHash,
    blocks: u64,
    tail: SmallVec<[u32; 16]>,
    /// Extra keys that touch the unfinished block, or later ones; in order, each once.
    extras: Vec<Extra>,
}

impl Chain {
    /// A chain of no tokens.
    pub fn new(root: PrefixRoot) -> Self {
        Self::after(root.hash(), 0)
    }

    /// A chain that goes on after the block of this hash, its `blocks`th. Extra keys that reach beyond it are to be
    /// [given](Self::extra_key) again.
    pub fn after(hash: BlockHash, blocks: u64) -> Self {
        Self { parent: hash, blocks, tail: SmallVec::new(), extras: Vec::new() }
    }

    /// The same, with tokens after it that do not fill a block.
    ///
    /// # Errors
    /// [`PrefixError::TailTooLong`] if they do.
    pub fn resume(
        hasher: &PrefixHasher,
        hash: BlockHash,
        blocks: u64,
        tail: &[u32],
    ) -> Result<Self, PrefixError> {
        let block_tokens = hasher.block_tokens();
        if tail.len() >= block_tokens {
            return Err(PrefixError::TailTooLong { tokens: tail.len(), block_tokens });
        }
        Ok(Self { tail: tail.into(), ..Self::after(hash, blocks) })
    }

    /// Goes on with these tokens; tells the hash of every block that they fill, in order.
    #[inline]
    pub fn extend(&mut self, hasher: &PrefixHasher, mut tokens: &[u32], mut full: impl FnMut(BlockHash)) {
        let block_tokens = hasher.block_tokens();
        if !self.tail.is_empty() {
            let (head, rest) = tokens.split_at(tokens.len().min(block_tokens - self.tail.len()));
            // Mostly one: no copy of a slice.
            self.tail.extend(head.iter().copied());
            if self.tail.len() < block_tokens {
                return;
            }
            let hash = hasher.block(self.entered(hasher, block_tokens), &self.tail);
            self.tail.clear();
            full(self.filled(hasher, hash));
            tokens = rest;
        }
        let (blocks, rest) = tokens.split_at(tokens.len() / block_tokens * block_tokens);
        self.tail.extend(rest.iter().copied());
        if self.extras.is_empty() {
            self.parent = hasher.blocks(self.parent, blocks, full);
            self.blocks += (blocks.len() / block_tokens) as u64;
            return;
        }
        for block in blocks.chunks_exact(block_tokens) {
            let hash = hasher.block(self.entered(hasher, block_tokens), block);
            full(self.filled(hasher, hash));
        }
    }

    #[inline]
    fn filled(&mut self, hasher: &PrefixHasher, hash: BlockHash) -> BlockHash {
        self.parent = hash;
        self.blocks += 1;
        if !self.extras.is_empty() {
            let hashed = self.hashed_tokens(hasher);
            self.extras.retain(|extra| extra.end > hashed);
        }
        hash
    }

    /// What stands for the parent of the next `tokens` tokens.
    #[inline]
    fn entered(&self, hasher: &PrefixHasher, tokens: usize) -> BlockHash {
        if self.extras.is_empty() {
            return self.parent;
        }
        let end = self.hashed_tokens(hasher) + tokens as u64;
        let mut touching = self.extras.iter().copied().take_while(|extra| extra.start < end).peekable();
        if touching.peek().is_none() { self.parent } else { hasher.enter(self.parent, touching) }
    }

    /// Tokens `start..end` mean something that their ids do not say: an image, by a hash of its pixels. All blocks that they
    /// touch, and all after those, are told apart by `key`, and by where the range begins and ends. To be said before the first of
    /// these blocks is full; what is said twice counts once, and the order does not count.
    ///
    /// # Errors
    /// [`PrefixError::EmptyKey`] without a key, [`PrefixError::EmptyRange`] without tokens, [`PrefixError::ExtraTooLate`] if the
    /// first of them is in a hashed block.
    pub fn extra_key(
        &mut self,
        hasher: &PrefixHasher,
        tokens: std::ops::Range<u64>,
        key: &[u8],
    ) -> Result<(), PrefixError> {
        let hashed = self.hashed_tokens(hasher);
        if key.is_empty() {
            return Err(PrefixError::EmptyKey { field: "extra key" });
        }
        if tokens.is_empty() {
            return Err(PrefixError::EmptyRange { start: tokens.start, end: tokens.end });
        }
        if tokens.start < hashed {
            return Err(PrefixError::ExtraTooLate { start: tokens.start, hashed });
        }
        let extra = hasher.extra(tokens.start, tokens.end, key);
        if let Err(place) = self.extras.binary_search(&extra) {
            self.extras.insert(place, extra);
        }
        Ok(())
    }

    /// Cuts the chain to its first `tokens` tokens, which must reach to the unfinished block: the tokens of finished ones are not
    /// kept, and a chain cut further back is [resumed](Self::resume) from its block's hash. Extra keys that begin after
    /// the cut are forgotten.
    ///
    /// # Errors
    /// [`PrefixError::NotInTail`] if they end before the unfinished block, or after the last token.
    pub fn truncate(&mut self, hasher: &PrefixHasher, tokens: u64) -> Result<(), PrefixError> {
        let (hashed, length) = (self.hashed_tokens(hasher), self.tokens(hasher));
        if !(hashed..=length).contains(&tokens) {
            return Err(PrefixError::NotInTail { asked: tokens, tokens: length, hashed });
        }
        self.tail.truncate((tokens - hashed) as usize);
        self.extras.retain(|extra| extra.start < tokens);
        Ok(())
    }

    /// The hash of the unfinished block: of the tokens that it has so far. No full block's hash is the same, whatever it
    /// holds. None if there are no tokens in it.
    pub fn partial(&self, hasher: &PrefixHasher) -> Option<BlockHash> {
        (!self.tail.is_empty()).then(|| hasher.partial(self.entered(hasher, self.tail.len()), &self.tail))
    }

    /// The hash of the last full block; before there is one, what the root stands for.
    #[inline]
    pub fn parent(&self) -> BlockHash {
        self.parent
    }

    /// Blocks that were filled.
    #[inline]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The tokens of the unfinished block.
    #[inline]
    pub fn tail(&self) -> &[u32] {
        &self.tail
    }

    /// Tokens in all.
    pub fn tokens(&self, hasher: &PrefixHasher) -> u64 {
        self.hashed_tokens(hasher) + self.tail.len() as u64
    }

    fn hashed_tokens(&self, hasher: &PrefixHasher) -> u64 {
        self.blocks * hasher.block_tokens() as u64
    }
}
