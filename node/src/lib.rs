//! Moves sequences and cached blocks of `kvpool` between nodes.

pub mod admin;
mod node;
pub mod protocol;
pub mod settings;
pub mod topology;
pub mod transport;
pub mod wire;

pub use node::{Arrival, Arrivals, Node, NodeAdmin, NodeBuilder, NodeCounters, NodeError, Offers, Spill};
