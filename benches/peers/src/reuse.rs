//! kvbm-logical as an engine with prefix reuse. The last token of a prompt is computed here too.

use std::ops::Range;

use kvbm_logical::blocks::{ImmutableBlock, MutableBlock};
use kvbm_logical::sequence::BlockSequence;
use kvbm_logical::{BlockManager, SequenceHash};
use kvpool_benches::reuse::{Engine, Worker, slots};

use crate::{Device, manager};

/// The engine with its own hashing, as a part of the admission or before it.
pub struct KvbmReuse<const HASHES: bool> {
    manager: BlockManager<Device>,
    block_tokens: usize,
}

impl<const HASHES: bool> Engine for KvbmReuse<HASHES> {
    type Worker<'a> = ReuseWorker<'a, HASHES>;

    const NAME: &'static str = if HASHES { "kvbm-logical" } else { "kvbm, hashed before" };

    fn new(blocks: usize, block_tokens: usize) -> Self {
        Self { manager: manager(blocks, block_tokens), block_tokens }
    }

    fn worker(&self, _: usize) -> ReuseWorker<'_, HASHES> {
        ReuseWorker { engine: self, hashes: Vec::new() }
    }

    fn clear(&self) {
        self.manager.reset_inactive_pool().expect("no block is owned");
    }

    fn unowned(&self) -> usize {
        self.manager.available_blocks()
    }
}

/// A thread that uses a manager.
pub struct ReuseWorker<'a, const HASHES: bool> {
    engine: &'a KvbmReuse<HASHES>,
    /// Hashes of the next prompt, if they are not to be timed.
    hashes: Vec<SequenceHash>,
}

/// A sequence.
pub struct Request {
    hashes: Vec<SequenceHash>,
    ids: Vec<usize>,
    cached: usize,
    found: Vec<ImmutableBlock<Device>>,
    open: Vec<MutableBlock<Device>>,
}

impl<const HASHES: bool> ReuseWorker<'_, HASHES> {
    fn hash(&self, prompt: &[u32]) -> Vec<SequenceHash> {
        BlockSequence::new(prompt.to_vec(), self.engine.block_tokens as u32, None).all_sequence_hashes()
    }
}

impl<const HASHES: bool> Worker for ReuseWorker<'_, HASHES> {
    type Request = Request;
    type Blocks = Vec<MutableBlock<Device>>;

    fn prepare(&mut self, prompt: &[u32]) {
        if !HASHES {
            self.hashes = self.hash(prompt);
        }
    }

    #[inline]
    fn look_up(&mut self, prompt: &[u32]) -> Request {
        let hashes = if HASHES { self.hash(prompt) } else { std::mem::take(&mut self.hashes) };
        let most = (prompt.len() - 1) / self.engine.block_tokens;
        let found = self.engine.manager.match_blocks(&hashes[..most]);
        let ids: Vec<usize> = found.iter().map(|block| block.block_id()).collect();
        Request { hashes, cached: ids.len() * self.engine.block_tokens, ids, found, open: Vec::new() }
    }

    #[inline]
    fn admit(&mut self, prompt: &[u32]) -> Request {
        let mut request = self.look_up(prompt);
        let count = prompt.len().div_ceil(self.engine.block_tokens) - request.found.len();
        request.open = self.allocate(count);
        request.ids.extend(request.open.iter().map(MutableBlock::block_id));
        request
    }

    fn cached(request: &Request) -> usize {
        request.cached
    }

    #[inline]
    fn slots(&mut self, request: &Request, tokens: Range<usize>, out: &mut Vec<i64>) {
        slots(self.engine.block_tokens, tokens, out, |place| request.ids[place] as i64);
    }

    #[inline]
    fn finish(&mut self, request: &mut Request) {
        let (first, full) = (request.found.len(), request.hashes.len());
        let hashes = request.hashes[first..].iter();
        let full = hashes.zip(request.open.drain(..full - first));
        let complete = full.map(|(&hash, block)| {
            block.stage(hash, self.engine.block_tokens).ok().expect("the manager's block size")
        });
        request.found.extend(self.engine.manager.register_blocks(complete.collect()));
    }

    #[inline]
    fn end(&mut self, request: Request) {
        drop(request.open);
        // The last block first, as in the other engines.
        request.found.into_iter().rev().for_each(drop);
    }

    #[inline]
    fn allocate(&mut self, count: usize) -> Self::Blocks {
        self.engine.manager.allocate_blocks(count).expect("enough blocks are free")
    }

    fn free(&mut self, blocks: Self::Blocks) {
        drop(blocks);
    }
}
