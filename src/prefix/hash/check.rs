//! The second hash: 64 bits whose strength does not depend on the chosen hash function.
//!
//! Tokens are processed 16 at a time, padded with zeros, as eight words `w` of two tokens each.
//! With secret words `s`,
//!
//! ```text
//! n  = (w0 + s0) * (w1 + s1) + (w2 + s2) * (w3 + s3) + ...     the sums in brackets mod 2^64, the rest mod 2^128      (NH)
//! c' = (c + low(n)) * a + high(n) * b       mod 2^61 - 1;  low, high: the upper 60 bits of each half of n      (a polynomial)
//! ```
//!
//! `c` carries over from block to block: one polynomial in `a` and `b` over all tokens of the
//! prefix. It is reduced below 2^63, not below the prime; equal prefixes still have equal checks.
//!
//! # Proven bound
//!
//! Take two different prefixes of the same length under the same keys, chosen without knowledge of
//! the secret or of any hash, and a piece in which they differ. The difference of its two `n` has
//! any given value with probability at most 2^-64 (Black and others, "UMAC", 1999). Both halves
//! agree except in their low 4 bits for 31^2 values, so with probability below 2^-54. Otherwise the
//! difference of the polynomials is nonzero, of degree at most `pieces + 1`, and vanishes for at
//! most that many of 2^59 choices of `a` and `b` (Schwartz and Zippel). For a million tokens,
//! `P(same check) < 2^-54 + (pieces + 1) / 2^59` is below 2^-42. An observer of enough hashes can
//! compute the secret.

const PRIME: u64 = (1 << 61) - 1;
/// Bits of `a`; `BITS`: of `b` and initial values. Few enough that no sum below overflows its word.
const A_BITS: u32 = 59;
const BITS: u32 = 60;
const PIECE: usize = 16;

#[derive(Clone)]
pub(super) struct Check {
    words: [u64; PIECE / 2],
    a: u64,
    b: u64,
    partial: u64,
}

impl Check {
    pub(super) const KEY_BYTES: usize = 8 * (PIECE / 2 + 3);

    pub(super) fn new(key: &[u8; Self::KEY_BYTES]) -> Self {
        let (words, _) = key.as_chunks::<8>();
        let word = |i: usize| u64::from_le_bytes(words[i]);
        let (a, b) = (word(PIECE / 2) >> (64 - A_BITS), word(PIECE / 2 + 1) >> (64 - BITS));
        Self { words: std::array::from_fn(word), a, b, partial: word(PIECE / 2 + 2) }
    }

    pub(super) const fn begin(bits: u64) -> u64 {
        bits >> (64 - BITS)
    }

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

    /// Returns the check of an unfinished block. A last piece with the number of tokens separates
    /// it from a zero-padded block, and a secret of its own from full blocks.
    #[inline]
    pub(super) fn partial(&self, check: u64, tokens: &[u32]) -> u64 {
        let mut last = [0; PIECE];
        // Wide enough: no block has four billion tokens.
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
        let (low, high) = (n as u64 >> 4, (n >> 64) as u64 >> 4);
        // Wrapping: only a check from outside this process is so large. The sum is below (2^63 +
        // 2^60) * 2^59 + 2^120.
        let sum =
            u128::from(check.wrapping_add(low)) * u128::from(self.a) + u128::from(high) * u128::from(self.b);
        // Below 2^63 again, since 2^61 is congruent to 1.
        (sum as u64 & PRIME) + (sum >> 61) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The textbook version: every step reduced mod the prime.
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
            let (low, high) = ((n % (1 << 64)) / 16, (n >> 64) / 16);
            c = ((c + low) % p * u128::from(check.a) % p + high % p * u128::from(check.b) % p) % p;
        }
        c as u64
    }

    #[test]
    fn is_the_polynomial_that_it_claims_to_be() {
        for round in 0..64u64 {
            let key: [u8; Check::KEY_BYTES] = std::array::from_fn(|i| {
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
