//! The hash functions of a pool with their secrets, shared by all its chains.

use std::fmt;

use smallvec::{SmallVec, smallvec};

use super::check::Check;
use super::function::{Function, put};
use super::keys::Extra;
use super::{BlockHash, HashKey, Hashing, PrefixKeys, PrefixRoot, Weights};
use crate::error::Invalid;

/// Hash function of a pool: [`Hashing`] with the secrets of a [`HashKey`], for blocks of one size.
/// Immutable; [chains](super::Chain) receive it by reference.
#[derive(Clone)]
pub struct PrefixHasher {
    function: Function,
    check: Check,
    bytes_key: [u8; 32],
    block_tokens: usize,
    name: &'static str,
    bare: PrefixRoot,
}

/// Purpose of a BLAKE3 input, encoded in its first byte.
#[derive(Clone, Copy)]
enum Domain {
    Root = 1,
    Extra = 2,
    Enter = 3,
    Partial = 4,
    Foreign = 5,
    Fingerprint = 6,
}

/// Input of BLAKE3: each variable-length part is preceded by its length.
struct HashInput(SmallVec<[u8; 256]>);

impl HashInput {
    fn new(domain: Domain) -> Self {
        Self(smallvec![domain as u8])
    }

    fn part(self, bytes: &[u8]) -> Self {
        let mut parts = self.number(bytes.len() as u64);
        parts.0.extend_from_slice(bytes);
        parts
    }

    fn tokens(self, tokens: &[u32]) -> Self {
        let mut parts = self.number(tokens.len() as u64);
        let begin = parts.0.len();
        parts.0.resize(begin + 4 * tokens.len(), 0);
        put(&mut parts.0[begin..], tokens);
        parts
    }

    fn number(mut self, number: u64) -> Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    fn hash(mut self, hash: BlockHash) -> Self {
        self.0.extend_from_slice(&hash.to_bytes());
        self
    }
}

impl PrefixHasher {
    /// Creates the hasher for blocks of `block_tokens` tokens.
    ///
    /// # Errors
    /// [`Invalid`] for blocks of zero tokens.
    pub fn new(hashing: Hashing, key: &HashKey, block_tokens: usize) -> Result<Self, Invalid> {
        if block_tokens == 0 {
            return Err(Invalid::new("tokens of a block", 0, "at least 1"));
        }
        let mut hasher = Self {
            name: hashing.name(),
            function: Function::new(hashing, key),
            check: Check::new(&key.derive("kvpool block checks, version 1")),
            bytes_key: key.derive("kvpool prefix roots, extra keys and unfinished blocks, version 1"),
            block_tokens,
            bare: PrefixRoot(BlockHash::new(0, 0)),
        };
        hasher.bare = hasher.hash_root(&PrefixKeys::new());
        Ok(hasher)
    }

    /// Returns a hasher with the same function and key, for blocks of another size.
    pub(crate) fn in_blocks_of(&self, block_tokens: usize) -> Self {
        let mut hasher = Self { block_tokens, ..self.clone() };
        hasher.bare = hasher.hash_root(&PrefixKeys::new());
        hasher
    }

    /// Returns the number of tokens per block.
    #[inline]
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Returns whether both hashers have the same function, key and block size.
    pub fn agrees_with(&self, other: &Self) -> bool {
        // The root without keys is a keyed hash of the block size and the function's name.
        let is_same = self.bare == other.bare;
        // Weak hashes of all masks have one name.
        #[cfg(feature = "internals")]
        let is_same = is_same && self.function.mask() == other.function.mask();
        is_same
    }

    /// Returns a number that hashers share if they [agree](Self::agrees_with), and most likely not
    /// otherwise. It reveals neither the key nor any hash.
    pub fn fingerprint(&self) -> [u8; 16] {
        let input = HashInput::new(Domain::Fingerprint).number(self.block_tokens as u64);
        let input = input.part(self.name.as_bytes());
        #[cfg(feature = "internals")]
        let input = self.function.mask().into_iter().fold(input, HashInput::number);
        self.digest(&input).key().to_le_bytes()
    }

    /// Returns the initial value of chains with these keys, without their extra keys.
    ///
    /// # Errors
    /// [`Invalid`] for a key of zero bytes.
    pub fn root(&self, keys: &PrefixKeys<'_>) -> Result<PrefixRoot, Invalid> {
        keys.check()?;
        if keys.is_plain() && keys.weights == Weights::default() {
            return Ok(self.bare);
        }
        Ok(self.hash_root(keys))
    }

    fn hash_root(&self, keys: &PrefixKeys<'_>) -> PrefixRoot {
        let mut parts =
            HashInput::new(Domain::Root).number(self.block_tokens as u64).part(self.name.as_bytes());
        let Weights { model, adapter } = keys.weights;
        let mut weights = [0; 16];
        weights[..8].copy_from_slice(&model.0.to_le_bytes());
        weights[8..].copy_from_slice(&adapter.0.to_le_bytes());
        // Hashes before the first change of weights have no versions.
        let weights = Some(&weights[..]).filter(|_| keys.weights != Weights::default());
        for value in [keys.salt, weights, keys.adapter] {
            parts = match value {
                None => parts.number(0),
                Some(value) => parts.number(1).part(value),
            };
        }
        PrefixRoot(self.digest(&parts))
    }

    /// Returns the hash of a block that an engine knows by its own hash, in a group of layers.
    pub(crate) fn foreign(&self, group: u32, hash: &[u8]) -> BlockHash {
        self.digest(&HashInput::new(Domain::Foreign).number(u64::from(group)).part(hash))
    }

    /// Computes B of the [module](super): 192 of BLAKE3's 256 bits.
    fn digest(&self, parts: &HashInput) -> BlockHash {
        let hash = blake3::keyed_hash(&self.bytes_key, &parts.0);
        let mut bytes = [0; BlockHash::BYTES];
        bytes.copy_from_slice(&hash.as_bytes()[..BlockHash::BYTES]);
        let hash = BlockHash::from_bytes(bytes);
        BlockHash { check: Check::begin(hash.check), ..hash }
    }

    #[inline]
    pub(super) fn block(&self, parent: BlockHash, tokens: &[u32]) -> BlockHash {
        debug_assert_eq!(tokens.len(), self.block_tokens, "a full block");
        let check = self.check.extend(parent.check, tokens);
        BlockHash::new(self.function.key(parent.key(), tokens), check)
    }

    #[inline]
    pub(super) fn blocks(
        &self,
        mut parent: BlockHash,
        tokens: &[u32],
        mut full: impl FnMut(BlockHash),
    ) -> BlockHash {
        // The usual block size, with a length known at compile time.
        if let (Function::Fast(function), 16) = (&self.function, self.block_tokens) {
            for tokens in tokens.as_chunks::<16>().0 {
                let check = self.check.piece(parent.check, tokens);
                parent = BlockHash::new(function.key_of_16(parent.key(), tokens), check);
                full(parent);
            }
        } else {
            for tokens in tokens.chunks_exact(self.block_tokens) {
                parent = self.block(parent, tokens);
                full(parent);
            }
        }
        parent
    }

    pub(super) fn extra(&self, start: u64, end: u64, key: &[u8]) -> Extra {
        let digest = self.digest(&HashInput::new(Domain::Extra).number(start).number(end).part(key));
        Extra { start, end, digest }
    }

    /// Returns the value that replaces a block's parent hash if extra keys touch the block.
    #[cold]
    pub(super) fn enter(&self, parent: BlockHash, extras: impl Iterator<Item = Extra>) -> BlockHash {
        let parts =
            extras.fold(HashInput::new(Domain::Enter).hash(parent), |parts, extra| parts.hash(extra.digest));
        self.digest(&parts)
    }

    pub(super) fn partial(&self, parent: BlockHash, tokens: &[u32]) -> BlockHash {
        match &self.function {
            // XXH3 hashes the length too, so fewer tokens than a full block's are a distinct input.
            Function::Fast(_) => BlockHash::new(
                self.function.key(parent.key(), tokens),
                self.check.partial(parent.check, tokens),
            ),
            #[cfg(feature = "internals")]
            Function::Weak(_) => self.digest(&HashInput::new(Domain::Partial).hash(parent).tokens(tokens)),
            Function::Keyed(_) => self.digest(&HashInput::new(Domain::Partial).hash(parent).tokens(tokens)),
        }
    }
}

impl fmt::Debug for PrefixHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrefixHasher")
            .field("function", &self.name)
            .field("block_tokens", &self.block_tokens)
            .finish_non_exhaustive()
    }
}
