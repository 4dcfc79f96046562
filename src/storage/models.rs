use crate::error::Invalid;

use super::groups::{GroupOptions, LayerGroups};
use super::layout::{KvLayout, KvLayoutBuilder};

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

/// A model with latent vectors, stored with the rotary part of K, which all heads share.
const fn latent(name: &'static str, layers: usize, lora_rank: usize, rope_dim: usize) -> Model {
    Model { name, layers, shape: Shape::Latent { elements: lora_rank + rope_dim }, block_tokens: 16 }
}

const MODELS: &[Model] = &[
    Model { block_tokens: 4, ..heads("tiny", 2, 2, 8) },
    heads("opt-125m", 12, 12, 64),
    heads("qwen2.5-0.5b", 24, 2, 64),
    heads("qwen2.5-1.5b", 28, 2, 128),
    heads("qwen2.5-3b", 36, 2, 128),
    heads("qwen2.5-7b", 28, 4, 128),
    heads("qwen2.5-14b", 48, 8, 128),
    heads("qwen2.5-32b", 64, 8, 128),
    heads("qwen2.5-72b", 80, 8, 128),
    heads("qwen3-0.6b", 28, 8, 128),
    heads("qwen3-1.7b", 28, 8, 128),
    heads("qwen3-4b", 36, 8, 128),
    heads("qwen3-8b", 36, 8, 128),
    heads("qwen3-14b", 40, 8, 128),
    heads("qwen3-32b", 64, 8, 128),
    heads("qwen3-30b-a3b", 48, 4, 128),
    heads("qwen3-235b-a22b", 94, 4, 128),
    heads("qwen3-coder-30b-a3b", 48, 4, 128),
    heads("qwen3-coder-480b-a35b", 62, 8, 128),
    heads("llama-3.2-1b", 16, 8, 64),
    heads("llama-3.2-3b", 28, 8, 128),
    heads("llama-3.1-8b", 32, 8, 128),
    heads("llama-3.1-70b", 80, 8, 128),
    heads("llama-3.1-405b", 126, 8, 128),
    heads("llama-3.3-70b", 80, 8, 128),
    heads("mistral-7b", 32, 8, 128),
    heads("mistral-nemo", 40, 8, 128),
    heads("mistral-small-24b", 40, 8, 128),
    heads("mixtral-8x7b", 32, 8, 128),
    heads("mixtral-8x22b", 56, 8, 128),
    heads("phi-4", 40, 10, 128),
    heads("phi-4-mini", 32, 8, 128),
    heads("gemma-2-9b", 42, 8, 256),
    heads("glm-4.5", 92, 8, 128),
    heads("glm-4.5-air", 46, 8, 128),
    heads("minimax-m2", 62, 8, 128),
    latent("deepseek-v2-lite", 27, 512, 64),
    latent("deepseek-v3", 61, 512, 64),
    latent("deepseek-r1", 61, 512, 64),
    latent("kimi-k2", 61, 512, 64),
];

/// Suffixes of names that do not change the shape, besides versions and dates.
const VARIANTS: [&str; 7] = ["base", "chat", "fp8", "hf", "instruct", "it", "thinking"];

impl KvLayout {
    /// Returns the layout of a [well-known model](Self::names), in bf16 with 16 tokens per block.
    ///
    /// Ignores case, organisation and usual suffixes: `qwen2.5-7b` is also
    /// `Qwen/Qwen2.5-7B-Instruct`. Excludes layers for multi-token prediction, and ignores sliding
    /// windows: all layers keep all tokens. The error lists the known names, similar ones first.
    pub fn named(name: &str) -> Result<Self, Invalid> {
        Self::named_builder(name)?.build()
    }

    /// Returns a builder with the same values, to change dtype, block size, ranks or arrangement.
    pub fn named_builder(name: &str) -> Result<KvLayoutBuilder, Invalid> {
        builder(name).ok_or_else(|| {
            let limit = format_args!("one of these, the closest first: {}", closest_first(name));
            Invalid::new("model", format_args!("{name:?}"), limit)
        })
    }

    /// Returns a builder with the values that a text describes: the name of a well-known model, or
    /// numbers such as `layers=32,kv-heads=8,head-dim=128,dtype=bf16`, or with the feature
    /// `model-config` the path of a Hugging Face `config.json` or its folder, in which all layers
    /// must be alike.
    pub fn described(text: &str) -> Result<KvLayoutBuilder, Invalid> {
        #[cfg(feature = "model-config")]
        if let Some(path) = super::model_config::path(text) {
            let config = std::fs::read_to_string(path).map_err(|error| error.to_string());
            return config
                .and_then(|config| super::model_config::builder(&config))
                .map_err(|reason| not_a_config(text, &reason));
        }
        let layout = if text.contains('=') { text.parse() } else { Self::named_builder(text) };
        #[cfg(feature = "model-config")]
        if layout.is_err() && std::path::Path::new(text).is_dir() {
            return Err(not_a_config(text, "a folder without config.json"));
        }
        layout
    }

    /// Returns the names that [`named`](Self::named) knows.
    pub fn names() -> impl Iterator<Item = &'static str> {
        MODELS.iter().map(|model| model.name)
    }
}

impl LayerGroups {
    /// Returns the groups of layers of a model that a text describes, in the ways that
    /// [`KvLayout::described`] accepts; of a `config.json`, the layers can differ.
    pub fn described(text: &str, options: GroupOptions) -> Result<Self, Invalid> {
        #[cfg(feature = "model-config")]
        if let Some(path) = super::model_config::path(text) {
            let config = std::fs::read_to_string(&path).map_err(|error| error.to_string());
            return config
                .and_then(|config| Self::from_config(&config, options).map_err(|error| error.to_string()))
                .map_err(|reason| {
                    let got = format_args!("{}: {reason}", path.display());
                    Invalid::new("layout", got, "the config.json of a model")
                });
        }
        let layout = KvLayout::described(text)?.build()?;
        Self::of_layout(&layout, options)
            .map_err(|error| Invalid::new("layout", error, "layers that can be grouped"))
    }
}

#[cfg(feature = "model-config")]
fn not_a_config(path: &str, reason: &str) -> Invalid {
    Invalid::new("layout", format_args!("{path}: {reason}"), "the config.json of a model with equal layers")
}

fn builder(name: &str) -> Option<KvLayoutBuilder> {
    let name = short(name);
    let mut name = name.as_str();
    let model = loop {
        if let Some(model) = MODELS.iter().find(|model| model.name == name) {
            break model;
        }
        let (rest, end) = name.rsplit_once('-')?;
        let version = end.strip_prefix('v').unwrap_or(end);
        let is_version = version.starts_with(|first: char| first.is_ascii_digit())
            && version.chars().all(|sign| sign.is_ascii_digit() || sign == '.');
        if !is_version && !VARIANTS.contains(&end) {
            return None;
        }
        name = rest;
    };
    let builder = KvLayout::builder().layers(model.layers).block_tokens(model.block_tokens);
    Some(match model.shape {
        Shape::Heads { kv_heads, head_dim } => builder.kv_heads(kv_heads).head_dim(head_dim),
        Shape::Latent { elements } => builder.latent(elements),
    })
}

/// Returns a name in lower case, without organisation and Llama's older prefix.
fn short(name: &str) -> String {
    let name = name.rsplit('/').next().unwrap_or_default().to_lowercase();
    name.strip_prefix("meta-").map(str::to_owned).unwrap_or(name)
}

fn closest_first(name: &str) -> String {
    let name = short(name);
    let mut names: Vec<_> = KvLayout::names().collect();
    names.sort_by_cached_key(|known| strsim::levenshtein(known, &name));
    names.join(", ")
}

impl std::str::FromStr for KvLayoutBuilder {
    type Err = Invalid;

    /// Parses `layers=N,kv-heads=N,head-dim=N`, or `layers=N,latent=N` for multi-head latent
    /// attention; `dtype=NAME` can follow. No part may repeat.
    fn from_str(text: &str) -> Result<Self, Invalid> {
        let (mut builder, mut named) = (KvLayout::builder(), Vec::new());
        for item in text.split(',') {
            let wrong = || {
                let parts = "a part of layers=32,kv-heads=8,head-dim=128,dtype=bf16 or layers=61,latent=576";
                Invalid::new("layout", format_args!("{item:?}"), parts)
            };
            let (key, value) = item.split_once('=').ok_or_else(wrong)?;
            let number = || value.trim().parse().map_err(|_| wrong());
            let key = key.trim().replace('_', "-");
            builder = match key.as_str() {
                "layers" => builder.layers(number()?),
                "kv-heads" => builder.kv_heads(number()?),
                "head-dim" => builder.head_dim(number()?),
                "latent" => builder.latent(number()?),
                "dtype" => builder.dtype(value.trim().parse()?),
                _ => return Err(wrong()),
            };
            let excludes = |other: &String| match other.as_str() {
                "latent" => key == "kv-heads" || key == "head-dim",
                "kv-heads" | "head-dim" => key == "latent",
                _ => false,
            };
            if let Some(other) = named.iter().find(|&other| *other == key || excludes(other)) {
                let got = format_args!("{item:?} beside {other}");
                return Err(Invalid::new("layout", got, "each key once, and latent without heads"));
            }
            named.push(key);
        }
        Ok(builder)
    }
}
