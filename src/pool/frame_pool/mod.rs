//! Pools for engines with ids, hashes and schedulers of their own: ids are frames, hashes are
//! foreign, and calls take lists.
//!
//! # Ids
//!
//! An engine's id is the number of a frame. Blocks and frames are in bijection, and a block with
//! references stays in its frame: allocations and hits pin it, and only blocks without references
//! move. So a frame's number means the block in it for as long as the engine has a reference. The
//! number of a cached frame without references, as [`FramePool::cached`] returns it, means
//! something until the next call of any thread that allocates or commits moves.
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
//! As in any pool, a frame that is freed while a [batch](FramePool::begin_batch) is in flight is
//! not reused before that batch has ended, also if it was cached meanwhile. Engines that order
//! everything on one stream need no batches.
//!
//! # Keys
//!
//! The pool knows a frame by the engine's [hash and group](FramePool::key) alone. The hash must
//! cover everything that the contents depend on: all tokens up to the frame's end, and the salt,
//! the adapter and the images among them, as vLLM's block hashes do with their extra keys. A hash
//! has any length, so that an engine whose own does not cover them can append these keys to it.
//!
//! # Below
//!
//! There is no protocol of its own here, and no second core: words, magazines, ladder, limbo,
//! eviction queues, index and moves are those of [`Pool`](crate::Pool). Blocks are released as
//! those of sequences are, which leaves them evictable; see `block/release/in_place.rs`. Further
//! hashes of a block are in `prefix/names.rs`.
//!
//! | file | contents |
//! |---|---|
//! | `builder` | construction |
//! | `frame_pool` | the pool: allocation and references by frame, batches, counts |
//! | `hashes` | keys, registration, lookups |
//! | `moves` | compaction in two steps: pairs for the engine to copy, then the commit |
//! | `resize` | growing, and shrinking in two steps |
//! | `waiting` | allocation that waits in line |
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
