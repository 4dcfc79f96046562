//! Layouts of well-known models, from their published configurations.

use crate::error::LayoutError;

use super::layout::{KvLayout, KvLayoutBuilder};

/// A model's name and the shape of its KV cache.
struct Model {
    name: &'static str,
    layers: usize,
    shape: Shape,
    block_tokens: usize,
}

enum Shape {
    Heads { kv_heads: usize, head_dim: usize },
    Latent { elements: usize },
}

const fn heads(name: &'static str, layers: usize, kv_heads: usize, head_dim: usize) -> Model {
    Model { name, layers, shape: Shape::Heads { kv_heads, head_dim }, block_tokens: 16 }
}

/// A model with latent vectors; the rotary part of K, which all heads share, is stored beside the
/// vector.
const fn latent(name: &'static str, layers: usize, lora_rank: usize, rope_dim: usize) -> Model {
    Model { name, layers, shape: Shape::Latent { elements: lora_rank + rope_dim }, block_tokens: 16 }
}

const MODELS: &[Model] = &[
    Model { block_tokens: 4, ..heads("tiny", 2, 2, 8) },
    heads("opt-125m", 12, 12, 64),
    heads("qwen2.5-0.5b", 24, 2, 64),
    heads("qwen2.5-7b", 28, 4, 128),
    heads("qwen2.5-72b", 80, 8, 128),
    heads("qwen3-8b", 36, 8, 128),
    heads("qwen3-32b", 64, 8, 128),
    heads("qwen3-30b-a3b", 48, 4, 128),
    heads("qwen3-235b-a22b", 94, 4, 128),
    heads("llama-3.2-1b", 16, 8, 64),
    heads("llama-3.1-8b", 32, 8, 128),
    heads("llama-3.1-70b", 80, 8, 128),
    heads("llama-3.1-405b", 126, 8, 128),
    heads("mistral-7b", 32, 8, 128),
    heads("mixtral-8x7b", 32, 8, 128),
    heads("gemma-2-9b", 42, 8, 256),
    latent("deepseek-v2-lite", 27, 512, 64),
    latent("deepseek-v3", 61, 512, 64),
];

impl KvLayout {
    /// Returns the layout of a well-known model, in bf16 with 16 tokens per block; see
    /// [`names`](Self::names).
    ///
    /// # Errors
    /// [`LayoutError::UnknownModel`], which lists the known names.
    pub fn named(name: &str) -> Result<Self, LayoutError> {
        Self::named_builder(name)?.build()
    }

    /// Returns a builder with the same values, to change dtype, block size, ranks or arrangement.
    ///
    /// # Errors
    /// [`LayoutError::UnknownModel`], which lists the known names.
    pub fn named_builder(name: &str) -> Result<KvLayoutBuilder, LayoutError> {
        builder(name).ok_or_else(|| LayoutError::UnknownModel {
            name: name.to_owned(),
            known: Self::names().collect::<Vec<_>>().join(", "),
        })
    }

    /// Returns the names that [`named`](Self::named) knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        MODELS.iter().map(|model| model.name)
    }
}

fn builder(name: &str) -> Option<KvLayoutBuilder> {
    let model = MODELS.iter().find(|model| model.name == name)?;
    let builder = KvLayout::builder().layers(model.layers).block_tokens(model.block_tokens);
    Some(match model.shape {
        Shape::Heads { kv_heads, head_dim } => builder.kv_heads(kv_heads).head_dim(head_dim),
        Shape::Latent { elements } => builder.latent(elements),
    })
}
