//! A small serving engine on kvpool, complete enough to serve and short enough to read in an hour.
//!
//! It decodes with a transformer of the Qwen2 and Llama family on the CPU. Several workers batch
//! continuously over one pool: chunked prefill, prefix cache, speculative drafts, several answers
//! by forks, preemption by swaps to a host pool or by recomputation, compaction and resizing beside
//! them, streams of tokens, cancellation. The same engine on contiguous caches is the reference:
//! all logits are equal to the bit.
//!
//! # Reading order
//!
//! 1. [`request`]: what is asked, and what a job is.
//! 2. [`cache`], the interface of a cache; [`paged`] with [`admission`] and [`preempt`] on kvpool, and
//!    [`contiguous`], the reference.
//! 3. [`scheduler`], what workers share, and [`worker`], their loop.
//! 4. [`engine`]: threads and streams.
//! 5. [`kernels`], [`model`], [`config`], [`weights`]: the transformer.
//! 6. [`storm`]: the comparison.
//! 7. [`hybrid`]: the same for a model whose layers differ.
//!
//! # Invariants
//!
//! - A row of every computation depends on that row alone, in a fixed order of sums. So a token's
//!   logits depend neither on the batch nor on the chunk nor on the place of K and V.
//! - Workers preempt the last job in the order of ranks, and jobs are admitted in that order.
//! - A worker holds no lock while it computes, allocates, or copies.

pub mod admission;
pub mod cache;
pub mod config;
pub mod contiguous;
pub mod engine;
pub mod error;
pub mod hybrid;
pub mod kernels;
pub mod model;
pub mod paged;
pub mod preempt;
pub mod request;
pub mod scheduler;
pub mod storm;
pub mod weights;
pub mod worker;
