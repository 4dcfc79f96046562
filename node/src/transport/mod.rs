//! Transports between nodes.

pub mod tcp;
