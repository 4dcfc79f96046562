//! Blocks: what the pool hands out.
//!
//! A block has a stable id, one packed word ([`BlockWord`]) and a little info. The word says which frame holds the
//! block's bytes, so that translation, sharing, pinning, sealing and the publication of a move are one atomic operation
//! each.
//!
//! # Bijection
//!
//! Blocks and frames are in bijection over the whole pool, free ones included: `block_at(frame(b)) == b` and
//! `frame(block_at(f)) == f`, and those of frames that a [shrink](Shrinking) has taken away. The free frames are what the [`frame`](crate::frame) floor deals in; the free blocks
//! are the blocks at free frames, so that there is no second allocator for ids. As long as nothing has moved,
//! `block == frame`; a move swaps two (`moving`).
//!
//! # Who may write a word
//!
//! - refs == 0, free: whoever owns the frame (a free one: the thread that took it out of the frame floor). Plain stores. Who
//!   keeps such a frame for longer than a call *holds* it: a mover its destinations, a pool that shrinks what it has
//!   collected. The word says so, so that the audit can tell such a frame from a lost one.
//! - refs == 0 and cached: whoever hits or evicts it, by compare-exchange only (`keep`).
//! - refs > 0: anyone who holds a reference or a handle, by compare-exchange only. A handle's generation is compared
//!   with the word's before each attempt, and what only owners may do to a guarded block is refused to it there.
//!
//! # Who may release a reference
//!
//! Each reference has one owner: a lease or a sequence's list (the block is *guarded*), or handles, which are counted by
//! who has them. A lease and a list release by id, what they own; a handle releases what no lease and no list owns. The word
//! says which of the two it is, and both releases compare that bit in the very step that takes the reference.
//!
//! # Conservation
//!
//! `free in bitmaps + in magazines + in the depot + in the reserve + retired + held + evictable + owned + null == total`, at every
//! quiescent point.
//! [`Core::audit`] recounts it.

mod allocate;
mod audit;
mod cache_handle;
mod core;
mod counts;
mod fast_path;
mod latency;
#[cfg(kvpool_loom)]
pub mod models;
mod moving;
mod release;
mod request;
mod resize;
mod space;
mod state;
mod thread_cache;
mod wait;

pub use self::core::{Blocks, BlocksConfig, Core, Evictable, Evictor, NotEvicted};
pub use audit::{AuditError, AuditReport, Place};
pub(crate) use cache_handle::CacheHandle;
pub use cache_handle::{KeepAlive, flush_thread};
pub use counts::Counts;
pub use latency::Latency;
pub(crate) use latency::Sampler;
pub use moving::{FrameUse, GaveWay, Wave};
pub use request::{AllocRequest, Priority};
pub use resize::Shrinking;
pub use space::Scrub;
pub use state::{BlockInfo, BlockWord, Moved, Ownership, Released, Since};
pub(crate) use state::{Bucket, Rows};
pub(crate) use thread_cache::INLINE_BLOCKS;
