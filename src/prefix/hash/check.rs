//! The second hash: 64 bits that no choice of hash function can weaken.
//!
//! Tokens are taken 16 at a time, padded with zeros, as eight words `w` of two tokens each. With secret words `s`,
//!
//! ```text
//! n  = (w0 + s0) * (w1 + s1) + (w2 + s2) * (w3 + s3) + ...      the sums mod 2^64, the rest mod 2^128     (NH)
//! c' = (c + low(n)) * k^2 + high(n) * k                          mod 2^61 - 1;  low, high: 60 bits each    (a polynomial)
//! ```
//!
//! and `c` goes on from block to block, so that it is one polynomial over all tokens of the prefix.
//!
//! # What is proven
//!
//! Take two different prefixes of the same length under the same keys, chosen without knowledge of the secret and of any
//! hash. At the first place where they differ, NH gives both the same 128 bits with probability at most 2^-64 (Black and
//! others, "UMAC", 1999), and the same lower 120 with at most 2^-56. If those differ, two polynomials in `k` of degree
//! at most twice the number of 16-token pieces are equal at no more points than that, of 2^61 - 2. So
//! `P(same check) <= 2^-56 + 2 * pieces / (2^61 - 2)`: below 2^-46 for a million tokens. It is a universal hash and not a
//! one-way function: who sees enough hashes can compute the secret.

/// 2^61 - 1.
const PRIME: u64 = (1 << 61) - 1;
/// The bits of a half of `n` that are kept: fewer than 61, so that no two halves are the same number mod the prime.
const HALF_BITS: u32 = 60;
const HALF: u64 = (1 << HALF_BITS) - 1;
/// Tokens that are hashed at once.
const PIECE: usize = 16;

/// The secret of the second hash.
pub(super) struct Check {
    words: [u64; PIECE / 2],
    k: u64,
    k_squared: u64,
    partial: u64,
}

impl Check {
    /// Bytes of key material.
    pub(super) const KEY_BYTES: usize = 8 * (PIECE / 2 + 2);

    pub(super) fn new(key: &[u8; Self::KEY_BYTES]) -> Self {
        let (words, _) = key.as_chunks::<8>();
        // Neither 0, which forgets everything, nor the prime, which is 0.
        let k = u64::from_le_bytes(words[PIECE / 2]) % (PRIME - 1) + 1;
        let k_squared = reduce(u128::from(k) * u128::from(k)) % PRIME;
        let partial = u64::from_le_bytes(words[PIECE / 2 + 1]);
        Self { words: std::array::from_fn(|i| u64::from_le_bytes(words[i])), k, k_squared, partial }
    }

    /// A number that a chain may begin with.
    pub(super) const fn begin(bits: u64) -> u64 {
        bits & HALF
    }

    /// The check of a prefix that goes on with these tokens.
    #[inline]
    pub(super) fn extend(&self, mut check: u64, tokens: &[u32]) -> u64 {
        let (pieces, rest) = tokens.as_chunks::<PIECE>();
        for piece in pieces {
            check = self.piece(check, piece);
        }
        if !rest.is_empty() {
            let mut piece = [0; PIECE];
            piece[..rest.len()].copy_from_slice(rest);
            check = self.piece(check, &piece);
        }
        check
    }

    /// The check of an unfinished block: told from one with zeros at its end by a last piece that says how many tokens it has,
    /// and from full blocks by a secret of its own.
    #[inline]
    pub(super) fn partial(&self, check: u64, tokens: &[u32]) -> u64 {
        let mut last = [0; PIECE];
        // Enough: there are no blocks of four billion tokens.
        last[0] = tokens.len() as u32;
        self.piece(self.extend(check, tokens), &last) ^ self.partial
    }

    #[inline]
    pub(super) fn piece(&self, check: u64, tokens: &[u32; PIECE]) -> u64 {
        let word = |i: usize| {
            let pair = u64::from(tokens[2 * i]) | u64::from(tokens[2 * i + 1]) << 32;
            u128::from(pair.wrapping_add(self.words[i]))
        };
        let product = |i: usize| word(i) * word(i + 1);
        let n = (product(0).wrapping_add(product(2))).wrapping_add(product(4).wrapping_add(product(6)));
        let (low, high) = (n as u64 & HALF, (n >> HALF_BITS) as u64 & HALF);
        // Wrapping: only a check that was made up elsewhere is so large.
        let low = u128::from(check.wrapping_add(low)) * u128::from(self.k_squared);
        reduce(low + u128::from(high) * u128::from(self.k))
    }
}

/// A number below 2^61 + 8 that is the same mod 2^61 - 1, of one below 2^126.
#[inline]
fn reduce(number: u128) -> u64 {
    let once = (number as u64 & PRIME) + (number >> 61) as u64;
    (once & PRIME) + (once >> 61)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same by the book: every step mod the prime, nothing postponed.
    fn by_the_book(check: &Check, begin: u64, tokens: &[u32]) -> u64 {
        let p = u128::from(PRIME);
        let mut c = u128::from(begin);
        for piece in tokens.chunks(PIECE) {
            let token = |i: usize| u64::from(piece.get(i).copied().unwrap_or(0));
            let mut n = 0u128;
            for i in (0..PIECE / 2).step_by(2) {
                let word = |i: usize| (token(2 * i) + (token(2 * i + 1) << 32)).wrapping_add(check.words[i]);
                n = n.wrapping_add(u128::from(word(i)) * u128::from(word(i + 1)));
            }
            let (low, high) = (n % (1 << 60), (n >> 60) % (1 << 60));
            let k = u128::from(check.k);
            c = (c + low) % p * k % p;
            c = (c + high) % p * k % p;
        }
        c as u64
    }

    #[test]
    fn is_the_polynomial_that_it_claims_to_be() {
        for round in 0..64u64 {
            let key: [u8; Check::KEY_BYTES] = std::array::from_fn(|i| {
                // All ones too, where the sums are largest.
                if round == 0 { 0xff } else { (round.wrapping_mul(i as u64 * 2 + 77) >> (i % 5)) as u8 }
            });
            let check = Check::new(&key);
            let tokens: Vec<u32> =
                (0..100).map(|i| if round % 3 == 0 { u32::MAX - i } else { i * 7919 }).collect();
            for len in [1, 15, 16, 17, 32, 100] {
                let begin = Check::begin(round.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                let got = check.extend(begin, &tokens[..len]);
                assert_eq!(
                    got % PRIME,
                    by_the_book(&check, begin, &tokens[..len]),
                    "round {round}, {len} tokens"
                );
            }
        }
    }

    #[test]
    fn no_check_makes_it_panic() {
        let check = Check::new(&[0xff; Check::KEY_BYTES]);
        check.extend(u64::MAX, &[u32::MAX; 33]);
    }
}
