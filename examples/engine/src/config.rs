//! The shape of a model, and the `config.json` beside real weights.

use std::path::{Path, PathBuf};

use kvpool::{Dtype, Invalid, KvLayout};
use serde::Deserialize;
use thiserror::Error;

use crate::kernels::Heads;

/// The shape of a decoder of the Qwen2 or Llama family.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelConfig {
    /// Elements of a token between the layers.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of K and V; divides `heads`.
    pub kv_heads: usize,
    /// Elements per head; even.
    pub head_dim: usize,
    /// Elements of a token inside of the feed-forward network.
    pub intermediate: usize,
    /// Number of tokens that exist.
    pub vocab: usize,
    /// Base of the rotary angles.
    pub rope_theta: f64,
    /// Added to the mean square before its root is taken.
    pub rms_epsilon: f32,
    /// Whether Q, K and V have a bias, as in Qwen2.
    pub qkv_bias: bool,
    /// Whether the embeddings are also the output layer.
    pub tied: bool,
    /// Token that ends an answer, if any.
    pub end: Option<u32>,
}

/// Why a `config.json` cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        error: std::io::Error,
    },
    /// The file is not JSON, or a field is missing or has another type.
    #[error("{}: {error}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Error of the parser, with the line.
        error: serde_json::Error,
    },
    /// A field has a value that this engine does not support.
    #[error("{field} = {value} is not supported: {reason}")]
    Unsupported {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: String,
        /// Why it is not supported.
        reason: &'static str,
    },
}

/// The fields that are read of a `config.json`.
#[derive(Deserialize)]
struct Json {
    model_type: String,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: usize,
    vocab_size: usize,
    rope_theta: Option<f64>,
    rope_scaling: Option<serde_json::Value>,
    rms_norm_eps: f32,
    attention_bias: Option<bool>,
    #[serde(default)]
    tie_word_embeddings: bool,
    eos_token_id: Option<serde_json::Value>,
}

impl ModelConfig {
    /// Returns a model of 0.8 million parameters, for measurements with random weights.
    pub fn small() -> Self {
        Self {
            hidden: 128,
            layers: 4,
            heads: 8,
            kv_heads: 2,
            head_dim: 16,
            intermediate: 352,
            vocab: 512,
            rope_theta: 10_000.0,
            rms_epsilon: 1e-6,
            qkv_bias: true,
            tied: false,
            end: None,
        }
    }

    /// Returns a model of 12 thousand parameters, for tests.
    pub fn tiny() -> Self {
        let sizes = Self { hidden: 32, layers: 2, heads: 4, kv_heads: 2, head_dim: 8, ..Self::small() };
        Self { intermediate: 40, vocab: 64, ..sizes }
    }

    /// Reads the `config.json` of a model.
    ///
    /// # Errors
    ///
    /// [`ConfigError`].
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|error| ConfigError::Io { path: path.into(), error })?;
        let json: Json =
            serde_json::from_str(&text).map_err(|error| ConfigError::Json { path: path.into(), error })?;
        let unsupported = |field, value: String, reason| ConfigError::Unsupported { field, value, reason };
        let is_qwen2 = match json.model_type.as_str() {
            "qwen2" => true,
            "llama" => false,
            other => return Err(unsupported("model_type", other.into(), "only qwen2 and llama are")),
        };
        if let Some(scaling) = json.rope_scaling {
            return Err(unsupported("rope_scaling", scaling.to_string(), "angles are not scaled"));
        }
        let heads = json.num_attention_heads;
        // A list of end tokens exists too; the first one is then used.
        let end = json.eos_token_id.map(|end| end.get(0).cloned().unwrap_or(end));
        let config = Self {
            hidden: json.hidden_size,
            layers: json.num_hidden_layers,
            heads,
            kv_heads: json.num_key_value_heads.unwrap_or(heads),
            head_dim: json.head_dim.unwrap_or(json.hidden_size / heads.max(1)),
            intermediate: json.intermediate_size,
            vocab: json.vocab_size,
            rope_theta: json.rope_theta.unwrap_or(10_000.0),
            rms_epsilon: json.rms_norm_eps,
            qkv_bias: json.attention_bias.unwrap_or(is_qwen2),
            tied: json.tie_word_embeddings,
            end: end.and_then(|end| end.as_u64()).and_then(|end| u32::try_from(end).ok()),
        };
        config.check()?;
        Ok(config)
    }

    /// Checks that the sizes fit together.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Unsupported`].
    pub fn check(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("hidden_size", self.hidden),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("intermediate_size", self.intermediate),
            ("vocab_size", self.vocab),
        ];
        let unsupported = |field, value: usize, reason| ConfigError::Unsupported {
            field,
            value: value.to_string(),
            reason,
        };
        if let Some(&(field, value)) = sizes.iter().find(|(_, size)| *size == 0 || *size > 1 << 24) {
            return Err(unsupported(field, value, "it must be from 1 to 16,777,216"));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(unsupported("num_key_value_heads", self.kv_heads, "it must divide the query heads"));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(unsupported("head_dim", self.head_dim, "rotary embeddings need an even number"));
        }
        Ok(())
    }

    /// Returns the numbers of heads.
    pub fn attention_heads(&self) -> Heads {
        Heads { q: self.heads, kv: self.kv_heads, dim: self.head_dim }
    }

    /// Returns the number of elements of K of one token in one layer.
    pub fn kv_row(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Returns the layout of a pool's blocks for this model, in f32.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the sizes exceed those of a pool.
    pub fn layout(&self, block_tokens: usize) -> Result<KvLayout, Invalid> {
        let builder = KvLayout::builder().layers(self.layers).kv_heads(self.kv_heads).head_dim(self.head_dim);
        builder.block_tokens(block_tokens).dtype(Dtype::F32).build()
    }
}
