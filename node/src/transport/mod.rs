//! Transports between nodes.

#[cfg(feature = "nixl")]
pub mod nixl;
pub mod tcp;
