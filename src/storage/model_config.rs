//! Shapes from the `config.json` of a model: one layout if its layers are alike, else groups.

mod fields;
mod kinds;
mod rows;
mod sparse;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::dtype::Dtype;
use crate::error::LayersError;

use super::groups::{DraftLayers, GroupOptions, LayerCache, LayerGroups, Reach, Row};
use super::layout::{KvLayout, KvLayoutBuilder};

use fields::Fields;
use kinds::Kind;

/// Parts of keys of models whose layers differ, or cache more than K and V per token and head:
/// windows, linear attention, state spaces, indexes, compressed and shared layers.
const DIFFERENT: &str = "mamba ssm_ state_size linear_attn linear_num linear_conv hybrid attention_interval \
    attn_every attn_layer attn_type attention_chunk window_pattern use_sliding no_rope index_topk index_head \
    compress_ratio kv_shared cross_attention_layers";

/// Those of the keys with these parts that groups are made from, besides parameters of states.
const GROUPED: &str = "linear_attn_config hybrid_override_pattern hybrid_layer_pattern \
    full_attention_interval attn_layer_period attn_layer_offset attn_type_list attention_chunk_size \
    sliding_window_pattern _sliding_window_pattern use_sliding_window no_rope_layers no_rope_layer_interval \
    index_topk index_head_dim compress_ratios num_kv_shared_layers";

/// Beginnings of keys that are parameters of states, and of an index.
const OF_STATES: [&str; 5] = ["mamba", "ssm_", "linear_num", "linear_conv", "state_size"];
const OF_INDEX: &str = "index_";

/// Types of layers that all keep K and V.
const ATTENTION: [&str; 3] = ["attention", "full_attention", "sliding_attention"];

/// Returns the path of a configuration, if the text is one.
pub(super) fn path(text: &str) -> Option<PathBuf> {
    let (path, inside) = (Path::new(text), Path::new(text).join("config.json"));
    let is_file = path.is_file() || path.extension().is_some_and(|end| end == "json");
    is_file.then(|| path.to_owned()).or_else(|| inside.is_file().then_some(inside))
}

/// Returns a builder with a configuration's values, or the reason why it describes no layout.
pub(super) fn builder(text: &str) -> Result<KvLayoutBuilder, String> {
    let fields = Fields::parse(text).map_err(|error| error.to_string())?;
    if let Some(by) = difference(&fields).map_err(|error| error.to_string())? {
        return Err(format!(
            "the layers of this model differ ({by}), and a layout has one shape for all; \
             `kvpool layout` prints its groups of layers"
        ));
    }
    uniform(&fields).map_err(|error| error.to_string())
}

fn uniform(fields: &Fields) -> Result<KvLayoutBuilder, LayersError> {
    let builder = KvLayout::builder().layers(fields.layers()?).dtype(fields.dtype()?);
    let number = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    match rows::attention(fields, Kind::Full)? {
        Row::Heads { k_dim, v_dim, .. } if k_dim != v_dim => Err(LayersError::field(
            "v_head_dim",
            format_args!("{v_dim}, and K has {k_dim} elements per head"),
        )),
        Row::Heads { kv_heads, k_dim, .. } => Ok(builder.kv_heads(number(kv_heads)).head_dim(number(k_dim))),
        Row::Latent { elements, .. } => Ok(builder.latent(number(elements))),
        Row::Bytes { .. } => Err(LayersError::field("kv_lora_rank", "its rows have no elements")),
    }
}

/// Returns the evidence that the layers differ, if any.
fn difference(fields: &Fields) -> Result<Option<String>, LayersError> {
    let types: Option<BTreeSet<String>> = fields.first(&["layer_types", "layers_block_type"])?;
    if let Some(types) = &types
        && (types.len() > 1 || types.iter().any(|kind| !ATTENTION.contains(&kind.as_str())))
    {
        return Ok(Some(format!(
            "layer types {}",
            types.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
        )));
    }
    let model = fields.model_type()?;
    if types.is_none() && kinds::has_windows(&model) {
        return Ok(Some(format!("model_type {model}")));
    }
    // MiniMax's types of attention: 1 is full, 0 linear.
    let is_full = |(key, value): &(&str, &serde_json::Value)| {
        *key == "attn_type_list" && value.as_array().is_some_and(|types| types.iter().all(|kind| *kind == 1))
    };
    Ok(fields
        .set()
        .filter(|field| !is_full(field))
        .find(|(key, _)| is_different(key))
        .map(|(key, _)| key.to_owned()))
}

fn is_different(key: &str) -> bool {
    DIFFERENT.split(' ').any(|part| key.contains(part))
}

impl LayerGroups {
    /// Groups the layers of a Hugging Face `config.json`.
    ///
    /// The repository's `docs/hybrid.md` lists the fields that are read. An unknown kind of layer,
    /// or a field that hints at one, is refused by name.
    pub fn from_config(json: &str, options: GroupOptions) -> Result<Self, LayersError> {
        let fields = Fields::parse(json)?;
        let dtype = options.dtype.map_or_else(|| fields.dtype(), Ok)?;
        let options = options.dtype(dtype);
        let count = fields.layers()?;
        // Before a list of as many entries is made.
        if count > 1 << 16 {
            return Err(LayersError::field("num_hidden_layers", format_args!("{count} is more than 65536")));
        }
        let drafts = if options.drafts == DraftLayers::Omitted {
            0
        } else {
            sparse::draft_layers(&fields)?.min(count)
        };
        if let Some(layers) = sparse::compressed(&fields, count, drafts, dtype)? {
            return Self::of_layers(&layers, options);
        }
        let kinds = kinds::kinds(&fields, count)?;
        understood(&fields, &kinds)?;
        let index = sparse::index(&fields, count)?;
        let mut layers = Vec::with_capacity(count + drafts);
        for (layer, &kind) in kinds.iter().enumerate() {
            let side = index.as_ref().map(|index| index[layer]);
            layers.push(caches(&fields, kind, side, dtype)?);
        }
        share(&fields, &kinds, &mut layers)?;
        for _ in 0..drafts {
            let side = index.as_ref().and_then(|index| index.iter().copied().max());
            let row = row(&fields, Kind::Full, side, dtype)?;
            layers.push(vec![LayerCache { row, reach: Reach::Draft { ahead: drafts as u64 } }]);
        }
        Self::of_layers(&layers, options)
    }
}

fn row(fields: &Fields, kind: Kind, side: Option<u64>, dtype: Dtype) -> Result<Row, LayersError> {
    match side {
        Some(side) => sparse::latent_with_index(fields, dtype, side),
        None => rows::attention(fields, kind),
    }
}

fn caches(
    fields: &Fields,
    kind: Kind,
    side: Option<u64>,
    dtype: Dtype,
) -> Result<Vec<LayerCache>, LayersError> {
    let reach = match kind {
        Kind::Nothing => return Ok(Vec::new()),
        Kind::Linear | Kind::Mamba => {
            return Ok(vec![LayerCache { row: rows::state(fields, kind)?, reach: Reach::State }]);
        }
        Kind::Full => Reach::All,
        Kind::Window => Reach::Window { tokens: fields.need(&["sliding_window"])?, sinks: 0 },
        Kind::Chunk => Reach::Chunk { tokens: fields.need(&["attention_chunk_size"])? },
    };
    Ok(vec![LayerCache { row: row(fields, kind, side, dtype)?, reach }])
}

/// Lets the last layers follow the last layer of their kind that has a cache of its own.
fn share(fields: &Fields, kinds: &[Kind], layers: &mut [Vec<LayerCache>]) -> Result<(), LayersError> {
    let field = "num_kv_shared_layers";
    let shared = fields.get::<usize>(field)?.unwrap_or(0);
    let too_many =
        LayersError::LayerOutOfRange { field, layer: shared as u64, first: 1, layers: kinds.len() };
    let own = kinds.len().checked_sub(shared).ok_or(too_many)?;
    for layer in own..kinds.len() {
        let followed = kinds[..own].iter().rposition(|kind| *kind == kinds[layer]);
        let followed = followed.ok_or_else(|| {
            LayersError::field(field, format_args!("layer {layer} finds no layer of its kind with a cache"))
        })?;
        layers[layer] = vec![LayerCache { row: Row::bytes(0), reach: Reach::Follows { layer: followed } }];
    }
    Ok(())
}

/// Refuses fields by which layers cache more than the groups would count.
fn understood(fields: &Fields, kinds: &[Kind]) -> Result<(), LayersError> {
    let has_states = kinds.iter().any(|kind| matches!(kind, Kind::Linear | Kind::Mamba));
    for (key, _) in fields.set().filter(|(key, _)| is_different(key)) {
        let is_of_state = OF_STATES.iter().any(|prefix| key.starts_with(prefix));
        if is_of_state && !has_states {
            return Err(LayersError::field(key, "no field says which layers have this state"));
        }
        if !is_of_state && !key.starts_with(OF_INDEX) && !GROUPED.split_whitespace().any(|known| known == key)
        {
            return Err(LayersError::field(key, "the layers that it describes are not known"));
        }
    }
    Ok(())
}
