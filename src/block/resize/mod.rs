//! Resizing: pools that grow and shrink while they are in use.
//!
//! | file | contents |
//! |---|---|
//! | `shrink` | a shrink collects the frames above the new end, then removes them. Read it first: the counts are defined there |
//! | `grow` | growth returns the frames that a shrink removed, then adds new ones |
//!
//! A shrink does not move blocks itself: the [`compact`](crate::compact) floor moves them out of
//! its region. Growth and shrinks exclude each other; all other operations continue.

mod grow;
mod shrink;

pub use shrink::Shrinking;
