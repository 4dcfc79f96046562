//! Checks of rows against a layout: layer, type and number.

use crate::dtype::Dtype;
use crate::error::StorageError;

use super::elements::Elements;
use super::layout::{KvLayout, KvPlanes, Scales};

/// Checks K and V of `slots` tokens: the layer exists, types match or convert, lengths fit.
pub(crate) fn check_rows(
    layout: &KvLayout,
    layer: usize,
    k: Elements<'_>,
    v: Elements<'_>,
    slots: usize,
) -> Result<(), StorageError> {
    if layer >= layout.layers() {
        return Err(StorageError::Layer { layer, layers: layout.layers() });
    }
    let want = slots.saturating_mul(layout.row_elements());
    let want_v = if layout.parts() == KvPlanes::Latent { 0 } else { want };
    for (which, rows, want) in [("k", k, want), ("v", v, want_v)] {
        // Empty rows need no type check: `Elements::none()` fits every layout.
        if want > 0 || !rows.is_empty() {
            check_dtype(layout, which, rows.dtype())?;
        }
        if rows.len() != want {
            return Err(StorageError::Length { which, got: rows.len(), want });
        }
    }
    Ok(())
}

pub(crate) fn check_dtype(layout: &KvLayout, which: &'static str, dtype: Dtype) -> Result<(), StorageError> {
    if dtype == layout.dtype() {
        let bare = dtype.is_quantised() && *layout.scales() == Scales::PerTokenHead;
        return if bare { Err(StorageError::BareCodes { which, dtype }) } else { Ok(()) };
    }
    if layout.dtype().is_quantised() && !dtype.is_quantised() {
        return Ok(());
    }
    Err(StorageError::DtypeMismatch { which, got: dtype, layout: layout.dtype() })
}
