//! Ways for bytes to get from one node to another.

#[cfg(feature = "nixl")]
pub mod nixl;
