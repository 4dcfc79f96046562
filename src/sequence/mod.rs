//! Sequences: the mapping from logical tokens to blocks.
//!
//! A [`Sequence`] owns an ordered list of blocks; token `t` is in block `t / block_tokens`. A
//! [`Batch`] is one step of the engine: it appends tokens and builds the inputs of kernels. A
//! [`SequenceView`] reads the list of a sequence while its owner changes it on another thread.
//!
//! - Opening: `builder`, with the cached prefix; `admit`, with all blocks of the prompt;
//!   `registry`, the open sequences by id, and their views.
//! - The owner's operations: `sequence` (fork, commit, truncate), `reserve` (blocks for appends
//!   that cannot fail), `footprint` (the blocks that a close gives back).
//! - `grouped`, `grouped_step`, `group_admission`: sequences and batches of pools with several groups of layers.
//! - Blocks: `list`, the shared list of ids; `frames`, the owner's copy of the frames;
//!   `token_hashes`, the known token ids and their block hashes.
//! - Appending: `batch`, `step` (many sequences, or none), `append`, `tokens` (what an append
//!   adds), `plan` (which blocks it writes; pure), `grow` (new blocks, copy on write).
//! - The end of a batch: `batch_inner`, on the host or on a stream; `seals` and `sealing`, when
//!   blocks become final; `abandoned`, `closing` and `withdraw`, for batches that do not finish and
//!   sequences closed during a batch.
//! - Data: `outputs` (block tables, slots, lengths), `moved` (outdated entries of persistent
//!   tables), `bytes` (store and load without `unsafe`).
//! - `pinned`, prefixes kept from eviction; `transfer`, to another pool; `prompt_blocks`, what a
//!   hit needs in every group, wherever it is.
//! - `window` and `slide`: blocks given up behind an attention window.
//!
//! # Invariants
//!
//! ```text
//! blocks == ceil(length / block_tokens)        committed <= length <= 2^31 - 1
//! each block of the list, and each reserved one, holds one reference of this sequence
//! a block with more than one reference, or a sealed block, is not written to
//! ```
//!
//! # Write access to a block's bytes
//!
//! Only the sequence that holds the block's single reference writes, through `&mut`, while the
//! block is neither sealed nor promised; other writes go to a copy. [`Batch::store`] and
//! [`Batch::load`] are safe because only its holder releases a reference; handles only read and
//! pin.
//!
//! # Nothing waits
//!
//! A block is unlinked, then released; a batch that may have read it in the list holds its frame
//! back. A reader begins its batch before it reads a list, and an owner fences between unlink and
//! release: either the reader does not find the block, or the release sees the batch.

mod abandoned;
mod admit;
mod append;
mod batch;
mod batch_inner;
mod builder;
mod bytes;
mod checkpoint;
mod closing;
mod footprint;
mod frames;
mod group_admission;
mod grouped;
mod grouped_step;
mod grow;
mod hint;
mod hinted;
#[cfg(not(kvpool_loom))]
mod list;
#[cfg(kvpool_loom)]
pub mod list;
mod moved;
mod outline;
mod outputs;
mod pinned;
mod pins;
mod plan;
mod prompt_blocks;
mod registry;
mod reserve;
mod sealing;
mod seals;
#[expect(clippy::module_inception, reason = "the floor is named after its main type")]
mod sequence;
mod session_infos;
mod sessions;
mod slide;
mod state;
mod step;
mod token_hashes;
mod tokens;
mod transfer;
mod versions;
mod window;
mod withdraw;

pub use crate::block::{Moved, Since};
pub use admit::AdmitRequest;
pub use append::Appended;
pub use batch::{Batch, FinishError};
pub use batch_inner::Finish;
pub use builder::SequenceBuilder;
pub(crate) use footprint::Footprint;
pub use grouped::GroupedSequence;
pub use grouped_step::GroupedAppended;
pub use grow::Copied;
pub use moved::MovedEntry;
pub(crate) use outline::{Groups, ListOutline, Outline};
pub use outputs::{BlockTable, CsrTable, Listed};
pub use pinned::PinnedPrefix;
pub use plan::TOKENS_MAX;
pub use prompt_blocks::{PromptBlock, PromptBlocks};
pub use registry::{PinnedInfo, SequenceView, Sequences};
pub use sequence::Sequence;
pub use state::GroupCopy;
pub use step::{Append, Stepped};
pub use tokens::Tokens;
pub use transfer::{AnySequence, ResumeOptions};
pub(crate) use transfer::{Arrival, BlockRefs};
pub use versions::VersionRange;
pub(crate) use window::ListKind;
pub use window::Window;

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
