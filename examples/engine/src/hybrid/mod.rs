//! Models whose layers differ, on [`Pool::layered`](kvpool::Pool::layered): full attention,
//! windows, chunks, and linear attention with a state.
//!
//! The engine holds the bytes of all groups in one memory of frames. What a kernel computes is
//! written once, over [`LayerMemory`](model::LayerMemory). The reference keeps the same
//! contiguously, so that all logits must be equal to the bit.
//!
//! # Reading order
//!
//! 1. [`model`]: the layers, and what they ask of a memory.
//! 2. [`frames`]: the memory of frames, and where a layer lies in it; [`mod@reference`], the other.
//! 3. [`request`], and [`worker`]: admission, growth in line, preemption, a batch of several
//!    sequences, checkpoints, drafts, forks.
//! 4. [`storm`]: the comparison.
//!
//! States are neither shared nor taken back, so a pool refuses to fork or draft beside them. There
//! are two models therefore: [`storm::states`], and [`storm::drafts`] without a state.

pub mod frames;
pub mod model;
pub mod reference;
pub mod request;
pub mod storm;
pub mod worker;
