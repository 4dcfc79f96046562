//! The bytes of a token: a function of its text, its position, and the layer, so that a misplaced
//! byte is detected without a reference copy.

use kvpool::storage::KvLayout;

/// Odd constants with well-spread bits (from the golden ratio and the square roots of 2 and 3).
const STEP_TOKEN: u64 = 0x9E37_79B9_7F4A_7C15;
const STEP_LAYER: u64 = 0x6A09_E667_F3BC_C909;
const STEP_WORD: u64 = 0xBB67_AE85_84CA_A73B;

/// Sizes of the bytes of a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Layers.
    pub layers: usize,
    /// Bytes of K of one token in one layer.
    pub k_bytes: usize,
    /// Bytes of V; 0 for a latent layout.
    pub v_bytes: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
}

impl Shape {
    /// Returns the shape of an unquantised layout.
    pub fn of(layout: &KvLayout) -> Self {
        let row = layout.row_elements() * layout.dtype().bytes();
        let latent = layout.parts() == kvpool::storage::KvPlanes::Latent;
        Self {
            layers: layout.layers(),
            k_bytes: row,
            v_bytes: if latent { 0 } else { row },
            block_tokens: layout.block_tokens(),
        }
    }

    /// Returns the number of blocks of this many tokens.
    pub const fn blocks(&self, tokens: u64) -> usize {
        tokens.div_ceil(self.block_tokens as u64) as usize
    }
}

/// Hash of the text on which the bytes of a token depend.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Content(u64);

impl Content {
    /// The empty text.
    pub const BEGIN: Self = Self(STEP_TOKEN);

    /// Returns the content of an attempt at a request.
    pub const fn of_attempt(request: u32, attempt: u32) -> Self {
        // Distinct for 2^32 requests and attempts; the multiplication spreads them over all bits.
        Self(((attempt as u64) << 32 | request as u64).wrapping_add(1).wrapping_mul(STEP_WORD))
    }

    /// Returns the content after a further piece of text, given by number.
    pub const fn then(self, piece: u32) -> Self {
        Self(mix(self.0.rotate_left(23) ^ (piece as u64 + 1).wrapping_mul(STEP_WORD)))
    }

    /// Fills rows of K or V (`plane` 0 or 1), starting with that of token `first`.
    pub fn fill(self, layer: usize, plane: usize, first: usize, row_bytes: usize, rows: &mut [u8]) {
        let base = self.base(layer, plane);
        if row_bytes == 8 {
            for (row, token) in rows.as_chunks_mut::<8>().0.iter_mut().zip(first..) {
                *row = word(base, token, 0).to_le_bytes();
            }
            return;
        }
        for (row, token) in rows.chunks_exact_mut(row_bytes.max(1)).zip(first..) {
            for (index, bytes) in row.chunks_mut(8).enumerate() {
                bytes.copy_from_slice(&word(base, token, index).to_le_bytes()[..bytes.len()]);
            }
        }
    }

    /// Returns the first token whose row is not as it was written, if any.
    pub fn find_wrong(
        self,
        layer: usize,
        plane: usize,
        first: usize,
        row_bytes: usize,
        rows: &[u8],
    ) -> Option<usize> {
        let base = self.base(layer, plane);
        if row_bytes == 8 {
            // Differences are accumulated without a branch; the row is searched only if there is
            // one.
            let rows = rows.as_chunks::<8>().0;
            let wrong = |(row, token): (&[u8; 8], usize)| u64::from_le_bytes(*row) ^ word(base, token, 0);
            let differences = rows.iter().zip(first..).fold(0, |all, pair| all | wrong(pair));
            if differences == 0 {
                return None;
            }
            return rows.iter().zip(first..).find(|&pair| wrong(pair) != 0).map(|(_, token)| token);
        }
        rows.chunks_exact(row_bytes.max(1)).zip(first..).find_map(|(row, token)| {
            let right = row
                .chunks(8)
                .enumerate()
                .all(|(index, bytes)| *bytes == word(base, token, index).to_le_bytes()[..bytes.len()]);
            (!right).then_some(token)
        })
    }

    const fn base(self, layer: usize, plane: usize) -> u64 {
        self.0.wrapping_add((2 * layer + plane) as u64 * 2 + 1).wrapping_mul(STEP_LAYER)
    }
}

#[inline]
fn word(base: u64, token: usize, index: usize) -> u64 {
    let mixed = base
        .wrapping_add((token as u64).wrapping_mul(STEP_TOKEN))
        .wrapping_add((index as u64).wrapping_mul(STEP_WORD));
    mix(mixed)
}

#[inline]
const fn mix(word: u64) -> u64 {
    let mixed = (word ^ word >> 32).wrapping_mul(STEP_TOKEN);
    mixed ^ mixed >> 29
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn filled_rows_are_right_and_any_flipped_bit_is_found() {
        for row_bytes in [8, 3, 24, 30] {
            let content = Content::of_attempt(5, 1);
            let mut rows = vec![0; row_bytes * 20];
            content.fill(2, 1, 100, row_bytes, &mut rows);
            assert_eq!(content.find_wrong(2, 1, 100, row_bytes, &rows), None);
            for at in 0..rows.len() {
                rows[at] ^= 1 << (at % 8);
                assert_eq!(content.find_wrong(2, 1, 100, row_bytes, &rows), Some(100 + at / row_bytes));
                rows[at] ^= 1 << (at % 8);
            }
        }
    }

    /// Every position has distinct bytes, so a misplaced token is detected.
    #[test]
    fn places_differ() {
        let mut seen = HashSet::new();
        let attempts =
            (0..20).flat_map(|request| (0..3).map(move |attempt| Content::of_attempt(request, attempt)));
        let pieces = (0..20).map(|piece| Content::BEGIN.then(piece));
        let twice = (0..20).map(|piece| Content::BEGIN.then(piece).then(3));
        for content in attempts.chain(pieces).chain(twice) {
            for layer in 0..3 {
                for plane in 0..2 {
                    let mut rows = [0; 8 * 50];
                    content.fill(layer, plane, 0, 8, &mut rows);
                    assert!(rows.as_chunks::<8>().0.iter().all(|row| seen.insert(*row)));
                }
            }
        }
    }
}
