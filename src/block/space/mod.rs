//! Free frames outside of thread caches: bitmaps, depot, reserve and shared retire list. Read
//! `free_space` first. Wake guards reach the wait queue by [`Announce`] alone.

mod free_space;
mod reserve;
mod shared_retire_list;
mod wake_guard;

pub use free_space::Scrub;
pub(in crate::block) use free_space::{FreeSpace, FreedFrames};
pub(in crate::block) use reserve::Reserve;
pub(in crate::block) use shared_retire_list::SharedRetireList;
pub(in crate::block) use wake_guard::{Announce, WakeGuard};
