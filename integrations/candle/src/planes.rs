//! Tensors whose memory is a pool's.

use candle_core::{Device, Tensor, WithDType};
use half::{bf16, f16};
use kvpool::Dtype;
use kvpool::storage::{AdoptedTensor, AdoptedTensors, HostStorage, KvLayout, KvPlanes};

use crate::{CandleError, candle_dtype};

/// K and V of each layer as tensors `[frames, block_tokens, kv_heads, head_dim]`, over the memory
/// in which a pool keeps its blocks.
///
/// A block is `narrow(0, frame, 1)` of its layer's tensor, and a block table is an index into
/// dimension 0. Clones are cheap, and keep the memory.
///
/// ```
/// use std::sync::Arc;
///
/// use kvpool::{Dtype, KvLayout, Pool};
/// use kvpool_candle::PlaneTensors;
///
/// let layout = KvLayout::builder().layers(2).kv_heads(2).head_dim(8).dtype(Dtype::F32).build()?;
/// let (planes, storage) = PlaneTensors::allocate(&layout, 101)?; // 100 blocks, and the null block
/// let pool = Pool::builder(layout).blocks(100).storage(Arc::new(storage)).build()?;
/// // SAFETY: no batch is in flight, and no block moves.
/// let k = unsafe { planes.k(1) }.expect("the second layer");
/// assert_eq!(k.dims(), [101, 16, 2, 8]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct PlaneTensors {
    k: Vec<Tensor>,
    v: Vec<Tensor>,
}

impl PlaneTensors {
    /// Allocates tensors for `frames` frames, filled with zeros, and a storage that uses their
    /// memory.
    ///
    /// The storage cannot grow.
    ///
    /// # Errors
    /// [`CandleError::Codes`] for a quantised layout, [`CandleError::Storage`] for a wrong number
    /// of frames.
    pub fn allocate(layout: &KvLayout, frames: usize) -> Result<(Self, HostStorage), CandleError> {
        candle_dtype(layout.dtype())?;
        match layout.dtype() {
            Dtype::F16 => Self::of::<f16>(layout, frames),
            Dtype::Bf16 => Self::of::<bf16>(layout, frames),
            _ => Self::of::<f32>(layout, frames),
        }
    }

    fn of<T: WithDType>(layout: &KvLayout, frames: usize) -> Result<(Self, HostStorage), CandleError> {
        // Refuses sizes that no address space has.
        layout.planes(frames).map_err(kvpool::StorageError::from)?;
        let shape = [frames, layout.block_tokens(), layout.kv_heads(), layout.head_dim()];
        let mut adopted = Vec::new();
        let mut tensor = |shape: &[usize]| {
            let mut elements = vec![T::zero(); shape.iter().product()];
            adopted.push(AdoptedTensor::of(&mut elements));
            // Moves the vector, and so neither copies nor moves its elements.
            Tensor::from_vec(elements, shape, &Device::Cpu)
        };
        let layers = || 0..layout.layers();
        let (mut planes, both) =
            (Self { k: Vec::new(), v: Vec::new() }, [&[frames, 2][..], &shape[1..]].concat());
        match layout.parts() {
            KvPlanes::Joined => {
                for _ in layers() {
                    let both = tensor(&both)?;
                    planes.k.push(both.narrow(1, 0, 1)?.squeeze(1)?);
                    planes.v.push(both.narrow(1, 1, 1)?.squeeze(1)?);
                }
            }
            parts => {
                planes.k = layers().map(|_| tensor(&shape)).collect::<Result<_, _>>()?;
                if parts != KvPlanes::Latent {
                    planes.v = layers().map(|_| tensor(&shape)).collect::<Result<_, _>>()?;
                }
            }
        }
        let form = match layout.parts() {
            KvPlanes::Joined => AdoptedTensors::FramesFirst(&adopted),
            KvPlanes::Latent => AdoptedTensors::Latent(&adopted),
            _ => AdoptedTensors::Separate { k: &adopted[..layout.layers()], v: &adopted[layout.layers()..] },
        };
        // SAFETY: the tensors own the memory, and the storage keeps clones of them. They are given
        // out by the unsafe functions below, whose callers keep the frame rule.
        let storage = unsafe { HostStorage::adopt_tensors(layout.clone(), form, frames, planes.clone()) };
        Ok((planes, storage.map_err(kvpool::StorageError::from)?))
    }

    /// Returns K of all frames in one layer, or their latent vectors; `None` if there is no such
    /// layer.
    ///
    /// # Safety
    /// While an operation of candle's reads this tensor or a view of it, no thread writes to any
    /// frame of the storage: candle borrows the whole tensor, even if it reads a part. So no thread
    /// stores or writes a tile, and no block is copied, moved or wiped. No operation writes to it.
    pub unsafe fn k(&self, layer: usize) -> Option<&Tensor> {
        self.k.get(layer)
    }

    /// Returns V of all frames in one layer; `None` if there is no such layer, or in a latent
    /// layout.
    ///
    /// # Safety
    /// As for [`k`](Self::k).
    pub unsafe fn v(&self, layer: usize) -> Option<&Tensor> {
        self.v.get(layer)
    }
}
