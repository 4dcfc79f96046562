//! Attention over a sequence's blocks where they are stored.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor};
use half::{bf16, f16};
use kvpool::storage::{Element, KvLayout, KvPlanes};
use kvpool::{Batch, Dtype, Sequence};

use crate::{CandleError, candle_dtype};

/// Computes causal attention of the last tokens of a sequence in one layer, without copying K or V.
///
/// `q` has the shape `[queries, heads, head_dim]`: the queries of the sequence's last tokens, of
/// which each sees the tokens up to its own. `heads` is a multiple of the layout's KV heads, which
/// consecutive heads share. The result has the shape and type of `q`; sums are in f32, in the
/// order of the tokens. Scores are multiplied by `scale`. `layout` is that of the pool.
///
/// # Errors
/// [`CandleError::Shape`], [`CandleError::ElementType`] and [`CandleError::NotOnHost`] for `q`;
/// [`CandleError::Codes`] and [`CandleError::Layout`] for quantised and latent layouts; and as for
/// [`Batch::tile`].
pub fn attention(
    layout: &KvLayout,
    batch: &Batch,
    sequence: &Sequence,
    layer: usize,
    q: &Tensor,
    scale: f32,
) -> Result<Tensor, CandleError> {
    let refused = |reason| CandleError::Layout { layout: layout.to_string(), reason };
    candle_dtype(layout.dtype())?;
    if layout.parts() == KvPlanes::Latent {
        return Err(refused("latent vectors are not K and V"));
    }
    match *q.dims() {
        [queries, heads, head_dim]
            if (1..=sequence.len()).contains(&queries)
                && heads > 0
                && heads.is_multiple_of(layout.kv_heads())
                && head_dim == layout.head_dim() => {}
        _ => {
            let (most, kv_heads, head_dim) = (sequence.len(), layout.kv_heads(), layout.head_dim());
            let want = format!("[1 to {most}, a multiple of {kv_heads}, {head_dim}]");
            return Err(CandleError::Shape { which: "q", got: q.dims().to_vec(), want });
        }
    }
    if !matches!(q.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        return Err(CandleError::ElementType { which: "q", got: q.dtype() });
    }
    if !q.device().is_cpu() {
        return Err(CandleError::NotOnHost { which: "q" });
    }
    let q = q.contiguous()?;
    match layout.dtype() {
        Dtype::F16 => InPlace::<f16>::new(layout, batch, sequence, layer, scale)?.apply(&q),
        Dtype::Bf16 => InPlace::<bf16>::new(layout, batch, sequence, layer, scale)?.apply(&q),
        _ => InPlace::<f32>::new(layout, batch, sequence, layer, scale)?.apply(&q),
    }
}

/// The operation: it borrows the blocks from batch and sequence.
struct InPlace<'a, T> {
    /// K and V of each block.
    tiles: Vec<(&'a [T], &'a [T])>,
    length: usize,
    kv_heads: usize,
    head_dim: usize,
    block_tokens: usize,
    scale: f32,
}

/// An element whose value is a float's.
trait Float: Element {
    fn value(self) -> f32;
}

impl Float for f32 {
    fn value(self) -> f32 {
        self
    }
}

impl Float for f16 {
    fn value(self) -> f32 {
        self.to_f32()
    }
}

impl Float for bf16 {
    fn value(self) -> f32 {
        self.to_f32()
    }
}

impl<'a, T: Float> InPlace<'a, T> {
    fn new(
        layout: &KvLayout,
        batch: &'a Batch,
        sequence: &'a Sequence,
        layer: usize,
        scale: f32,
    ) -> Result<Self, CandleError> {
        let (length, row, block_tokens) = (sequence.len(), layout.row_elements(), layout.block_tokens());
        let tiles = (0..sequence.block_count()).map(|index| batch.tile::<T>(sequence, layer, index));
        let tiles = tiles.collect::<Result<Vec<_>, _>>()?;
        let fits = |index: usize, part: &[T]| {
            part.len() == length.saturating_sub(index * block_tokens).min(block_tokens) * row
        };
        if !tiles.iter().enumerate().all(|(index, (k, v))| fits(index, k) && fits(index, v)) {
            return Err(CandleError::Layout {
                layout: layout.to_string(),
                reason: "the pool has another layout",
            });
        }
        let (kv_heads, head_dim) = (layout.kv_heads(), layout.head_dim());
        Ok(Self { tiles, length, kv_heads, head_dim, block_tokens, scale })
    }

    fn apply(&self, q: &Tensor) -> Result<Tensor, CandleError> {
        Ok(q.apply_op1_no_bwd(self)?)
    }

    /// Returns the row of a token and a KV head.
    fn row(&self, part: impl Fn(&(&'a [T], &'a [T])) -> &'a [T], token: usize, head: usize) -> &'a [T] {
        let tile = part(&self.tiles[token / self.block_tokens]);
        &tile[(token % self.block_tokens * self.kv_heads + head) * self.head_dim..][..self.head_dim]
    }

    fn run(&self, q: &[f32], heads: usize) -> Vec<f32> {
        let mut out = vec![0f32; q.len()];
        let mut scores = vec![0f32; self.length];
        let queries = q.len() / (heads * self.head_dim);
        let rows = q.chunks(self.head_dim).zip(out.chunks_mut(self.head_dim)).enumerate();
        for (at, (q, out)) in rows {
            let (query, head) = (at / heads, at % heads);
            let kv_head = head / (heads / self.kv_heads);
            let scores = &mut scores[..self.length - queries + query + 1];
            let mut largest = f32::NEG_INFINITY;
            for (token, score) in scores.iter_mut().enumerate() {
                let k = self.row(|tile| tile.0, token, kv_head);
                *score = q.iter().zip(k).map(|(q, k)| q * k.value()).sum::<f32>() * self.scale;
                largest = largest.max(*score);
            }
            let mut sum = 0f32;
            for (token, score) in scores.iter().enumerate() {
                let weight = (score - largest).exp();
                sum += weight;
                let v = self.row(|tile| tile.1, token, kv_head);
                out.iter_mut().zip(v).for_each(|(out, v)| *out += weight * v.value());
            }
            out.iter_mut().for_each(|out| *out /= sum);
        }
        out
    }
}

impl<T: Float> CustomOp1 for InPlace<'_, T> {
    fn name(&self) -> &'static str {
        "kvpool-attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let shape = layout.shape().clone();
        let (_, heads, _) = shape.dims3()?;
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("queries are contiguous")
        };
        let out = match storage {
            CpuStorage::F32(q) => CpuStorage::F32(self.run(&q[start..end], heads)),
            CpuStorage::F16(q) => {
                let q: Vec<f32> = q[start..end].iter().map(|q| q.to_f32()).collect();
                CpuStorage::F16(self.run(&q, heads).into_iter().map(f16::from_f32).collect())
            }
            CpuStorage::BF16(q) => {
                let q: Vec<f32> = q[start..end].iter().map(|q| q.to_f32()).collect();
                CpuStorage::BF16(self.run(&q, heads).into_iter().map(bf16::from_f32).collect())
            }
            _ => candle_core::bail!("queries are f32, f16 or bf16"),
        };
        Ok((out, shape))
    }
}
