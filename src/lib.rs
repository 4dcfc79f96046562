#![doc = include_str!("../README.md")]
// Docs of public items point to the tables and protocols in the docs of private modules: `--document-private-items`
// has those.
#![allow(rustdoc::private_intra_doc_links)]
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

// First: the macro that it shadows is seen by the modules that follow.
#[cfg(kvpool_planted)]
#[macro_use]
mod planted;

/// A function that the tests, models and benches of this workspace call, and users do not: public with the feature
/// `internals`.
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

// The floors whose functions trust their callers: who calls them in the wrong order breaks other owners. What of their types
// users need is public through `pool` and `sequence`.
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

/// The examples of the tour, which are compiled and run as tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/tour.md")]
struct Tour;
