//! kvpool itself.

use std::ops::Range;
use std::thread;

use kvpool::prefix::PrefixConfig;
use kvpool::storage::{Dtype, KvLayout};
use kvpool::{AllocError, AllocRequest, Batch, BlockTable, Lease, Pool, Sequence, SequenceError, SequenceId};

use super::{Engine, Worker};

/// A pool, with a default prefix cache (LRU, hashes with a random key) or without one.
pub struct PoolEngine<const CACHE: bool>(Pool);

/// A pool with a prefix cache.
pub type Kvpool = PoolEngine<true>;

/// A pool without one.
pub type KvpoolUncached = PoolEngine<false>;

impl<const CACHE: bool> Engine for PoolEngine<CACHE> {
    type Worker<'a> = PoolWorker<'a, CACHE>;

    const NAME: &'static str = "kvpool";

    fn new(blocks: usize, block_tokens: usize) -> Self {
        let shape = KvLayout::builder().layers(28).kv_heads(4).head_dim(128).dtype(Dtype::Bf16);
        let layout = shape.block_tokens(block_tokens).build().expect("a valid layout");
        let pool = Pool::builder(layout).blocks(blocks).without_storage();
        let pool = if CACHE { pool.prefix_cache(PrefixConfig::new()) } else { pool };
        Self(pool.build().expect("a valid pool"))
    }

    fn worker(&self, thread: usize) -> PoolWorker<'_, CACHE> {
        let next = (thread as u64) << 32;
        PoolWorker { pool: &self.0, batch: None, next, table: BlockTable::new() }
    }

    fn clear(&self) {
        self.0.clear_prefix_cache();
    }

    fn unowned(&self) -> usize {
        self.0.audit().expect("a consistent pool");
        self.0.available_blocks()
    }

    fn kept_free(&self) -> usize {
        self.0.free_blocks()
    }
}

impl<const CACHE: bool> PoolWorker<'_, CACHE> {
    /// Acts as an engine whose request is refused: it ends its step, so that no other thread waits
    /// for it, and retries in the next.
    #[cold]
    fn again(&mut self, refused: Sequence) {
        drop(refused);
        self.batch.take().into_iter().for_each(Batch::finish);
        thread::yield_now();
        self.batch = Some(self.pool.begin_batch());
    }
}

/// A thread with a batch.
pub struct PoolWorker<'a, const CACHE: bool> {
    pool: &'a Pool,
    batch: Option<Batch>,
    next: u64,
    table: BlockTable,
}

impl<'a, const CACHE: bool> Worker for PoolWorker<'a, CACHE> {
    /// The sequence, and the number of its cached tokens.
    type Request = (Sequence, usize);
    type Blocks = Lease<'a>;

    #[inline]
    fn begin(&mut self) {
        self.batch = Some(self.pool.begin_batch());
    }

    #[inline]
    fn look_up(&mut self, prompt: &[u32]) -> Self::Request {
        self.next += 1;
        let builder = self.pool.sequence(SequenceId(self.next));
        let opened = if CACHE { builder.tokens(prompt) } else { builder.open() };
        let sequence = opened.expect("a new id, and room");
        let cached = sequence.len();
        (sequence, cached)
    }

    #[inline]
    fn admit(&mut self, prompt: &[u32]) -> Self::Request {
        loop {
            let (mut sequence, cached) = self.look_up(prompt);
            let batch = self.batch.as_mut().expect("a step has begun");
            match batch.append(&mut sequence, prompt.len() - cached) {
                Ok(_) => return (sequence, cached),
                // Another thread was stopped in its step, and may still see all blocks released
                // since it began.
                Err(SequenceError::Alloc(AllocError::Exhausted { .. })) => self.again(sequence),
                Err(error) => panic!("no room: {error}"),
            }
        }
    }

    fn cached(request: &Self::Request) -> usize {
        request.1
    }

    #[inline]
    fn append(&mut self, (sequence, _): &mut Self::Request, token: u32) {
        let batch = self.batch.as_mut().expect("a step has begun");
        if CACHE {
            batch.append(sequence, &[token]).expect("there is room");
        } else {
            batch.append(sequence, 1).expect("there is room");
        }
    }

    #[inline]
    fn slots(&mut self, request: &Self::Request, tokens: Range<usize>, out: &mut Vec<i64>) {
        let batch = self.batch.as_ref().expect("a step has begun");
        batch.slot_mapping(&request.0, tokens, out).expect("its own tokens");
    }

    #[inline]
    fn table<'r>(&mut self, requests: impl Iterator<Item = &'r Self::Request> + Clone) -> &[i32] {
        let batch = self.batch.as_ref().expect("a step has begun");
        let sequences = requests.map(|(sequence, _)| sequence);
        batch.block_table(sequences, &mut self.table).expect("sequences of this pool");
        self.table.entries()
    }

    #[inline]
    fn finish_all<'r>(&mut self, _: impl Iterator<Item = &'r mut Self::Request>) {
        self.batch.take().into_iter().for_each(Batch::finish);
    }

    #[inline]
    fn end(&mut self, request: Self::Request) {
        drop(request);
    }

    #[inline]
    fn allocate(&mut self, count: usize) -> Lease<'a> {
        self.pool.allocate(AllocRequest::new(count)).expect("enough blocks are free")
    }

    fn free(&mut self, blocks: Lease<'a>) {
        drop(blocks);
    }
}
