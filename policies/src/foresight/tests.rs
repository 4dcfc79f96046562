//! The parts by themselves, and the learning of the whole policy.

use std::collections::BTreeMap;
use std::thread;

use kvpool::prefix::policy::{CachePriority, QUEUES_MAX};

use super::ages::BINS;
use super::duel::Round;
use super::features::{ALL, BRANCH, CHAIN, GAP, HITS, NEW, TAIL, TURN, VALUES};
use super::*;

fn released(order: u64, hash: u64, depth: u32, chain: u32, hits: u32, context: u64) -> Released {
    let priority = CachePriority::Normal;
    Released { order, hash, depth, chain, hits, context, state: 0, priority, keep_until: None }
}

#[test]
fn a_state_gives_back_what_was_put_in() {
    let first = State::new(Request::new(5, None), 1000, 2, 3, 11);
    let values = |state: State| ALL.map(|feature| state.get(feature));
    // hits 2, turn 0, 7 behind it, 5 new, no gap, a chain of 11, no branch
    assert_eq!(values(first), [2, 0, 3, 3, 0, 4, 0]);
    assert_eq!(first.age(1500), 500);
    let next =
        State::new(Request::new(0, Some((State::new(Request::new(9, None), 0, 0, 9, 10), 6))), 7, 99, 0, 1);
    assert_eq!(values(next), [7, 1, 0, 0, 4, 1, 1], "a chain continued at its end is the same conversation");
    let common = State::new(Request::new(3, Some((first, 0))), 7, 0, 0, 1);
    assert_eq!(
        (common.get(TURN), common.get(BRANCH)),
        (0, 4),
        "a chain continued in its middle is a common beginning"
    );
}

#[test]
fn any_bits_are_a_state() {
    for bits in [0, 1, u64::MAX, u64::MAX << 25, (1 << 25) - 1, 0x5555_5555_5555_5555] {
        let state = State(bits);
        assert!(ALL.iter().all(|&feature| state.get(feature) < VALUES));
        let request = Request::new(u32::MAX, Some((state, usize::MAX / 2)));
        let next = State::new(request, u64::MAX, u32::MAX, u32::MAX, 0);
        let largest = [(HITS, 7), (TURN, 7), (NEW, 15), (GAP, 15), (CHAIN, 15), (TAIL, 15), (BRANCH, 7)];
        assert!(largest.iter().all(|&(feature, most)| next.get(feature) <= most));
        assert!(State::known(next.0).is_some(), "a state is never zero");
        Model::new(0.03).learn(state, f32::MAX.sqrt());
    }
    assert_eq!(State(u64::MAX).age(0), 1, "the order wraps");
    assert_eq!(
        State::new(Request::new(0, None), 50, 0, 0, 1).age(49),
        0,
        "an order that is later than the latest seen"
    );
}

#[test]
fn noted_blocks_stand_for_all() {
    for chain in 1..200 {
        let blocks: u32 = (0..chain).filter_map(|depth| stands_for(depth, chain)).sum();
        assert_eq!(blocks, chain);
    }
}

#[test]
fn a_note_is_taken_once_and_the_oldest_gives_way() {
    let awaited = Awaited::new(4);
    let state = |order| State::new(Request::new(0, None), order, 0, 0, 1);
    let wait = |order| Wait { state: state(order), blocks: 3, queue: 6, from: 0 };
    // One set of eight.
    for number in 0..8u64 {
        assert!(awaited.note(number + 1, wait(100 + number), 200).is_none());
    }
    assert_eq!(awaited.take(5), Some(wait(104)));
    assert!(awaited.take(5).is_none());
    assert!(awaited.take(0).is_none(), "0 marks a free note");
    assert!(awaited.note(9, wait(300), 400).is_none(), "in the free place");
    assert_eq!(awaited.note(10, wait(301), 400).map(|wait| wait.state), Some(state(100)));
    let mut waits = Vec::new();
    (0..8).for_each(|_| awaited.look_through(500, |wait, age| waits.push((wait.from, age))));
    assert_eq!(waits.len(), 8);
    assert!(waits.contains(&(0, 199)));
    (0..8).for_each(|_| awaited.look_through(510, |wait, age| panic!("{wait:?} counted again at {age}")));
}

#[test]
fn worth_is_the_hazard_where_that_is_constant_and_falls_with_it() {
    let ages = Ages::new(20.0);
    // Ten thousand blocks, each reused after an age between 100 and 1000, and as many that never
    // are.
    for age in (100..1000).step_by(9) {
        for _ in 0..100 {
            ages.awaited(3, 1.0, 1.0, 0, age);
            ages.reused(3, 1.0, age);
            ages.awaited(3, 1.0, 1.0, 0, 100_000);
        }
    }
    ages.compute();
    assert!(ages.index(3, 600) > 10.0 * ages.index(3, 3000), "past its time");
    assert!(ages.index(3, 300) > ages.index(3, 0), "before its time, less than in it");
    let score_up = ages.index(5, 600) / ages.index(3, 600);
    assert!((1.5..4.0).contains(&score_up), "a class never seen is worth what its score says: {score_up}");
}

/// Cached blocks in exact queues, for one thread.
struct Bench {
    policy: Foresight,
    capacity: usize,
    cached: BTreeMap<u64, (u8, u64, u64, u32)>,
    queues: Vec<BTreeMap<u64, u64>>,
    order: u64,
}

impl Bench {
    fn new(capacity: usize) -> Self {
        let policy = Foresight::new(capacity);
        let queues = vec![BTreeMap::new(); policy.queues()];
        Self { policy, capacity, cached: BTreeMap::new(), queues, order: 0 }
    }

    /// Serves a request for a chain of blocks, and returns its hits.
    fn request(&mut self, blocks: &[u64]) -> usize {
        let hash = |block: u64| (block + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hits = blocks.iter().take_while(|block| self.cached.contains_key(block)).count();
        let state = hits.checked_sub(1).map_or(0, |last| self.cached[&blocks[last]].2);
        let mut hashes = blocks.iter().map(|&block| hash(block));
        let mut lookup =
            Lookup { blocks: blocks.len() as u32, hits: hits as u32, state, hashes: &mut hashes };
        let context = self.policy.looked_up(&mut lookup, Millis(0));
        for (depth, &block) in blocks.iter().enumerate().rev() {
            let before = self.cached.remove(&block);
            if let Some((queue, rank, ..)) = before {
                self.queues[queue as usize].remove(&rank);
            }
            let hits = before.map_or(0, |(.., hits)| hits + 1);
            self.order += 1;
            let released =
                released(self.order, hash(block), depth as u32, blocks.len() as u32, hits, context);
            let Place { queue, rank, state } = self.policy.place(&released, Millis(0));
            self.queues[queue as usize].insert(rank, block);
            self.cached.insert(block, (queue, rank, state, hits));
        }
        while self.cached.len() > self.capacity {
            self.evict();
        }
        hits
    }

    fn evict(&mut self) -> u64 {
        let head = |queue: &BTreeMap<u64, u64>| {
            let (&rank, block) = queue.first_key_value()?;
            Some(Head { rank, state: self.cached[block].2 })
        };
        let heads: Vec<_> = self.queues.iter().map(head).collect();
        let queue = self.policy.victim(&heads, Millis(0)).expect("a block");
        let (_, block) = self.queues[queue].pop_first().expect("a queue with a head");
        self.cached.remove(&block);
        block
    }
}

#[test]
fn a_victim_is_one_of_the_heads() {
    let policy = Foresight::new(100);
    assert!((1..=QUEUES_MAX).contains(&policy.queues()));
    let mut heads = vec![None; policy.queues()];
    assert_eq!(policy.victim(&heads, Millis(7)), None);
    for queue in 0..heads.len() {
        for (rank, state) in [(0, 0), (u64::MAX, u64::MAX), (0, u64::MAX), (u64::MAX, 0)] {
            heads[queue] = Some(Head { rank, state });
            assert_eq!(policy.victim(&heads, Millis(7)), Some(queue));
        }
        heads[queue] = None;
    }
}

#[test]
fn frontiers_agree_where_prospects_are_equal() {
    let (duel, ages) = (Duel::new(256.0, 1.0), Ages::new(20.0));
    // A thousand blocks of two classes, half of which the pool keeps, released before now at 2000.
    for class in [2, 4] {
        (1..=500).for_each(|age| duel.waited(class, 1.0, 0, 2 * age));
    }
    duel.evicts((0..CLASSES + 1).map(|_| Some(400)), 2000);
    duel.end(Duel::begin(), 0, &ages, 2000);
    for (age, is_kept) in [(100, true), (399, true), (401, false), (900, false)] {
        let mut round = Duel::begin();
        duel.reused(&mut round, 2, 1.0, age, 2000);
        assert_eq!(round.by_release, is_kept, "{age}");
    }
    // Frontiers never fall: what was gone at 2000 is gone later.
    duel.evicts((0..CLASSES + 1).map(|_| Some(5000)), 7000);
    let mut round = Duel::begin();
    duel.reused(&mut round, 2, 1.0, 5450, 7000);
    assert!(!round.by_release, "released at 1550");
}

#[test]
fn the_order_that_gains_evicts() {
    let (duel, ages) = (Duel::new(64.0, 1.0), Ages::new(20.0));
    let gains = |gain: f32| (0..200).for_each(|_| duel.end(Round { gain, ..Duel::begin() }, 1, &ages, 0));
    assert!(!duel.is_by_worth(), "it has to prove itself");
    gains(0.5);
    assert!(duel.is_by_worth());
    gains(-0.1);
    assert!(!duel.is_by_worth());
    gains(0.0);
    assert!(!duel.is_by_worth());
}

/// The blocks whose worth is least go, and a surplus of room goes to those that are not admitted.
#[test]
fn the_frontier_by_worth_fills_the_room() {
    let ages = Ages::new(20.0);
    for age in (10..1000).step_by(10) {
        ages.awaited(1, 1.0, 50.0, 0, age);
        ages.awaited(5, 1.0, 50.0, 0, age);
        ages.reused(5, 50.0, age);
    }
    ages.compute();
    let mut exposure = [[0.0; BINS]; CLASSES + 1];
    exposure[1][..10].fill(1.0);
    exposure[5][..10].fill(1.0);
    let kept = duel::kept_by_worth(&exposure, 10.0, &ages);
    assert!(kept[5] > 8.0 * kept[1].max(1.0), "{kept:?}");
    exposure[CLASSES][..4].fill(1.0);
    let kept = duel::kept_by_worth(&exposure, 22.0, &ages);
    assert_eq!(bin(kept[CLASSES] as u64), 2, "{kept:?}");
}

#[test]
fn a_recent_score_is_that_of_all_blocks_of_a_chain() {
    let model = Model::new(0.03);
    let state = |depth, hits| State::new(Request::new(5, None), 1000, hits, depth, 40);
    model.learn(state(3, 1), 1.0);
    let score = model.recent_score(state(3, 1));
    assert_eq!((score, model.recent_score(state(20, 1))), (model.score(state(3, 1)), score));
    assert_ne!(score, model.recent_score(state(20, 2)));
    model.learn(state(3, 1), 1.0);
    assert_eq!(model.recent_score(state(3, 1)), score, "as before");
    model.forget();
    assert_eq!(model.recent_score(state(3, 1)), model.score(state(3, 1)));
}

#[test]
fn without_observations_it_is_lru() {
    let mut bench = Bench::new(100);
    for request in 0..10 {
        bench.request(&[request * 3, request * 3 + 1, request * 3 + 2]);
    }
    let evicted: Vec<u64> = (0..30).map(|_| bench.evict()).collect();
    let oldest: Vec<u64> = (0..10).flat_map(|request| [2, 1, 0].map(|depth| request * 3 + depth)).collect();
    assert_eq!(evicted, oldest);
}

/// Long prompts that never return, and short ones that do: LRU keeps none of those for long enough.
#[test]
fn it_learns_which_prompts_return() {
    let mut bench = Bench::new(400);
    let (mut hits, mut asked) = (0, 0);
    for round in 0..1500u64 {
        let once: Vec<u64> = (0..40).map(|block| 1_000_000 + round * 40 + block).collect();
        assert_eq!(bench.request(&once), 0);
        // Twenty short prompts, one per round: the blocks between two uses of a prompt exceed the
        // capacity.
        let short: Vec<u64> = (0..3).map(|block| (round % 20) * 3 + block).collect();
        let found = bench.request(&short);
        if round >= 1000 {
            hits += found;
            asked += short.len();
        }
    }
    assert!(hits * 10 >= asked * 9, "{hits} of {asked}");
}

#[test]
fn it_keeps_part_of_a_loop_that_is_longer_than_the_cache() {
    let mut bench = Bench::new(500);
    let hits: usize = (0..8000u64)
        .map(|round| {
            let document: Vec<u64> = (0..10).map(|block| (round % 100) * 10 + block).collect();
            let found = bench.request(&document);
            if round >= 4000 { found } else { 0 }
        })
        .sum();
    // Half of the loop fits. LRU has no hits.
    assert!(hits > 40_000 / 20, "{hits} of 40000");
}

/// Concurrent calls with arbitrary states: none panics, and a victim is one of the heads.
#[test]
fn concurrent_calls_are_safe() {
    let policy = Foresight::new(1000);
    let rounds = if cfg!(miri) { 100 } else { 20_000u64 };
    thread::scope(|scope| {
        for seed in 1..=3u64 {
            let policy = &policy;
            scope.spawn(move || {
                let mut random = seed;
                for round in 0..rounds {
                    random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(seed);
                    let mut hashes = (0..8).map(|block| random >> 48 | block);
                    let mut lookup = Lookup { blocks: 8, hits: 3, state: random, hashes: &mut hashes };
                    let context = policy.looked_up(&mut lookup, Millis(random));
                    for depth in (0..8).rev() {
                        let hash = random >> 48 | u64::from(depth);
                        let order = round * 24 + u64::from(depth);
                        let place = policy.place(&released(order, hash, depth, 8, depth, context), Millis(0));
                        assert!(usize::from(place.queue) < policy.queues());
                    }
                    let mut heads = [None; CLASSES + 1];
                    let queue = (random >> 60) as usize % heads.len();
                    heads[queue] = Some(Head { rank: random, state: random.rotate_left(9) });
                    assert_eq!(policy.victim(&heads, Millis(0)), Some(queue));
                }
            });
        }
    });
}
