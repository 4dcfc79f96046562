//! Layouts from the `config.json` of a model, as Hugging Face has it.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::dtype::Dtype;
use crate::error::LayoutError;

use super::layout::{KvLayout, KvLayoutBuilder};

/// Keys of models whose layers differ, or keep other things than K and V of every token.
const OTHER_STATE: [&str; 20] = [
    "attention_chunk_size",
    "attn_layer_period",
    "attn_type_list",
    "compress_ratios",
    "cross_attention_layers",
    "full_attention_interval",
    "global_attn_every_n_layers",
    "hybrid_override_pattern",
    "index_head_dim",
    "index_topk",
    "linear_attn_config",
    "linear_num_key_heads",
    "mamba_d_state",
    "mamba_num_heads",
    "no_rope_layers",
    "num_kv_shared_layers",
    "sliding_window_pattern",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
];

/// Beginnings of the types of models with windows in some layers, which older configurations do not
/// tell otherwise.
const WINDOWED: [&str; 6] = ["cohere2", "gemma2", "gemma3", "gemma4", "gpt_oss", "llama4"];

/// Types of layers that all keep K and V.
const ATTENTION: [&str; 3] = ["attention", "full_attention", "sliding_attention"];

/// The keys that are read.
#[derive(Deserialize)]
struct Config {
    model_type: Option<String>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    #[serde(alias = "num_kv_heads")]
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_size: Option<usize>,
    kv_lora_rank: Option<usize>,
    qk_rope_head_dim: Option<usize>,
    torch_dtype: Option<String>,
    dtype: Option<String>,
    #[serde(alias = "layers_block_type")]
    layer_types: Option<Vec<String>>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Returns the path of a configuration, if a text is one.
pub(super) fn path(text: &str) -> Option<PathBuf> {
    let (path, inside) = (Path::new(text), Path::new(text).join("config.json"));
    let is_file = path.is_file() || path.extension().is_some_and(|end| end == "json");
    is_file.then(|| path.to_owned()).or_else(|| inside.is_file().then_some(inside))
}

/// Reads a configuration.
pub(super) fn read(path: &Path) -> Result<KvLayoutBuilder, LayoutError> {
    let path_name = path.display().to_string();
    match fs::read_to_string(path) {
        Ok(text) => of_json(&text, path_name),
        Err(error) => Err(LayoutError::Config { path: path_name, reason: error.to_string() }),
    }
}

fn of_json(text: &str, path: String) -> Result<KvLayoutBuilder, LayoutError> {
    let config = match parse(text) {
        Ok(config) => config,
        Err(error) => return Err(LayoutError::Config { path, reason: error.to_string() }),
    };
    match differs(&config) {
        Some(by) => Err(LayoutError::LayersDiffer { by }),
        None => builder(&config).map_err(|reason| LayoutError::Config { path, reason }),
    }
}

fn parse(text: &str) -> Result<Config, serde_json::Error> {
    let mut config: Map<String, Value> = serde_json::from_str(text)?;
    // The language model of one that also takes images or sound. Its type of elements may be outside.
    if let Some(Value::Object(mut nested)) = config.remove("text_config") {
        for key in ["torch_dtype", "dtype"] {
            nested.entry(key).or_insert(config.remove(key).unwrap_or_default());
        }
        config = nested;
    }
    Config::deserialize(Value::from(config))
}

/// Returns why the layers do not all keep K and V of every token in one shape, if so.
fn differs(config: &Config) -> Option<String> {
    let kinds: BTreeSet<&str> = config.layer_types.iter().flatten().map(String::as_str).collect();
    if kinds.len() > 1 || kinds.iter().any(|kind| !ATTENTION.contains(kind)) {
        return Some(format!("layer types {}", kinds.into_iter().collect::<Vec<_>>().join(", ")));
    }
    // One type of all layers says more than the type of the model.
    let model = config.model_type.as_deref().filter(|_| kinds.is_empty());
    if let Some(model) = model.filter(|model| WINDOWED.iter().any(|windowed| model.starts_with(windowed))) {
        return Some(format!("model_type {model}"));
    }
    if config.use_sliding_window == Some(true) && config.max_window_layers != Some(0) && kinds.is_empty() {
        return Some("use_sliding_window".to_owned());
    }
    let says = |value: &Value| match value {
        Value::Null => false,
        Value::Bool(is) => *is,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::Array(items) => !items.is_empty(),
        Value::String(_) | Value::Object(_) => true,
    };
    OTHER_STATE.into_iter().find(|key| config.others.get(*key).is_some_and(says)).map(str::to_owned)
}

fn builder(config: &Config) -> Result<KvLayoutBuilder, String> {
    let missing = |key: &str| format!("it has no {key}");
    let layers = config.num_hidden_layers.ok_or_else(|| missing("num_hidden_layers"))?;
    let builder = KvLayout::builder().layers(layers).dtype(dtype(config)?);
    if let Some(rank) = config.kv_lora_rank {
        let rope = config.qk_rope_head_dim.ok_or_else(|| missing("qk_rope_head_dim"))?;
        return Ok(builder.latent(rank + rope));
    }
    if config.others.get("multi_query") == Some(&Value::Bool(true)) {
        return Err("multi_query is not supported".to_owned());
    }
    let heads = config.num_attention_heads;
    let kv_heads = config.num_key_value_heads.or(heads).ok_or_else(|| missing("num_key_value_heads"))?;
    let split = || config.hidden_size?.checked_div(heads?);
    let head_dim = config.head_dim.or_else(split).ok_or_else(|| missing("head_dim"))?;
    Ok(builder.kv_heads(kv_heads).head_dim(head_dim))
}

fn dtype(config: &Config) -> Result<Dtype, String> {
    match config.torch_dtype.as_ref().or(config.dtype.as_ref()).map(String::as_str) {
        None | Some("auto" | "bfloat16") => Ok(Dtype::Bf16),
        Some("float16") => Ok(Dtype::F16),
        Some("float32") => Ok(Dtype::F32),
        Some(other) => Err(format!("K and V of dtype {other:?} are not supported")),
    }
}
