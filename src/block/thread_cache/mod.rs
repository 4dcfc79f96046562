//! Thread caches: a thread's magazines and retire lists, and how the owner and visitors enter them.
//!
//! A thread cache is an [owner cell](crate::frame::OwnerCell): its owner enters with two plain
//! stores, other threads visit it while the owner is outside. Idle and finished threads therefore
//! strand no frames.
//!
//! | file | contents |
//! |---|---|
//! | `local` | the contents: two magazines, retire lists, and the way of freed frames into them. Read it first |
//! | `cell` | the cell with mirrors for statistics, and the list of all thread caches of a pool |
//! | `reference` | the two rights of an owner to enter: for a short step, or counted |
//!
//! [`CacheHandle`](crate::block::CacheHandle) assigns caches to threads and tasks.

mod cell;
mod local;
mod reference;

pub(in crate::block) use cell::{ThreadCache, ThreadCaches};
pub(crate) use local::INLINE_BLOCKS;
pub(in crate::block) use local::{Local, Returning};
pub(in crate::block) use reference::{CacheRef, CountedRef, ThreadUses};
