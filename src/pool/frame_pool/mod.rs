//! Pools for engines with ids, hashes and schedulers of their own: ids are frames, hashes are
//! foreign, and calls take lists.
//!
//! A frame number is valid as long as the engine has a reference: allocations and hits pin blocks.
//!
//! # States of a frame
//!
//! ```text
//! free ──allocate, claim──► referenced ──free──► free, or cached without references if it has hashes
//! cached without references ──share, hit──► referenced
//!                           ──an allocation needs it, claim, uncache──► free
//! ```
//!
//! # Keys
//!
//! The pool knows a frame only by the engine's [hash and group](FramePool::key). The hash must
//! cover all tokens up to the frame's end, including salt, adapter and images, as vLLM's block
//! hashes do. It may have any length, so an engine can append these to its own. All else is shared
//! with [`Pool`](crate::Pool); see `block/release/in_place.rs`, and `prefix/names.rs` for further
//! hashes.
//!
//! | file | contents |
//! |---|---|
//! | `builder` | construction |
//! | `frame_pool` | the pool: allocation and references by frame, batches, counts |
//! | `hashes` | keys, registration, lookups |
//! | `groups` | lookups of several groups of layers at one boundary |
//! | `moves` | compaction in two steps: pairs for the engine to copy, then the commit |
//! | `resize` | growth, and shrinking in two steps |
//! | `waiting` | allocation that waits in the queue |
//! | `metrics` | counters, gauges and histograms; fragmentation, the state of every frame, owners |

mod builder;
#[expect(clippy::module_inception, reason = "the room is named after its main type")]
mod frame_pool;
mod groups;
mod hashes;
mod metrics;
mod moves;
mod resize;
mod waiting;

pub use builder::FramePoolBuilder;
pub use frame_pool::{FrameBatch, FrameInfo, FramePool};
pub use groups::{HitGroup, Need};
pub use hashes::{FrameGroup, FrameKey};
pub use moves::{FrameMoves, MovedFrames};
pub use resize::FrameShrink;
pub use waiting::FrameLease;
