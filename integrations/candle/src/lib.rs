//! K and V of a [`kvpool`] as candle tensors, on the host.
//!
//! | | copies? | safe? |
//! |---|---|---|
//! | [`PlaneTensors`] | no: the pool works in memory that candle's tensors own, so that they are views of its planes | reading them is `unsafe` |
//! | [`attention`] | no: an operation of candle's that reads each block where it is stored | yes |
//! | [`read`], [`read_block`] | one copy, out of the pool | yes |
//! | [`write`] | one copy, into the pool | yes |
//!
//! # What candle does not permit
//!
//! A tensor of candle owns its memory: on the host a `Vec`, on CUDA a `CudaSlice`, which frees it
//! when the last view is dropped. There is no variant that borrows, so that no tensor can be made
//! over memory that a pool has reserved for itself. On the host [`PlaneTensors`] turns this around
//! and lets the pool [adopt] the memory of tensors. On CUDA, where pools map memory as they grow,
//! this crate has no views: kernels take addresses and strides from [`Storage::planes`].
//!
//! [adopt]: kvpool::storage::HostStorage::adopt_tensors
//! [`Storage::planes`]: kvpool::storage::Storage::planes
//!
//! # Example
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use kvpool::{Dtype, KvLayout, Pool, SequenceId};
//!
//! let layout = KvLayout::builder().layers(2).kv_heads(2).head_dim(8).block_tokens(4).dtype(Dtype::F32).build()?;
//! let pool = Pool::builder(layout).blocks(100).build()?;
//! let mut sequence = pool.sequence(SequenceId(1)).open()?;
//!
//! let mut batch = pool.begin_batch();
//! let new = batch.append(&mut sequence, 10)?.tokens;
//! let k = Tensor::randn(0f32, 1.0, (10, 2, 8), &Device::Cpu)?; // [tokens, kv_heads, head_dim]
//! kvpool_candle::write(&mut batch, &mut sequence, 0, new.clone(), &k, Some(&k))?;
//!
//! // Four query heads for two KV heads, and the queries of the last three tokens.
//! let q = Tensor::randn(0f32, 1.0, (3, 4, 8), &Device::Cpu)?;
//! let out = kvpool_candle::attention(pool.layout(), &batch, &sequence, 0, &q, 0.35)?;
//! assert_eq!((out.dims(), out.dtype()), (&[3, 4, 8][..], DType::F32));
//! batch.finish();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

use candle_core::DType;
use kvpool::{Dtype, SequenceError, StorageError};
use thiserror::Error;

mod attention;
mod copies;
mod planes;

pub use attention::attention;
pub use copies::{read, read_block, write};
pub use planes::PlaneTensors;

/// Reason why K and V could not be passed between a pool and candle. Nothing was changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CandleError {
    /// The batch or the sequence refused.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
    /// The storage refused.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// Candle refused.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// Candle has no tensors of the pool's elements.
    #[error("candle has no tensors of {dtype} elements with their scales")]
    Codes {
        /// Type of the pool's elements.
        dtype: Dtype,
    },
    /// A tensor's elements are none of a pool.
    #[error("{which} has elements of {got:?}; K and V are f32, f16 or bf16")]
    ElementType {
        /// `k`, `v` or `q`.
        which: &'static str,
        /// Type of the tensor.
        got: DType,
    },
    /// A tensor has another shape.
    #[error("{which} has the shape {got:?}, instead of {want}")]
    Shape {
        /// `k`, `v` or `q`.
        which: &'static str,
        /// Shape of the tensor.
        got: Vec<usize>,
        /// Expected shape.
        want: String,
    },
    /// A tensor is not in host memory.
    #[error("{which} is not in host memory")]
    NotOnHost {
        /// `k`, `v` or `q`.
        which: &'static str,
    },
    /// The layout is that of another pool, or has latent vectors.
    #[error("attention over {layout}: {reason}")]
    Layout {
        /// The layout.
        layout: String,
        /// What does not fit.
        reason: &'static str,
    },
}

/// Returns candle's type of a pool's elements.
fn candle_dtype(dtype: Dtype) -> Result<DType, CandleError> {
    match dtype {
        Dtype::F32 => Ok(DType::F32),
        Dtype::F16 => Ok(DType::F16),
        Dtype::Bf16 => Ok(DType::BF16),
        dtype => Err(CandleError::Codes { dtype }),
    }
}
