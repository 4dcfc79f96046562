//! Resizing: pools that grow and shrink while they are in use. Read `shrink` first: it defines the
//! counts. A shrink does not move blocks itself: the [`compact`](crate::compact) floor moves them
//! out of its region. Growth and shrinks exclude each other; all other operations continue.

mod grow;
mod shrink;

pub use shrink::Shrinking;
