use std::fmt;

use kvpool::prefix::BlockHash;
use kvpool::transfer::PackedForm;
use kvpool::{CacheGroup, GroupKeeps, Pool, TransferError};

use super::error::TierError;

/// Equal for two pools if and only if they may share bytes of blocks.
///
/// It is derived from the packed form of a block (layers, heads, dtype, scales), the groups of
/// layers if there are several, the hashing of the prefix cache with its key, and the namespace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fingerprint([u8; 16]);

impl Fingerprint {
    /// Returns the fingerprint of a pool in a namespace.
    ///
    /// The namespace identifies what form and hashes do not: the model, and the revision of its
    /// weights.
    ///
    /// # Errors
    /// [`TierError::Namespace`] if it is empty; [`TierError::Pool`] for a pool without a prefix
    /// cache.
    pub fn of(pool: &Pool, namespace: &str) -> Result<Self, TierError> {
        if namespace.is_empty() {
            return Err(TierError::Namespace);
        }
        let cache = pool.prefix_cache().ok_or(TransferError::NoCache { pool: pool.tag() })?;
        let mut hasher = blake3::Hasher::new_derive_key("kvpool shared tier, fingerprint, version 1");
        hasher.update(&PackedForm::of(pool.layout()).fingerprint());
        hasher.update(&cache.hasher().fingerprint());
        // What lies in a block depends on its group, whose number is part of the hash.
        let groups = pool.cache_groups();
        if groups.len() > 1 {
            for CacheGroup { keeps, block_tokens, blocks, .. } in groups {
                let (kind, tokens, sinks) = match keeps {
                    GroupKeeps::All => (0, 0, 0),
                    GroupKeeps::Window(window) => (1, window.tokens(), window.sink_tokens()),
                    _ => (2, 0, 0),
                };
                for number in [kind, tokens, sinks, block_tokens as usize, blocks] {
                    hasher.update(&(number as u64).to_le_bytes());
                }
            }
        }
        hasher.update(namespace.as_bytes());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Ok(Self(bytes))
    }

    /// Creates a fingerprint from its bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Returns its bytes.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }
}

/// 32 hexadecimal digits.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Key of a block in a tier.
///
/// Its text is `kvp2/{fingerprint}/{hash}`, with the 128 bits of the hash by which pools find
/// blocks. The value has the 64-bit check of the hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TierKey {
    /// Identifies pools that may share the value.
    pub fingerprint: Fingerprint,
    /// The block.
    pub hash: BlockHash,
}

impl TierKey {
    /// Creates a key from a cryptographic hash of a name instead of a block's hash.
    pub fn named(fingerprint: Fingerprint, name: &[u8]) -> Self {
        let hash = blake3::Hasher::new_derive_key("kvpool shared tier, name of a value, version 1")
            .update(name)
            .finalize();
        let hash = BlockHash::from_bytes(*hash.as_bytes().first_chunk().expect("32 bytes"));
        Self { fingerprint, hash }
    }
}

impl fmt::Display for TierKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kvp2/{}/{:032x}", self.fingerprint, self.hash.key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_text_with_all_bits_of_its_parts() {
        let fingerprint = Fingerprint::from_bytes(std::array::from_fn(|at| at as u8));
        let key = TierKey { fingerprint, hash: BlockHash::new(0xAB, 7) };
        let text = "kvp2/000102030405060708090a0b0c0d0e0f/000000000000000000000000000000ab";
        assert_eq!(key.to_string(), text);
    }

    #[test]
    fn names_of_values_are_apart() {
        let fingerprint = Fingerprint::from_bytes([7; 16]);
        let of = |name: &[u8]| TierKey::named(fingerprint, name);
        assert_eq!(of(b"a"), of(b"a"));
        let names: [&[u8]; 5] = [b"", b"\0", b"\0\0", b"a", &[9; 100]];
        for (at, name) in names.iter().enumerate() {
            assert!(names[..at].iter().all(|other| of(other).hash != of(name).hash), "{name:?}");
        }
    }
}
