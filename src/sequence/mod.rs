//! Sequences: the mapping from logical tokens to blocks.
//!
//! A [`Sequence`] owns an ordered list of blocks; token `t` is in block `t / block_tokens`. A
//! [`Batch`] is one step of the engine: tokens are appended under it, and it builds the inputs of
//! kernels. A [`SequenceView`] reads a sequence's list while its owner, on another thread,
//! continues to change it.
//!
//! | file | what |
//! |---|---|
//! | `plan` | which blocks an append writes (pure) |
//! | `seals` | which blocks are sealed, when, and by which batch (bookkeeping) |
//! | `token_hashes` | the known token ids, as block hashes |
//! | `list` | the growing list of ids: one owner, any number of readers |
//! | `frames` | the owner's copy of the frames, which tables are copied from |
//! | `registry` | [`Sequences`]: open sequences by id; views |
//! | `sequence` | the owner's operations: fork, commit, truncate |
//! | `sealing` | how it seals and registers its blocks |
//! | `footprint` | the blocks that the close of a sequence gives back |
//! | `builder` | opening a sequence with its cached prefix |
//! | `reserve` | blocks for appends that cannot fail |
//! | `admit` | opening a sequence together with its blocks |
//! | `tokens` | what an append adds |
//! | `batch_inner` | the end of a batch, on the host or on a stream |
//! | `batch` | a step of the engine |
//! | `grow` | the blocks that an append takes; copy on write |
//! | `append` | the append to a sequence |
//! | `step` | appends to many sequences, or to none |
//! | `abandoned` | what a batch wrote that did not finish |
//! | `closing` | sequences that were closed while a batch was writing to them |
//! | `withdraw` | what a sequence does about both |
//! | `outputs` | block tables, slots and lengths for kernels |
//! | `moved` | entries of persistent block tables whose blocks moved |
//! | `bytes` | store and load without `unsafe` |
//! | `pinned` | cached prefixes that are kept from eviction |
//! | `transfer` | transfer of a sequence to another pool |
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
//! Only the sequence that holds the block's single reference, through `&mut`, while the block is
//! neither sealed nor about to be. Any other write goes to a copy. This makes [`Batch::store`] and
//! [`Batch::load`] safe to call. It rests on one rule of the whole interface: a reference is
//! released only by its holder. A handle holds none: it can read and pin a block, and nothing else.
//!
//! # Nothing waits
//!
//! A block removed from a list is unlinked, then released; a batch that may have read it in the
//! list holds its frame back. A reader begins its batch before it reads a list, and an owner fences
//! between unlinking and releasing. So either the reader does not find the block, or the release
//! sees the batch.

mod abandoned;
mod admit;
mod append;
mod batch;
mod batch_inner;
mod builder;
mod bytes;
mod closing;
mod footprint;
mod frames;
mod grow;
#[cfg(not(kvpool_loom))]
mod list;
#[cfg(kvpool_loom)]
pub mod list;
mod moved;
mod outputs;
mod pinned;
mod plan;
mod registry;
mod reserve;
mod sealing;
mod seals;
#[expect(clippy::module_inception, reason = "the floor is named after its main type")]
mod sequence;
mod step;
mod token_hashes;
mod tokens;
mod transfer;
mod withdraw;

pub use crate::block::{Moved, Since};
pub use admit::AdmitRequest;
pub use append::Appended;
pub use batch::{Batch, FinishError};
pub use batch_inner::Finish;
pub use builder::SequenceBuilder;
pub use grow::Copied;
pub use moved::MovedEntry;
pub use outputs::{BlockTable, CsrTable, Listed};
pub use pinned::PinnedPrefix;
pub use plan::TOKENS_MAX;
pub use registry::{PinnedInfo, SequenceView, Sequences};
pub use sequence::Sequence;
pub use step::{Append, Stepped};
pub use tokens::Tokens;
pub use transfer::ResumeOptions;
pub(crate) use transfer::{Arrival, BlockRefs, Outline};

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
