//! Migration: blocks go to another pool, of the host or of another device, and come back.
//!
//! Three things are built of the same parts. A sequence goes as a whole, and goes on there ([`replicate`], of which
//! [`migrate`] is the one that closes the source). Cached blocks that would be evicted soon go into another pool's cache
//! ([`offload`]); and those of a prompt come back from there ([`bring_back`]).
//!
//! # Protocol
//!
//! ```text
//! prepare    both pools hold a reference on each block that takes part: what is read here, what is written there.
//!            No room there, other form, being written: refused, and nothing has happened
//! transfer   bytes go from frames to frames, in runs, a piece at a time, each piece under a lease of the source
//! commit     the blocks there are sealed, registered, and the new owner's;  then those here are released
//! abort      everything that is held is given back:  there it is free again, here it is what it was
//! ```
//!
//! # Who holds what, and who may drop it
//!
//! | | while it is prepared | while bytes are copied | afterwards |
//! |---|---|---|---|
//! | the caller | the sequence | the sequence, in the future (`migrate`) or borrowed (`replicate`) | the new sequence, or the old one in the error |
//! | the transfer | - | a reference on each block here; fresh blocks, and the id, there | - |
//!
//! The transfer is a job of its own: on a tokio runtime one of its threads for blocking work has it, elsewhere whoever polls. What
//! it holds is dropped where it ends, and not before: nobody gives a frame to another while bytes are copied into it. So the
//! future can be dropped at its one await: the job stops after the piece that is under way, and what it holds is given back.
//! A sequence that a dropped future owned is closed then, as any that is dropped; one that was borrowed goes on as if
//! nothing had been. An offload is the job's alone, and commits by itself: a dropped one stops, or is done.
//!
//! # Why nobody writes what is read
//!
//! - A block of the source has a reference of the transfer's. Blocks of a cache are sealed. Those of a sequence are either
//!   sealed, or were last written by a batch that has ended; with two references on them the next write goes to a copy.
//! - Compaction may move a sealed block meanwhile. The frame that it leaves is not reused before every batch has ended that
//!   began before: a piece begins one, and looks up the frames afterwards.
//! - A block of the target is fresh, known to nobody else, and not sealed: it is neither evicted nor moved.
//!
//! # Invariants
//!
//! ```text
//! a block that is found in a cache has all its bytes: it is registered after they were copied
//! a block is evicted here after it was registered there, and only if nobody had it meanwhile
//! what was evictable here and is held is evictable again when the transfer ends, however it ends
//! ```
//!
//! # Files
//!
//! `route` two pools and what both need · `carry` pieces, runs, leases · `job` on which thread, and what if nobody waits ·
//! `sequence` and `cached` what goes · `report` what was done.

mod cached;
mod carry;
mod error;
mod job;
mod report;
mod route;
mod sequence;

pub use cached::{bring_back, offload};
pub use error::MigrateError;
pub use report::{BringBackReport, Carried, MigrationReport, OffloadReport};
pub use sequence::{migrate, replicate};
