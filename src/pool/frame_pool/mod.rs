//! Pools for engines with ids, hashes and schedulers of their own: ids are frames, hashes are
//! foreign, and calls take lists.
//!
//! # Ids
//!
//! An engine's id is the number of a frame. A block with references stays in its frame: allocations
//! and hits pin it, and only blocks without references move. So the number means the block for as
//! long as the engine has a reference.
//!
//! # States of a frame
//!
//! ```text
//! free ──allocate, claim──► referenced ──free──► free, or cached without references if it has hashes
//! cached without references ──share, hit──► referenced
//!                           ──an allocation needs it, claim, uncache──► free
//! ```
//!
//! # Batches in flight
//!
//! A frame that is freed while a [batch](FramePool::begin_batch) is in flight is not reused before
//! that batch has ended. Engines that order everything on one stream need no batches.
//!
//! # Keys
//!
//! The pool knows a frame by the engine's [hash and group](FramePool::key) alone. The hash must
//! cover all tokens up to the frame's end, and the salt, the adapter and the images among them, as
//! vLLM's block hashes do. It has any length, so that an engine can append these to its own.
//!
//! # Below
//!
//! Words, magazines, ladder, retire lists, eviction queues, index and moves are those of
//! [`Pool`](crate::Pool). See `block/release/in_place.rs`, and `prefix/names.rs` for further
//! hashes.
//!
//! | file | contents |
//! |---|---|
//! | `builder` | construction |
//! | `frame_pool` | the pool: allocation and references by frame, batches, counts |
//! | `hashes` | keys, registration, lookups |
//! | `moves` | compaction in two steps: pairs for the engine to copy, then the commit |
//! | `resize` | growing, and shrinking in two steps |
//! | `waiting` | allocation that waits in the queue |
//! | `metrics` | counters, gauges and histograms |

mod builder;
#[expect(clippy::module_inception, reason = "the room is named after its main type")]
mod frame_pool;
mod hashes;
mod metrics;
mod moves;
mod resize;
mod waiting;

pub use builder::FramePoolBuilder;
pub use frame_pool::{FrameBatch, FrameInfo, FramePool};
pub use hashes::{FrameGroup, FrameKey};
pub use moves::{FrameMoves, MovedFrames};
pub use resize::FrameShrink;
pub use waiting::FrameLease;
