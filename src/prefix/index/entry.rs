//! One word of the index: a fingerprint of the key, and the block id. Pure functions only.
//!
//! | bits | field | meaning |
//! |---|---|---|
//! | 63 | taken | set in every entry, so that 0 is the empty slot even if key and block are 0 |
//! | 27..63 | fingerprint | the key's second word, without the bits that choose the bucket and the topmost bit |
//! | 0..27 | block | its id |
//!
//! Equal fingerprints in a bucket (probability 2^-36) are harmless: lookups compare whole hashes.

use crate::config::FRAME_BITS;
use crate::ids::BlockId;

const ID_MASK: u64 = (1 << FRAME_BITS) - 1;
const TAKEN: u64 = 1 << 63;

/// Key of a lookup: 128 bits, assumed to be uniform; other keys crowd, and are dropped sooner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key(pub u64, pub u64);

impl Key {
    /// Returns the key's two buckets, of `mask + 1`, a power of two.
    #[inline]
    pub(super) fn buckets(self, mask: usize) -> [usize; 2] {
        debug_assert!(mask as u64 <= ID_MASK, "bits of the fingerprint would choose the bucket");
        [self.0 as usize & mask, self.1 as usize & mask]
    }

    #[inline]
    pub(super) fn entry(self, id: BlockId) -> Entry {
        Entry(self.1 & !ID_MASK | TAKEN | id.0 as u64)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry(u64);

impl Entry {
    pub(super) const EMPTY: Self = Self(0);

    #[inline]
    pub(super) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    #[inline]
    pub(super) fn to_bits(self) -> u64 {
        self.0
    }

    #[inline]
    pub(super) fn id(self) -> BlockId {
        BlockId((self.0 & ID_MASK) as u32)
    }

    #[inline]
    pub(super) fn is_like(self, other: Self) -> bool {
        (self.0 ^ other.0) <= ID_MASK
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_never_empty_and_gives_its_block_back() {
        for key in [Key(0, 0), Key(!0, !0), Key(1, 1 << 63), Key(7, ID_MASK)] {
            for id in [0, 1, 77, ID_MASK as u32] {
                let entry = key.entry(BlockId(id));
                assert_eq!(Entry::from_bits(entry.to_bits()), entry);
                assert_eq!(entry.id(), BlockId(id));
                assert!(!entry.is_like(Entry::EMPTY));
            }
        }
    }

    #[test]
    fn each_bit_of_the_fingerprint_tells_keys_apart_and_no_bit_of_the_block_does() {
        let key = Key(3, 0x0123_4567_89ab_cdef);
        let entry = key.entry(BlockId(5));
        for bit in FRAME_BITS..63 {
            assert!(!entry.is_like(Key(3, key.1 ^ 1 << bit).entry(BlockId(5))), "bit {bit}");
        }
        for bit in 0..FRAME_BITS {
            assert!(entry.is_like(key.entry(BlockId(5 ^ 1 << bit))), "bit {bit}");
        }
    }
}
