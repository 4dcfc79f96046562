//! Migration: transfer of blocks to another pool, on the host or on another device, and back.
//!
//! There are three operations. A whole sequence is copied and continues in the other pool
//! ([`replicate`]; [`migrate`] also closes the source). Cached blocks that would be evicted soon
//! move to another pool's cache ([`offload`]). Cached blocks of a prompt are copied back from there
//! ([`bring_back`]).
//!
//! # Protocol
//!
//! ```text
//! prepare    both pools hold a reference on each block involved: sources here, destinations there.
//!            Refused without effect if there is no room, the layouts differ, or the source is being written
//! transfer   bytes are copied from frames to frames, in runs, a piece at a time, whose source blocks are pinned
//! commit     the destination blocks are sealed, registered, and handed to the new owner;  then the sources are released
//! abort      all references are released:  there the blocks are free again, here they are as before
//! ```
//!
//! # Ownership during a transfer
//!
//! | | during prepare | during the copy | afterwards |
//! |---|---|---|---|
//! | the caller | the sequence | the sequence, owned by the future (`migrate`) or borrowed (`replicate`) | the new sequence, or the old one in the error |
//! | the transfer | - | a reference on each source block; fresh blocks and the id in the target | - |
//!
//! The transfer runs as a job of its own: on a tokio runtime in a thread for blocking work,
//! elsewhere in the polling thread. Its references are dropped when the job ends, not earlier, so
//! no frame is reused while bytes are copied into it. The future can therefore be dropped at its
//! single await: the job stops after the current piece, and releases its references. A sequence
//! owned by a dropped future is closed, like any dropped sequence; a borrowed one is unaffected. An
//! offload belongs entirely to its job, which also commits it: when the future is dropped, the job
//! stops early or completes.
//!
//! # Why the source is not written meanwhile
//!
//! - The transfer holds a reference on each source block. Blocks of a cache are sealed. Blocks of a
//!   sequence are sealed, or were last written by a batch that has ended; with a second reference
//!   on them, the next write goes to a copy.
//! - Compaction does not move a block that is pinned: a piece pins its blocks, and looks up the frames
//!   afterwards. It holds no batch, which would hold back every frame that is freed in the source
//!   meanwhile; unless a block has all its pins already. Then a batch begins before the frames are
//!   looked up: the frame that a move leaves is not reused until that batch has ended.
//! - A destination block is fresh, unknown to other threads, and not sealed: it is neither evicted
//!   nor moved.
//!
//! # Invariants
//!
//! ```text
//! a block found in a cache has all its bytes: it is registered after they were copied
//! a block is evicted here after it was registered there, and only if no sequence took it meanwhile
//! a formerly evictable block that the transfer holds is evictable again when the transfer ends, however it ends
//! ```
//!
//! # Files
//!
//! `route` the two pools and their common requirements · `carry` pieces, runs, pins · `job` the
//! thread of a transfer, and dropped futures · `sequence` and `cached` the operations · `report`
//! results · `transport` the trait for bytes between frames.

mod cached;
mod carry;
mod error;
mod job;
mod report;
mod route;
mod sequence;
pub mod transport;

pub use cached::{bring_back, offload};
pub use error::MigrateError;
pub use report::{BringBackReport, Carried, MigrationCounts, MigrationReport, OffloadReport};
pub use sequence::{migrate, replicate};
