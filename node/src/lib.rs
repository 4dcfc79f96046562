//! Moves sequences and cached blocks of `kvpool` between nodes.

pub mod admin;
pub mod settings;
pub mod topology;
