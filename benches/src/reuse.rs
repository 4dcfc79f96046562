//! Engines that find a prompt's prefix again, as the benches of reuse see them: kvpool, an exact LRU behind a mutex, and in
//! the workspace of the peers one more.
//!
//! A request goes through the same steps everywhere. What a step may do is the engine's affair, so that the whole request
//! is timed beside its admission: nobody wins by putting work off.
//!
//! ```text
//! prepare   a step of the engine begins                                         not timed
//! admit     hash the prompt, take what is cached of it, allocate the rest       admission
//! slots     of the tokens that are to be computed                               admission
//! finish    they are computed: full blocks can be found from now on             request
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

/// A pool of blocks with a cache of prefixes.
pub trait Engine: Sync + Sized {
    /// What one thread works through.
    type Worker<'a>: Worker
    where
        Self: 'a;

    /// How reports call it.
    const NAME: &'static str;

    /// With so many blocks, all free, of so many tokens each.
    fn new(blocks: usize, block_tokens: usize) -> Self;

    /// For a thread; the number tells it from others, past ones too.
    fn worker(&self, thread: usize) -> Self::Worker<'_>;

    /// Forgets what is cached. Nobody owns a block.
    fn clear(&self);

    /// Blocks that nobody owns, cached or not.
    fn unowned(&self) -> usize;
}

/// One thread's way to an engine. A bench never asks for more than there is: what fails panics.
pub trait Worker {
    /// A request that was admitted.
    type Request;
    /// Blocks of no sequence.
    type Blocks;

    /// A step of the engine begins, of which this prompt is the only request.
    fn prepare(&mut self, prompt: &[u32]);

    /// Hashes a prompt and takes its longest cached prefix, but for the last token.
    fn look_up(&mut self, prompt: &[u32]) -> Self::Request;

    /// The same, and allocates the rest.
    fn admit(&mut self, prompt: &[u32]) -> Self::Request;

    /// Tokens that were cached.
    fn cached(request: &Self::Request) -> usize;

    /// Where tokens of a request lie: `frame * block_tokens + offset`.
    fn slots(&mut self, request: &Self::Request, tokens: Range<usize>, out: &mut Vec<i64>);

    /// All tokens are computed, and the step has ended.
    fn finish(&mut self, request: &mut Self::Request);

    /// Closes the sequence.
    fn end(&mut self, request: Self::Request);

    /// Blocks that are nobody's sequence: evicts as many as are not free.
    fn allocate(&mut self, count: usize) -> Self::Blocks;

    /// Gives them back.
    fn free(&mut self, blocks: Self::Blocks);
}

/// Slots of tokens in blocks of `block_tokens`, of which `block` knows the one at each place.
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
