//! The shape of K and V in a block, and their arrangement in memory.
//!
//! ```text
//! bytes_per_token  == layers * halves * heads * (head_dim * dtype.bytes() + scale_bytes)
//! bytes_per_block  == sum over planes of tile_bytes, each rounded up to 16
//! packed_bytes     == block_tokens * bytes_per_token
//! ```
//!
//! `halves` is 2 for K and V, 1 for a latent plane; `scale_bytes` is 4 with dynamic scales, else 0.
//! In common layouts tiles are multiples of 16 bytes, and `bytes_per_block == packed_bytes`.

use std::fmt;

use crate::dtype::Dtype;
use crate::error::Invalid;

use super::plane::{PlaneKind, PlanePart, TILE_ALIGN};

/// Maximum number of planes, to bound the table.
const PLANES_MAX: usize = 1 << 16;

/// Placement of K and V of one layer relative to each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum KvPlanes {
    /// One plane for K and one for V.
    #[default]
    Separate,
    /// One plane; a frame's tile holds its K, followed by its V.
    Joined,
    /// One plane of latent vectors (multi-head latent attention): one head, no V, all on each rank.
    Latent,
}

/// Whether the frames of a layer or the layers of a frame are adjacent in memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum Arrangement {
    /// All frames of a layer's K, then of its V, then the next layer: the usual form for attention
    /// kernels. On the host, layers that are never written take no memory.
    #[default]
    LayerFirst,
    /// All layers of a frame, then the next frame: one contiguous piece per block.
    BlockFirst,
}

/// Mapping from the codes of a quantised dtype to values.
#[derive(Clone, PartialEq, Debug, Default)]
#[non_exhaustive]
pub enum Scales {
    /// `value = code`. The only choice for dtypes that are not quantised.
    #[default]
    Unit,
    /// Static: `value = code * scale[layer][head]`, as `[layers][heads]` of this rank.
    PerHead {
        /// For K, or for the latent vector (one per layer).
        k: Box<[f32]>,
        /// For V; empty for a latent layout.
        v: Box<[f32]>,
    },
    /// Dynamic: each token and head gets the f32 scale that maps its largest magnitude to the
    /// largest code. Scales are in separate planes; they belong to the block and move with it.
    PerTokenHead,
}

/// Layout of a pool's blocks on one tensor-parallel rank.
#[derive(Clone, PartialEq, Debug)]
pub struct KvLayout {
    layers: usize,
    heads: usize,
    heads_total: usize,
    tensor_parallel: usize,
    head_dim: usize,
    block_tokens: usize,
    dtype: Dtype,
    parts: KvPlanes,
    arrangement: Arrangement,
    scales: Scales,
    bytes_per_token: usize,
    bytes_per_block: usize,
}

/// Builds a [`KvLayout`]. Layers, KV heads and head dimension are required. The defaults are 16
/// tokens per block, bf16, no tensor parallelism, separate K and V, layer-first.
#[derive(Clone, Debug)]
#[must_use]
pub struct KvLayoutBuilder {
    layers: usize,
    heads_total: usize,
    tensor_parallel: usize,
    head_dim: usize,
    block_tokens: usize,
    dtype: Dtype,
    parts: KvPlanes,
    arrangement: Arrangement,
    scales: Scales,
    replicates_heads: bool,
}

impl Default for KvLayoutBuilder {
    fn default() -> Self {
        Self {
            layers: 0,
            heads_total: 0,
            tensor_parallel: 1,
            head_dim: 0,
            block_tokens: 16,
            dtype: Dtype::default(),
            parts: KvPlanes::default(),
            arrangement: Arrangement::default(),
            scales: Scales::default(),
            replicates_heads: false,
        }
    }
}

impl KvLayoutBuilder {
    /// Sets the number of layers with K and V.
    pub fn layers(mut self, layers: usize) -> Self {
        self.layers = layers;
        self
    }

    /// Sets the number of KV heads of the whole model, over all tensor-parallel ranks.
    pub fn kv_heads(mut self, heads: usize) -> Self {
        self.heads_total = heads;
        self
    }

    /// Sets the number of elements per head and token.
    pub fn head_dim(mut self, elements: usize) -> Self {
        self.head_dim = elements;
        self
    }

    /// Stores one latent vector of `elements` elements per token and layer instead of K and V
    /// (multi-head latent attention): one head, and [`KvPlanes::Latent`].
    pub fn latent(mut self, elements: usize) -> Self {
        self.heads_total = 1;
        self.head_dim = elements;
        self.parts = KvPlanes::Latent;
        self
    }

    /// Sets the number of tokens per block.
    pub fn block_tokens(mut self, tokens: usize) -> Self {
        self.block_tokens = tokens;
        self
    }

    /// Sets the type in which elements are stored.
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.dtype = dtype;
        self
    }

    /// Sets the number of ranks that share the model's KV heads. It must divide the number of
    /// heads, unless [`replicate_kv_heads`](Self::replicate_kv_heads) allows more ranks than heads.
    pub fn tensor_parallel(mut self, ranks: usize) -> Self {
        self.tensor_parallel = ranks;
        self
    }

    /// Allows more ranks than KV heads, as a multiple: each head is stored by `ranks / heads`
    /// consecutive ranks, so rank `r` has head `r * heads / ranks`.
    pub fn replicate_kv_heads(mut self) -> Self {
        self.replicates_heads = true;
        self
    }

    /// Sets the placement of K and V relative to each other.
    pub fn parts(mut self, parts: KvPlanes) -> Self {
        self.parts = parts;
        self
    }

    /// Sets whether layers or blocks come first in memory.
    pub fn arrangement(mut self, arrangement: Arrangement) -> Self {
        self.arrangement = arrangement;
        self
    }

    /// Sets the mapping from the codes of a quantised dtype to values.
    pub fn scales(mut self, scales: Scales) -> Self {
        self.scales = scales;
        self
    }

    /// Builds the layout. The error names the field: zero or missing, heads and ranks that do not
    /// divide, scales that do not fit, blocks that exceed the address space, over 65,536 planes.
    pub fn build(self) -> Result<KvLayout, Invalid> {
        for (field, value) in [
            ("layers", self.layers),
            ("kv_heads", self.heads_total),
            ("head_dim", self.head_dim),
            ("block_tokens", self.block_tokens),
            ("tensor_parallel", self.tensor_parallel),
        ] {
            if value == 0 {
                return Err(Invalid::new(field, "0, or nothing", "at least 1"));
            }
        }
        let latent = self.parts == KvPlanes::Latent;
        if latent && self.heads_total != 1 {
            return Err(Invalid::new("kv_heads", self.heads_total, "1, as the layout is latent"));
        }
        let ranks = if latent { 1 } else { self.tensor_parallel };
        let kv_heads = self.heads_total;
        let indivisible = |limit: fmt::Arguments<'_>| {
            Err(Invalid::new("tensor_parallel", format_args!("{ranks} ranks for {kv_heads} KV heads"), limit))
        };
        let heads = if kv_heads.is_multiple_of(ranks) {
            kv_heads / ranks
        } else if !ranks.is_multiple_of(kv_heads) {
            return indivisible(format_args!("a divisor of the heads"));
        } else if self.replicates_heads {
            1
        } else {
            let keep = ranks / kv_heads;
            return indivisible(format_args!(
                "a divisor of the heads, or `replicate_kv_heads`, with which {keep} ranks keep each head"
            ));
        };
        self.check_scales(heads)?;

        let mut layout = KvLayout {
            layers: self.layers,
            heads,
            heads_total: self.heads_total,
            tensor_parallel: self.tensor_parallel,
            head_dim: self.head_dim,
            block_tokens: self.block_tokens,
            dtype: self.dtype,
            parts: self.parts,
            arrangement: self.arrangement,
            scales: self.scales,
            bytes_per_token: 0,
            bytes_per_block: 0,
        };
        let (per_token, per_block) = layout.count_bytes().ok_or_else(|| too_large("block", "its size"))?;
        (layout.bytes_per_token, layout.bytes_per_block) = (per_token, per_block);
        if layout.planes_per_layer() * layout.layers > PLANES_MAX {
            let got = layout.planes_per_layer() * layout.layers;
            return Err(Invalid::new("number of planes", got, format_args!("at most {PLANES_MAX}")));
        }
        Ok(layout)
    }

    fn check_scales(&self, heads: usize) -> Result<(), Invalid> {
        if self.scales != Scales::Unit && !self.dtype.is_quantised() {
            let got = format_args!("scales for {}", self.dtype);
            return Err(Invalid::new("scales", got, "none, as the type is not quantised"));
        }
        let Scales::PerHead { k, v } = &self.scales else { return Ok(()) };
        let want = self.layers.checked_mul(heads).ok_or_else(|| too_large("block", "its size"))?;
        let want_v = if self.parts == KvPlanes::Latent { 0 } else { want };
        for (which, scales, want) in [("static scales of k", k, want), ("static scales of v", v, want_v)] {
            if scales.len() != want {
                let limit = format_args!("{want}, one for each layer and head");
                return Err(Invalid::new(which, scales.len(), limit));
            }
            // The inverse must be normal too, because values are multiplied by it.
            let bad = scales.iter().position(|&s| !(s > 0.0 && s.is_normal() && s.recip().is_normal()));
            if let Some(index) = bad {
                let (layer, head) = (index / heads, index % heads);
                let got = format_args!("{:e} for layer {layer}, head {head}", scales[index]);
                return Err(Invalid::new(which, got, "a positive normal number").at(index));
            }
        }
        Ok(())
    }
}

impl KvLayout {
    /// Starts building a layout.
    pub fn builder() -> KvLayoutBuilder {
        KvLayoutBuilder::default()
    }

    /// Returns whether packed blocks of both layouts have the same form, which depends neither on
    /// arrangement, joining of K and V, nor number of ranks if each has the same number of heads.
    pub fn packs_as(&self, other: &Self) -> bool {
        let is_latent = |layout: &Self| layout.parts == KvPlanes::Latent;
        self.layers == other.layers
            && self.heads == other.heads
            && self.head_dim == other.head_dim
            && self.block_tokens == other.block_tokens
            && self.dtype == other.dtype
            && is_latent(self) == is_latent(other)
            && self.scales == other.scales
    }

    /// Returns the number of layers with K and V.
    #[inline]
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Returns the number of KV heads of this rank.
    #[inline]
    pub fn kv_heads(&self) -> usize {
        self.heads
    }

    /// Returns the number of KV heads of the whole model.
    #[inline]
    pub fn kv_heads_total(&self) -> usize {
        self.heads_total
    }

    /// Returns the number of ranks that share the heads.
    #[inline]
    pub fn tensor_parallel(&self) -> usize {
        self.tensor_parallel
    }

    /// Returns the number of ranks that store the same heads: 1 unless ranks outnumber heads.
    pub fn kv_head_replicas(&self) -> usize {
        self.tensor_parallel * self.heads / self.heads_total
    }

    /// Returns the number of elements per head and token, or of the latent vector.
    #[inline]
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Returns the number of tokens per block.
    #[inline]
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Returns the type in which elements are stored.
    #[inline]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the placement of K and V relative to each other.
    #[inline]
    pub fn parts(&self) -> KvPlanes {
        self.parts
    }

    /// Returns whether layers or blocks come first in memory.
    #[inline]
    pub fn arrangement(&self) -> Arrangement {
        self.arrangement
    }

    /// Returns the mapping from codes to values.
    #[inline]
    pub fn scales(&self) -> &Scales {
        &self.scales
    }

    /// Returns the elements per token of K, V or latent vector in one layer: `kv_heads * head_dim`.
    #[inline]
    pub fn row_elements(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the bytes per token over all layers, with scales and without padding.
    #[inline]
    pub fn bytes_per_token(&self) -> usize {
        self.bytes_per_token
    }

    /// Returns the bytes of memory per block.
    #[inline]
    pub fn bytes_per_block(&self) -> usize {
        self.bytes_per_block
    }

    /// Returns the bytes of a packed block: all its data with scales, without padding.
    #[inline]
    pub fn packed_bytes(&self) -> usize {
        self.block_tokens * self.bytes_per_token
    }

    #[inline]
    pub(super) fn planes_per_layer(&self) -> usize {
        let parts = if self.parts == KvPlanes::Separate { 2 } else { 1 };
        if self.has_scale_planes() { 2 * parts } else { parts }
    }

    #[inline]
    pub(super) fn has_scale_planes(&self) -> bool {
        self.scales == Scales::PerTokenHead
    }

    /// Returns the bytes per token of K, V or latent vector in a plane of this kind.
    #[inline]
    pub fn row_bytes(&self, kind: PlaneKind) -> usize {
        match kind {
            PlaneKind::Values => self.row_elements() * self.dtype.bytes(),
            PlaneKind::Scales => self.heads * size_of::<f32>(),
        }
    }

    pub(super) fn tiles_of_layer(&self) -> impl Iterator<Item = (PlaneKind, PlanePart, usize)> {
        let parts: &[PlanePart] = match self.parts {
            KvPlanes::Separate => &[PlanePart::K, PlanePart::V],
            KvPlanes::Joined => &[PlanePart::Joined],
            KvPlanes::Latent => &[PlanePart::Latent],
        };
        let kinds: &[PlaneKind] = if self.has_scale_planes() {
            &[PlaneKind::Values, PlaneKind::Scales]
        } else {
            &[PlaneKind::Values]
        };
        kinds.iter().flat_map(move |&kind| {
            parts.iter().map(move |&part| {
                let halves = if part == PlanePart::Joined { 2 } else { 1 };
                (kind, part, halves * self.block_tokens * self.row_bytes(kind))
            })
        })
    }

    /// Returns the bytes per token and per block; `None` if either exceeds the address space.
    fn count_bytes(&self) -> Option<(usize, usize)> {
        let halves = if self.parts == KvPlanes::Latent { 1 } else { 2 };
        let scale_bytes = if self.has_scale_planes() { size_of::<f32>() } else { 0 };
        let per_head = self.head_dim.checked_mul(self.dtype.bytes())?.checked_add(scale_bytes)?;
        let row = self.heads.checked_mul(per_head)?.checked_mul(halves)?;
        let per_token = self.layers.checked_mul(row)?;
        let packed = per_token.checked_mul(self.block_tokens)?;
        // No tile overflows from here on: each is smaller than the packed block.
        let padding = self.layers.checked_mul(self.planes_per_layer())?.checked_mul(TILE_ALIGN)?;
        packed.checked_add(padding).filter(|&bytes| bytes <= isize::MAX as usize)?;
        let layer: usize = self.tiles_of_layer().map(|(.., tile)| tile.next_multiple_of(TILE_ALIGN)).sum();
        Some((per_token, self.layers * layer))
    }
}

pub(super) fn too_large(what: &'static str, got: impl fmt::Display) -> Invalid {
    Invalid::new(what, got, "a size within the address space")
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layers, heads, head_dim, block_tokens, dtype, .. } = self;
        match self.parts {
            KvPlanes::Latent => write!(f, "{layers} layers x latent {head_dim}")?,
            _ => write!(f, "{layers} layers x {heads} KV heads x {head_dim}")?,
        }
        write!(f, ", {dtype}, {block_tokens} tokens and {} bytes a block", self.bytes_per_block)
    }
}

#[cfg(test)]
mod tests;
