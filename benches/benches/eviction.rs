//! Eviction order: the rank queue compared with an exact LRU list under a mutex.
//!
//! Steady state: every block is evictable, the oldest is popped, and filed as the newest. The
//! blocks' rows are in random order, as in a pool that has run for a while.

use std::hint::black_box;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use kvpool::BlockId;
use kvpool::prefix::{Links, RankQueue};
use kvpool_benches::check::Owners;
use kvpool_benches::threads::together;
use parking_lot::Mutex;

const SIZES: [usize; 3] = [1 << 10, 1 << 16, 1 << 20];

/// Blocks per request: 31,000 tokens at 512 per block, or 1,000 at 16.
const REQUEST: usize = 62;

/// An eviction order under measurement.
trait Order: Sync {
    const NAME: &'static str;

    /// Creates an order for `blocks` blocks, none of them filed.
    fn new(blocks: usize) -> Self;

    /// Files blocks as the newest, the first of them as the oldest among these.
    fn push_all(&self, ids: &[BlockId]);

    /// Pops the oldest block.
    fn pop(&self) -> Option<BlockId>;
}

#[derive(Default)]
struct Row {
    rank: AtomicU64,
    next: AtomicU32,
}

struct Rows(Box<[Row]>);

impl Links for Rows {
    #[inline]
    fn next(&self, id: BlockId) -> &AtomicU32 {
        &self.0[id.index()].next
    }

    #[inline]
    fn rank(&self, id: BlockId) -> u64 {
        self.0[id.index()].rank.load(Relaxed)
    }
}

/// The rank queue, with a counter for ranks.
struct Ranked {
    queue: RankQueue,
    rows: Rows,
    newest: AtomicU64,
}

impl Order for Ranked {
    const NAME: &'static str = "queue";

    fn new(blocks: usize) -> Self {
        let rows = Rows((0..blocks).map(|_| Row::default()).collect());
        Self { queue: RankQueue::new(blocks), rows, newest: AtomicU64::new(0) }
    }

    #[inline]
    fn push_all(&self, ids: &[BlockId]) {
        let base = self.newest.fetch_add(ids.len() as u64, Relaxed);
        for (&id, rank) in ids.iter().zip(base..) {
            self.rows.0[id.index()].rank.store(rank, Relaxed);
        }
        match ids {
            &[id] => self.queue.push(&self.rows, id),
            _ => self.queue.push_all(&self.rows, ids),
        }
    }

    #[inline]
    fn pop(&self) -> Option<BlockId> {
        self.queue.pop(&self.rows)
    }
}

/// A doubly linked list over rows. The row past the last block is the list's end.
struct List {
    links: Box<[(u32, u32)]>,
}

/// The list under one lock.
struct Locked(Mutex<List>);

impl Order for Locked {
    const NAME: &'static str = "list, mutex";

    fn new(blocks: usize) -> Self {
        let end = blocks as u32;
        Self(Mutex::new(List { links: vec![(end, end); blocks + 1].into() }))
    }

    #[inline]
    fn push_all(&self, ids: &[BlockId]) {
        let links = &mut self.0.lock().links;
        let end = links.len() - 1;
        for &id in ids {
            let last = links[end].0;
            links[id.index()] = (last, end as u32);
            links[last as usize].1 = id.0;
            links[end].0 = id.0;
        }
    }

    #[inline]
    fn pop(&self) -> Option<BlockId> {
        let links = &mut self.0.lock().links;
        let end = links.len() - 1;
        let first = links[end].1 as usize;
        if first == end {
            return None;
        }
        // A real cache unlinks a block from any position.
        let (before, after) = links[first];
        links[before as usize].1 = after;
        links[after as usize].0 = before;
        Some(BlockId(first as u32))
    }
}

/// Creates an order with all blocks filed one by one, in random order.
fn filled<O: Order>(blocks: usize) -> O {
    let order = O::new(blocks);
    let mut ids: Vec<BlockId> = (0..blocks as u32).map(BlockId).collect();
    fastrand::Rng::with_seed(5).shuffle(&mut ids);
    ids.chunks(1).for_each(|id| order.push_all(id));
    order
}

/// Checks that no block is lost or duplicated, and that on one thread they pop in the order of
/// filing.
fn check<O: Order>() {
    let order: O = filled(4096);
    let owners = Owners::new(4096);
    together(
        2,
        |_| Vec::new(),
        |_, held: &mut Vec<BlockId>| {
            for _ in 0..200 {
                held.extend((0..REQUEST).filter_map(|_| order.pop()));
                held.iter().for_each(|id| owners.take(id.0));
                held.iter().for_each(|id| owners.give(id.0));
                order.push_all(held);
                held.clear();
            }
        },
    );
    let first: Vec<BlockId> = std::iter::from_fn(|| order.pop()).collect();
    assert_eq!(first.len(), 4096, "{} lost blocks", O::NAME);
    order.push_all(&first);
    let second: Vec<BlockId> = std::iter::from_fn(|| order.pop()).collect();
    assert!(first == second, "{} changed the order", O::NAME);
}

fn one<O: Order>(c: &mut Criterion) {
    check::<O>();
    let mut group = c.benchmark_group("eviction, pop the oldest + push as newest");
    for blocks in SIZES {
        let order: O = filled(blocks);
        group.bench_function(BenchmarkId::new(O::NAME, blocks), |bencher| {
            bencher.iter(|| {
                let id = order.pop().expect("all are filed");
                order.push_all(black_box(&[id]));
            });
        });
        assert_eq!(std::iter::from_fn(|| order.pop()).count(), blocks, "lost blocks");
    }
}

fn request<O: Order>(c: &mut Criterion) {
    let mut group = c.benchmark_group(format!("eviction, pop {REQUEST} + push {REQUEST} at once"));
    for blocks in SIZES {
        let order: O = filled(blocks);
        let mut ids = Vec::with_capacity(REQUEST);
        group.bench_function(BenchmarkId::new(O::NAME, blocks), |bencher| {
            bencher.iter(|| {
                ids.extend((0..REQUEST).filter_map(|_| order.pop()));
                order.push_all(black_box(&ids));
                ids.clear();
            });
        });
    }
}

/// Times pushes alone: the pops are not timed.
fn push_request<O: Order>(c: &mut Criterion) {
    let mut group = c.benchmark_group(format!("eviction, push {REQUEST} at once"));
    for blocks in SIZES {
        let order: O = filled(blocks);
        group.bench_function(BenchmarkId::new(O::NAME, blocks), |bencher| {
            bencher.iter_batched_ref(
                || (0..REQUEST).filter_map(|_| order.pop()).collect::<Vec<_>>(),
                |ids| order.push_all(ids),
                criterion::BatchSize::PerIteration,
            );
        });
    }
}

fn two_threads<O: Order>(c: &mut Criterion) {
    let mut group = c.benchmark_group("eviction, two threads, each pop + push");
    for blocks in SIZES {
        let order: O = filled(blocks);
        group.bench_function(BenchmarkId::new(O::NAME, blocks), |bencher| {
            bencher.iter_custom(|iterations| -> Duration {
                together(
                    2,
                    |_| (),
                    |_, ()| {
                        for _ in 0..iterations {
                            let id = order.pop().expect("two threads hold at most two");
                            order.push_all(black_box(&[id]));
                        }
                    },
                )
            });
        });
    }
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = one::<Ranked>, one::<Locked>, request::<Ranked>, request::<Locked>, push_request::<Ranked>,
        push_request::<Locked>, two_threads::<Ranked>, two_threads::<Locked>
}
criterion_main!(benches);
