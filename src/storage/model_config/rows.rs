//! Bytes of an entry of each kind of layer.

use serde_json::json;

use crate::dtype::Dtype;
use crate::error::LayersError;
use crate::storage::groups::Row;

use super::fields::{Fields, dtype, missing};
use super::kinds::Kind;

/// Returns the row of a layer with K and V, or with a latent vector.
pub(super) fn attention(fields: &Fields, kind: Kind) -> Result<Row, LayersError> {
    if let Some(rank) = fields.get::<u64>("kv_lora_rank")?.filter(|&rank| rank > 0) {
        let rope: u64 = fields.need(&["qk_rope_head_dim"])?;
        return Ok(Row::Latent { elements: rank.saturating_add(rope), side_bytes: 0 });
    }
    if fields.get("multi_query")? == Some(json!(true)) {
        return Err(LayersError::field("multi_query", "not supported"));
    }
    // Names of what windows, or full layers beside windows, have instead.
    let [heads_of_kind, dim_of_kind, v_dim_of_kind] = match kind {
        Kind::Window => ["swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"],
        _ => ["num_global_key_value_heads", "global_head_dim", "global_v_head_dim"],
    };
    let heads = fields.get::<u64>("num_attention_heads")?;
    let kv_heads = fields.first(&[heads_of_kind, "num_key_value_heads"])?.or(heads);
    let kv_heads = kv_heads.ok_or_else(|| missing("num_key_value_heads"))?;
    let dim: Option<u64> = fields.first(&[dim_of_kind, "head_dim"])?;
    let k_dim = match (dim, fields.get::<u64>("hidden_size")?, heads) {
        (Some(dim), ..) => dim,
        (None, Some(size), Some(heads)) if size.is_multiple_of(heads) => size / heads.max(1),
        (None, Some(size), Some(heads @ 1..)) => {
            let hint = format!(", and hidden_size {size} is no multiple of {heads} heads").into();
            return Err(LayersError::Missing { field: "head_dim", hint });
        }
        _ => return Err(missing("head_dim")),
    };
    let v_dim = fields.first(&[v_dim_of_kind, "v_head_dim"])?.unwrap_or(k_dim);
    Ok(Row::Heads { kv_heads, k_dim, v_dim })
}

/// Returns the row of a state: the last columns of a convolution, and a recurrent state.
pub(super) fn state(fields: &Fields, kind: Kind) -> Result<Row, LayersError> {
    let [channels, taps, recurrent] = if kind == Kind::Mamba { mamba(fields)? } else { linear(fields)? };
    // Those of Kimi delta attention are in f32, whatever the configuration says.
    let is_kimi = kind == Kind::Linear && fields.section("linear_attn_config")?.is_some();
    let recurrent_dtype = if is_kimi { Dtype::F32 } else { recurrent_dtype(fields)? };
    let convolution = channels.saturating_mul(taps.saturating_sub(1));
    let bytes = |elements: u64, dtype: Dtype| elements.saturating_mul(dtype.bytes() as u64);
    Ok(Row::bytes(bytes(convolution, fields.dtype()?).saturating_add(bytes(recurrent, recurrent_dtype))))
}

/// Returns the channels and the length of the convolution, and the elements of the recurrent state.
fn linear(fields: &Fields) -> Result<[u64; 3], LayersError> {
    // Kimi delta attention: three convolutions.
    if let Some(linear) = fields.section("linear_attn_config")? {
        let [heads, dim]: [u64; 2] = [linear.need(&["num_heads"])?, linear.need(&["head_dim"])?];
        let width = heads.saturating_mul(dim);
        let taps = linear.need(&["short_conv_kernel_size"])?;
        return Ok([width.saturating_mul(3), taps, width.saturating_mul(dim)]);
    }
    // Gated delta network.
    let need = |field| fields.need::<u64>(&[field]);
    let k_dim = need("linear_key_head_dim")?;
    let k_width = need("linear_num_key_heads")?.saturating_mul(k_dim);
    let v_width = need("linear_num_value_heads")?.saturating_mul(need("linear_value_head_dim")?);
    let channels = k_width.saturating_mul(2).saturating_add(v_width);
    Ok([channels, need("linear_conv_kernel_dim")?, v_width.saturating_mul(k_dim)])
}

/// Returns the same of a state space.
fn mamba(fields: &Fields) -> Result<[u64; 3], LayersError> {
    let need = |names: &[&'static str]| fields.need::<u64>(names);
    let taps = need(&["conv_kernel", "mamba_d_conv"])?;
    let size = need(&["ssm_state_size", "mamba_d_state"])?;
    // Only the second version has heads.
    let Some(heads) = fields.first::<u64>(&["mamba_num_heads", "mamba_n_heads"])? else {
        let width = need(&["hidden_size"])?.saturating_mul(need(&["mamba_expand"])?);
        return Ok([width, taps, width.saturating_mul(size)]);
    };
    let width = heads.saturating_mul(need(&["mamba_head_dim", "mamba_d_head"])?);
    let shared = need(&["n_groups", "mamba_n_groups"])?.saturating_mul(size).saturating_mul(2);
    Ok([width.saturating_add(shared), taps, width.saturating_mul(size)])
}

/// Returns the type of recurrent states: that of the model, if none is named.
fn recurrent_dtype(fields: &Fields) -> Result<Dtype, LayersError> {
    for field in ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"] {
        if let Some(name) = fields.get::<String>(field)?.filter(|name| name != "auto") {
            return dtype(&name)
                .ok_or_else(|| LayersError::field(field, format_args!("{name:?} is not supported")));
        }
    }
    fields.dtype()
}
