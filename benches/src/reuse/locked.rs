//! The baseline: an exact LRU, as in most engines, behind one mutex.
//!
//! A hash map from keys to blocks, a doubly linked list of the unowned blocks, and a stack of free
//! ones. Prompts are hashed with kvpool's function, outside of the lock; slots are computed outside
//! too; inside, each step of a request is one visit. Keys are random numbers, and the map uses them
//! as hashes.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

use kvpool::prefix::{BlockHash, Chain, HashKey, Hashing, PrefixHasher, PrefixKeys, PrefixRoot};
use parking_lot::Mutex;

use super::{Engine, Worker};

#[derive(Default)]
pub(super) struct Identity(u64);

impl Hasher for Identity {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u128");
    }

    fn write_u128(&mut self, key: u128) {
        self.0 = key as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[derive(Clone, Copy)]
struct Row {
    refs: u32,
    before: u32,
    after: u32,
    /// Hash under which the block is registered.
    hash: Option<BlockHash>,
}

/// State guarded by the lock.
struct Blocks {
    /// A row per block, and one more: the end of the list, whose `after` is the oldest.
    rows: Box<[Row]>,
    by_key: HashMap<u128, u32, BuildHasherDefault<Identity>>,
    free: Vec<u32>,
    /// Length of the list.
    evictable: usize,
}

impl Blocks {
    fn new(blocks: usize) -> Self {
        let end = blocks as u32;
        Self {
            rows: vec![Row { refs: 0, before: end, after: end, hash: None }; blocks + 1].into(),
            by_key: HashMap::with_capacity_and_hasher(blocks, BuildHasherDefault::default()),
            free: (0..end).rev().collect(),
            evictable: 0,
        }
    }

    fn end(&self) -> usize {
        self.rows.len() - 1
    }

    fn unlink(&mut self, block: u32) {
        let Row { before, after, .. } = self.rows[block as usize];
        self.rows[before as usize].after = after;
        self.rows[after as usize].before = before;
        self.evictable -= 1;
    }

    fn link_as_newest(&mut self, block: u32) {
        let end = self.end();
        let newest = self.rows[end].before;
        let row = &mut self.rows[block as usize];
        (row.before, row.after) = (newest, end as u32);
        self.rows[newest as usize].after = block;
        self.rows[end].before = block;
        self.evictable += 1;
    }

    /// Takes a reference to each block of the longest cached prefix.
    fn take_cached(&mut self, hashes: &[BlockHash], out: &mut Vec<u32>) {
        for &hash in hashes {
            let Some(&block) = self.by_key.get(&hash.key()) else { break };
            if self.rows[block as usize].hash != Some(hash) {
                break;
            }
            if self.rows[block as usize].refs == 0 {
                self.unlink(block);
            }
            self.rows[block as usize].refs += 1;
            out.push(block);
        }
    }

    fn allocate(&mut self, count: usize, out: &mut Vec<u32>) {
        for _ in 0..count {
            let block = self.free.pop().unwrap_or_else(|| self.evict());
            self.rows[block as usize].refs = 1;
            out.push(block);
        }
    }

    fn evict(&mut self) -> u32 {
        let oldest = self.rows[self.end()].after;
        assert_ne!(oldest as usize, self.end(), "enough blocks are free");
        self.unlink(oldest);
        let hash = self.rows[oldest as usize].hash.take().expect("an evictable block is registered");
        self.by_key.remove(&hash.key());
        oldest
    }

    fn register(&mut self, blocks: &[u32], hashes: &[BlockHash]) {
        for (&block, &hash) in blocks.iter().zip(hashes) {
            // If another request registered the hash first, this block is free at its end.
            self.by_key.entry(hash.key()).or_insert_with(|| {
                self.rows[block as usize].hash = Some(hash);
                block
            });
        }
    }

    /// The last block first, so that the end of a prefix is evicted before its beginning.
    fn release(&mut self, blocks: &[u32]) {
        for &block in blocks.iter().rev() {
            let row = &mut self.rows[block as usize];
            row.refs -= 1;
            if row.refs == 0 {
                match row.hash {
                    Some(_) => self.link_as_newest(block),
                    None => self.free.push(block),
                }
            }
        }
    }
}

/// The exact LRU behind a mutex; without a cache, a list of free blocks behind a mutex.
pub struct LockedEngine<const CACHE: bool> {
    blocks: Mutex<Blocks>,
    hasher: PrefixHasher,
    root: PrefixRoot,
    block_tokens: usize,
}

/// The exact LRU.
pub type Locked = LockedEngine<true>;

/// The list of free blocks.
pub type LockedList = LockedEngine<false>;

impl<const CACHE: bool> Engine for LockedEngine<CACHE> {
    type Worker<'a> = LockedWorker<'a, CACHE>;

    const NAME: &'static str = if CACHE { "LRU, mutex" } else { "list, mutex" };

    fn new(blocks: usize, block_tokens: usize) -> Self {
        let key = HashKey::random().expect("the system has random numbers");
        let hasher = PrefixHasher::new(Hashing::Fast, &key, block_tokens).expect("blocks have tokens");
        let root = hasher.root(&PrefixKeys::new()).expect("no keys are valid keys");
        Self { blocks: Mutex::new(Blocks::new(blocks)), hasher, root, block_tokens }
    }

    fn worker(&self, _: usize) -> LockedWorker<'_, CACHE> {
        LockedWorker { engine: self, table: Vec::new() }
    }

    fn clear(&self) {
        let blocks = &mut *self.blocks.lock();
        while blocks.evictable > 0 {
            let block = blocks.evict();
            blocks.free.push(block);
        }
    }

    fn unowned(&self) -> usize {
        let blocks = self.blocks.lock();
        blocks.free.len() + blocks.evictable
    }
}

/// A thread that uses the lock.
pub struct LockedWorker<'a, const CACHE: bool> {
    engine: &'a LockedEngine<CACHE>,
    /// The block table, in a reused buffer.
    table: Vec<i32>,
}

/// A sequence.
pub struct Request {
    chain: Chain,
    /// Hashes of the full blocks; none without a cache.
    hashes: Vec<BlockHash>,
    blocks: Vec<u32>,
    /// Leading blocks that are registered.
    registered: usize,
    tokens: usize,
}

impl<const CACHE: bool> LockedWorker<'_, CACHE> {
    /// Looks up, and with `all` allocates the rest, under one lock.
    #[inline]
    fn open(&self, prompt: &[u32], all: bool) -> Request {
        let LockedEngine { blocks, hasher, root, block_tokens } = self.engine;
        let (mut chain, mut hashes) = (Chain::new(*root), Vec::new());
        if CACHE {
            hashes.reserve(prompt.len() / block_tokens);
            chain.extend(hasher, prompt, |hash| hashes.push(hash));
        }
        let (count, most) = (prompt.len().div_ceil(*block_tokens), (prompt.len() - 1) / block_tokens);
        let mut own = Vec::with_capacity(count);
        let mut blocks = blocks.lock();
        if CACHE {
            blocks.take_cached(&hashes[..most], &mut own);
        }
        let registered = own.len();
        if all {
            blocks.allocate(count - registered, &mut own);
        }
        Request { chain, hashes, blocks: own, registered, tokens: prompt.len() }
    }
}

impl<const CACHE: bool> Worker for LockedWorker<'_, CACHE> {
    /// Returns the blocks, with the number of cached tokens.
    type Request = (Request, usize);
    type Blocks = Vec<u32>;

    fn begin(&mut self) {}

    #[inline]
    fn look_up(&mut self, prompt: &[u32]) -> Self::Request {
        let request = self.open(prompt, false);
        let cached = request.registered * self.engine.block_tokens;
        (request, cached)
    }

    #[inline]
    fn admit(&mut self, prompt: &[u32]) -> Self::Request {
        let request = self.open(prompt, true);
        let cached = request.registered * self.engine.block_tokens;
        (request, cached)
    }

    fn cached(request: &Self::Request) -> usize {
        request.1
    }

    #[inline]
    fn append(&mut self, (request, _): &mut Self::Request, token: u32) {
        if request.tokens.is_multiple_of(self.engine.block_tokens) {
            self.engine.blocks.lock().allocate(1, &mut request.blocks);
        }
        request.tokens += 1;
        if CACHE {
            request.chain.extend(&self.engine.hasher, &[token], |hash| request.hashes.push(hash));
        }
    }

    #[inline]
    fn slots(&mut self, (request, _): &Self::Request, tokens: Range<usize>, out: &mut Vec<i64>) {
        super::slots(self.engine.block_tokens, tokens, out, |place| i64::from(request.blocks[place]));
    }

    #[inline]
    fn table<'r>(&mut self, requests: impl Iterator<Item = &'r Self::Request> + Clone) -> &[i32] {
        super::table(&mut self.table, requests.map(|(request, _)| &request.blocks[..]), |&block| block as i32)
    }

    #[inline]
    fn finish_all<'r>(&mut self, requests: impl Iterator<Item = &'r mut Self::Request>) {
        let mut blocks = None;
        for (request, _) in requests {
            let (first, full) = (request.registered, request.hashes.len());
            if first < full {
                let blocks = blocks.get_or_insert_with(|| self.engine.blocks.lock());
                blocks.register(&request.blocks[first..full], &request.hashes[first..]);
                request.registered = full;
            }
        }
    }

    #[inline]
    fn end(&mut self, (request, _): Self::Request) {
        self.engine.blocks.lock().release(&request.blocks);
    }

    #[inline]
    fn allocate(&mut self, count: usize) -> Vec<u32> {
        let mut blocks = Vec::with_capacity(count);
        self.engine.blocks.lock().allocate(count, &mut blocks);
        blocks
    }

    fn free(&mut self, blocks: Vec<u32>) {
        self.engine.blocks.lock().release(&blocks);
    }
}
