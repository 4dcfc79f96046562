//! What a block is known by: the hash of its tokens and of everything before them.
//!
//! ```text
//! root      = B(root,    block_tokens, function, salt, tenant, adapter)            precomputed when there are none of these
//! parent'   = parent, or B(enter, parent, extra keys that touch the block)          (an image, for one)
//! block     = F(parent', tokens)                                                   every full block
//! unfinished= B(partial, parent', tokens), or F with a mark if F is Fast            a tail that may be found again
//!
//! B   BLAKE3, keyed: 128 bits of key and 64 of check; the domain, and a length before each part
//! F   key:   the function that was chosen, Hashing
//!     check: the second hash, which is always the same one
//! ```
//!
//! | part | bits | made by |
//! |---|---|---|
//! | `key` | 128 | [`Hashing`]: XXH3 with a secret, BLAKE3 with a key, or a user's own |
//! | `check` | 64 | [`check`]: a keyed universal hash; whatever the key's function is, and whoever attacks it |
//!
//! What is found by its key is taken for the same only if the check is the same too.
//!
//! # Which function
//!
//! | who sends prompts, and what do they see | choose |
//! |---|---|
//! | anybody, and whether a prefix was cached (by the time to the first token) | [`Hashing::Fast`] |
//! | anybody, and somebody whom you do not trust sees hashes (in logs, or as events) | [`Hashing::Keyed`] |
//!
//! XXH3 is no cryptographic hash, and nobody proved anything about it. What stands behind `Fast` is that its secret
//! and that of the check are drawn at random, or from your key, and that the check's chance to fail is proven, against
//! senders who see neither of them nor any hash. BLAKE3 is collision-resistant, also for who knows the key.
//! `cargo bench -p kvpool-benches --bench hashing` measures what that costs; the figures are in `docs/prefix.md`.
//!
//! # What cannot collide by concatenation
//!
//! Everything of variable length goes through B, with its length and a tag before it, and so does whatever is not a full
//! block, but for the unfinished blocks of `Fast`: XXH3 is given fewer tokens than for a full one, and the check a mark. All
//! full blocks of a chain have the same number of tokens. What B returns is not predictable without the key, so that no
//! tokens can imitate a root or an extra key.
//!
//! # Who else computes the same
//!
//! Everybody with the same [`HashKey`], [`Hashing`] and block size: other processes, other machines, routers. With
//! [`HashKey::random`] nobody does. Byte order is little-endian everywhere.

use std::fmt;
use std::str::FromStr;

use crate::error::PrefixError;

mod chain;
mod check;
mod function;
mod hasher;
mod keys;
#[cfg(test)]
mod tests;

pub use chain::Chain;
pub use function::{HashFunction, HashKey, Hashing};
pub use hasher::PrefixHasher;
pub use keys::{PrefixKeys, PrefixRoot};

/// The chained hash of a block: of its tokens, and of all blocks and keys before it. See the [module](self).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash {
    key: [u64; 2],
    check: u64,
}

impl BlockHash {
    /// Bytes of a hash as [`to_bytes`](Self::to_bytes) gives them.
    pub const BYTES: usize = 24;

    /// From its parts, as another process sent them.
    #[inline]
    pub const fn new(key: u128, check: u64) -> Self {
        Self { key: [key as u64, (key >> 64) as u64], check }
    }

    /// What the block is looked up by.
    #[inline]
    pub const fn key(self) -> u128 {
        self.key[0] as u128 | (self.key[1] as u128) << 64
    }

    /// The same as two words, the lower first.
    #[inline]
    pub const fn words(self) -> [u64; 2] {
        self.key
    }

    /// What must be the same as well.
    #[inline]
    pub const fn check(self) -> u64 {
        self.check
    }

    /// Key and check, little-endian.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..16].copy_from_slice(&self.key().to_le_bytes());
        bytes[16..].copy_from_slice(&self.check.to_le_bytes());
        bytes
    }

    /// The hash of these bytes.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |i: usize| u64::from_le_bytes(words[i]);
        Self { key: [word(0), word(1)], check: word(2) }
    }
}

/// 32 hexadecimal digits of the key, a hyphen, 16 of the check. `{:.8}` shows the first eight digits, for people.
impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:032x}-{:016x}", self.key(), self.check))
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({self})")
    }
}

/// Reads what `Display` writes.
impl FromStr for BlockHash {
    type Err = PrefixError;

    fn from_str(text: &str) -> Result<Self, PrefixError> {
        let digits = |part: &str, len| part.len() == len && part.bytes().all(|byte| byte.is_ascii_hexdigit());
        (text.split_once('-'))
            .filter(|(key, check)| digits(key, 32) && digits(check, 16))
            .and_then(|(key, check)| {
                let key = u128::from_str_radix(key, 16).ok()?;
                Some(Self::new(key, u64::from_str_radix(check, 16).ok()?))
            })
            .ok_or_else(|| PrefixError::NotAHash { text: text.into() })
    }
}
