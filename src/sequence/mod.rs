//! Sequences: logical tokens to blocks.
//!
//! A [`Sequence`] owns an ordered list of blocks; token `t` is in block `t / block_tokens`. A [`Batch`] is one step of
//! the engine: tokens are appended under it, and it builds what kernels read. A [`SequenceView`] reads a sequence's
//! list while its owner, on another thread, goes on.
//!
//! | file | what |
//! |---|---|
//! | `plan` | which blocks an append writes: arithmetic |
//! | `seals` | which blocks are sealed, by whom and when: bookkeeping |
//! | `list` | the growing list of ids: one owner, any number of readers |
//! | `registry` | [`Sequences`]: what is open, by id; views |
//! | `sequence` | the owner's side: fork, commit, truncate |
//! | `batch` | append, draft, copy-on-write, the end of a step |
//! | `outputs` | block tables, slots and lengths for kernels |
//! | `moved` | entries of tables that live on, whose blocks moved |
//! | `bytes` | store and load without `unsafe` |
//! | `transit` | on the way to another pool |
//!
//! # Invariants
//!
//! ```text
//! blocks == ceil(length / block_tokens)        committed <= length <= 2^31 - 1
//! every block of the list holds one reference of this sequence
//! a block with more than one reference, or sealed, is not written to
//! ```
//!
//! # Who may write a block's bytes
//!
//! The one sequence that holds the block's only reference, through `&mut`, while the block is neither sealed nor about
//! to be. A write into anything else goes to a copy. This is what makes [`Batch::store`] and [`Batch::load`] safe to
//! call; it rests on one rule, which all of the pool's interface rests on: a reference is released only by whoever
//! holds it. Sequences do not give their references out as handles, and no handle changes a [guarded](crate::block) block.
//!
//! # Who waits for what
//!
//! Nobody waits. What leaves a list is unlinked, then released; a batch that may have read it there holds it back
//! ([`Clock`](crate::batch::Clock)): a reader begins its batch before it reads a list, an owner fences between unlinking and
//! releasing, so that either the reader misses the block or the release sees the batch.

mod batch;
mod batch_inner;
mod builder;
mod bytes;
#[cfg(not(kvpool_loom))]
mod list;
#[cfg(kvpool_loom)]
pub mod list;
mod moved;
mod outputs;
mod plan;
mod registry;
mod seals;
#[expect(clippy::module_inception, reason = "the floor is named for what it is about")]
mod sequence;
mod token_hashes;
mod transit;

pub use crate::block::{Moved, Since};
pub use batch::{Appended, Batch, Copied, FinishError};
pub use batch_inner::Finish;
pub use builder::SequenceBuilder;
pub use moved::MovedEntry;
pub use outputs::{BlockTable, CsrTable, Listed};
pub use plan::TOKENS_MAX;
pub use registry::{SequenceView, Sequences};
pub use sequence::Sequence;
pub(crate) use transit::{Arrival, Held};

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
