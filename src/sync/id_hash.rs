//! A cheap keyed hash of ids, for maps whose keys users choose.
//!
//! ```text
//! fold(x, k) = low half ^ high half of x * k,  128 bits wide
//! hash(id)   = fold(fold(id ^ key.0, MULTIPLIER), key.1)
//! ```
//!
//! Both keys are random for each map and secret, so that colliding ids cannot be prepared. All bits
//! of the hash depend on all bits of the id, because a sharded map uses high and low ones. It is
//! not cryptographic: a caller that measures single operations could learn about the keys.

use std::hash::{BuildHasher, Hasher, RandomState};

/// The fraction of the golden ratio, an odd number.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

#[derive(Clone)]
pub(super) struct IdHashes {
    key: [u64; 2],
}

impl IdHashes {
    pub(super) fn random() -> Self {
        let random = || RandomState::new().build_hasher().finish();
        // An odd factor loses no bit of the other.
        Self { key: [random(), random() | 1] }
    }
}

impl BuildHasher for IdHashes {
    type Hasher = IdHasher;

    #[inline]
    fn build_hasher(&self) -> IdHasher {
        IdHasher { hash: self.key[0], last: self.key[1] }
    }
}

pub(super) struct IdHasher {
    hash: u64,
    last: u64,
}

#[inline]
fn fold(x: u64, factor: u64) -> u64 {
    let product = u128::from(x) * u128::from(factor);
    product as u64 ^ (product >> 64) as u64
}

impl Hasher for IdHasher {
    #[inline]
    fn write_u64(&mut self, id: u64) {
        self.hash = fold(self.hash ^ id, MULTIPLIER);
    }

    fn write(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            self.write_u64(u64::from_le_bytes(word));
        }
        self.write_u64(bytes.len() as u64);
    }

    #[inline]
    fn finish(&self) -> u64 {
        fold(self.hash, self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the maximum load of 256 buckets.
    fn fullest(ids: impl Iterator<Item = u64> + Clone) -> usize {
        let hashes = IdHashes { key: [0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3211] };
        let at = |shift: u32| {
            let mut places = [0usize; 256];
            ids.clone().for_each(|id| places[(hashes.hash_one(id) >> shift & 255) as usize] += 1);
            places.into_iter().max().unwrap_or_default()
        };
        [0, 20, 49, 56].map(at).into_iter().max().unwrap_or_default()
    }

    #[test]
    fn ids_of_any_pattern_spread_over_all_places() {
        // 16 on average; a random hash exceeds 45 about once in a billion times.
        assert!(fullest(0..4_096) < 45);
        for shift in [8, 16, 32, 48] {
            assert!(fullest((0..4_096).map(|id| id << shift)) < 45, "shifted by {shift}");
        }
        assert!(fullest((0..4_096).map(|id| u64::MAX - id * 4_096)) < 45);
    }

    #[test]
    fn maps_hash_differently() {
        let [one, other] = [(); 2].map(|()| IdHashes::random());
        assert!((0..8u64).any(|id| one.hash_one(id) != other.hash_one(id)));
        assert_ne!(one.hash_one([1u8, 2]), one.hash_one([1u8, 2, 0]));
    }
}
