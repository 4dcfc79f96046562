//! Copies between a pool and tensors of candle's own.

use std::ops::Range;

use candle_core::{CpuStorage, Device, Layout, Storage, Tensor, WithDType};
use half::{bf16, f16};
use kvpool::storage::{Element, Elements, ElementsMut, KvLayout, KvPlanes};
use kvpool::{Batch, Dtype, Sequence};

use crate::{CandleError, candle_dtype};

/// Copies K and V of tokens in one layer into new tensors `[tokens, kv_heads, head_dim]`.
///
/// They have the pool's dtype, or f32 if the pool's is quantised. V is `None` in a latent layout.
/// `layout` is that of the pool.
///
/// # Errors
/// As for [`Batch::load`].
pub fn read(
    layout: &KvLayout,
    batch: &mut Batch,
    sequence: &Sequence,
    layer: usize,
    tokens: Range<usize>,
) -> Result<(Tensor, Option<Tensor>), CandleError> {
    fn of<T>(
        layout: &KvLayout,
        batch: &mut Batch,
        sequence: &Sequence,
        layer: usize,
        tokens: Range<usize>,
    ) -> Result<(Tensor, Option<Tensor>), CandleError>
    where
        T: WithDType,
        for<'a> ElementsMut<'a>: From<&'a mut [T]>,
    {
        // A range out of bounds is refused below, and needs no memory.
        let elements = tokens.len().min(sequence.len()) * layout.row_elements();
        let is_latent = layout.parts() == KvPlanes::Latent;
        let mut k = vec![T::zero(); elements];
        let mut v = vec![T::zero(); if is_latent { 0 } else { elements }];
        let v_out = if is_latent { ElementsMut::none() } else { v.as_mut_slice().into() };
        batch.load(sequence, layer, tokens, k.as_mut_slice().into(), v_out)?;
        let k = tensor(layout, k)?;
        Ok((k, (!is_latent).then(|| tensor(layout, v)).transpose()?))
    }
    match layout.dtype() {
        Dtype::F16 => of::<f16>(layout, batch, sequence, layer, tokens),
        Dtype::Bf16 => of::<bf16>(layout, batch, sequence, layer, tokens),
        _ => of::<f32>(layout, batch, sequence, layer, tokens),
    }
}

/// Copies K and V of one block's tokens in one layer into new tensors `[tokens, kv_heads,
/// head_dim]`.
///
/// As [`read`], and several threads may do so under one batch. V is `None` in a latent layout.
///
/// # Errors
/// As for [`Batch::tile`]; [`CandleError::Codes`] in a quantised layout.
pub fn read_block(
    layout: &KvLayout,
    batch: &Batch,
    sequence: &Sequence,
    layer: usize,
    index: usize,
) -> Result<(Tensor, Option<Tensor>), CandleError> {
    fn of<T: Element + WithDType>(
        layout: &KvLayout,
        (k, v): (&[T], &[T]),
    ) -> Result<(Tensor, Option<Tensor>), CandleError> {
        let k = tensor(layout, k.to_vec())?;
        Ok((k, if v.is_empty() { None } else { Some(tensor(layout, v.to_vec())?) }))
    }
    candle_dtype(layout.dtype())?;
    match layout.dtype() {
        Dtype::F16 => of(layout, batch.tile::<f16>(sequence, layer, index)?),
        Dtype::Bf16 => of(layout, batch.tile::<bf16>(sequence, layer, index)?),
        _ => of(layout, batch.tile::<f32>(sequence, layer, index)?),
    }
}

/// Makes a tensor of rows of K or V, without a copy.
fn tensor<T: WithDType>(layout: &KvLayout, rows: Vec<T>) -> Result<Tensor, CandleError> {
    let shape = (rows.len() / layout.row_elements(), layout.kv_heads(), layout.head_dim());
    Ok(Tensor::from_vec(rows, shape, &Device::Cpu)?)
}

/// Copies tensors `[tokens, kv_heads, head_dim]` into the pool, as K and V of tokens in one layer.
///
/// They have the pool's dtype; in a quantised layout f32, f16 or bf16, and are quantised here. V is
/// `None` in a latent layout. A tensor that is not contiguous is copied once more.
///
/// # Errors
/// As for [`Batch::store`], which also refuses the wrong number of elements;
/// [`CandleError::ElementType`], [`CandleError::NotOnHost`].
pub fn write(
    batch: &mut Batch,
    sequence: &mut Sequence,
    layer: usize,
    tokens: Range<usize>,
    k: &Tensor,
    v: Option<&Tensor>,
) -> Result<(), CandleError> {
    let k = k.contiguous()?;
    let v = v.map(Tensor::contiguous).transpose()?;
    let (k_storage, k_layout) = k.storage_and_layout();
    let v = v.as_ref().map(Tensor::storage_and_layout);
    let v = match &v {
        None => Elements::none(),
        Some((storage, layout)) => elements("v", storage, layout)?,
    };
    batch.store(sequence, layer, tokens, elements("k", &k_storage, k_layout)?, v)?;
    Ok(())
}

/// Returns the elements of a contiguous tensor in host memory.
fn elements<'a>(
    which: &'static str,
    storage: &'a Storage,
    layout: &Layout,
) -> Result<Elements<'a>, CandleError> {
    let Storage::Cpu(storage) = storage else { return Err(CandleError::NotOnHost { which }) };
    let (start, end) = layout.contiguous_offsets().ok_or(CandleError::NotOnHost { which })?;
    match storage {
        CpuStorage::F32(all) => Ok((&all[start..end]).into()),
        CpuStorage::F16(all) => Ok((&all[start..end]).into()),
        CpuStorage::BF16(all) => Ok((&all[start..end]).into()),
        other => {
            use candle_core::backend::BackendStorage;
            Err(CandleError::ElementType { which, got: other.dtype() })
        }
    }
}
