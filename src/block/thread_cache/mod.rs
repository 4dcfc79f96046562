//! Thread caches: a thread's magazines and its limbo, and how the thread and visitors enter them.

mod cell;
mod local;
mod reference;

pub(in crate::block) use cell::{ThreadCache, ThreadCaches};
pub(crate) use local::INLINE_BLOCKS;
pub(in crate::block) use local::Returning;
pub(in crate::block) use reference::{CacheRef, CountedRef, ThreadUses};
