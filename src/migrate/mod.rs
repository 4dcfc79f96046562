//! Migration: transfer of blocks to another pool, on the host or on another device, and back.
//!
//! A sequence is copied ([`SequenceCopy`]; a move then closes the source), cached blocks that would
//! be evicted soon move to another pool's cache ([`offload`]), and those of a prompt are copied
//! back from there ([`bring_back`]). Each consists of an [`Export`] in the source, an [`Import`] in
//! the target, and a copy in between: within the process one call of the target's storage, between
//! nodes a [`transport`], preceded by a [`Manifest`] of the blocks.
//!
//! # Protocol
//!
//! ```text
//! prepare    both pools hold a reference on each block involved: sources here, destinations there.
//!            Refused without effect if there is no room, the forms differ, or the source is being written
//! transfer   bytes are copied from frames to frames, in runs, a piece at a time, whose source blocks are pinned
//! verify     between nodes: the checksum of each block that arrived is that of the manifest
//! commit     the destination blocks are sealed, registered, and handed to the new owner;  then the sources are released
//! abort      all references are released:  there the blocks are free again, here they are as before
//! ```
//!
//! # Ownership during a transfer
//!
//! | | during prepare | during the transfer | afterwards |
//! |---|---|---|---|
//! | the caller | the sequence | the sequence, owned by the future or the export (`migrate`), or borrowed (`replicate`) | the new sequence, or the old one in the error |
//! | export and import | a reference on each source block; fresh blocks and the id in the target | the same | - |
//! | the copy or transport | - | a [hold](transport::Hold) on each piece: the same references, and the pins of the source's blocks | - |
//!
//! The last of export, import and holds to be dropped releases the references, so a transfer can be
//! aborted at any time. Blocks whose bytes a transport may still read or write stay owned, and are
//! reported as quarantined.
//!
//! Within the process a job owns export and import: on a tokio runtime in a thread for blocking
//! work; elsewhere, or for a short copy of a sequence, in the polling thread. When the future is
//! dropped, the job stops after the current piece; an offload, which it commits, stops early or
//! completes.
//!
//! # Why the source is not written meanwhile
//!
//! - The transfer holds a reference on each source block. Blocks of a cache are sealed; those of a
//!   sequence are sealed, or their writers have ended and the second reference makes the next write
//!   go to a copy.
//! - Compaction does not move pinned blocks: a piece pins its blocks, then looks up the frames. If
//!   a block has no pin left, a batch instead keeps the bytes in its old frame.
//! - A destination block is fresh, unknown to other threads, and not sealed: nothing moves or
//!   evicts it.
//!
//! # Invariants
//!
//! ```text
//! a block found in a cache has all its bytes: it is registered after they were copied
//! a block is evicted here after it was registered there, and only if no sequence took it meanwhile
//! a formerly evictable block that the transfer holds is evictable again when the transfer ends, however it ends
//! ```
//!
//! # Eras
//!
//! A cache that was cleared must not find what was computed before. So blocks and sequences carry
//! their [origins](crate::prefix::Origin): the caches and eras in which they were computed. An
//! import accepts nothing with an origin in an earlier era of its own cache, and shares no cached
//! block of another era of a cache than the arriving sequence. The tokens of a sequence stay known;
//! its hashes are dropped.
//!
//! | cleared | between | effect |
//! |---|---|---|
//! | the source | export and commit | the import [forgets](Import::forget) the hashes: the export [asks](Export::is_current) just before the commit |
//! | the source | that question and the end of the commit | found in the target, as if the copy had come before the clear; rejected if it comes back |
//! | the target | the first step and the end of the commit | noted in the earlier era, and not found |
//!
//! Other files: `form` and `heads` (packed blocks, and parts of them), `checksum`, `transfers` (of
//! a pool), `route` (the two pools, and what they must share), `held` (references and pins),
//! `gather` (imports from several sources), `carry` (the copy within the process), `job` (its
//! thread), `remote` (other nodes), `fetch` (a prompt's blocks from one), `report` (results).

mod cached;
mod carry;
mod checksum;
mod error;
mod export;
mod fetch;
mod form;
mod gather;
mod heads;
mod held;
mod import;
mod job;
mod manifest;
mod remote;
mod report;
mod route;
mod sequence;
mod transfers;
pub mod transport;

pub(crate) use cached::{bring_back, offload};
pub use error::MigrateError;
pub use export::Export;
pub(crate) use fetch::bring_back_from;
pub use form::PackedForm;
pub use heads::HeadRange;
pub use held::{Arriving, Finished, Piece};
pub use import::{Import, ImportError, Imported};
pub use manifest::Manifest;
pub use remote::{Fetched, Remote, RemoteFuture, Remotes, SendError, Sent};
pub(crate) use report::Kind;
pub use report::{BringBackReport, Carried, MigrationCounts, MigrationReport, OffloadReport};
pub(crate) use route::{End, Route};
pub(crate) use sequence::SequenceCopy;
pub(crate) use transfers::Transfers;
pub use transfers::{TransferDirection, TransferOwner};
