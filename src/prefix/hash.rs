//! Block hashes: the hash of a block's tokens and of everything before them.
//!
//! ```text
//! root      = B(root,    block_tokens, function, salt, weights, adapter)           precomputed for chains without keys
//! parent'   = parent, or B(enter, parent, extra keys that touch the block)          (an image, for example)
//! block     = F(parent', tokens)                                                   every full block
//! unfinished= B(partial, parent', tokens), or F with a mark if F is Fast            a partially filled last block
//! foreign   = B(foreign, group, hash)                                              a block of an engine with its own hashes
//!
//! B   BLAKE3, keyed: 128 bits of key and 64 of check; input: a domain, and a length before each part
//! F   key:   the configured function, Hashing
//!     check: the second hash, always the same function
//! ```
//!
//! | part | bits | made by |
//! |---|---|---|
//! | `key` | 128 | [`Hashing`]: XXH3 with a secret, or BLAKE3 with a key |
//! | `check` | 64 | [`check`]: a keyed universal hash, independent of the key's function and of attacks on it |
//!
//! A block found by its key is accepted only if the check is equal too. All input is little-endian.
//!
//! [`Hashing`] has the criteria for choosing a function. Nothing is proven about XXH3: `Fast`
//! relies on its secret and that of the check, which are random or derived from the configured key,
//! and on the proven failure probability of the check, against senders that see neither the secrets
//! nor any hash. `cargo bench -p kvpool-benches --bench hashing` measures both; see
//! `docs/prefix.md`.
//!
//! # Why concatenation cannot collide
//!
//! All variable-length input, and everything that is not a full block, goes through B, preceded by
//! its length and a tag. The exception is an unfinished block under `Fast`: XXH3 receives fewer
//! tokens than for a full block, and the check also their number. All full blocks of a chain have
//! the same number of tokens. Without the key, B's output is unpredictable, so no tokens can
//! imitate a root or an extra key.

use std::fmt;
use std::str::FromStr;

use crate::error::Invalid;

mod chain;
mod check;
mod function;
mod hasher;
mod keys;
#[cfg(test)]
mod tests;

pub use chain::Chain;
pub(crate) use chain::ChainHash;
pub use function::{HashKey, Hashing};
pub use hasher::PrefixHasher;
pub use keys::{ExtraKey, PrefixKeys, PrefixRoot, Weights};

/// Chained hash of a block: of its tokens, and of all blocks and keys before it. Equal hashes
/// require the same [`HashKey`], [`Hashing`] and block size.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash {
    key: [u64; 2],
    check: u64,
}

impl BlockHash {
    /// Length in bytes, as returned by [`to_bytes`](Self::to_bytes).
    pub const BYTES: usize = 24;

    /// Creates a hash from its parts, for example as received from another process.
    #[inline]
    pub const fn new(key: u128, check: u64) -> Self {
        Self { key: [key as u64, (key >> 64) as u64], check }
    }

    /// Returns the key by which the block is looked up.
    #[inline]
    pub const fn key(self) -> u128 {
        self.key[0] as u128 | (self.key[1] as u128) << 64
    }

    /// Returns the key as two words, the lower first.
    #[inline]
    pub const fn words(self) -> [u64; 2] {
        self.key
    }

    /// Returns the root from which a group of layers hashes the same tokens: the block of one group
    /// is never found for another. 0 stands for all layers: the root itself.
    pub(crate) const fn of_group(self, group: u32) -> Self {
        /// Odd, so that groups differ in the low bits too.
        const STEP: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        Self::new(self.key() ^ STEP.wrapping_mul(group as u128), self.check)
    }

    /// Returns the hash of a block of the state after the block with this hash, computed from blocks
    /// of which none was uncached up to a call.
    pub(crate) const fn of_state(self, state: usize, block: usize, call: u64) -> Self {
        /// Odd, and not that of groups.
        const STEP: u128 = 0xd1b5_4a32_d192_ed03_8cb9_2ba7_2f3d_8dd7;
        let number = ((call as u128) << 64 | (state as u128) << 32 | block as u128) + 1;
        Self::new(self.key() ^ STEP.wrapping_mul(number), self.check)
    }

    /// Returns the second hash, which must be equal too.
    #[inline]
    pub const fn check(self) -> u64 {
        self.check
    }

    /// Returns key and check, little-endian.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..16].copy_from_slice(&self.key().to_le_bytes());
        bytes[16..].copy_from_slice(&self.check.to_le_bytes());
        bytes
    }

    /// Returns the hash with these bytes.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |i: usize| u64::from_le_bytes(words[i]);
        Self { key: [word(0), word(1)], check: word(2) }
    }
}

/// 32 hexadecimal digits of the key, a hyphen, 16 of the check; `{:.8}` prints the first eight.
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

/// The `Display` text in human-readable formats, as other languages lose digits of large numbers;
/// [bytes](BlockHash::to_bytes) in others.
#[cfg(feature = "serde")]
impl serde::Serialize for BlockHash {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            return serializer.collect_str(self);
        }
        self.to_bytes().serialize(serializer)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for BlockHash {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if !deserializer.is_human_readable() {
            return <[u8; Self::BYTES]>::deserialize(deserializer).map(Self::from_bytes);
        }
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl FromStr for BlockHash {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let digits = |part: &str, len| part.len() == len && part.bytes().all(|byte| byte.is_ascii_hexdigit());
        (text.split_once('-'))
            .filter(|(key, check)| digits(key, 32) && digits(check, 16))
            .and_then(|(key, check)| {
                let key = u128::from_str_radix(key, 16).ok()?;
                Some(Self::new(key, u64::from_str_radix(check, 16).ok()?))
            })
            .ok_or_else(|| {
                let limit = "32 and 16 hexadecimal digits separated by a hyphen";
                Invalid::new("block hash", format_args!("{text:?}"), limit)
            })
    }
}
