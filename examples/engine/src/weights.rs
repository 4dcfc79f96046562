//! The weights of a model: random ones from a seed, or those of a safetensors file.

use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use thiserror::Error;

use crate::config::ModelConfig;
use crate::kernels::Linear;

/// The weights of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Scale of the normalization before attention.
    pub attention_norm: Vec<f32>,
    /// Projections to Q, K and V.
    pub qkv: [Linear; 3],
    /// Projection of the attended values.
    pub out: Linear,
    /// Scale of the normalization before the feed-forward network.
    pub mlp_norm: Vec<f32>,
    /// Gate of the feed-forward network.
    pub gate: Linear,
    /// Its other input projection.
    pub up: Linear,
    /// Its output projection.
    pub down: Linear,
}

/// All weights of a model, in f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    /// `[vocab][hidden]`.
    pub embeddings: Vec<f32>,
    /// The layers, from the input up.
    pub layers: Vec<Layer>,
    /// Scale of the last normalization.
    pub norm: Vec<f32>,
    /// Projection to logits, if it is not the embeddings.
    pub head: Option<Linear>,
}

/// Why weights could not be loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The file cannot be read.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        error: std::io::Error,
    },
    /// The file is not a safetensors file.
    #[error("{}: {error}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Error of the parser.
        error: safetensors::SafeTensorError,
    },
    /// The file has no tensor of this name.
    #[error("tensor {name} is missing")]
    Missing {
        /// Name of the tensor.
        name: String,
    },
    /// A tensor has another shape than the configuration demands.
    #[error("tensor {name} has shape {shape:?} instead of {expected:?}")]
    Shape {
        /// Name of the tensor.
        name: String,
        /// Its shape in the file.
        shape: Vec<usize>,
        /// Its shape by the configuration.
        expected: Vec<usize>,
    },
    /// A tensor has a type other than f32, f16 and bf16.
    #[error("tensor {name} has type {dtype:?}; supported are f32, f16 and bf16")]
    Type {
        /// Name of the tensor.
        name: String,
        /// Its type in the file.
        dtype: Dtype,
    },
}

impl Weights {
    /// Makes random weights from a seed.
    pub fn random(config: &ModelConfig, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let made = Self::build::<std::convert::Infallible>(config, |name, shape| {
            Ok(random_tensor(&mut rng, name, shape))
        });
        let Ok(weights) = made;
        weights
    }

    /// Loads the weights of a safetensors file with the tensor names of Qwen2 and Llama.
    ///
    /// # Errors
    ///
    /// [`WeightsError`].
    pub fn load(config: &ModelConfig, path: &Path) -> Result<Self, WeightsError> {
        let bytes = std::fs::read(path).map_err(|error| WeightsError::Io { path: path.into(), error })?;
        let file = SafeTensors::deserialize(&bytes)
            .map_err(|error| WeightsError::Format { path: path.into(), error })?;
        Self::build(config, |name, shape| {
            let tensor = file.tensor(name).map_err(|_| WeightsError::Missing { name: name.into() })?;
            if tensor.shape() != shape {
                let (shape, expected) = (tensor.shape().to_vec(), shape.to_vec());
                return Err(WeightsError::Shape { name: name.into(), shape, expected });
            }
            elements(&tensor).ok_or_else(|| WeightsError::Type { name: name.into(), dtype: tensor.dtype() })
        })
    }

    /// Assembles weights from tensors, which `get` returns by name and shape.
    ///
    /// # Errors
    ///
    /// The first error of `get`.
    pub fn build<E>(
        config: &ModelConfig,
        mut get: impl FnMut(&str, &[usize]) -> Result<Vec<f32>, E>,
    ) -> Result<Self, E> {
        let ModelConfig { hidden, intermediate, vocab, heads, kv_heads, head_dim, .. } = *config;
        let embeddings = get("model.embed_tokens.weight", &[vocab, hidden])?;
        let mut layers = Vec::with_capacity(config.layers);
        for layer in 0..config.layers {
            let mut get = |name: &str, shape: &[usize]| get(&format!("model.layers.{layer}.{name}"), shape);
            let mut linear =
                |name: &str, outputs: usize, inputs: usize, has_bias: bool| -> Result<Linear, E> {
                    let weight = get(&format!("{name}.weight"), &[outputs, inputs])?;
                    let bias = if has_bias { Some(get(&format!("{name}.bias"), &[outputs])?) } else { None };
                    Ok(Linear { weight, bias, inputs })
                };
            let bias = config.qkv_bias;
            let qkv = [
                linear("self_attn.q_proj", heads * head_dim, hidden, bias)?,
                linear("self_attn.k_proj", kv_heads * head_dim, hidden, bias)?,
                linear("self_attn.v_proj", kv_heads * head_dim, hidden, bias)?,
            ];
            let out = linear("self_attn.o_proj", hidden, heads * head_dim, false)?;
            let gate = linear("mlp.gate_proj", intermediate, hidden, false)?;
            let up = linear("mlp.up_proj", intermediate, hidden, false)?;
            let down = linear("mlp.down_proj", hidden, intermediate, false)?;
            let attention_norm = get("input_layernorm.weight", &[hidden])?;
            let mlp_norm = get("post_attention_layernorm.weight", &[hidden])?;
            layers.push(Layer { attention_norm, qkv, out, mlp_norm, gate, up, down });
        }
        let norm = get("model.norm.weight", &[hidden])?;
        let head = if config.tied {
            None
        } else {
            Some(Linear { weight: get("lm_head.weight", &[vocab, hidden])?, bias: None, inputs: hidden })
        };
        Ok(Self { embeddings, layers, norm, head })
    }
}

/// Returns random elements of a tensor, scaled so that activations keep their size.
pub fn random_tensor(rng: &mut fastrand::Rng, name: &str, shape: &[usize]) -> Vec<f32> {
    let count = shape.iter().product();
    let (center, width) = match shape {
        [_] if name.ends_with("norm.weight") => (1.0, 0.2),
        [_] => (0.0, 0.2),
        [.., inputs] => (0.0, if name.contains("embed") { 2.0 } else { 3.4 / (*inputs as f32).sqrt() }),
        [] => (0.0, 0.0),
    };
    (0..count).map(|_| center + width * (rng.f32() - 0.5)).collect()
}

/// Returns a tensor's elements in f32, or none for other types than f32, f16 and bf16.
fn elements(tensor: &TensorView<'_>) -> Option<Vec<f32>> {
    let bytes = tensor.data();
    let halves = || bytes.chunks_exact(2).map(|two| [two[0], two[1]]);
    Some(match tensor.dtype() {
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Dtype::F16 => halves().map(|two| half::f16::from_le_bytes(two).to_f32()).collect(),
        Dtype::BF16 => halves().map(|two| half::bf16::from_le_bytes(two).to_f32()).collect(),
        _ => return None,
    })
}
