//! Engines with prefix reuse, as the benches of reuse drive them: kvpool, an exact LRU and a
//! radix tree behind a mutex each, and in the workspace of the peers one more.
//!
//! A request goes through the same steps in every engine. Each engine decides what a step does, so
//! the whole request is timed as well as its admission: postponing work gains nothing.
//!
//! ```text
//! begin     a step of the engine                                                not timed
//! admit     hash the prompt, share its cached prefix, allocate the rest         admission
//! slots     of the tokens to compute                                            admission
//! finish    the tokens are computed: full blocks can be hit from now on         request
//! end       the sequence is closed; its blocks stay as long as there is room    request
//! ```
//!
//! An engine also serves many requests in each step: see [`step`](crate::step).

mod full;
mod locked;
mod pool;
mod radix;
mod requests;
mod turns;
mod verify;

use std::ops::Range;

pub use full::{BLOCK_TOKENS, Full};
pub use locked::{Locked, LockedList};
pub use pool::{Kvpool, KvpoolUncached};
pub use radix::Radix;
pub use requests::{Case, Figures, Prompts, Requests};
pub use turns::Turns;
pub use verify::{verify, verify_hits};

/// A pool of blocks with a prefix cache.
pub trait Engine: Sync + Sized {
    /// Handle of one thread.
    type Worker<'a>: Worker
    where
        Self: 'a;

    /// Name in reports.
    const NAME: &'static str;

    /// Creates an engine of `blocks` free blocks of `block_tokens` tokens each.
    fn new(blocks: usize, block_tokens: usize) -> Self;

    /// Creates a thread's worker; the number is unique among all threads, past ones included.
    fn worker(&self, thread: usize) -> Self::Worker<'_>;

    /// Clears the cache. No block is owned.
    fn clear(&self);

    /// Returns the number of unowned blocks, cached or not.
    fn unowned(&self) -> usize;

    /// Returns the number of blocks that are free although the engine has been full, at least.
    fn kept_free(&self) -> usize {
        0
    }
}

/// One thread's handle to an engine. A bench never exhausts the pool: a failure panics.
pub trait Worker {
    /// An admitted request.
    type Request;
    /// Blocks outside of sequences.
    type Blocks: Send;

    /// Begins a step of the engine.
    fn begin(&mut self);

    /// Does what need not be timed before the [look-up](Self::look_up) of this prompt.
    fn prepare(&mut self, _prompt: &[u32]) {}

    /// Hashes a prompt and shares its longest cached prefix, excluding the last token.
    fn look_up(&mut self, prompt: &[u32]) -> Self::Request;

    /// The same, and allocates the rest.
    fn admit(&mut self, prompt: &[u32]) -> Self::Request;

    /// Returns the number of cached tokens.
    fn cached(request: &Self::Request) -> usize;

    /// Appends a decoded token.
    fn append(&mut self, request: &mut Self::Request, token: u32);

    /// Writes the slots of tokens of a request: `frame * block_tokens + offset`.
    fn slots(&mut self, request: &Self::Request, tokens: Range<usize>, out: &mut Vec<i64>);

    /// Returns the block table: a row of frames per request, padded to the longest.
    fn table<'r>(&mut self, requests: impl Iterator<Item = &'r Self::Request> + Clone) -> &[i32]
    where
        Self::Request: 'r;

    /// Ends the step with these requests: all tokens are computed.
    fn finish_all<'r>(&mut self, requests: impl Iterator<Item = &'r mut Self::Request>)
    where
        Self::Request: 'r;

    /// Ends the step with one request.
    #[inline]
    fn finish(&mut self, request: &mut Self::Request) {
        self.finish_all(std::iter::once(request));
    }

    /// Closes the sequence.
    fn end(&mut self, request: Self::Request);

    /// Allocates blocks outside of sequences: evicts as many as are not free.
    fn allocate(&mut self, count: usize) -> Self::Blocks;

    /// Frees them.
    fn free(&mut self, blocks: Self::Blocks);
}

/// Writes a block table into a reused buffer: a row per list of blocks, padded with 0.
pub fn table<'t, 'b, B: 'b>(
    out: &'t mut Vec<i32>,
    rows: impl Iterator<Item = &'b [B]> + Clone,
    frame: impl Fn(&B) -> i32,
) -> &'t [i32] {
    let width = rows.clone().map(<[B]>::len).max().unwrap_or(0);
    out.clear();
    for row in rows {
        let end = out.len() + width;
        out.extend(row.iter().map(&frame));
        out.resize(end, 0);
    }
    out
}

/// Writes the slots of tokens in blocks of `block_tokens`; `block` returns the block at each
/// position.
pub fn slots(block_tokens: usize, tokens: Range<usize>, out: &mut Vec<i64>, block: impl Fn(usize) -> i64) {
    let mut next = tokens.start;
    while next < tokens.end {
        let (place, offset) = (next / block_tokens, next % block_tokens);
        let count = (block_tokens - offset).min(tokens.end - next);
        let first = block(place) * block_tokens as i64 + offset as i64;
        out.extend(first..first + count as i64);
        next += count;
    }
}
