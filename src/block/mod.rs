//! Blocks: the unit that a pool hands out.
//!
//! A block has a stable id, one packed word ([`BlockWord`]) and 16 bytes of info. The word names
//! its frame, so translation, sharing, pinning, sealing and publishing a move are one atomic
//! operation.
//!
//! The room `state` has the words and tables, without algorithms: read `state/word.rs` first.
//! `docs/code-map.md` lists the other rooms.
//!
//! # Bijection
//!
//! `block_at(frame(b)) == b` and `frame(block_at(f)) == f` over the whole pool, also for free
//! blocks and for frames that a [shrink](Shrinking) removed. The [`frame`](crate::frame) floor
//! manages free frames; the free blocks are those at free frames, so ids need no allocator.
//!
//! # Who may write a word
//!
//! - Free: only the owner of the frame, that is, the thread that took it out of the frame floor, by
//!   plain stores. A thread that keeps such a frame for longer than a call *holds* it (a mover its
//!   destinations, a shrink its collected frames). The word records the hold, for the audit.
//! - Evictable: a thread that hits or evicts the block, by compare-exchange (`allocate/evict.rs`).
//! - Owned: a thread with a reference, or with a handle if it pins, by compare-exchange, except for
//!   the *private release*. The handle's generation is compared with the word's before each
//!   attempt.
//!
//! # Private release
//!
//! A lease that gave out neither a handle nor a second lease of its blocks releases an unsealed,
//! unpinned block by a load and a plain store. No update by another thread is lost between the two:
//!
//! - The lease has the only reference, so no other owner shares, seals, reopens or releases the
//!   block.
//! - Movers exchange words of sealed blocks only, and the prefix cache those of cached blocks only.
//! - Only a forged handle can pin the block. A release clears the pins in any case; a later unpin
//!   fails because the generation has changed.
//!
//! If a handle was given out, the release must be a compare-exchange: a thread that begins a batch
//! and then pins the block may rely on its frame until the batch ends, and the releasing thread
//! sees that batch only because its exchange reads from the pin's. If a second lease exists, a
//! plain store would undo the other release. Models: `loom-tests/tests/unseen.rs`.
//!
//! # Conservation
//!
//! Each reference has one owner: a lease or a sequence's list. A handle owns none. At every
//! quiescent point, `free in bitmaps + in magazines + in the depot + in the reserve + retired +
//! held + evictable + owned + null == total`. [`Core::audit`] recounts both.

mod accounts;
mod allocate;
mod audit;
mod cache_handle;
mod core;
mod counts;
mod latency;
#[cfg(kvpool_loom)]
pub mod models;
mod moving;
mod release;
mod request;
mod resize;
mod space;
mod state;
mod tenants;
mod thread_cache;
mod wait;

#[cfg(not(kvpool_loom))]
pub use self::core::WeakBlocks;
pub use self::core::{Blocks, BlocksConfig, Core, Evictable, Evictor, NotEvicted};
pub(crate) use accounts::Accounts;
pub use accounts::Unaccounted;
pub use allocate::{ListEnd, ListShare};
pub(crate) use allocate::{WordCell, unit_of};
pub use audit::{AuditError, AuditReport, FramePlace};
pub use cache_handle::{KeepAlive, flush_thread};
pub use counts::Counts;
pub use latency::{Latency, LatencyBucket, LatencyHistogram};
pub(crate) use latency::{Operation, Sampler};
pub use moving::{FrameUse, MoveCancelled, Wave};
pub(crate) use release::Exposure;
pub use request::{AllocRequest, Priority};
pub use resize::Shrinking;
pub use space::Scrub;
pub(crate) use state::Class;
#[cfg(debug_assertions)]
pub(crate) use state::Site;
pub use state::SourcePlace;
pub use state::{AllocationCounts, Refusals, WaitCounts};
pub use state::{BlockInfo, BlockWord, MoveCount, Moved, Released, Since};
pub(crate) use state::{GrowTable, Noted, TablePart};
pub use tenants::{EvictedFor, TENANTS_MAX, Tenant, Tenants};
pub(crate) use thread_cache::INLINE_BLOCKS;
pub(crate) use wait::{BatchesEnd, Waiting};
