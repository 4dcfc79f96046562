//! The arithmetic: matrix products, normalization, rotary embeddings, attention.
//!
//! Every function computes a row of its output from the corresponding row of its input alone, and
//! sums in an order that depends only on the length of the sum. A token's logits therefore have the
//! same bits whatever batch or chunk the token is computed in, and wherever its K and V lie.

use crate::cache::Tile;

/// Number of partial sums of a dot product, which the compiler keeps in vector registers.
const LANES: usize = 8;

/// Rows that a matrix product computes together, so that each weight is loaded once for all.
const ROWS: usize = 4;

/// Returns the sum of the lanes, in a fixed order.
fn sum(lanes: [f32; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + b) + (c + d)) + ((e + f) + (g + h))
}

/// Computes the dot products of `N` rows with the same weights.
///
/// The result for a row does not depend on `N`.
#[inline(always)]
fn dots<const N: usize>(weight: &[f32], rows: [&[f32]; N]) -> [f32; N] {
    let whole = weight.len() / LANES * LANES;
    let mut lanes = [[0.0f32; LANES]; N];
    for at in (0..whole).step_by(LANES) {
        let w: &[f32; LANES] = weight[at..at + LANES].try_into().expect("a slice of this length");
        for (lanes, row) in lanes.iter_mut().zip(rows) {
            let x: &[f32; LANES] = row[at..at + LANES].try_into().expect("a slice of this length");
            for lane in 0..LANES {
                lanes[lane] += w[lane] * x[lane];
            }
        }
    }
    let mut sums = lanes.map(sum);
    for (sum, row) in sums.iter_mut().zip(rows) {
        for (w, x) in weight[whole..].iter().zip(&row[whole..weight.len()]) {
            *sum += w * x;
        }
    }
    sums
}

/// A dense layer: `y = x W^T + b`.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// `[outputs][inputs]`.
    pub weight: Vec<f32>,
    /// `[outputs]`, or none.
    pub bias: Option<Vec<f32>>,
    /// Length of a row of the input.
    pub inputs: usize,
}

impl Linear {
    /// Returns the product for rows `[rows][inputs]`, as `[rows][outputs]`.
    pub fn apply(&self, x: &[f32]) -> Vec<f32> {
        let (outputs, rows) = (self.weight.len() / self.inputs, x.len() / self.inputs);
        let row = |index: usize| &x[index * self.inputs..][..self.inputs];
        let mut y = vec![0.0; rows * outputs];
        for (output, weight) in self.weight.chunks_exact(self.inputs).enumerate() {
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias[output]);
            let mut at = 0;
            while at + ROWS <= rows {
                for (more, sum) in
                    dots::<ROWS>(weight, std::array::from_fn(|r| row(at + r))).iter().enumerate()
                {
                    y[(at + more) * outputs + output] = sum + bias;
                }
                at += ROWS;
            }
            for at in at..rows {
                y[at * outputs + output] = dots(weight, [row(at)])[0] + bias;
            }
        }
        y
    }
}

/// Normalizes each row by its root mean square, and scales it (RMSNorm).
pub fn rms_norm(x: &[f32], scale: &[f32], epsilon: f32) -> Vec<f32> {
    let mut y = Vec::with_capacity(x.len());
    for row in x.chunks_exact(scale.len()) {
        let factor = (dots(row, [row])[0] / scale.len() as f32 + epsilon).sqrt().recip();
        y.extend(row.iter().zip(scale).map(|(x, scale)| x * factor * scale));
    }
    y
}

/// Adds `y` to `x`, element by element.
pub fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Computes `silu(gate) * up` in place of `gate` (SwiGLU).
pub fn swiglu(gate: &mut [f32], up: &[f32]) {
    gate.iter_mut().zip(up).for_each(|(gate, up)| *gate = *gate / (1.0 + (-*gate).exp()) * up);
}

/// The angles of rotary position embeddings: element `i` of a head turns with element `i + half`.
#[derive(Clone, Debug)]
pub struct Rotary {
    /// Cosine and sine, `[positions][half]`.
    angles: Vec<(f32, f32)>,
    half: usize,
}

impl Rotary {
    /// Computes the angles of `positions` positions.
    pub fn new(positions: usize, head_dim: usize, theta: f64) -> Self {
        let half = head_dim / 2;
        let angle = |position: usize, i: usize| {
            let angle = position as f64 * theta.powf(-(i as f64) / half as f64);
            (angle.cos() as f32, angle.sin() as f32)
        };
        let angles = (0..positions).flat_map(|position| (0..half).map(move |i| angle(position, i))).collect();
        Self { angles, half }
    }

    /// Turns all heads of one token, `[heads][head_dim]`.
    pub fn turn(&self, heads: &mut [f32], position: usize) {
        let angles = &self.angles[position * self.half..][..self.half];
        for head in heads.chunks_exact_mut(2 * self.half) {
            let (low, high) = head.split_at_mut(self.half);
            for ((x, y), (cos, sin)) in low.iter_mut().zip(high).zip(angles) {
                (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
            }
        }
    }
}

/// Numbers of heads, and elements per head.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Heads of Q.
    pub q: usize,
    /// Heads of K and V; each serves `q / kv` heads of Q.
    pub kv: usize,
    /// Elements per head.
    pub dim: usize,
}

/// Causal grouped-query attention of one sequence's new tokens, over all of its tokens.
///
/// `q` has the shape `[new tokens][q heads][dim]`, and the first new token is at position `first`.
/// The tiles hold K and V of consecutive tokens from position 0 on, `[tokens][kv heads][dim]`; how
/// the tokens are divided into tiles does not change a bit of the result.
pub fn attention(heads: Heads, q: &[f32], first: usize, tiles: &[Tile<'_>], out: &mut [f32]) {
    let Heads { q: q_heads, kv, dim } = heads;
    let (scale, mut scores) = ((dim as f32).sqrt().recip(), Vec::new());
    let each = q.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate();
    for (index, (q, out)) in each {
        let (visible, kv_head) = (first + index / q_heads + 1, index % q_heads * kv / q_heads);
        scores.clear();
        for tile in tiles {
            let keys = tile.k.chunks_exact(kv * dim).take(visible - scores.len());
            scores.extend(keys.map(|k| dots(q, [&k[kv_head * dim..][..dim]])[0] * scale));
        }
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut total = 0.0;
        for score in &mut scores {
            *score = (*score - largest).exp();
            total += *score;
        }
        out.fill(0.0);
        let mut weights = scores.iter().map(|score| score / total);
        for tile in tiles {
            for (v, weight) in tile.v.chunks_exact(kv * dim).zip(&mut weights) {
                out.iter_mut().zip(&v[kv_head * dim..]).for_each(|(out, v)| *out += weight * v);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(len: usize, seed: u64) -> Vec<f32> {
        let mut rng = fastrand::Rng::with_seed(seed);
        (0..len).map(|_| rng.f32() - 0.5).collect()
    }

    #[test]
    fn a_row_of_a_product_does_not_depend_on_the_rows_beside_it() {
        for inputs in [1, 7, 8, 19, 64] {
            let layer = Linear { weight: random(5 * inputs, 1), bias: Some(random(5, 2)), inputs };
            let x = random(11 * inputs, 3);
            let whole = layer.apply(&x);
            for (row, y) in x.chunks_exact(inputs).zip(whole.chunks_exact(5)) {
                assert_eq!(layer.apply(row), y);
                for (output, y) in y.iter().enumerate() {
                    let exact: f64 = (0..inputs)
                        .map(|i| f64::from(layer.weight[output * inputs + i]) * f64::from(row[i]))
                        .sum();
                    let exact = exact + f64::from(layer.bias.as_ref().unwrap()[output]);
                    assert!((f64::from(*y) - exact).abs() < 1e-4, "{y} instead of {exact}");
                }
            }
        }
    }

    #[test]
    fn attention_does_not_depend_on_the_division_into_tiles_or_chunks() {
        let heads = Heads { q: 4, kv: 2, dim: 8 };
        let (tokens, row) = (13, heads.kv * heads.dim);
        let (q, k, v) = (random(tokens * 32, 1), random(tokens * row, 2), random(tokens * row, 3));
        let mut whole = vec![0.0; q.len()];
        attention(heads, &q, 0, &[Tile { k: &k, v: &v }], &mut whole);
        let tiles: Vec<_> = k.chunks(4 * row).zip(v.chunks(4 * row)).map(|(k, v)| Tile { k, v }).collect();
        let mut tiled = vec![0.0; q.len()];
        let (head, tail) = tiled.split_at_mut(5 * 32);
        attention(heads, &q[..5 * 32], 0, &tiles, head);
        attention(heads, &q[5 * 32..], 5, &tiles, tail);
        assert_eq!(whole, tiled);
        // The first token sees only itself, with weight 1.
        assert_eq!(whole[..8], v[..8]);
        assert_eq!(whole[16..24], v[8..16]);
    }

    #[test]
    fn a_rotation_keeps_lengths_and_depends_on_distance_only() {
        let rotary = Rotary::new(16, 8, 10_000.0);
        let product = |at: usize, other: usize| {
            let (mut a, mut b) = (random(8, 1), random(8, 2));
            rotary.turn(&mut a, at);
            rotary.turn(&mut b, other);
            dots(&a, [&b])[0]
        };
        assert!((product(3, 1) - product(14, 12)).abs() < 1e-5);
        assert!((product(3, 1) - product(3, 2)).abs() > 1e-4);
        let (before, mut after) = (random(8, 1), random(8, 1));
        rotary.turn(&mut after, 9);
        assert!((dots(&before, [&before])[0] - dots(&after, [&after])[0]).abs() < 1e-5);
    }
}
