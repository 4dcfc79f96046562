#![doc = include_str!("../README.md")]
// Docs of public items point to the tables and protocols in the docs of private modules: `--document-private-items`
// has those.
#![allow(rustdoc::private_intra_doc_links)]
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

// First: the macro that it shadows is seen by the modules that follow.
#[cfg(kvpool_planted)]
#[macro_use]
mod planted;

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

pub mod compact;

pub mod prefix;

pub mod migrate;

pub mod pool;

#[cfg(all(feature = "cuda", not(kvpool_loom)))]
pub mod cuda;
