//! Moves sequences and cached blocks of `kvpool` between nodes.

pub mod protocol;
pub mod transport;
pub mod wire;
