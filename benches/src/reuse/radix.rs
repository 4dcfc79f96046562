//! A radix tree behind one mutex, as in engines whose prefix cache is a tree.
//!
//! ```text
//! root ── run of 31 blocks ─┬─ run of 31 blocks   a node: the tokens of a run and its blocks
//!                           └─ run of 33 blocks   a leaf without references is in the LRU list
//! ```
//!
//! A node is referenced by its children and by the requests whose cached prefix ends in it, and not
//! block by block: opening and closing a request touch one node, whatever its length. A lookup
//! compares the tokens of each run with those of the prompt, and divides a node of which it needs a
//! part. Only the first block of each run is hashed, to find the child. Eviction takes the least
//! recently used leaf as a whole or, if fewer blocks are needed, its end; then its parent may
//! become a leaf.

mod tree;

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use self::tree::{FirstHash, ROOT, Request, Tree};
use super::{Engine, Worker};

/// The radix tree behind a mutex.
pub struct Radix {
    tree: Mutex<Tree>,
    hash: Arc<FirstHash>,
}

impl Engine for Radix {
    type Worker<'a> = RadixWorker<'a>;

    const NAME: &'static str = "radix tree, mutex";

    fn new(blocks: usize, block_tokens: usize) -> Self {
        let hash = Arc::new(FirstHash::new(block_tokens));
        Self { tree: Mutex::new(Tree::new(blocks, hash.clone())), hash }
    }

    fn worker(&self, _: usize) -> RadixWorker<'_> {
        RadixWorker { engine: self, table: Vec::new() }
    }

    fn clear(&self) {
        self.tree.lock().clear();
    }

    fn unowned(&self) -> usize {
        self.tree.lock().unowned()
    }
}

/// A thread that uses the lock.
pub struct RadixWorker<'a> {
    engine: &'a Radix,
    /// The block table, in a reused buffer.
    table: Vec<i32>,
}

impl RadixWorker<'_> {
    /// Looks up, and with `all` allocates the rest, under one lock.
    #[inline]
    fn open(&self, prompt: &[u32], all: bool) -> Request {
        let Radix { tree, hash } = self.engine;
        let (count, most) =
            (prompt.len().div_ceil(hash.block_tokens), (prompt.len() - 1) / hash.block_tokens);
        let (first, mut blocks) = (hash.of(prompt), Vec::with_capacity(count));
        let mut locked = tree.lock();
        let node = locked.descend(ROOT, &prompt[..most * hash.block_tokens], first, &mut blocks);
        locked.share(node);
        let registered = blocks.len();
        if all {
            locked.allocate(count - registered, &mut blocks);
        }
        drop(locked);
        let cached = registered * hash.block_tokens;
        let rest = prompt[cached..].to_vec();
        Request { blocks, node, registered, copies: Vec::new(), rest, tokens: prompt.len(), cached }
    }
}

impl Worker for RadixWorker<'_> {
    type Request = Request;
    type Blocks = Vec<u32>;

    fn begin(&mut self) {}

    #[inline]
    fn look_up(&mut self, prompt: &[u32]) -> Request {
        self.open(prompt, false)
    }

    #[inline]
    fn admit(&mut self, prompt: &[u32]) -> Request {
        self.open(prompt, true)
    }

    fn cached(request: &Request) -> usize {
        request.cached
    }

    #[inline]
    fn append(&mut self, request: &mut Request, token: u32) {
        if request.tokens.is_multiple_of(self.engine.hash.block_tokens) {
            self.engine.tree.lock().allocate(1, &mut request.blocks);
        }
        request.tokens += 1;
        request.rest.push(token);
    }

    #[inline]
    fn slots(&mut self, request: &Request, tokens: Range<usize>, out: &mut Vec<i64>) {
        super::slots(self.engine.hash.block_tokens, tokens, out, |place| i64::from(request.blocks[place]));
    }

    #[inline]
    fn table<'r>(&mut self, requests: impl Iterator<Item = &'r Request> + Clone) -> &[i32] {
        super::table(&mut self.table, requests.map(|request| &request.blocks[..]), |&block| block as i32)
    }

    #[inline]
    fn finish_all<'r>(&mut self, requests: impl Iterator<Item = &'r mut Request>) {
        let Radix { tree, hash } = self.engine;
        let mut locked = None;
        for request in requests.filter(|request| request.rest.len() >= hash.block_tokens) {
            let first = hash.of(&request.rest);
            locked.get_or_insert_with(|| tree.lock()).register(request, first);
        }
    }

    #[inline]
    fn end(&mut self, request: Request) {
        let mut tree = self.engine.tree.lock();
        tree.free.extend_from_slice(&request.blocks[request.registered..]);
        tree.free.extend_from_slice(&request.copies);
        tree.release(request.node);
    }

    #[inline]
    fn allocate(&mut self, count: usize) -> Vec<u32> {
        let mut blocks = Vec::with_capacity(count);
        self.engine.tree.lock().allocate(count, &mut blocks);
        blocks
    }

    fn free(&mut self, blocks: Vec<u32>) {
        self.engine.tree.lock().free.extend_from_slice(&blocks);
    }
}
