#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::dtype::Dtype;

use super::layout::{KvLayout, KvLayoutBuilder};

/// Parts of keys of models whose layers differ, or cache more than K and V per token and head:
/// windows, linear attention, state spaces, indexes, compressed and shared layers.
const DIFFERENT: &str = "mamba ssm_ state_size linear_attn linear_num linear_conv hybrid attention_interval \
    attn_every attn_layer attn_type attention_chunk window_pattern use_sliding no_rope index_topk index_head \
    compress_ratio kv_shared cross_attention_layers";

/// Prefixes of model types with windows in some layers, which the configuration may not show.
const WINDOWED: [&str; 6] = ["cohere2", "gemma2", "gemma3", "gemma4", "gpt_oss", "llama4"];

/// Types of layers that all keep K and V.
const ATTENTION: [&str; 3] = ["attention", "full_attention", "sliding_attention"];

struct Config {
    model_type: Option<String>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_size: Option<usize>,
    kv_lora_rank: Option<usize>,
    qk_rope_head_dim: Option<usize>,
    torch_dtype: Option<String>,
    dtype: Option<String>,
    layer_types: Option<BTreeSet<String>>,
    others: Map<String, Value>,
}

impl Config {
    /// Takes the values of the keys; an error names the key.
    fn new(mut keys: Map<String, Value>) -> Result<Self, String> {
        let keys = &mut keys;
        let types = take(keys, "layer_types")?;
        Ok(Self {
            model_type: take(keys, "model_type")?,
            num_hidden_layers: take(keys, "num_hidden_layers")?,
            num_attention_heads: take(keys, "num_attention_heads")?,
            num_key_value_heads: take(keys, "num_key_value_heads")?,
            head_dim: take(keys, "head_dim")?,
            hidden_size: take(keys, "hidden_size")?,
            kv_lora_rank: take(keys, "kv_lora_rank")?.filter(|&rank| rank > 0),
            qk_rope_head_dim: take(keys, "qk_rope_head_dim")?,
            torch_dtype: take(keys, "torch_dtype")?,
            dtype: take(keys, "dtype")?,
            layer_types: if types.is_some() { types } else { take(keys, "layers_block_type")? },
            others: std::mem::take(keys),
        })
    }
}

fn take<T: DeserializeOwned>(keys: &mut Map<String, Value>, key: &str) -> Result<Option<T>, String> {
    let value = keys.remove(key).unwrap_or_default();
    Option::deserialize(value).map_err(|error| format!("{key}: {error}"))
}

/// Returns the path of a configuration, if the text is one.
pub(super) fn path(text: &str) -> Option<PathBuf> {
    let (path, inside) = (Path::new(text), Path::new(text).join("config.json"));
    let is_file = path.is_file() || path.extension().is_some_and(|end| end == "json");
    is_file.then(|| path.to_owned()).or_else(|| inside.is_file().then_some(inside))
}

/// Returns a builder with a configuration's values, or the reason why it describes no layout.
pub(super) fn builder(text: &str) -> Result<KvLayoutBuilder, String> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut keys: Map<String, Value> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    // The language model of a multimodal one.
    if let Some(Value::Object(language)) = keys.remove("text_config") {
        keys.extend(language);
    }
    let config = Config::new(keys)?;
    if let Some(by) = difference(&config) {
        return Err(format!("the layers of this model differ ({by}), and a layout has one shape for all"));
    }
    let missing = |key: &str| format!("it has no {key}");
    let layers = config.num_hidden_layers.ok_or_else(|| {
        let nested = config.others.iter().find(|(_, value)| value.get("num_hidden_layers").is_some());
        let has =
            nested.map_or(String::new(), |(key, _)| format!(", but {key} in it has: save that as a file"));
        missing("num_hidden_layers") + &has
    })?;
    let dtype = match config.torch_dtype.or(config.dtype).as_deref() {
        None | Some("bfloat16") => Dtype::Bf16,
        Some("float16") => Dtype::F16,
        Some("float32") => Dtype::F32,
        Some(other) => return Err(format!("K and V of dtype {other:?} are not supported")),
    };
    let builder = KvLayout::builder().layers(layers).dtype(dtype);
    if let Some(rank) = config.kv_lora_rank {
        let rope = config.qk_rope_head_dim.ok_or_else(|| missing("qk_rope_head_dim"))?;
        return Ok(builder.latent(rank.saturating_add(rope)));
    }
    if config.others.get("multi_query") == Some(&json!(true)) {
        return Err("multi_query is not supported".to_owned());
    }
    let heads = config.num_attention_heads;
    let kv_heads = config.num_key_value_heads.or(heads).ok_or_else(|| missing("num_key_value_heads"))?;
    let head_dim = match (config.head_dim, config.hidden_size, heads) {
        (Some(head_dim), ..) => head_dim,
        (None, Some(size), Some(heads)) if size.is_multiple_of(heads) => size / heads.max(1),
        (None, Some(size), Some(heads @ 1..)) => {
            return Err(
                missing("head_dim") + &format!(", and hidden_size {size} is no multiple of {heads} heads")
            );
        }
        _ => return Err(missing("head_dim")),
    };
    Ok(builder.kv_heads(kv_heads).head_dim(head_dim))
}

/// Returns the evidence that the layers differ, if any.
fn difference(config: &Config) -> Option<String> {
    if let Some(types) = &config.layer_types
        && (types.len() > 1 || types.iter().any(|kind| !ATTENTION.contains(&kind.as_str())))
    {
        return Some(format!(
            "layer types {}",
            types.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
        ));
    }
    let model = config.model_type.as_deref().unwrap_or_default();
    if config.layer_types.is_none() && WINDOWED.iter().any(|windowed| model.starts_with(windowed)) {
        return Some(format!("model_type {model}"));
    }
    let none = [Value::Null, json!(false), json!(0), json!([])];
    let is_different = |key: &str| DIFFERENT.split(' ').any(|part| key.contains(part));
    // MiniMax's types of attention: 1 is full, 0 linear.
    let is_full = |key: &str, value: &Value| {
        key == "attn_type_list" && value.as_array().is_some_and(|types| types.iter().all(|kind| *kind == 1))
    };
    config
        .others
        .iter()
        .find(|(key, value)| is_different(key) && !none.contains(value) && !is_full(key, value))
        .map(|(key, _)| key.clone())
}
