//! Prefix reuse under faults: truncated tokens, threads that die, policies with invalid answers. A
//! hit holds the right bytes, and no block is lost.
#![cfg(not(kvpool_loom))]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvpool::prefix::PrefixConfig;
use kvpool::prefix::policy::{CachePriority, Head, Lookup, Millis, Place, Policy, PolicyKind, Released};
use kvpool::{AllocRequest, Pool, SequenceId};
use kvpool_testkit::prompts::{admit, pool, pool_of, prompt};
use kvpool_testkit::steps::append;

/// Returns the number of cached tokens of a prompt.
fn cached(pool: &Pool, prompt: &[u32]) -> usize {
    pool.sequence(SequenceId(u64::MAX)).tokens(prompt).unwrap().len()
}

#[test]
fn a_rewritten_sequence_is_not_found_under_old_tokens() {
    let pool = pool(100);
    let (old, new) = (prompt(1, 9), prompt(2, 9));
    let (mut sequence, _) = admit(&pool, 1, &old);
    pool.clear_prefix_cache();
    sequence.truncate(0).unwrap();
    append(&pool, &mut sequence, &new);
    assert_eq!(sequence.announced(), 9);
    drop(sequence);
    assert_eq!(cached(&pool, &old), 0, "its blocks hold other tokens");
    assert_eq!(pool.audit().unwrap().owned, 0);
}

/// The sequence outlives the failed step: its tail continues bytes that were not stored, and must
/// not be found either.
#[test]
fn a_tail_after_a_panic_is_not_found() {
    let (pool, tokens) = (pool(100), prompt(1, 11));
    let mut sequence = pool.sequence(SequenceId(1)).reuse_tail().tokens(&tokens).unwrap();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, tokens.len()).unwrap();
        panic!("before anything is stored");
    }));
    assert!(outcome.is_err());
    drop(sequence);
    // Another sequence computes the blocks before it.
    drop(admit(&pool, 2, &tokens[..9]));
    let longer = prompt(1, 20);
    let found = pool.sequence(SequenceId(3)).reuse_tail().tokens(&longer).unwrap();
    assert_eq!(found.len(), 8);
}

/// Answer to the nth call, with these heads; `None` panics.
type Victim = fn(u64, &[Option<Head>]) -> Option<Option<usize>>;

/// A policy with arbitrary answers.
struct Any {
    queues: usize,
    calls: AtomicU64,
    /// Answer to the nth call; `None` panics.
    place: fn(u64, &Released) -> Option<Place>,
    victim: Victim,
    looked_up: fn(u64) -> Option<u64>,
}

impl std::fmt::Debug for Any {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Any")
    }
}

impl Any {
    fn call(&self) -> u64 {
        self.calls.fetch_add(1, Relaxed)
    }
}

impl Policy for Any {
    fn name(&self) -> &'static str {
        "any"
    }

    fn queues(&self) -> usize {
        self.queues
    }

    fn looked_up(&self, _: &mut Lookup<'_>, _: Millis) -> u64 {
        (self.looked_up)(self.call()).unwrap_or_else(|| panic!("the policy panics in a look-up"))
    }

    fn place(&self, released: &Released, _: Millis) -> Place {
        (self.place)(self.call(), released).unwrap_or_else(|| panic!("the policy panics in a placement"))
    }

    fn victim(&self, heads: &[Option<Head>], _: Millis) -> Option<usize> {
        (self.victim)(self.call(), heads).unwrap_or_else(|| panic!("the policy panics in an eviction"))
    }
}

fn first(heads: &[Option<Head>]) -> Option<Option<usize>> {
    Some(heads.iter().position(Option::is_some))
}

/// Requests of all kinds under a policy with arbitrary answers: no block is lost, and hits are
/// exact.
fn serves(policy: Any) {
    let pool = pool_of(60, PrefixConfig::new().policy_of(Arc::new(policy)));
    let mut rng = fastrand::Rng::with_seed(5);
    let mut open = Vec::new();
    for step in 0..600 {
        let prompt = prompt(rng.u32(..8), rng.usize(1..60));
        match pool.sequence(SequenceId(step)).tokens(&prompt) {
            Ok(mut sequence) => {
                let mut batch = pool.begin_batch();
                let rest = prompt.len() - sequence.len();
                if batch.append(&mut sequence, rest).is_ok() {
                    open.push(sequence);
                }
                batch.finish();
            }
            Err(error) => panic!("{error}"),
        }
        if open.len() > 3 {
            open.swap_remove(rng.usize(..open.len()));
        }
        if step % 50 == 0 {
            pool.audit().unwrap();
        }
    }
    open.clear();
    assert_eq!((pool.audit().unwrap().owned, pool.available_blocks()), (0, 60));
    let stats = pool.prefix_cache().unwrap().stats();
    assert!(stats.hit_blocks > 100 && stats.evicted_blocks > 100, "{stats:?}");
    drop(pool.allocate(AllocRequest::new(60)).unwrap());
    pool.audit().unwrap();
}

fn in_order(_: u64, released: &Released) -> Option<Place> {
    Some(Place { queue: (released.hash % 3) as u8, rank: released.order, state: 0 })
}

#[test]
fn a_policy_that_panics_loses_nothing() {
    let calls = || AtomicU64::new(0);
    let (place, victim, looked_up) = (in_order, |_, heads: &[_]| first(heads), |_| Some(0));
    let place_panics =
        |call: u64, released: &Released| in_order(call, released).filter(|_| !call.is_multiple_of(97));
    serves(Any { queues: 3, calls: calls(), place: place_panics, victim, looked_up });
    let victim_panics = |call: u64, heads: &[_]| first(heads).filter(|_| !call.is_multiple_of(97));
    serves(Any { queues: 3, calls: calls(), place, victim: victim_panics, looked_up });
    let looked_up_panics = |call: u64| (!call.is_multiple_of(97)).then_some(7);
    serves(Any { queues: 3, calls: calls(), place, victim, looked_up: looked_up_panics });
}

#[test]
fn a_policy_with_invalid_answers_breaks_nothing() {
    let calls = || AtomicU64::new(0);
    let (victim, looked_up) = (|_, heads: &[_]| first(heads), |_| Some(u64::MAX));
    let place_of = |place: fn(u64, &Released) -> Option<Place>| Any {
        queues: 3,
        calls: calls(),
        place,
        victim,
        looked_up,
    };
    // Queues that do not exist, and the queue of useless blocks.
    serves(place_of(|call, released| Some(Place { queue: call as u8, rank: released.order, state: call })));
    serves(place_of(|_, _| Some(Place { queue: 1, rank: 7, state: 0 })));
    serves(place_of(|_, _| Some(Place { queue: 2, rank: u64::MAX, state: 0 })));
    serves(place_of(|call, _| Some(Place { queue: 0, rank: u64::MAX - call, state: 0 })));
    serves(place_of(|call, _| Some(Place { queue: 0, rank: 1_000_000 - call, state: 0 })));
    // Ranks far apart, close together, and around the wrap-arounds of a rank queue.
    serves(place_of(|call, _| {
        Some(Place { queue: (call % 3) as u8, rank: call.wrapping_mul(0x9e37_79b9_7f4a_7c15), state: 0 })
    }));
    serves(place_of(|call, _| Some(Place { queue: (call % 3) as u8, rank: 1_000_000 + call % 5, state: 0 })));
    for victim in [|_, _: &[_]| Some(None), |call: u64, _: &[_]| Some(Some(call as usize))] {
        serves(Any { queues: 3, calls: calls(), place: in_order, victim, looked_up });
    }
}

/// One block waits at the front of its queue, another behind it, both far from the queue's cursor.
#[test]
fn a_front_gives_way_to_smaller_ranks_alone() {
    let place = |_: u64, released: &Released| match released.priority {
        CachePriority::High => Some(Place { queue: 1, rank: 1_000_000_000 - released.order, state: 0 }),
        _ => Some(Place { queue: 0, rank: released.order, state: 0 }),
    };
    let (victim, looked_up) = (|_, heads: &[_]| first(heads), |_| Some(0));
    let policy = Any { queues: 2, calls: AtomicU64::new(0), place, victim, looked_up };
    let pool = pool_of(10, PrefixConfig::new().policy_of(Arc::new(policy)));
    let serve = |first, keep| {
        let mut sequence = pool.sequence(SequenceId(1)).keep(keep).tokens(&prompt(first, 4)).unwrap();
        append(&pool, &mut sequence, 4);
    };
    serve(1, CachePriority::High);
    serve(2, CachePriority::Low);
    drop(pool.allocate(AllocRequest::new(9)).unwrap());
    assert_eq!(pool.prefix_cache().unwrap().stats().evicted_blocks, 1);
    serve(3, CachePriority::High);
    serve(4, CachePriority::High);
    // Looked up in the order of service; otherwise they would be placed elsewhere.
    let cached = |first| {
        let high = pool.sequence(SequenceId(u64::MAX)).keep(CachePriority::High);
        high.tokens(&prompt(first, 5)).unwrap().len()
    };
    // The last of them has the smallest rank.
    for (blocks, left) in [(8, [4, 4, 0]), (9, [4, 0, 0]), (10, [0, 0, 0])] {
        drop(pool.allocate(AllocRequest::new(blocks)).unwrap());
        assert_eq!([1, 3, 4].map(cached), left);
    }
    pool.audit().unwrap();
}

/// More unevictable blocks than an eviction skips are in front of an evictable one.
#[test]
fn an_evictable_block_is_found_behind_unevictable_ones() {
    let config = || PrefixConfig::new().policy(PolicyKind::Priority);
    let pool = pool_of(101, config());
    let admit = |id, prompt: &[u32], keep| {
        let mut sequence = pool.sequence(SequenceId(id)).keep(keep).tokens(prompt).unwrap();
        let mut batch = pool.begin_batch();
        let rest = prompt.len() - sequence.len();
        batch.append(&mut sequence, rest).unwrap();
        sequence
    };
    let (dear, cheap) =
        (admit(1, &prompt(1, 4), CachePriority::High), admit(2, &prompt(2, 400), CachePriority::Low));
    drop(dear);
    let batch = pool.begin_batch();
    drop(cheap);
    drop(pool.allocate(AllocRequest::new(1)).expect("the batch does not see the first prompt"));
    assert!(pool.allocate(AllocRequest::new(2)).is_err());
    batch.finish();
    drop(pool.allocate(AllocRequest::new(101)).unwrap());
    pool.audit().unwrap();
}

/// A block at the front of its queue is hit, and then placed in another: it must not hide those
/// behind it.
#[test]
fn a_front_that_is_placed_elsewhere_leaves_its_queue() {
    let place = |_: u64, released: &Released| {
        let (queue, state) = match released.priority {
            CachePriority::Low => (0, 5),
            CachePriority::Normal => (2, if released.order < 4 { 0 } else { 7 }),
            CachePriority::High => (1, 10),
        };
        // Far apart, so that the rank queue distinguishes them.
        Some(Place { queue, rank: released.order * 1_000_000, state })
    };
    let victim = |_: u64, heads: &[Option<Head>]| {
        let states = heads.iter().enumerate().filter_map(|(queue, head)| Some(((*head)?.state, queue)));
        Some(states.min().map(|(_, queue)| queue))
    };
    let looked_up = |_| Some(0);
    let policy = Any { queues: 3, calls: AtomicU64::new(0), place, victim, looked_up };
    let pool = pool_of(10, PrefixConfig::new().policy_of(Arc::new(policy)));
    let serve = |first, keep| {
        let mut sequence = pool.sequence(SequenceId(1)).keep(keep).tokens(&prompt(first, 5)).unwrap();
        let rest = 5 - sequence.len();
        append(&pool, &mut sequence, rest);
    };
    serve(1, CachePriority::Low);
    serve(2, CachePriority::Low);
    serve(3, CachePriority::Normal);
    // The third is evicted; for that, the first has come to the front.
    drop(pool.allocate(AllocRequest::new(8)).unwrap());
    serve(1, CachePriority::High);
    serve(4, CachePriority::Normal);
    // The second: its rank is below the fourth's and the first's, which does not block it.
    drop(pool.allocate(AllocRequest::new(8)).unwrap());
    assert_eq!([1, 2, 3, 4].map(|first| cached(&pool, &prompt(first, 5))), [4, 0, 0, 4]);
    pool.audit().unwrap();
}
