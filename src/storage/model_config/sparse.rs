//! Models with an index, which finds the tokens to attend to, and with compressed tokens.

use crate::dtype::Dtype;
use crate::error::LayersError;
use crate::storage::groups::{LayerCache, Reach, Row};

use super::fields::Fields;

/// Elements that have a scale in common, in the keys of an index and in latent vectors.
const INDEX_SCALE_ELEMENTS: u64 = 128;
const LATENT_SCALE_ELEMENTS: u64 = 64;

/// Returns the bytes that each layer's index takes beside a token: 0 in a layer without one, and in
/// one that uses the index of another layer. `None` if the model has no index.
pub(super) fn index(fields: &Fields, layers: usize) -> Result<Option<Vec<u64>>, LayersError> {
    let is_set = |field: &str| fields.set().any(|(name, _)| name == field);
    if !is_set("index_topk") && !is_set("index_head_dim") {
        return Ok(None);
    }
    let dim: u64 = fields.need(&["index_head_dim"])?;
    let bytes = scaled_index(dim);
    let Some(types) = fields.get::<Vec<String>>("indexer_types")? else {
        return Ok(Some(vec![bytes; layers]));
    };
    let field = "indexer_types";
    if types.len() != layers {
        return Err(LayersError::Length { field, got: types.len(), layers });
    }
    let of_type = |(layer, name): (usize, &String)| match name.as_str() {
        "full" => Ok(bytes),
        "shared" => Ok(0),
        _ => Err(LayersError::UnknownKind { field, layer, kind: name.as_str().into() }),
    };
    types.iter().enumerate().map(of_type).collect::<Result<_, _>>().map(Some)
}

/// Returns the row of a latent vector beside an index. In 8 bits, engines store the rotary part in
/// 16, and an f32 scale for each 128 of the other elements.
pub(super) fn latent_with_index(fields: &Fields, dtype: Dtype, side_bytes: u64) -> Result<Row, LayersError> {
    let [rank, rope]: [u64; 2] = [fields.need(&["kv_lora_rank"])?, fields.need(&["qk_rope_head_dim"])?];
    if dtype.bytes() > 1 {
        return Ok(Row::Latent { elements: rank.saturating_add(rope), side_bytes });
    }
    let scales = rank.div_ceil(INDEX_SCALE_ELEMENTS).saturating_mul(4);
    let bytes = rank.saturating_add(scales).saturating_add(rope.saturating_mul(2));
    Ok(Row::Bytes { bytes, side_bytes })
}

/// Returns the caches of a model whose layers have a window of tokens, and before it compressed
/// ones; `None` if it is another model. Behind the layers come those that draft tokens.
pub(super) fn compressed(
    fields: &Fields,
    layers: usize,
    drafts: usize,
    dtype: Dtype,
) -> Result<Option<Vec<Vec<LayerCache>>>, LayersError> {
    let field = "compress_ratios";
    let Some(mut ratios) = fields.get::<Vec<u64>>(field)?.filter(|list| !list.is_empty()) else {
        return Ok(None);
    };
    let most = layers.saturating_add(draft_layers(fields)?.max(1));
    if !(layers..=most).contains(&ratios.len()) {
        return Err(LayersError::Length { field, got: ratios.len(), layers });
    }
    // The layers that draft have windows alone, unless the list says otherwise.
    ratios.resize(layers + drafts, 0);
    let window = fields.need(&["sliding_window"])?;
    let [dim, rope]: [u64; 2] = [fields.need(&["head_dim"])?, fields.need(&["qk_rope_head_dim"])?];
    let index_dim = fields.get::<u64>("index_head_dim")?.unwrap_or(0);
    let (bytes, index) = if dtype.bytes() > 1 {
        let element = dtype.bytes() as u64;
        (dim.saturating_mul(element), index_dim.saturating_mul(element))
    } else {
        let rest = dim.checked_sub(rope);
        let rest = rest.ok_or_else(|| LayersError::field("qk_rope_head_dim", "it is above head_dim"))?;
        // One byte a scale, padded to 8.
        let scales = rest.div_ceil(LATENT_SCALE_ELEMENTS).next_multiple_of(8);
        let bytes = rest.saturating_add(rope.saturating_mul(2)).saturating_add(scales);
        (bytes, if index_dim == 0 { 0 } else { scaled_index(index_dim) })
    };
    let local = LayerCache { row: Row::bytes(bytes), reach: Reach::Window { tokens: window, sinks: 0 } };
    let of_ratio = |&ratio: &u64| {
        if ratio == 0 {
            return vec![local];
        }
        // Each compressed token covers twice its tokens if these are few, and only then has an
        // index. What it is computed from is kept in f32: a value and a score for each element.
        let (overlap, side, side_state) = if ratio == 4 { (2, index, index_dim) } else { (1, 0, 0) };
        let state = |elements: u64| elements.saturating_mul(overlap * 2 * 4);
        let reach = Reach::Window { tokens: ratio.saturating_mul(overlap), sinks: 0 };
        vec![
            local,
            LayerCache { row: Row::Bytes { bytes, side_bytes: side }, reach: Reach::Compressed { ratio } },
            LayerCache { row: Row::Bytes { bytes: state(dim), side_bytes: state(side_state) }, reach },
        ]
    };
    Ok(Some(ratios.iter().map(of_ratio).collect()))
}

/// Returns the number of layers that draft tokens.
pub(super) fn draft_layers(fields: &Fields) -> Result<usize, LayersError> {
    Ok(fields.first(&["num_nextn_predict_layers", "mtp_num_hidden_layers"])?.unwrap_or(0))
}

/// Returns the bytes of a key of an index in 8 bits, with an f32 scale for each 128 elements.
fn scaled_index(dim: u64) -> u64 {
    dim.saturating_add(dim.div_ceil(INDEX_SCALE_ELEMENTS).saturating_mul(4))
}
