//! Growing and shrinking.

mod grow;
mod shrink;

pub use shrink::Shrinking;
