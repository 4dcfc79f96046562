//! kvbm-logical as an engine with prefix reuse. The last token of a prompt is computed here too.

use std::ops::Range;

use kvbm_logical::blocks::{ImmutableBlock, MutableBlock};
use kvbm_logical::sequence::BlockSequence;
use kvbm_logical::{BlockManager, KvbmSequenceHashProvider, SequenceHash};
use kvpool_benches::reuse::{Engine, Worker, slots, table};

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
        ReuseWorker { engine: self, hashed: None, table: Vec::new() }
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
    /// The next prompt with its hashes, if they are not to be timed.
    hashed: Option<(BlockSequence, Vec<SequenceHash>)>,
    /// The block table, in a reused buffer.
    table: Vec<i32>,
}

/// A sequence.
pub struct Request {
    tokens: BlockSequence,
    hashes: Vec<SequenceHash>,
    ids: Vec<usize>,
    cached: usize,
    found: Vec<ImmutableBlock<Device>>,
    open: Vec<MutableBlock<Device>>,
}

impl<const HASHES: bool> ReuseWorker<'_, HASHES> {
    fn hash(&self, prompt: &[u32]) -> (BlockSequence, Vec<SequenceHash>) {
        let tokens = BlockSequence::new(prompt.to_vec(), self.engine.block_tokens as u32, None);
        let hashes = tokens.all_sequence_hashes();
        (tokens, hashes)
    }
}

impl<const HASHES: bool> Worker for ReuseWorker<'_, HASHES> {
    type Request = Request;
    type Blocks = Vec<MutableBlock<Device>>;

    fn begin(&mut self) {}

    fn prepare(&mut self, prompt: &[u32]) {
        if !HASHES {
            self.hashed = Some(self.hash(prompt));
        }
    }

    #[inline]
    fn look_up(&mut self, prompt: &[u32]) -> Request {
        let (tokens, hashes) = self.hashed.take().unwrap_or_else(|| self.hash(prompt));
        let most = (prompt.len() - 1) / self.engine.block_tokens;
        let found = self.engine.manager.match_blocks(&hashes[..most]);
        let ids: Vec<usize> = found.iter().map(|block| block.block_id()).collect();
        Request { tokens, hashes, cached: ids.len() * self.engine.block_tokens, ids, found, open: Vec::new() }
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
    fn append(&mut self, request: &mut Request, token: u32) {
        if request.tokens.total_tokens().is_multiple_of(self.engine.block_tokens) {
            let block = self.engine.manager.allocate_blocks(1).expect("enough blocks are free");
            request.ids.extend(block.iter().map(MutableBlock::block_id));
            request.open.extend(block);
        }
        let full = request.tokens.append_token(token).expect("a valid token");
        request.hashes.extend(full.map(|place| request.tokens.blocks()[place].kvbm_sequence_hash()));
    }

    #[inline]
    fn slots(&mut self, request: &Request, tokens: Range<usize>, out: &mut Vec<i64>) {
        slots(self.engine.block_tokens, tokens, out, |place| request.ids[place] as i64);
    }

    #[inline]
    fn table<'r>(&mut self, requests: impl Iterator<Item = &'r Request> + Clone) -> &[i32] {
        table(&mut self.table, requests.map(|request| &request.ids[..]), |&id| id as i32)
    }

    #[inline]
    fn finish_all<'r>(&mut self, requests: impl Iterator<Item = &'r mut Request>) {
        for request in requests {
            let (first, full) = (request.found.len(), request.hashes.len());
            if first == full {
                continue;
            }
            let hashes = request.hashes[first..].iter();
            let full = hashes.zip(request.open.drain(..full - first));
            let complete = full.map(|(&hash, block)| {
                block.stage(hash, self.engine.block_tokens).expect("the manager's block size")
            });
            request.found.extend(self.engine.manager.register_blocks(complete.collect()));
        }
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
