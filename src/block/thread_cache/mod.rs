//! Thread caches: how the owner and visitors enter a thread's magazines and retire lists.
//!
//! A thread cache is an [owner cell](crate::frame::OwnerCell): its owner enters with two plain
//! stores, other threads visit it while the owner is outside, so idle and finished threads strand
//! no frames. [`CacheHandle`](crate::block::CacheHandle) assigns caches to threads and tasks.

mod cell;
mod local;
mod reference;

pub(in crate::block) use cell::{ThreadCache, ThreadCaches};
pub(crate) use local::INLINE_BLOCKS;
pub(in crate::block) use local::{Local, Returning};
pub(in crate::block) use reference::{CacheRef, CountedRef, ThreadUses};
