use std::ptr::NonNull;

use crate::dtype::Dtype;
use crate::error::{Invalid, StorageError};

use super::elements::Element;

/// K and V of one frame in one layer, in this process's memory; see [`tile`](super::Storage::tile).
/// Each is `[block_tokens][heads][head_dim]`, and its dynamic scales `[block_tokens][heads]`.
#[derive(Clone, Copy, Debug)]
pub struct HostTile {
    dtype: Dtype,
    tokens: usize,
    values: [NonNull<[u8]>; 2],
    scales: [NonNull<[f32]>; 2],
}

impl HostTile {
    /// For backends: describes the memory of a frame of `tokens` tokens, K and V and the scales of
    /// both. V is empty in a latent layout, and both scales without dynamic scales.
    ///
    /// # Safety
    /// While the storage lives and has the frame, each slice is initialised, readable and writable
    /// memory of this process, aligned to its elements; no two overlap, nor do those of different
    /// frames or layers. Its length is that of `tokens` rows. The storage accesses them only in its
    /// unsafe operations on this frame. Copies to this frame that were
    /// [enqueued](super::Storage::copy_on) are complete.
    pub const unsafe fn new(
        dtype: Dtype,
        tokens: usize,
        values: [NonNull<[u8]>; 2],
        scales: [NonNull<[f32]>; 2],
    ) -> Self {
        Self { dtype, tokens, values, scales }
    }

    /// Returns the type of the elements.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the memory of K and V; V is empty in a latent layout.
    pub const fn values(&self) -> [NonNull<[u8]>; 2] {
        self.values
    }

    /// Returns the dynamic scales of K and V; empty in a layout without them.
    pub const fn scales(&self) -> [NonNull<[f32]>; 2] {
        self.scales
    }

    /// Returns the first `tokens` rows of K and V, if `T` holds their elements.
    pub(crate) fn rows<T: Element>(&self, tokens: usize) -> Result<[NonNull<[T]>; 2], StorageError> {
        if !T::holds(self.dtype) {
            let limit = format_args!("one that holds {}", self.dtype);
            return Err(Invalid::new("element type", T::NAME, limit).into());
        }
        Ok(self.values.map(|bytes| {
            let elements = NonNull::slice_from_raw_parts(bytes.cast(), bytes.len() / size_of::<T>());
            first(elements, tokens, self.tokens)
        }))
    }

    /// Returns the dynamic scales of the first `tokens` tokens of K and V, if any.
    pub(crate) fn scale_rows(&self, tokens: usize) -> Result<[NonNull<[f32]>; 2], StorageError> {
        if self.scales[0].is_empty() {
            let got = format_args!("{} without dynamic scales", self.dtype);
            return Err(Invalid::new("layout", got, "dynamic scales").into());
        }
        Ok(self.scales.map(|scales| first(scales, tokens, self.tokens)))
    }
}

fn first<T>(tile: NonNull<[T]>, tokens: usize, of: usize) -> NonNull<[T]> {
    assert!(tokens <= of, "a tile of {of} tokens has no {tokens}");
    // An empty tile's address need not be aligned.
    let data = if tile.is_empty() { NonNull::dangling() } else { tile.cast() };
    NonNull::slice_from_raw_parts(data, tile.len() / of * tokens)
}
