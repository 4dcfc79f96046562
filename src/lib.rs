#![doc = include_str!("../README.md")]
// Docs of public items may link to tables and protocols in the docs of private modules, which
// `--document-private-items` includes.
#![allow(rustdoc::private_intra_doc_links)]
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

// First: the modules that follow see the macro that it shadows.
#[cfg(kvpool_planted)]
#[macro_use]
mod planted;

/// Declares a function for this workspace's tests, models and benches, not for users: public with
/// the feature `internals`.
macro_rules! internal {
    ($(#[$attribute:meta])* fn $($function:tt)*) => {
        #[cfg(feature = "internals")]
        $(#[$attribute])*
        pub fn $($function)*

        #[cfg(not(feature = "internals"))]
        $(#[$attribute])*
        pub(crate) fn $($function)*
    };
}

pub mod config;
pub mod dtype;
pub mod error;
pub mod ids;
pub(crate) mod sync;

// These floors trust their callers: calls in the wrong order corrupt other owners' blocks. Types
// that users need are public through `pool` and `sequence`.
#[cfg(feature = "internals")]
pub mod frame;
#[cfg(not(feature = "internals"))]
#[allow(dead_code, unused_imports, reason = "some is for tests and models")]
pub(crate) mod frame;

#[cfg(feature = "internals")]
pub mod batch;
#[cfg(not(feature = "internals"))]
#[allow(dead_code, unused_imports, reason = "some is for tests and models")]
pub(crate) mod batch;

#[cfg(feature = "internals")]
pub mod block;
#[cfg(not(feature = "internals"))]
#[allow(dead_code, unused_imports, reason = "some is for tests and models")]
pub(crate) mod block;

pub mod storage;

pub mod sequence;

pub mod compact;

pub mod prefix;

pub mod migrate;

pub mod pool;

pub mod testing;

#[cfg(all(feature = "cuda", not(kvpool_loom)))]
pub mod cuda;

/// The examples of the tour, compiled and run as tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/tour.md")]
struct Tour;
