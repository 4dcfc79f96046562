//! Prefix reuse: blocks that outlive their sequence, found again by what they hold.
//!
//! # Files
//!
//! `policy` which evictable block goes first.

pub mod policy;
//! `index` which block may hold what is looked for.

mod index;

pub use index::{Index, Inserted, Key};
