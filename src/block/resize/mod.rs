//! Resizing: pools that grow and shrink in use. Read `shrink` first. A shrink does not move blocks
//! itself: the [`compact`](crate::compact) floor does. Growth and shrinks exclude each other.

mod grow;
mod shrink;

pub use shrink::Shrinking;
