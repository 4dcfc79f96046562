//! kvpool: a lock-free concurrent pool for the KV-cache blocks of LLM inference engines.
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

pub mod config;
pub mod dtype;
pub mod error;
pub mod ids;
pub(crate) mod sync;

pub mod frame;

pub mod batch;

pub mod block;

pub mod storage;

pub mod sequence;

pub mod pool;
