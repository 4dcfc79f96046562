//! kvpool itself.

use std::ops::Range;
use std::thread;

use kvpool::prefix::PrefixConfig;
use kvpool::storage::{Dtype, KvLayout};
use kvpool::{AllocError, AllocRequest, Batch, Lease, Pool, Sequence, SequenceError, SequenceId};

use super::{Engine, Worker};

/// A pool with a default prefix cache: LRU, hashes with a random key.
pub struct Kvpool(Pool);

impl Engine for Kvpool {
    type Worker<'a> = KvpoolWorker<'a>;

    const NAME: &'static str = "kvpool";

    fn new(blocks: usize, block_tokens: usize) -> Self {
        let shape = KvLayout::builder().layers(28).kv_heads(4).head_dim(128).dtype(Dtype::Bf16);
        let layout = shape.block_tokens(block_tokens).build().expect("a valid layout");
        let pool = Pool::builder(layout).blocks(blocks).without_storage().prefix_cache(PrefixConfig::new());
        Self(pool.build().expect("a valid pool"))
    }

    fn worker(&self, thread: usize) -> KvpoolWorker<'_> {
        KvpoolWorker { pool: &self.0, batch: None, next: (thread as u64) << 32 }
    }

    fn clear(&self) {
        self.0.clear_prefix_cache();
    }

    fn unowned(&self) -> usize {
        self.0.audit().expect("a consistent pool");
        self.0.available_blocks()
    }
}

impl KvpoolWorker<'_> {
    /// Acts as an engine whose request is refused: it ends its step, so that no other thread waits
    /// for it, and retries in the next.
    #[cold]
    fn again(&mut self, refused: Sequence) {
        drop(refused);
        drop(self.batch.take());
        thread::yield_now();
        self.batch = Some(self.pool.begin_batch());
    }
}

/// A thread with a batch of one request.
pub struct KvpoolWorker<'a> {
    pool: &'a Pool,
    batch: Option<Batch>,
    next: u64,
}

impl<'a> Worker for KvpoolWorker<'a> {
    /// The sequence, and the number of its cached tokens.
    type Request = (Sequence, usize);
    type Blocks = Lease<'a>;

    fn prepare(&mut self, _: &[u32]) {
        self.batch = Some(self.pool.begin_batch());
    }

    #[inline]
    fn look_up(&mut self, prompt: &[u32]) -> Self::Request {
        self.next += 1;
        let sequence = self.pool.sequence(SequenceId(self.next)).tokens(prompt).expect("a new id, and room");
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
    fn slots(&mut self, request: &Self::Request, tokens: Range<usize>, out: &mut Vec<i64>) {
        let batch = self.batch.as_ref().expect("a step has begun");
        batch.slot_mapping(&request.0, tokens, out).expect("its own tokens");
    }

    #[inline]
    fn finish(&mut self, _: &mut Self::Request) {
        drop(self.batch.take());
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
