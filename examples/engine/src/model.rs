//! The decoder: one forward pass over the new tokens of several sequences.

use crate::cache::KvCache;
use crate::config::ModelConfig;
use crate::error::EngineError;
use crate::kernels::{Linear, Rotary, add, attention, rms_norm, swiglu};
use crate::weights::Weights;

/// New tokens of one sequence in a step.
pub struct Segment<'a, S> {
    /// K and V of the sequence, with room for the new tokens.
    pub cache: &'a mut S,
    /// The new tokens: a chunk of a prompt, or a decoded token and drafts behind it.
    pub tokens: &'a [u32],
    /// Position of the first of them in the sequence.
    pub first: usize,
    /// Number of the last new tokens whose logits are needed.
    pub logits: usize,
}

/// What workers compute with. A trait, so that the model of the scheduler can do without
/// arithmetic.
pub trait Network: Send + Sync {
    /// Returns the number of logits of a token.
    fn vocab(&self) -> usize;

    /// Returns the token that ends an answer, if any.
    fn end(&self) -> Option<u32>;

    /// Computes the new tokens of all segments, and stores their K and V.
    ///
    /// Returns the logits that were asked for, segment by segment, `[tokens][vocab]`.
    ///
    /// # Errors
    ///
    /// Errors of the cache; the K and V of the new tokens are then unspecified.
    fn forward<C: KvCache>(
        &self,
        cache: &C,
        step: &mut C::Step,
        segments: &mut [Segment<'_, C::Sequence>],
    ) -> Result<Vec<f32>, EngineError>;
}

/// A decoder-only transformer of the Qwen2 and Llama family.
pub struct Model {
    config: ModelConfig,
    weights: Weights,
    head: Linear,
    rotary: Rotary,
}

impl Model {
    /// Creates a model for sequences of up to `positions` tokens.
    pub fn new(config: ModelConfig, mut weights: Weights, positions: usize) -> Self {
        let rotary = Rotary::new(positions, config.head_dim, config.rope_theta);
        let tied = || Linear { weight: weights.embeddings.clone(), bias: None, inputs: config.hidden };
        let head = weights.head.take().unwrap_or_else(tied);
        Self { config, weights, head, rotary }
    }

    /// Returns the shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
}

impl Network for Model {
    fn vocab(&self) -> usize {
        self.config.vocab
    }

    fn end(&self) -> Option<u32> {
        self.config.end
    }

    fn forward<C: KvCache>(
        &self,
        cache: &C,
        step: &mut C::Step,
        segments: &mut [Segment<'_, C::Sequence>],
    ) -> Result<Vec<f32>, EngineError> {
        let (config, heads) = (&self.config, self.config.attention_heads());
        let (q_row, kv_row) = (heads.q * heads.dim, config.kv_row());
        let tokens = segments.iter().flat_map(|segment| segment.tokens);
        // [new tokens of all segments][hidden]
        let mut x: Vec<f32> = Vec::new();
        tokens.for_each(|&token| {
            x.extend_from_slice(&self.weights.embeddings[token as usize * config.hidden..][..config.hidden]);
        });
        for (index, layer) in self.weights.layers.iter().enumerate() {
            let normed = rms_norm(&x, &layer.attention_norm, config.rms_epsilon);
            let [mut q, mut k, v] = layer.qkv.each_ref().map(|projection| projection.apply(&normed));
            let mut attended = vec![0.0; q.len()];
            let mut row = 0;
            for Segment { cache: sequence, tokens, first, .. } in segments.iter_mut() {
                let rows = row..row + tokens.len();
                let (of_q, of_kv) =
                    (rows.start * q_row..rows.end * q_row, rows.start * kv_row..rows.end * kv_row);
                for (at, row) in rows.clone().enumerate() {
                    self.rotary.turn(&mut q[row * q_row..][..q_row], *first + at);
                    self.rotary.turn(&mut k[row * kv_row..][..kv_row], *first + at);
                }
                let (q, out) = (&q[of_q.clone()], &mut attended[of_q]);
                cache.attend(step, sequence, index, *first, &k[of_kv.clone()], &v[of_kv], |tiles| {
                    attention(heads, q, *first, tiles, out);
                })?;
                row = rows.end;
            }
            add(&mut x, &layer.out.apply(&attended));
            let normed = rms_norm(&x, &layer.mlp_norm, config.rms_epsilon);
            let mut gate = layer.gate.apply(&normed);
            swiglu(&mut gate, &layer.up.apply(&normed));
            add(&mut x, &layer.down.apply(&gate));
        }
        // Only the rows whose logits are needed.
        let (mut last, mut row) = (Vec::new(), 0);
        for segment in segments.iter() {
            row += segment.tokens.len();
            last.extend_from_slice(&x[(row - segment.logits) * config.hidden..row * config.hidden]);
        }
        Ok(self.head.apply(&rms_norm(&last, &self.weights.norm, config.rms_epsilon)))
    }
}
