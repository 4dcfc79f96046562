//! A query whether blocks are cached at a peer, and its answer; independent of any migration.
//!
//! Either may be lost; the caller may then ask again. An answer is a snapshot and reserves nothing.

use kvpool::prefix::BlockHash;
use serde::{Deserialize, Serialize};

use super::bounded::{Bytes, List};

/// Most hashes of a query.
pub const QUESTION_MAX: usize = 1024;

/// Asks which blocks a node has cached.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CacheQuestion {
    /// Number of the query, chosen by the asking node.
    pub number: u64,
    /// Hashes of the blocks, from any chains.
    pub hashes: List<BlockHash, QUESTION_MAX>,
}

/// Answer to a [`CacheQuestion`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CacheAnswer {
    /// Number of the query.
    pub number: u64,
    /// One bit per hash, from the lowest of the first byte: whether a block is cached for it.
    bits: Bytes<{ QUESTION_MAX / 8 }>,
}

impl CacheAnswer {
    /// Answers for the hashes of a query; those past [`QUESTION_MAX`] are ignored.
    pub fn new(number: u64, cached: &[bool]) -> Self {
        let cached = &cached[..cached.len().min(QUESTION_MAX)];
        let byte = |eight: &[bool]| eight.iter().rev().fold(0, |byte, &bit| byte << 1 | u8::from(bit));
        let bits = Bytes::new(cached.chunks(8).map(byte).collect());
        Self { number, bits: bits.unwrap_or_else(|_| unreachable!("at most a bit for each hash")) }
    }

    /// Returns the answer for each of `hashes` hashes; `None` if it has another number of bits.
    pub fn cached(&self, hashes: usize) -> Option<Vec<bool>> {
        let bit = |place: usize| self.bits[place / 8] >> (place % 8) & 1 == 1;
        let is_of = self.bits.len() == hashes.div_ceil(8);
        let has_spare = || (hashes..self.bits.len() * 8).any(bit);
        (is_of && !has_spare()).then(|| (0..hashes).map(bit).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_a_bit_for_each_hash() {
        for hashes in (0..20).chain([QUESTION_MAX]) {
            let cached: Vec<bool> = (0..hashes).map(|place| place % 3 == 0).collect();
            let answer = CacheAnswer::new(7, &cached);
            assert_eq!(answer.cached(hashes), Some(cached));
            assert_eq!(answer.cached(hashes + 8), None, "of more hashes");
            if hashes > 0 {
                assert_eq!(answer.cached(hashes.next_multiple_of(8) - 8), None, "of fewer");
            }
        }
        // Bits without a hash.
        assert_eq!(CacheAnswer::new(7, &[false, false, true]).cached(2), None);
    }

    #[test]
    fn the_length_of_a_question_is_checked_first() {
        let hashes = |count: usize| vec![BlockHash::new(1, 2); count];
        let encoded = |count| postcard::to_allocvec(&(7_u64, hashes(count))).unwrap();
        let decode = |bytes: &[u8]| postcard::from_bytes::<CacheQuestion>(bytes);
        assert_eq!(decode(&encoded(QUESTION_MAX)).unwrap().hashes.len(), QUESTION_MAX);
        assert!(decode(&encoded(QUESTION_MAX + 1)).is_err());
        // A length of 2^32 - 1, and no hashes.
        assert!(decode(&[7, 0xff, 0xff, 0xff, 0xff, 0x0f]).is_err());
        let answer = |bytes: usize| postcard::to_allocvec(&(7_u64, vec![0_u8; bytes])).unwrap();
        let decode = |bytes: &[u8]| postcard::from_bytes::<CacheAnswer>(bytes);
        assert!(decode(&answer(QUESTION_MAX / 8)).is_ok() && decode(&answer(QUESTION_MAX / 8 + 1)).is_err());
    }
}
