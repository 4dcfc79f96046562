use std::collections::BTreeSet;
use std::thread;

use crate::sync::{AtomicBool, AtomicU32};

use super::*;
use proptest::prelude::*;

struct Rows {
    next: Vec<AtomicU32>,
    rank: Vec<AtomicU64>,
}

impl Links for Rows {
    fn next(&self, id: BlockId) -> &AtomicU32 {
        &self.next[id.index()]
    }

    fn rank(&self, id: BlockId) -> u64 {
        self.rank[id.index()].load(Relaxed)
    }
}

impl Rows {
    fn new(blocks: usize) -> Self {
        Self {
            next: (0..blocks).map(|_| AtomicU32::new(!0)).collect(),
            rank: (0..blocks).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn set(&self, id: BlockId, rank: u64) {
        self.rank[id.index()].store(rank, Relaxed);
    }
}

/// A rank queue, and a model of its contents.
struct Both {
    queue: RankQueue,
    rows: Rows,
    enqueued: BTreeSet<(u64, BlockId)>,
    idle: Vec<BlockId>,
}

impl Both {
    fn new(queue: RankQueue, blocks: usize) -> Self {
        let idle = (0..blocks as u32).rev().map(BlockId).collect();
        Self { queue, rows: Rows::new(blocks), enqueued: BTreeSet::new(), idle }
    }

    fn take_idle(&mut self, rank: u64) -> Option<BlockId> {
        let id = self.idle.pop()?;
        self.rows.set(id, rank);
        self.enqueued.insert((rank, id));
        Some(id)
    }

    fn push(&mut self, rank: u64) {
        let id = self.take_idle(rank);
        id.into_iter().for_each(|id| self.queue.push(&self.rows, id));
    }

    fn push_all(&mut self, from: u64, count: u64) {
        let ids: Vec<BlockId> =
            (0..count).rev().filter_map(|i| self.take_idle(from.saturating_add(i))).collect();
        self.queue.push_all(&self.rows, &ids);
    }

    fn grow(&mut self, which: usize, by: u64) {
        let Some(&(rank, id)) = self.enqueued.iter().nth(which % self.enqueued.len().max(1)) else { return };
        self.enqueued.remove(&(rank, id));
        let rank = rank.saturating_add(by);
        self.enqueued.insert((rank, id));
        self.rows.set(id, rank);
    }

    fn pop(&mut self) -> Option<u64> {
        let cursor = self.queue.cursor();
        let head = self.queue.head();
        let smallest = self.enqueued.first().map(|&(rank, _)| rank);
        if let Some(smallest) = smallest {
            assert!(head.expect("a block is enqueued") <= smallest.max(cursor), "{head:?} for {smallest}");
        }
        let Some(id) = self.queue.pop(&self.rows) else {
            assert_eq!(smallest, None, "pop found nothing, but a block is enqueued");
            assert_eq!(self.queue.head(), None, "the hints are exact when nothing is left");
            return None;
        };
        let rank = self.rows.rank(id);
        assert!(self.enqueued.remove(&(rank, id)), "{id} was not enqueued at {rank}");
        let smallest = smallest.expect("the popped block was enqueued");
        assert!(
            rank == smallest || rank <= cursor,
            "popped {rank}, {smallest} is enqueued, the cursor is at {cursor}"
        );
        self.idle.push(id);
        Some(rank)
    }

    fn drain(&mut self) {
        while self.pop().is_some() {}
        assert!(self.enqueued.is_empty());
    }
}

#[derive(Clone, Debug)]
enum Step {
    Push(u64),
    PushAt(u64),
    PushAll(u64, u64),
    Grow(usize, u64),
    Pop(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let rank = || (0..64_u32, any::<u64>()).prop_map(|(bits, number)| number >> bits);
    prop_oneof![
        4 => rank().prop_map(Step::Push),
        1 => rank().prop_map(Step::PushAt),
        2 => (rank(), 1..70_u64).prop_map(|(rank, count)| Step::PushAll(rank, count)),
        2 => (any::<usize>(), rank()).prop_map(|(which, by)| Step::Grow(which, by)),
        4 => (1..20_usize).prop_map(Step::Pop),
    ]
}

proptest! {
    #[test]
    fn as_a_sorted_set(bits in 1..=12_u32, steps in prop::collection::vec(step(), 1..120)) {
        let mut both = Both::new(RankQueue::with_digits(bits, 64), 500);
        let mut last = 0_u64;
        for step in steps {
            match step {
                Step::Push(above) => both.push(last.saturating_add(above)),
                Step::PushAt(rank) => both.push(rank),
                Step::PushAll(above, count) => both.push_all(last.saturating_add(above), count),
                Step::Grow(which, by) => both.grow(which, by),
                Step::Pop(times) => last = (0..times).filter_map(|_| both.pop()).last().unwrap_or(last),
            }
        }
        both.drain();
    }
}

/// The pattern of LRU: ranks from a counter, some blocks touched again while they are enqueued.
#[test]
fn a_counter_for_ranks() {
    let mut both = Both::new(RankQueue::new(5000), 5000);
    let mut random = fastrand::Rng::with_seed(11);
    let mut counter = 0;
    for round in 0..4000 {
        let count = random.u64(1..70);
        both.push_all(counter, count);
        counter += count;
        let touched = random.usize(..64);
        let by = counter.saturating_sub(both.enqueued.iter().nth(touched).map_or(0, |&(rank, _)| rank));
        both.grow(touched, by);
        counter += 1;
        while both.idle.len() < 70 || (round > 3000 && both.idle.len() < 4900) {
            both.pop();
        }
    }
    assert!(both.queue.cursor() > 1 << 16, "level 1 has wrapped");
    both.drain();
}

#[test]
fn the_largest_ranks_have_a_place() {
    for bits in 1..=12 {
        let mut both = Both::new(RankQueue::with_digits(bits, 64), 200);
        for i in 0..100 {
            both.push(u64::MAX - i);
            both.push(i << 50);
        }
        both.drain();
        both.push(3);
        assert_eq!(both.pop(), Some(3), "a rank below the cursor is overdue");
        both.push(u64::MAX);
        both.drain();
    }
}

#[test]
fn ranks_beyond_a_small_wheel_count_as_its_largest() {
    let both = Both::new(RankQueue::with_digits(1, 3), 3);
    for (id, rank) in [(0, 900), (1, 7), (2, 6)].map(|(id, rank)| (BlockId(id), rank)) {
        both.rows.set(id, rank);
        both.queue.push(&both.rows, id);
    }
    assert_eq!(both.queue.pop(&both.rows), Some(BlockId(2)));
    let rest = [(); 2].map(|()| both.queue.pop(&both.rows).unwrap().0);
    assert!(rest == [0, 1] || rest == [1, 0]);
    assert_eq!(both.queue.pop(&both.rows), None);
}

/// The work per block does not grow with their number, and no pop pays for many blocks.
#[test]
fn enqueued_once_more_and_taken() {
    /// Enqueueing and taking a block each read its rank.
    struct Counted(Rows, AtomicU64);
    impl Links for Counted {
        fn next(&self, id: BlockId) -> &AtomicU32 {
            self.0.next(id)
        }

        fn rank(&self, id: BlockId) -> u64 {
            self.1.fetch_add(1, Relaxed);
            self.0.rank(id)
        }
    }
    for blocks in [1 << 8, 1 << 12, 1 << 16] {
        let rows = Counted(Rows::new(blocks), AtomicU64::new(0));
        let queue = RankQueue::new(blocks);
        let mut rank = 0;
        let mut push = |id| {
            rows.0.set(id, rank);
            rank += 1;
            queue.push(&rows, id);
        };
        (0..blocks as u32).map(BlockId).for_each(&mut push);
        let (mut all, mut most) = (0, 0);
        let turns = 5 * blocks as u64;
        for turn in 0..turns {
            let before = rows.1.load(Relaxed);
            let id = queue.pop(&rows).unwrap();
            let asked = rows.1.load(Relaxed) - before;
            all += asked;
            if turn > blocks as u64 {
                most = most.max(asked);
            }
            push(id);
        }
        let each = all as f64 / turns as f64;
        assert!(each < 2.1, "{each} rank reads per block at {blocks} blocks");
        assert!(most < 8, "{most} rank reads in one pop at {blocks} blocks");
    }
}

/// Threads push, pop and grow ranks: no block is popped twice or lost, and the rest is in order.
#[test]
fn threads() {
    const BLOCKS: usize = 600;
    for (seed, bits) in [(1, 1), (2, 3), (3, 6), (4, 9)] {
        let (queue, rows) = (&RankQueue::with_digits(bits, 64), &Rows::new(BLOCKS));
        let owned: &Vec<AtomicBool> = &(0..BLOCKS).map(|_| AtomicBool::new(true)).collect();
        let counter = &AtomicU64::new(0);
        let steps = if cfg!(miri) { 200 } else { 60_000 };
        let mut held: Vec<BlockId> = thread::scope(|scope| {
            let work = |thread: usize| {
                let mut random = fastrand::Rng::with_seed(seed * 8 + thread as u64);
                let mut held: Vec<BlockId> =
                    (0..BLOCKS as u32).map(BlockId).skip(thread).step_by(4).collect();
                for _ in 0..steps {
                    let count = random.usize(1..9).min(held.len());
                    if random.bool() {
                        let base = counter.fetch_add(random.u64(1..30), Relaxed);
                        let ids = held.split_off(held.len() - count);
                        for (i, &id) in ids.iter().enumerate() {
                            rows.set(id, base + random.u64(..4) + i as u64);
                            owned[id.index()].store(false, Relaxed);
                        }
                        queue.push_all(rows, &ids);
                    } else if let Some(id) = queue.pop(rows) {
                        assert!(!owned[id.index()].swap(true, Relaxed), "{id} has two owners");
                        held.push(id);
                    }
                    if random.u32(..8) == 0 {
                        rows.rank[random.usize(..BLOCKS)].fetch_add(random.u64(..2000), Relaxed);
                    }
                }
                held
            };
            let threads: Vec<_> = (0..4).map(|thread| scope.spawn(move || work(thread))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let cursor = queue.cursor();
        let rest: Vec<BlockId> = std::iter::from_fn(|| queue.pop(rows)).collect();
        let ranks: Vec<u64> = rest.iter().map(|&id| rows.rank(id).max(cursor)).collect();
        assert!(ranks.is_sorted(), "out of order beyond {cursor}: {ranks:?}");
        held.extend(rest);
        held.sort_unstable();
        assert!(held.into_iter().eq((0..BLOCKS as u32).map(BlockId)), "a block was lost or duplicated");
    }
}
