//! Free frames outside of thread caches: bitmaps, depot, reserve and shared retire list.
//!
//! | file | contents |
//! |---|---|
//! | `free_space` | [`FreeSpace`]: the parts together, and the steps that make a frame free, held or wiped. Read it first |
//! | `reserve` | frames set aside for urgent requests |
//! | `shared_retire_list` | retired frames that are in no thread cache's retire list |
//! | `wake_guard` | the right to take free frames out of reach of searches, and the duty to announce them |
//!
//! This room knows the words of [`state`](crate::block::state) and the frame and batch floors, but
//! not thread caches nor the wait queue: [`Announce`] is how a wake guard reaches the
//! line.

mod free_space;
mod reserve;
mod shared_retire_list;
mod wake_guard;

pub use free_space::Scrub;
pub(in crate::block) use free_space::{FreeSpace, FreedFrames};
pub(in crate::block) use reserve::Reserve;
pub(in crate::block) use shared_retire_list::SharedRetireList;
pub(in crate::block) use wake_guard::{Announce, WakeGuard};
