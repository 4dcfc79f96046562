//! Sessions by hand, with sorted maps as queues.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{CachePriority, Lru};
use super::*;

#[derive(Default)]
struct Bench {
    policy: Sessions,
    queues: BTreeMap<(usize, u64, u32), u64>,
    /// Queue, rank and state of the last place of each block.
    places: BTreeMap<u32, (usize, u64, u64)>,
    order: u64,
    begun: BTreeSet<u64>,
}

impl Bench {
    fn look_up(&mut self, session: u64, blocks: &[u32], now: u64) {
        let hashes = &mut blocks.iter().map(|&block| u64::from(block));
        let (count, session) = (blocks.len() as u32, Some(SessionId(session)));
        let mut lookup = Lookup { blocks: count, hits: 0, state: 0, hashes, session };
        self.policy.looked_up(&mut lookup, Millis(now));
        for &block in blocks {
            if let Some(&(queue, rank, _)) = self.places.get(&block) {
                self.queues.remove(&(queue, rank, block));
            }
        }
    }

    /// Releases the blocks of a request. A new session looks them up before.
    fn release(&mut self, session: Option<u64>, blocks: &[u32], now: u64, returns_at: Option<u64>) {
        if let Some(session) = session.filter(|&session| self.begun.insert(session)) {
            self.look_up(session, blocks, now);
        }
        for (depth, &block) in blocks.iter().enumerate().rev() {
            self.order += 1;
            let released = Released {
                order: self.order,
                hash: u64::from(block),
                depth: depth as u32,
                chain: blocks.len() as u32,
                hits: 0,
                context: 0,
                state: self.places.get(&block).map_or(0, |&(.., state)| state),
                priority: CachePriority::Normal,
                session: session.map(SessionId),
                returns_at: returns_at.map(Millis),
            };
            let Place { queue, rank, state } = self.policy.place(&released, Millis(now));
            assert!(usize::from(queue) < QUEUES);
            self.queues.insert((queue.into(), rank, block), state);
            self.places.insert(block, (queue.into(), rank, state));
        }
    }

    fn first(&self, queue: usize) -> Option<(usize, u64, u32)> {
        self.queues.range((queue, 0, 0)..(queue + 1, 0, 0)).next().map(|(&key, _)| key)
    }

    fn evict(&mut self, now: u64) -> Option<u32> {
        let head = |queue| self.first(queue).map(|key| Head { rank: key.1, state: self.queues[&key] });
        let heads: Vec<_> = (0..QUEUES).map(head).collect();
        let queue = self.policy.victim(&heads, Millis(now))?;
        let key = self.first(queue).expect("the named queue has a head");
        self.queues.remove(&key);
        self.places.remove(&key.2);
        Some(key.2)
    }

    fn evict_all(&mut self, now: u64) -> Vec<u32> {
        std::iter::from_fn(|| self.evict(now)).collect()
    }
}

#[test]
fn without_sessions_it_is_lru() {
    let mut bench = Bench::default();
    let mut random = 1u64;
    for now in 0..500 {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let first = (now as u32) * 8;
        let blocks: Vec<u32> = (first..=first + (random >> 61) as u32).collect();
        bench.release(None, &blocks, now * 1000, None);
    }
    let lru = Lru;
    for now in (0..600_000).step_by(1000) {
        let first = bench.queues.iter().min_by_key(|((_, rank, _), _)| *rank).map(|(&(.., block), _)| block);
        assert_eq!(bench.evict(now), first);
    }
    assert_eq!(lru.queues(), 1);
}

#[test]
fn sessions_without_hints_go_by_age_and_the_end_of_a_prompt_first() {
    let mut bench = Bench::default();
    bench.release(Some(1), &[1, 2], 1000, None);
    bench.release(None, &[3, 4], 2000, None);
    bench.release(Some(2), &[5, 6], 3000, None);
    assert_eq!(bench.evict_all(4000), [2, 1, 4, 3, 6, 5]);
}

#[test]
fn the_session_that_returns_last_goes_first() {
    let mut bench = Bench::default();
    let returns = [5, 90, 20, 4000, 3, 300, 45, 900_000];
    for (session, seconds) in (0..).zip(returns) {
        let first = session as u32 * 2;
        bench.release(Some(session), &[first, first + 1], 1000, Some(1000 + seconds * 1000));
    }
    // The last is over.
    assert_eq!(bench.evict_all(2000), [15, 14, 7, 6, 11, 10, 3, 2, 13, 12, 5, 4, 1, 0, 9, 8]);
}

#[test]
fn hints_hold_over_any_span_of_time() {
    let mut random = 1u64;
    let mut random = |below: u64| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (random >> 33) % below
    };
    // The last one passes the end of the range of times.
    for start in [0, 1 << 21, 1_780_000_000_000, (1 << TIME_BITS) - 100_000] {
        let mut bench = Bench::default();
        let returns: Vec<u64> = (0..40).map(|_| 1 + random(1_000_000)).collect();
        for (session, &ms) in (0..).zip(&returns) {
            bench.release(Some(session), &[session as u32], start, Some(start + ms));
        }
        // The longest wait of those that are visible.
        while !bench.queues.is_empty() {
            let heads = (1..OVER_QUEUE).filter_map(|queue| bench.first(queue)).map(|(.., block)| block);
            let longest = heads.max_by_key(|&block| returns[block as usize]);
            assert_eq!(bench.evict(start), longest);
        }
    }
}

#[test]
fn a_late_session_goes_before_one_that_returns_sooner_than_it_is_late() {
    let mut bench = Bench::default();
    bench.release(Some(1), &[1], 0, Some(10_000));
    bench.release(Some(2), &[2], 0, Some(200_000));
    bench.release(Some(3), &[3], 0, Some(115_000));
    assert_eq!(bench.evict_all(110_000), [1, 2, 3], "late by 100 s; 90 s ahead; 5 s ahead");
}

#[test]
fn a_path_that_its_session_has_left_goes_first() {
    let mut bench = Bench::default();
    bench.release(Some(2), &[20], 0, None);
    bench.release(Some(1), &[1, 2, 3], 5000, None);
    bench.look_up(1, &[1, 4], 6000);
    assert_eq!(bench.evict(6000), Some(3), "it is newer than 20");
    bench.release(Some(1), &[1, 4], 7000, None);
    assert_eq!(bench.evict_all(7001), [2, 20, 4, 1]);
}

#[test]
fn a_session_that_no_longer_gives_hints_is_probably_over() {
    let mut bench = Bench::default();
    bench.release(Some(1), &[1], 0, Some(1000));
    bench.look_up(1, &[1], 1000);
    bench.release(Some(2), &[2], 2000, None);
    bench.release(Some(1), &[1], 3000, None);
    assert_eq!(bench.evict_all(5000), [1, 2]);
}

#[test]
fn a_usual_think_time_is_waited_for() {
    let mut bench = Bench::default();
    for turn in 0..4 {
        bench.look_up(1, &[1], turn * 60_000);
        bench.release(Some(1), &[1], turn * 60_000, None);
    }
    bench.release(Some(2), &[2], 150_000, None);
    assert_eq!(bench.evict(185_000), Some(1), "it returns once a minute, and has 55 s to go");
    bench.release(Some(1), &[1], 185_000, None);
    bench.release(Some(2), &[2], 185_000, None);
    assert_eq!(bench.evict(215_000), Some(1), "of the same age");
    bench.release(Some(1), &[1], 400_000, None);
    assert_eq!(bench.evict(430_000), Some(2), "its age is more than theirs together");
}

#[test]
fn blocks_of_several_sessions_are_not_over_with_one() {
    let mut bench = Bench::default();
    bench.release(Some(1), &[1, 2], 0, None);
    bench.look_up(2, &[1, 3], 1000);
    bench.release(Some(2), &[1, 3], 2000, Some(u64::MAX));
    assert_eq!(bench.evict_all(3000), [3, 2, 1]);
    bench.release(Some(1), &[1], 0, None);
    bench.release(None, &[1], 0, None);
    bench.release(Some(1), &[1], 0, Some(u64::MAX));
    assert_eq!(bench.places[&1].0, COMMON_QUEUE);
}

/// Arbitrary states, ranks and times: the answer is always a queue with a head.
#[test]
fn no_input_is_a_panic() {
    let mut random = 1u64;
    let mut random = || {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let mixed = random ^ random >> 29;
        [mixed, 0, u64::MAX, mixed >> 24, 1 << (mixed % 64)][(mixed >> 7) as usize % 5]
    };
    let policy = Sessions::default();
    for _ in 0..20_000 {
        let now = Millis(random());
        let session = Some(SessionId(random() % 20));
        let mut hashes = std::iter::empty();
        let (blocks, hits, state) = (random() as u32, random() as u32, random());
        policy.looked_up(&mut Lookup { blocks, hits, state, hashes: &mut hashes, session }, now);
        let released = Released {
            order: random(),
            hash: random(),
            depth: random() as u32,
            chain: random() as u32,
            hits: random() as u32,
            context: random(),
            state: random(),
            priority: CachePriority::Low,
            session: session.filter(|session| session.0 > 0),
            returns_at: Some(Millis(random())).filter(|at| at.0 % 3 > 0),
        };
        assert!(usize::from(policy.place(&released, now).queue) < QUEUES);
        let mut head = || Some(Head { rank: random(), state: random() }).filter(|head| head.rank % 2 == 0);
        let heads: Vec<_> = (0..QUEUES).map(|_| head()).collect();
        let victim = policy.victim(&heads, Millis(random()));
        assert_eq!(victim.is_some(), heads.iter().any(Option::is_some));
        assert!(victim.is_none_or(|queue| heads[queue].is_some()));
    }
}
