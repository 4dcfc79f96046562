//! The order of evictions in a full pool beside LRU's, eviction by eviction: exactly LRU's with a
//! tolerance of 0, and never earlier than a larger one allows.
#![cfg(not(kvpool_loom))]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use fastrand::Rng;
use futures_core::Stream;
use kvpool::prefix::{BlockHash, HashKey, KvEvent, KvEvents, PrefixConfig};
use kvpool::storage::KvLayout;
use kvpool::{BlockId, Pool, Sequence, SequenceId};

const BLOCKS: usize = 4_000;
/// Tokens per block of the layout.
const BLOCK_TOKENS: usize = 4;
const ROUNDS: u64 = 2_000;

/// Evictable blocks by the number of their release.
#[derive(Default)]
struct Lru {
    by_order: BTreeMap<u64, BlockId>,
    order_of: HashMap<BlockId, u64>,
    next: u64,
    /// Hashes of cached blocks.
    hashes: HashMap<BlockId, BlockHash>,
    /// Number of cached blocks of a hash.
    alike: HashMap<BlockHash, u32>,
    /// Blocks whose contents another cached block had when they were released: the cache evicts
    /// them first, also if it has evicted the other one early since.
    copies: HashSet<BlockId>,
    /// Evictions of another block than the oldest, and of any.
    early: u64,
    evicted: u64,
}

impl Lru {
    fn release(&mut self, id: BlockId) {
        self.by_order.insert(self.next, id);
        assert_eq!(self.order_of.insert(id, self.next), None, "{id:?} was evictable");
        self.next += 1;
        if self.hashes.get(&id).is_some_and(|hash| self.alike[hash] > 1) {
            self.copies.insert(id);
        }
    }

    fn hit(&mut self, id: BlockId) {
        if let Some(order) = self.order_of.remove(&id) {
            self.by_order.remove(&order);
            self.copies.remove(&id);
        }
    }

    fn evict(&mut self, id: BlockId, tolerance: f64) {
        let order = self.order_of.remove(&id).expect("an evicted block was evictable");
        let oldest = *self.by_order.keys().next().unwrap();
        self.by_order.remove(&order);
        let hash = self.hashes.remove(&id).expect("an evicted block was stored");
        // Units beside a completed one go twice as early.
        let latest = oldest + ((self.next - oldest) as f64 * (2.0 * tolerance)) as u64;
        // Blocks behind one that was evicted early are computed again: their first copies go next.
        let alike = self.alike.get_mut(&hash).expect("it was stored");
        *alike -= 1;
        let is_copy = self.copies.remove(&id) || *alike > 0;
        let is_early = order > latest && !is_copy;
        assert!(!is_early, "evicted {order}, the oldest is {oldest}, the next {}", self.next);
        self.evicted += 1;
        self.early += u64::from(order != oldest);
    }
}

/// A pool, a subscription to its evictions, and the model.
struct Bench {
    pool: Pool,
    events: KvEvents,
    lru: Lru,
    tolerance: f64,
}

impl Bench {
    /// Creates a full bench. The seed determines the hashes too: a failure reproduces.
    fn new(seed: u64, tolerance: f64) -> Self {
        let key = HashKey::from_bytes([seed as u8; 32]);
        let config = PrefixConfig::new().tolerance(tolerance).key(key);
        let layout = KvLayout::named("tiny").unwrap();
        let pool = Pool::builder(layout).blocks(BLOCKS).prefix_cache(config).build().unwrap();
        let events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
        Self { pool, events, lru: Lru::default(), tolerance }
    }

    /// Repeats in the model what the pool evicted.
    fn catch_up(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(event)) = pin!(&mut self.events).poll_next(&mut context) {
            match event.event {
                KvEvent::Removed { block, .. } => self.lru.evict(block, self.tolerance),
                KvEvent::Stored { block, hash, .. } => {
                    *self.lru.alike.entry(hash).or_default() += 1;
                    self.lru.hashes.insert(block, hash);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn open(&mut self, id: u64, tokens: &[u32]) -> Sequence {
        let sequence = self.pool.sequence(SequenceId(id)).tokens(tokens).unwrap();
        sequence.blocks().for_each(|id| self.lru.hit(id));
        self.catch_up();
        sequence
    }

    fn close(&mut self, sequence: Sequence, open: &[(Sequence, usize)]) {
        let full = sequence.len() / BLOCK_TOKENS;
        let blocks: Vec<BlockId> = sequence.blocks().take(full).collect();
        let shared: HashSet<BlockId> = open.iter().flat_map(|(other, _)| other.blocks()).collect();
        // The end of a sequence is evicted before its beginning.
        let released = blocks.into_iter().rev().filter(|id| !shared.contains(id));
        released.for_each(|id| self.lru.release(id));
        drop(sequence);
        self.catch_up();
    }
}

/// Runs chats that grow turn by turn, and returns the numbers of early evictions and of all.
fn chats(seed: u64, tolerance: f64) -> (u64, u64) {
    let (mut bench, mut rng) = (Bench::new(seed, tolerance), Rng::with_seed(seed));
    let mut texts: Vec<Vec<u32>> = vec![Vec::new(); 60];
    let mut open = Vec::<(Sequence, usize)>::new();
    for round in 0..ROUNDS {
        let chat = rng.usize(..texts.len());
        if open.len() < 8 && open.iter().all(|&(_, of)| of != chat) {
            if texts[chat].len() > 2_000 {
                texts[chat].clear();
            }
            let more = rng.usize(20..400);
            texts[chat].extend(std::iter::repeat_with(|| rng.u32(..)).take(more));
            // An unfinished block at the end: all full ones can be hit, so none is cached twice.
            while texts[chat].len().is_multiple_of(BLOCK_TOKENS) {
                texts[chat].push(rng.u32(..));
            }
            open.push((bench.open(round, &texts[chat]), chat));
        }
        let mut batch = bench.pool.begin_batch();
        for (sequence, of) in &mut open {
            let missing = texts[*of].len() - sequence.len();
            if missing > 0 {
                batch.append(sequence, missing.min(256)).unwrap();
            } else if rng.bool() {
                let token = rng.u32(..);
                batch.append(sequence, &[token]).unwrap();
                texts[*of].push(token);
            }
        }
        bench.catch_up();
        batch.finish();
        bench.catch_up();
        if open.len() >= 4 {
            let (sequence, of) = open.swap_remove(rng.usize(..open.len()));
            texts[of].truncate(sequence.len());
            bench.close(sequence, &open);
        }
    }
    drop(open);
    bench.pool.audit().unwrap();
    (bench.lru.early, bench.lru.evicted)
}

#[test]
fn without_tolerance_the_order_is_exactly_that_of_lru() {
    for seed in 0..3 {
        let (early, evicted) = chats(seed, 0.0);
        assert!(evicted > 5 * BLOCKS as u64, "seed {seed}: {evicted} evictions");
        assert_eq!(early, 0, "seed {seed}");
    }
}

#[test]
fn no_eviction_is_earlier_than_tolerated() {
    for (seed, tolerance) in [(3, 0.02), (4, 0.05), (5, 0.3), (6, 1.0)] {
        let (early, evicted) = chats(seed, tolerance);
        println!("tolerance {tolerance}: {early} of {evicted} evictions were early");
        assert!(early > 0, "seed {seed}: no eviction of {evicted} completed a unit");
    }
}

#[test]
fn a_tolerance_is_a_share() {
    for share in [-0.1, 1.5, f64::NAN, f64::INFINITY] {
        let layout = KvLayout::named("tiny").unwrap();
        let config = PrefixConfig::new().tolerance(share);
        let error = Pool::builder(layout).blocks(10).prefix_cache(config).build().err();
        let message = error.unwrap().to_string();
        assert_eq!(message, format!("eviction tolerance: got {share}, expected a share from 0 to 1"));
    }
}
