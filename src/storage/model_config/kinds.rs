//! The kind of each layer, from the field of a configuration that tells it.
//!
//! Families of models name the kinds in different ways: a list, a pattern, an interval. The first
//! field of these that is set decides; the table of the fields is in `docs/hybrid.md`.

use serde_json::Value;

use crate::error::LayersError;

use super::fields::{Fields, missing};

/// What a layer does with the tokens before a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Full,
    Window,
    Chunk,
    /// Linear attention.
    Linear,
    Mamba,
    /// It caches nothing, such as a layer of experts between others.
    Nothing,
}

/// Intervals of full layers between windows, of model types whose configurations may omit them.
const INTERVALS: [(&str, usize); 3] = [("cohere2", 4), ("gemma2", 2), ("gemma3", 6)];

/// Other model types with windows in some layers: the configuration must say which.
const WINDOWED: [&str; 3] = ["gemma4", "gpt_oss", "llama4"];

/// Returns whether a model of this type has windows in some layers, shown or not.
pub(super) fn has_windows(model_type: &str) -> bool {
    interval(model_type).is_some() || WINDOWED.iter().any(|name| model_type.starts_with(name))
}

fn interval(model_type: &str) -> Option<usize> {
    INTERVALS.iter().find(|(name, _)| model_type.starts_with(name)).map(|&(_, every)| every)
}

pub(super) fn kinds(fields: &Fields, layers: usize) -> Result<Vec<Kind>, LayersError> {
    for field in ["layer_types", "layers_block_type"] {
        if let Some(names) = fields.get::<Vec<String>>(field)? {
            return listed(field, &names, layers, |name| by_name(name));
        }
    }
    if let Some(pattern) = fields.get::<String>("hybrid_override_pattern")? {
        let letters: Vec<char> = pattern.chars().collect();
        return listed("hybrid_override_pattern", &letters, layers, |letter| {
            Some(match letter {
                'M' => Kind::Mamba,
                '*' => Kind::Full,
                'E' | '-' => Kind::Nothing,
                _ => return None,
            })
        });
    }
    if let Some(linear) = fields.section("linear_attn_config")? {
        return from_one(&linear.need::<Vec<u64>>(&["full_attn_layers"])?, layers);
    }
    if let Some(pattern) = fields.get::<Vec<u64>>("hybrid_layer_pattern")? {
        return listed("hybrid_layer_pattern", &pattern, layers, |&one| by_number(one, Kind::Window));
    }
    if let Some(period) = fields.get::<usize>("attn_layer_period")? {
        let offset = fields.get("attn_layer_offset")?.unwrap_or(0);
        return every("attn_layer_period", period, layers, |at| at % period == offset, Kind::Mamba);
    }
    if let Some(interval) = fields.get::<usize>("full_attention_interval")? {
        let is_full = |at: usize| (at + 1).is_multiple_of(interval);
        return every("full_attention_interval", interval, layers, is_full, Kind::Linear);
    }
    if fields.get::<u64>("attention_chunk_size")?.is_some() {
        if let Some(rotary) = fields.get::<Vec<u64>>("no_rope_layers")?.filter(|list| !list.is_empty()) {
            return listed("no_rope_layers", &rotary, layers, |&one| by_number(one, Kind::Chunk));
        }
        let interval = fields.get("no_rope_layer_interval")?.unwrap_or(4);
        let is_full = |at: usize| (at + 1).is_multiple_of(interval);
        return every("no_rope_layer_interval", interval, layers, is_full, Kind::Chunk);
    }
    if let Some(types) = fields.get::<Vec<u64>>("attn_type_list")?
        && types.iter().any(|&kind| kind != 1)
    {
        return Err(LayersError::field("attn_type_list", "the states of its linear attention are not known"));
    }
    windows(fields, layers)
}

/// Returns the kinds of a model whose layers have windows or keep all tokens.
fn windows(fields: &Fields, layers: usize) -> Result<Vec<Kind>, LayersError> {
    let field = "sliding_window_pattern";
    let model = fields.model_type()?;
    let every_nth = match fields.first::<Value>(&["sliding_window_pattern", "_sliding_window_pattern"])? {
        Some(Value::String(pattern)) => return letters(field, &pattern, layers),
        Some(number) => number.as_u64().map(|number| number as usize).or(Some(0)),
        None => interval(&model),
    };
    if let Some(interval) = every_nth {
        return every(field, interval, layers, |at| (at + 1).is_multiple_of(interval), Kind::Window);
    }
    if has_windows(&model) {
        return Err(missing("layer_types"));
    }
    let window = fields.get::<u64>("sliding_window")?;
    let is_used = fields.get("use_sliding_window")?.unwrap_or(window.is_some());
    let first = if is_used { fields.get("max_window_layers")?.unwrap_or(0) } else { layers };
    Ok((0..layers).map(|at| if at < first { Kind::Full } else { Kind::Window }).collect())
}

/// Returns the kinds of a repeated pattern such as `LLLG`: local and global layers.
fn letters(field: &'static str, pattern: &str, layers: usize) -> Result<Vec<Kind>, LayersError> {
    let repeated: Vec<char> = pattern.chars().cycle().take(layers).collect();
    listed(field, &repeated, layers, |letter| match letter {
        'L' => Some(Kind::Window),
        'G' => Some(Kind::Full),
        _ => None,
    })
}

fn by_number(number: u64, one: Kind) -> Option<Kind> {
    [Kind::Full, one].get(usize::try_from(number).ok()?).copied()
}

fn by_name(name: &str) -> Option<Kind> {
    Some(match name {
        "full_attention" | "attention" => Kind::Full,
        "sliding_attention" => Kind::Window,
        "chunked_attention" => Kind::Chunk,
        "linear_attention" => Kind::Linear,
        "mamba" | "mamba2" => Kind::Mamba,
        "moe" | "mlp" => Kind::Nothing,
        _ => return None,
    })
}

/// Returns the kinds of a list with an entry for each layer.
fn listed<T: std::fmt::Display>(
    field: &'static str,
    list: &[T],
    layers: usize,
    kind: impl Fn(&T) -> Option<Kind>,
) -> Result<Vec<Kind>, LayersError> {
    if list.len() != layers {
        return Err(LayersError::Length { field, got: list.len(), layers });
    }
    let known = |(layer, name): (usize, &T)| {
        kind(name).ok_or_else(|| LayersError::UnknownKind { field, layer, kind: name.to_string().into() })
    };
    list.iter().enumerate().map(known).collect()
}

fn every(
    field: &'static str,
    interval: usize,
    layers: usize,
    is_full: impl Fn(usize) -> bool,
    other: Kind,
) -> Result<Vec<Kind>, LayersError> {
    if interval == 0 {
        return Err(LayersError::field(field, "it is not a number of layers"));
    }
    Ok((0..layers).map(|at| if is_full(at) { Kind::Full } else { other }).collect())
}

/// Returns the kinds of a model whose full layers are listed, counted from 1.
fn from_one(full: &[u64], layers: usize) -> Result<Vec<Kind>, LayersError> {
    let mut kinds = vec![Kind::Linear; layers];
    for &layer in full {
        let index = layer.checked_sub(1).and_then(|index| kinds.get_mut(usize::try_from(index).ok()?));
        let field = "linear_attn_config.full_attn_layers";
        *index.ok_or(LayersError::LayerOutOfRange { field, layer, first: 1, layers })? = Kind::Full;
    }
    Ok(kinds)
}
