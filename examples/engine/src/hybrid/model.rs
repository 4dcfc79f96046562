//! A decoder whose layers differ, and what they ask of a memory.

use std::ops::Range;

use kvpool::storage::groups::{LayerCache, Reach, Row};
use kvpool::{Dtype, SequenceError};

use crate::cache::Tile;
use crate::config::ModelConfig;
use crate::kernels::{Heads, Linear, Rotary, add, attention, rms_norm, swiglu};
use crate::weights::{Layer, Weights};

/// What a layer keeps of a sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keeps {
    /// K and V of all tokens.
    All,
    /// K and V of the last tokens.
    Window(usize),
    /// K and V of the tokens since the last multiple of a length.
    Chunk(usize),
    /// A matrix for each head, which each token overwrites.
    State,
}

impl Keeps {
    /// Returns the first position that the token at a position sees.
    fn begin(self, position: usize) -> usize {
        match self {
            Self::All => 0,
            Self::Window(tokens) => (position + 1).saturating_sub(tokens),
            Self::Chunk(tokens) => position / tokens * tokens,
            Self::State => position,
        }
    }
}

/// The shape of a layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerShape {
    /// What it keeps.
    pub keeps: Keeps,
    /// Its heads; with a state, as many of K and V as of Q.
    pub heads: Heads,
}

impl LayerShape {
    /// Returns the number of elements of K of a token.
    pub fn kv_row(&self) -> usize {
        self.heads.kv * self.heads.dim
    }

    /// Returns the number of elements of its state.
    pub fn state_len(&self) -> usize {
        self.heads.kv * self.heads.dim * self.heads.dim
    }

    /// Returns what the library needs to know to group the layers.
    pub fn cache(&self) -> LayerCache {
        let Heads { kv, dim, .. } = self.heads;
        let row = Row::Heads { kv_heads: kv as u64, k_dim: dim as u64, v_dim: dim as u64 };
        let reach = match self.keeps {
            Keeps::All => Reach::All,
            Keeps::Window(tokens) => Reach::Window { tokens: tokens as u64, sinks: 0 },
            Keeps::Chunk(tokens) => Reach::Chunk { tokens: tokens as u64 },
            Keeps::State => Reach::State,
        };
        let state = Row::bytes((self.state_len() * Dtype::F32.bytes()) as u64);
        LayerCache { row: if self.keeps == Keeps::State { state } else { row }, reach }
    }
}

/// Where the layers of one sequence keep what they compute.
pub trait LayerMemory {
    /// Stores K and V of new tokens, the first of them at position `first`.
    ///
    /// # Errors
    ///
    /// Errors of the pool.
    fn store(&mut self, layer: usize, first: usize, k: &[f32], v: &[f32]) -> Result<(), SequenceError>;

    /// Returns K and V of tokens, each `[tokens][kv heads][dim]`.
    ///
    /// # Errors
    ///
    /// Errors of the pool, such as a token that was given up.
    fn load(&self, layer: usize, tokens: Range<usize>) -> Result<[Vec<f32>; 2], SequenceError>;

    /// Stores the state of a layer behind the token at a position; a memory need only keep those
    /// from which it computes on.
    fn store_state(&mut self, layer: usize, position: usize, state: &[f32]);

    /// Returns the state of a layer behind the last computed token, drafts that were rejected
    /// aside.
    fn load_state(&self, layer: usize) -> Vec<f32>;
}

/// A decoder whose layers differ.
pub struct HybridModel {
    config: ModelConfig,
    shapes: Vec<LayerShape>,
    layers: Vec<Layer>,
    embeddings: Linear,
    norm: Vec<f32>,
    rotary: Rotary,
}

impl HybridModel {
    /// Creates a model with random weights, for sequences of up to `positions` tokens. All layers
    /// with attention have heads of the dimension of the configuration.
    pub fn random(config: ModelConfig, shapes: Vec<LayerShape>, positions: usize, seed: u64) -> Self {
        let of_layer = |(index, shape): (usize, &LayerShape)| {
            let Heads { q, kv, dim } = shape.heads;
            let config = ModelConfig { layers: 1, heads: q, kv_heads: kv, head_dim: dim, ..config.clone() };
            Weights::random(&config, seed.wrapping_mul(1_000) + index as u64).layers.remove(0)
        };
        let layers = shapes.iter().enumerate().map(of_layer).collect();
        let Weights { embeddings, norm, .. } = Weights::random(&config, seed);
        let rotary = Rotary::new(positions, config.head_dim, config.rope_theta);
        let embeddings = Linear { weight: embeddings, bias: None, inputs: config.hidden };
        Self { config, shapes, layers, embeddings, norm, rotary }
    }

    /// Returns the number of logits of a token.
    pub fn vocab(&self) -> usize {
        self.config.vocab
    }

    /// Returns the shapes of the layers.
    pub fn shapes(&self) -> &[LayerShape] {
        &self.shapes
    }

    /// Computes new tokens of a sequence, of which `first` are computed, and returns their logits,
    /// `[tokens][vocab]`.
    ///
    /// # Errors
    ///
    /// Errors of the memory.
    pub fn forward(
        &self,
        memory: &mut impl LayerMemory,
        tokens: &[u32],
        first: usize,
    ) -> Result<Vec<f32>, SequenceError> {
        let (hidden, epsilon) = (self.config.hidden, self.config.rms_epsilon);
        let embedding = |&token: &u32| &self.embeddings.weight[token as usize * hidden..][..hidden];
        let mut x: Vec<f32> = tokens.iter().flat_map(embedding).copied().collect();
        for (index, (layer, shape)) in self.layers.iter().zip(&self.shapes).enumerate() {
            let normed = rms_norm(&x, &layer.attention_norm, epsilon);
            let qkv = layer.qkv.each_ref().map(|projection| projection.apply(&normed));
            let attended = match shape.keeps {
                Keeps::State => retain(memory, index, shape, &qkv, first),
                _ => self.attend(memory, index, shape, qkv, first)?,
            };
            add(&mut x, &layer.out.apply(&attended));
            let normed = rms_norm(&x, &layer.mlp_norm, epsilon);
            let mut gate = layer.gate.apply(&normed);
            swiglu(&mut gate, &layer.up.apply(&normed));
            add(&mut x, &layer.down.apply(&gate));
        }
        Ok(self.embeddings.apply(&rms_norm(&x, &self.norm, epsilon)))
    }

    /// Computes a layer of attention to the tokens that it keeps.
    fn attend(
        &self,
        memory: &mut impl LayerMemory,
        index: usize,
        shape: &LayerShape,
        [mut q, mut k, v]: [Vec<f32>; 3],
        first: usize,
    ) -> Result<Vec<f32>, SequenceError> {
        let (heads, row) = (shape.heads, shape.kv_row());
        let (q_row, tokens) = (heads.q * heads.dim, k.len() / row);
        for (at, (q, k)) in q.chunks_exact_mut(q_row).zip(k.chunks_exact_mut(row)).enumerate() {
            self.rotary.turn(q, first + at);
            self.rotary.turn(k, first + at);
        }
        memory.store(index, first, &k, &v)?;
        let from = shape.keeps.begin(first);
        let [k, v] = memory.load(index, from..first + tokens)?;
        let mut out = vec![0.0; q.len()];
        for (at, (q, out)) in q.chunks_exact(q_row).zip(out.chunks_exact_mut(q_row)).enumerate() {
            let begin = shape.keeps.begin(first + at);
            let seen = (begin - from) * row..(first + at + 1 - from) * row;
            let tile = Tile { k: &k[seen.clone()], v: &v[seen] };
            attention(heads, q, first + at - begin, &[tile], out);
        }
        Ok(out)
    }
}

/// Computes a layer of linear attention: `S = decay S + k^T v`, `o = q S` (RetNet, 2307.08621).
///
/// Position 0 begins with zeros, whatever the memory holds.
fn retain(
    memory: &mut impl LayerMemory,
    index: usize,
    shape: &LayerShape,
    [q, k, v]: &[Vec<f32>; 3],
    first: usize,
) -> Vec<f32> {
    let Heads { kv: heads, dim, .. } = shape.heads;
    let mut state = if first == 0 { vec![0.0; shape.state_len()] } else { memory.load_state(index) };
    let mut out = vec![0.0; q.len()];
    let rows = q.chunks_exact(dim).zip(k.chunks_exact(dim)).zip(v.chunks_exact(dim));
    let mut each = out.chunks_exact_mut(dim).zip(rows);
    for position in first..first + q.len() / (heads * dim) {
        for (head, (out, ((q, k), v))) in each.by_ref().take(heads).enumerate() {
            let decay = 1.0 - (-5.0 - head as f32).exp2();
            let state = state[head * dim * dim..][..dim * dim].chunks_exact_mut(dim);
            for ((row, q), k) in state.zip(q).zip(k) {
                for ((cell, v), out) in row.iter_mut().zip(v).zip(&mut *out) {
                    *cell = decay * *cell + k * v;
                    *out += q / dim as f32 * *cell;
                }
            }
        }
        memory.store_state(index, position, &state);
    }
    drop(each);
    out
}
