//! Free frames outside of thread caches: bitmaps, depot, reserve, and the retired frames that no thread cache holds.

mod custody;
mod free_space;
mod reserve;
mod shared_limbo;

pub(in crate::block) use custody::{Announce, Custody};
pub(in crate::block) use free_space::FreeSpace;
pub use free_space::Scrub;
pub(in crate::block) use reserve::Reserve;
pub(in crate::block) use shared_limbo::SharedLimbo;
