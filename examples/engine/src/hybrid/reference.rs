//! The reference: K, V and states of one sequence, contiguous, from position 0 on.

use std::ops::Range;

use kvpool::SequenceError;

use super::model::{HybridModel, LayerMemory};
use super::request::{Expected, Request};

/// The memory of one sequence.
pub struct Contiguous {
    /// K and V of all tokens, or a state, by layer.
    layers: Vec<[Vec<f32>; 2]>,
    kv_rows: Vec<usize>,
}

impl Contiguous {
    /// Creates the memory of a sequence without tokens.
    pub fn new(model: &HybridModel) -> Self {
        let kv_rows = model.shapes().iter().map(|shape| shape.kv_row()).collect();
        Self { layers: vec![Default::default(); model.shapes().len()], kv_rows }
    }
}

impl LayerMemory for Contiguous {
    fn store(&mut self, layer: usize, first: usize, k: &[f32], v: &[f32]) -> Result<(), SequenceError> {
        for (all, new) in self.layers[layer].iter_mut().zip([k, v]) {
            all.truncate(first * self.kv_rows[layer]);
            all.extend_from_slice(new);
        }
        Ok(())
    }

    fn load(&self, layer: usize, tokens: Range<usize>) -> Result<[Vec<f32>; 2], SequenceError> {
        let row = self.kv_rows[layer];
        Ok(self.layers[layer].each_ref().map(|all| all[tokens.start * row..tokens.end * row].to_vec()))
    }

    fn store_state(&mut self, layer: usize, _position: usize, state: &[f32]) {
        self.layers[layer][0] = state.to_vec();
    }

    fn load_state(&self, layer: usize) -> Vec<f32> {
        self.layers[layer][0].clone()
    }
}

/// Decodes an answer, token by token.
///
/// # Errors
///
/// None: the memory has no pool.
pub fn decode(model: &HybridModel, request: &Request, answer: u32) -> Result<Expected, SequenceError> {
    let (mut memory, mut tokens, mut logits) = (Contiguous::new(model), request.prompt.clone(), Vec::new());
    for position in 0..request.tokens_max() - 1 {
        let row = model.forward(&mut memory, &tokens[position..=position], position)?;
        if position + 1 == tokens.len() {
            tokens.push(request.choose(&row, answer, tokens.len()));
        }
        logits.extend(row);
    }
    Ok(Expected { tokens, logits })
}
