//! The function of a block's key, and the secret from which all others are derived.

use std::fmt;

use smallvec::SmallVec;

use crate::error::PrefixError;

/// Secret from which all secrets of a pool's hashes are derived. Processes with the same key,
/// [`Hashing`] and block size compute the same hashes.
#[derive(Clone)]
pub struct HashKey([u8; 32]);

impl HashKey {
    /// Draws a key from the system's source of randomness.
    ///
    /// # Errors
    /// [`PrefixError::NoRandomness`] if the system has none.
    pub fn random() -> Result<Self, PrefixError> {
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|error| PrefixError::NoRandomness { reason: error.to_string() })?;
        Ok(Self(key))
    }

    /// Creates a key that other processes use too. It should be random: a party that guesses it can
    /// construct prompts whose `Fast` hashes collide.
    pub const fn from_bytes(key: [u8; 32]) -> Self {
        Self(key)
    }

    /// Derives key material for one purpose, independent of that for others.
    pub(super) fn derive<const N: usize>(&self, purpose: &'static str) -> [u8; N] {
        let mut material = [0; N];
        blake3::Hasher::new_derive_key(purpose).update(&self.0).finalize_xof().fill(&mut material);
        material
    }
}

/// Does not print the key.
impl fmt::Debug for HashKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HashKey(..)")
    }
}

/// Function that computes the keys of blocks.
///
/// | untrusted parties can | choose |
/// |---|---|
/// | send prompts, and observe whether a prefix was cached (by the time to the first token) | [`Fast`](Self::Fast) |
/// | also see hashes (in logs, or as events) | [`Keyed`](Self::Keyed) |
///
/// With either, a second hash with a proven collision bound must be equal before a block is reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Hashing {
    /// XXH3, 128 bits, with a secret. Not a cryptographic hash.
    #[default]
    Fast,
    /// BLAKE3 with a key, of which 128 bits are used: collision-resistant, for hostile tenants.
    Keyed,
    /// Keys that collide often, for tests of the check: the sum of all tokens so far, masked.
    #[cfg(feature = "internals")]
    #[doc(hidden)]
    Weak {
        /// Bits of the sum that are kept; with 0 all keys are equal.
        mask: u64,
    },
}

impl Hashing {
    /// Returns its name, which enters the root of each chain.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fast => "xxh3-128",
            Self::Keyed => "blake3",
            #[cfg(feature = "internals")]
            Self::Weak { .. } => "weak",
        }
    }
}

#[derive(Clone)]
pub(super) enum Function {
    Fast(Fast),
    Keyed(Keyed),
    #[cfg(feature = "internals")]
    Weak(u64),
}

impl Function {
    pub(super) fn new(hashing: Hashing, key: &HashKey) -> Self {
        match hashing {
            Hashing::Fast => Self::Fast(Fast(Box::new(key.derive(Fast::PURPOSE)))),
            Hashing::Keyed => Self::Keyed(Keyed(key.derive(Keyed::PURPOSE))),
            #[cfg(feature = "internals")]
            Hashing::Weak { mask } => Self::Weak(mask),
        }
    }

    #[cfg(feature = "internals")]
    pub(super) fn mask(&self) -> Option<u64> {
        if let Self::Weak(mask) = self { Some(*mask) } else { None }
    }

    #[inline]
    pub(super) fn key(&self, parent: u128, tokens: &[u32]) -> u128 {
        match (self, tokens.as_chunks::<16>()) {
            (Self::Fast(function), ([tokens], [])) => function.key_of_16(parent, tokens),
            (Self::Fast(function), _) => function.key_of(parent, tokens),
            (Self::Keyed(function), _) => function.key(&bytes(parent, tokens)),
            #[cfg(feature = "internals")]
            (Self::Weak(mask), _) => {
                (parent + tokens.iter().map(|&token| u128::from(token)).sum::<u128>()) & u128::from(*mask)
            }
        }
    }
}

/// XXH3 with a full-length secret; at least 136 bytes are required. The parent's key is XORed into
/// the last four tokens, as in CBC-MAC: blocks after different keys have the same input only if
/// their tokens differ by the XOR of the keys, which is secret. Fewer than four tokens follow the
/// key instead.
#[derive(Clone)]
pub(super) struct Fast(Box<[u8; 192]>);

impl Fast {
    pub(super) const PURPOSE: &str = "kvpool block keys, XXH3 secret, version 1";

    #[inline]
    fn key(&self, bytes: &[u8]) -> u128 {
        xxhash_rust::xxh3::xxh3_128_with_secret(bytes, &*self.0)
    }

    /// Hashes a block of the usual size: everything but the hash compiles to a few moves.
    #[inline]
    pub(super) fn key_of_16(&self, parent: u128, tokens: &[u32; 16]) -> u128 {
        let mut bytes = [0; 64];
        put(&mut bytes, tokens);
        add(&mut bytes, parent);
        self.key(&bytes)
    }

    fn key_of(&self, parent: u128, tokens: &[u32]) -> u128 {
        if tokens.len() < 4 {
            return self.key(&bytes(parent, tokens));
        }
        let mut bytes: SmallVec<[u8; 512]> = SmallVec::from_elem(0, 4 * tokens.len());
        put(&mut bytes, tokens);
        add(&mut bytes, parent);
        self.key(&bytes)
    }
}

#[inline]
fn add(bytes: &mut [u8], parent: u128) {
    if let Some(last) = bytes.last_chunk_mut::<16>() {
        *last = (u128::from_le_bytes(*last) ^ parent).to_le_bytes();
    }
}

#[derive(Clone)]
pub(super) struct Keyed([u8; 32]);

impl Keyed {
    pub(super) const PURPOSE: &str = "kvpool block keys, BLAKE3 key, version 1";

    fn key(&self, bytes: &[u8]) -> u128 {
        let hash = blake3::keyed_hash(&self.0, bytes);
        u128::from_le_bytes(hash.as_bytes().as_chunks().0[0])
    }
}

fn bytes(parent: u128, tokens: &[u32]) -> SmallVec<[u8; 528]> {
    let mut bytes = SmallVec::from_elem(0, 16 + 4 * tokens.len());
    let (key, words) = bytes.split_at_mut(16);
    key.copy_from_slice(&parent.to_le_bytes());
    put(words, tokens);
    bytes
}

#[inline]
pub(super) fn put(bytes: &mut [u8], tokens: &[u32]) {
    for (word, token) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(tokens) {
        *word = token.to_le_bytes();
    }
}
