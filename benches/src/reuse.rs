//! Engines with prefix reuse, as the benches of reuse drive them: kvpool, an exact LRU behind a
//! mutex, and in the workspace of the peers one more.
//!
//! A request goes through the same steps in every engine. Each engine decides what a step does, so
//! the whole request is timed as well as its admission: postponing work gains nothing.
//!
//! ```text
//! prepare   a step of the engine begins                                         not timed
//! admit     hash the prompt, share its cached prefix, allocate the rest         admission
//! slots     of the tokens to compute                                            admission
//! finish    the tokens are computed: full blocks can be hit from now on         request
//! end       the sequence is closed; its blocks stay as long as there is room    request
//! ```

mod locked;
mod pool;
mod requests;
mod turns;
mod verify;

use std::ops::Range;

pub use locked::Locked;
pub use pool::Kvpool;
pub use requests::{Case, Figures, Prompts, Requests};
pub use turns::Turns;
pub use verify::verify;

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
}

/// One thread's handle to an engine. A bench never exhausts the pool: a failure panics.
pub trait Worker {
    /// An admitted request.
    type Request;
    /// Blocks outside of sequences.
    type Blocks;

    /// Begins a step of the engine, with this prompt as its only request.
    fn prepare(&mut self, prompt: &[u32]);

    /// Hashes a prompt and shares its longest cached prefix, excluding the last token.
    fn look_up(&mut self, prompt: &[u32]) -> Self::Request;

    /// The same, and allocates the rest.
    fn admit(&mut self, prompt: &[u32]) -> Self::Request;

    /// Returns the number of cached tokens.
    fn cached(request: &Self::Request) -> usize;

    /// Writes the slots of tokens of a request: `frame * block_tokens + offset`.
    fn slots(&mut self, request: &Self::Request, tokens: Range<usize>, out: &mut Vec<i64>);

    /// Ends the step: all tokens are computed.
    fn finish(&mut self, request: &mut Self::Request);

    /// Closes the sequence.
    fn end(&mut self, request: Self::Request);

    /// Allocates blocks outside of sequences: evicts as many as are not free.
    fn allocate(&mut self, count: usize) -> Self::Blocks;

    /// Frees them.
    fn free(&mut self, blocks: Self::Blocks);
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
