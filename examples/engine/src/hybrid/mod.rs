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
//! A state holds final tokens only: the engine keeps a copy behind each draft, and computes on from
//! that of the last accepted one. States are not shared, so a pool refuses to fork beside them.
//! There are two models therefore: [`storm::states`], and [`storm::forks`] without a state.

pub mod frames;
pub mod model;
pub mod reference;
pub mod request;
pub mod storm;
pub mod worker;
