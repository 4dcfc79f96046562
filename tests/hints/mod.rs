//! Hints about sessions and cached blocks: what is evicted first and last, until when, and for
//! whom.

mod found;
mod limits;
mod moved;
mod pins;
mod states;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use kvpool::hints::{Action, Hint, HintLimits, Limit, Outcome, Rejection, Target};
use kvpool::prefix::policy::{CachePriority, Millis, PolicyKind};
use kvpool::prefix::{PrefixConfig, PrefixKeys};
use kvpool::{
    AdmitRequest, AllocRequest, KvLayout, Pool, Sequence, SequenceError, SequenceId, SessionId, Tokens,
};
use kvpool_testkit::prompts::{BLOCK_TOKENS, prompt};

/// A pool with hints, and its clock.
struct Bench {
    pool: Pool,
    time: Arc<AtomicU64>,
}

impl Bench {
    fn new(blocks: usize, limits: HintLimits) -> Self {
        Self::with(blocks, limits, PolicyKind::Lru)
    }

    fn with(blocks: usize, limits: HintLimits, policy: PolicyKind) -> Self {
        let time = Arc::new(AtomicU64::new(1_000));
        let clock = time.clone();
        let cache = PrefixConfig::new().tolerance(0.0).policy(policy);
        let cache = cache.clock(move || Millis(clock.load(Relaxed)));
        let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(blocks).threads(1);
        let pool = builder.magazine_blocks(4).prefix_cache(cache).hints(limits).build().unwrap();
        Self { pool, time }
    }

    fn block_bytes(&self) -> u64 {
        self.pool.layout().bytes_per_block() as u64
    }

    /// Opens and computes the prompt of this number, with this many full blocks.
    fn open(&self, id: u64, number: u32, blocks: usize) -> Sequence {
        self.try_open(id, number, blocks).unwrap()
    }

    fn try_open(&self, id: u64, number: u32, blocks: usize) -> Result<Sequence, SequenceError> {
        let tokens = prompt(number, blocks * BLOCK_TOKENS + 1);
        let request = AdmitRequest::new(SequenceId(id), &tokens).session(SessionId(number.into()));
        let mut sequence = self.pool.admit(&request)?;
        let mut batch = self.pool.begin_batch();
        let missing = tokens.len() - sequence.len();
        batch.append(&mut sequence, Tokens::Announced(missing))?;
        batch.finish();
        Ok(sequence)
    }

    /// Runs a request of the session of this number.
    fn run(&self, number: u32, blocks: usize) {
        drop(self.open(number.into(), number, blocks));
    }

    /// Evicts this many blocks, if no others are free.
    fn evict(&self, blocks: usize) {
        let free = self.pool.free_blocks();
        drop(self.pool.allocate(AllocRequest::new(free + blocks)).unwrap());
    }

    /// Returns how many leading blocks of a prompt are cached.
    fn cached(&self, number: u32) -> usize {
        let cache = self.pool.prefix_cache().unwrap();
        let all: Vec<_> = self.pool.cached_blocks().into_iter().map(|(_, hash)| hash).collect();
        let hashes = cache.hashes(&PrefixKeys::new(), &prompt(number, 40 * BLOCK_TOKENS)).unwrap();
        hashes.iter().take_while(|hash| all.contains(hash)).count()
    }

    fn hint(&self, target: Target, action: Action) -> Outcome {
        self.pool.hint(&Hint::new(target, action))
    }

    fn session(&self, number: u32, action: Action) -> Outcome {
        self.hint(Target::Session(SessionId(number.into())), action)
    }

    fn retain(&self, number: u32, until: u64) -> Outcome {
        self.session(number, retain(CachePriority::Normal, until))
    }

    fn evictions_of_retained(&self) -> u64 {
        self.pool.metrics().evictions.retained
    }
}

fn retain(priority: CachePriority, until: u64) -> Action {
    Action::Retain { priority, until: Millis(until) }
}

fn pin(until: u64) -> Action {
    Action::Pin { until: Millis(until) }
}

fn target(number: u32) -> Target {
    Target::Session(SessionId(number.into()))
}

#[test]
fn a_retained_session_goes_last_and_by_its_age_afterwards() {
    for kind in [PolicyKind::Lru, PolicyKind::Priority] {
        let bench = Bench::with(30, HintLimits::new(), kind);
        (1..=3).for_each(|number| bench.run(number, 5));
        assert_eq!(bench.retain(1, 5_000), Outcome::Accepted { blocks: 5 });
        bench.evict(10);
        assert_eq!([1, 2, 3].map(|number| bench.cached(number)), [5, 0, 0], "{kind}");
        (2..=3).for_each(|number| bench.run(number, 5));
        bench.time.store(5_000, Relaxed);
        // It has ended: in the order of its release it is the oldest.
        bench.evict(7);
        assert_eq!([1, 2, 3].map(|number| bench.cached(number)), [0, 3, 5], "{kind}");
        assert_eq!(bench.evictions_of_retained(), 0, "{kind}");
        bench.pool.audit().unwrap();
    }
}

/// The retention that a request asks for itself, with policies that order by release.
#[test]
fn what_a_request_keeps_goes_last_until_its_time_ends() {
    for kind in [PolicyKind::Lru, PolicyKind::Priority] {
        let bench = Bench::with(30, HintLimits::new(), kind);
        let tokens = prompt(1, 5 * BLOCK_TOKENS + 1);
        let request = AdmitRequest::new(SequenceId(1), &tokens).keep_until(Millis(2_000));
        let mut sequence = bench.pool.admit(&request).unwrap();
        let mut batch = bench.pool.begin_batch();
        batch.append(&mut sequence, Tokens::Announced(tokens.len())).unwrap();
        batch.finish();
        drop(sequence);
        (2..=3).for_each(|number| bench.run(number, 5));
        bench.evict(7);
        assert_eq!([1, 2, 3].map(|number| bench.cached(number)), [5, 0, 3], "{kind}");
        bench.time.store(2_000, Relaxed);
        bench.evict(2);
        assert_eq!([1, 2, 3].map(|number| bench.cached(number)), [3, 0, 3], "{kind}: its end first");
    }
}

#[test]
fn classes_go_by_priority_and_pins_last() {
    let bench = Bench::new(40, HintLimits::new());
    (1..=5).for_each(|number| bench.run(number, 5));
    let until = 100_000;
    for (number, action) in [
        (1, pin(2_000)),
        (2, retain(CachePriority::High, until)),
        (3, retain(CachePriority::Low, until)),
        (4, retain(CachePriority::Normal, until)),
    ] {
        assert_eq!(bench.session(number, action), Outcome::Accepted { blocks: 5 });
    }
    for (evicted, gone) in [(5, 5), (5, 3), (5, 4), (5, 2), (5, 1)] {
        let before = [1, 2, 3, 4, 5].map(|number| bench.cached(number));
        bench.evict(evicted);
        assert_eq!((before[gone as usize - 1], bench.cached(gone)), (5, 0), "{gone}");
    }
    assert_eq!(bench.evictions_of_retained(), 20);
    bench.pool.audit().unwrap();
}

/// Among equals: the one whose time ends first.
#[test]
fn an_earlier_end_goes_before_a_later_one() {
    let bench = Bench::new(30, HintLimits::new());
    (1..=3).for_each(|number| bench.run(number, 5));
    for (number, until) in [(1, 9_000), (2, 3_000), (3, 6_000)] {
        bench.retain(number, until);
    }
    bench.evict(12);
    assert_eq!([1, 2, 3].map(|number| bench.cached(number)), [3, 0, 0]);
    // A later hint replaces an earlier one.
    bench.run(2, 5);
    bench.retain(1, 1_500);
    bench.time.store(1_500, Relaxed);
    bench.evict(3);
    assert_eq!([1, 2].map(|number| bench.cached(number)), [0, 5]);
}

/// After a clear, what was retained is useless.
#[test]
fn a_clear_ends_retention() {
    let bench = Bench::new(30, HintLimits::new());
    bench.run(1, 5);
    bench.retain(1, 9_000);
    bench.pool.clear_prefix_cache();
    (2..=3).for_each(|number| bench.run(number, 5));
    bench.retain(2, 9_000);
    bench.evict(5);
    assert_eq!([2, 3].map(|number| bench.cached(number)), [5, 5]);
    bench.evict(5);
    assert_eq!([2, 3].map(|number| bench.cached(number)), [5, 0]);
    assert_eq!(bench.pool.metrics().evictions.useless, 5);
}

#[test]
fn a_hint_lasts_for_later_requests_of_its_session() {
    let bench = Bench::new(60, HintLimits::new());
    bench.run(1, 5);
    bench.retain(1, 9_000);
    bench.run(1, 10);
    (2..=3).for_each(|number| bench.run(number, 10));
    bench.evict(20);
    assert_eq!([1, 2, 3].map(|number| bench.cached(number)), [10, 0, 0]);
    // While a request is open, its blocks have an owner.
    let open = bench.open(7, 1, 10);
    assert_eq!(bench.retain(1, 9_500), Outcome::Deferred { blocks: 10 });
    drop(open);
    bench.run(2, 10);
    bench.evict(10);
    assert_eq!([1, 2].map(|number| bench.cached(number)), [10, 0]);
    bench.session(1, Action::Demote);
    bench.run(1, 10);
    bench.run(2, 10);
    bench.evict(5);
    assert_eq!([1, 2].map(|number| bench.cached(number)), [5, 10], "a later hint replaces it");
}

#[test]
fn demoted_blocks_go_first() {
    let bench = Bench::new(30, HintLimits::new());
    (1..=3).for_each(|number| bench.run(number, 5));
    assert_eq!(bench.session(3, Action::Demote), Outcome::Accepted { blocks: 5 });
    bench.evict(3);
    assert_eq!([1, 2, 3].map(|number| bench.cached(number)), [5, 5, 2], "its end first");
    bench.run(3, 2);
    bench.evict(5);
    assert_eq!([1, 2, 3].map(|number| bench.cached(number)), [0, 5, 2], "a hit ends it");
}

/// Blocks that other sessions used stay, before or after it; the session is forgotten.
#[test]
fn a_release_leaves_what_is_shared() {
    let shared = prompt(1, 3 * BLOCK_TOKENS + 1);
    for (other, is_first) in [(Some(SessionId(9)), false), (Some(SessionId(9)), true), (None, true)] {
        let bench = Bench::new(40, HintLimits::new());
        let run_other = || {
            let request = AdmitRequest::new(SequenceId(0), &shared);
            let request = other.into_iter().fold(request, |request, other| request.session(other));
            let mut sequence = bench.pool.admit(&request).unwrap();
            let mut batch = bench.pool.begin_batch();
            let missing = shared.len() - sequence.len();
            batch.append(&mut sequence, Tokens::Announced(missing)).unwrap();
            batch.finish();
        };
        if is_first {
            run_other();
        }
        bench.run(1, 3);
        if !is_first {
            run_other();
        }
        bench.run(1, 8);
        bench.run(2, 5);
        assert_eq!(bench.session(1, Action::Release), Outcome::Accepted { blocks: 5 }, "{other:?}");
        assert_eq!(bench.session(1, Action::Release), Outcome::Missing);
        bench.evict(5);
        assert_eq!([1, 2].map(|number| bench.cached(number)), [3, 5], "{other:?}");
        assert_eq!(bench.pool.sessions().len(), 1 + usize::from(other.is_some()));
    }
}

/// The requests of one session hit its blocks as often as they like.
#[test]
fn a_release_takes_forks_and_prompts_that_were_computed_again() {
    let bench = Bench::new(60, HintLimits::new());
    for id in 10..13 {
        let open = bench.open(id, 1, 5);
        let forks: Vec<_> = (20..24).map(|fork| open.fork(SequenceId(fork)).unwrap()).collect();
        drop(bench.open(30, 1, 4));
        drop((open, forks));
    }
    bench.evict(2);
    bench.run(1, 5);
    bench.run(2, 5);
    assert_eq!(bench.session(1, Action::Release), Outcome::Accepted { blocks: 5 });
    bench.evict(5);
    assert_eq!([1, 2].map(|number| bench.cached(number)), [0, 5]);
}

#[test]
fn tokens_of_an_open_sequence_are_placed_when_it_is_closed() {
    let bench = Bench::new(60, HintLimits::new());
    let sequence = bench.open(1, 1, 10);
    let tokens = |tokens| Target::Tokens(SequenceId(1), tokens);
    let high = retain(CachePriority::High, 9_000);
    assert_eq!(bench.hint(tokens(0..18), high), Outcome::Deferred { blocks: 4 });
    assert_eq!(bench.hint(tokens(24..usize::MAX), Action::Demote), Outcome::Deferred { blocks: 4 });
    let none = bench.hint(tokens(1..7), high);
    assert_eq!(none, Outcome::Rejected { reason: Rejection::NoBlock { tokens: 1..7 } });
    assert_eq!(bench.hint(Target::Tokens(SequenceId(2), 0..100), high), Outcome::Missing);
    drop(sequence);
    bench.run(2, 5);
    bench.evict(4);
    assert_eq!([1, 2].map(|number| bench.cached(number)), [6, 5]);
    bench.evict(7);
    assert_eq!([1, 2].map(|number| bench.cached(number)), [4, 0]);
    // A later sequence of the same id has no hint.
    bench.open(1, 3, 5);
    bench.run(4, 5);
    bench.evict(5);
    assert_eq!([1, 3, 4].map(|number| bench.cached(number)), [4, 0, 5]);
    bench.pool.audit().unwrap();
}

#[test]
fn blocks_are_named_by_their_hashes_too() {
    let bench = Bench::new(30, HintLimits::new());
    (1..=2).for_each(|number| bench.run(number, 5));
    let hashes = |number| {
        let cache = bench.pool.prefix_cache().unwrap();
        Target::Hashes(cache.hashes(&PrefixKeys::new(), &prompt(number, 5 * BLOCK_TOKENS)).unwrap())
    };
    let high = retain(CachePriority::High, 9_000);
    assert_eq!(bench.hint(hashes(1), high), Outcome::Accepted { blocks: 5 });
    assert_eq!(bench.hint(hashes(8), high), Outcome::Missing);
    assert_eq!(bench.hint(Target::Hashes(Vec::new()), high), Outcome::Missing);
    let open = bench.open(2, 2, 5);
    let owned = bench.hint(hashes(2), Action::Demote);
    assert!(matches!(owned, Outcome::Rejected { reason: Rejection::Unsupported { .. } }), "{owned:?}");
    drop(open);
    bench.evict(5);
    assert_eq!([1, 2].map(|number| bench.cached(number)), [5, 0]);
}

/// Every block of the pool is pinned or retained: nothing is refused.
#[test]
fn no_hint_makes_a_pool_unusable() {
    let bench = Bench::new(40, HintLimits::new().pinned_bytes(0));
    let all = HintLimits::new().pinned_bytes(40 * bench.block_bytes());
    let bench = Bench::new(40, all);
    (1..=4).for_each(|number| bench.run(number, 9));
    for number in 1..=4 {
        assert_eq!(bench.session(number, pin(100_000)), Outcome::Accepted { blocks: 9 });
    }
    drop(bench.pool.allocate(AllocRequest::new(40)).unwrap());
    assert_eq!(bench.evictions_of_retained(), 36);
    drop(bench.pool.allocate(AllocRequest::new(40).contiguous()).unwrap());
    bench.pool.audit().unwrap();
}

#[test]
fn threads_hint_and_run_at_once() {
    let bench = Bench::new(300, HintLimits::new());
    thread::scope(|scope| {
        for thread in 0..3u32 {
            let bench = &bench;
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread.into());
                for round in 0..2_000u64 {
                    let number = 1 + random.u32(..12);
                    match random.u8(..8) {
                        0..4 => {
                            let blocks = 1 + random.usize(..12);
                            // Refused if all blocks are in use, or seen by batches.
                            drop(bench.try_open(u64::from(thread) << 32 | round, number, blocks));
                        }
                        4 => _ = bench.session(number, retain(CachePriority::High, 1_500 + round)),
                        5 => _ = bench.session(number, pin(1_500 + round)),
                        6 => _ = bench.session(number, Action::Demote),
                        _ if random.bool() => _ = bench.session(number, Action::Release),
                        _ => _ = bench.time.fetch_add(10, Relaxed),
                    }
                    if random.u8(..4) == 0 {
                        let wanted = random.usize(1..250);
                        drop(bench.pool.allocate(AllocRequest::new(wanted)));
                    }
                }
            });
        }
    });
    bench.pool.audit().unwrap();
    drop(bench.pool.allocate(AllocRequest::new(300)).unwrap());
    bench.pool.audit().unwrap();
}
