//! Sessions of sequences that move to another pool, and come back.

use kvpool::prefix::HashKey;
use kvpool::{Preempt, ResumeOptions};
use pollster::block_on;

use super::*;

/// A pool that hashes as all of these do, whose clock begins at this time.
fn bench(now: u64) -> Bench {
    let time = Arc::new(AtomicU64::new(now));
    let clock = time.clone();
    let cache = PrefixConfig::new().key(HashKey::from_bytes([7; 32])).tolerance(0.0);
    let cache = cache.clock(move || Millis(clock.load(Relaxed)));
    let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(40).threads(1).magazine_blocks(4);
    Bench { pool: builder.prefix_cache(cache).hints(HintLimits::new()).build().unwrap(), time }
}

/// Returns the sessions: id, requests, cached blocks, time until the return.
fn sessions(bench: &Bench) -> Vec<(u64, u64, usize, Option<u64>)> {
    let now = bench.time.load(Relaxed);
    let all = bench.pool.sessions().into_iter();
    all.map(|it| (it.id.0, it.requests, it.cached_blocks, it.returns_at.map(|at| at.0 - now))).collect()
}

#[test]
fn a_session_goes_with_a_sequence_that_moves() {
    let (from, to) = (bench(1_000), bench(500_000));
    let mut sequence = from.open(3, 3, 5);
    sequence.expect_return(Millis(9_000));
    let (moved, _) = block_on(from.pool.migrate(sequence, &to.pool)).unwrap();
    to.time.store(501_000, Relaxed);
    drop(moved);
    assert_eq!(sessions(&to), [(3, 1, 5, Some(7_000))], "by the other clock");
    assert_eq!(to.retain(3, 600_000), Outcome::Accepted { blocks: 5 });
    // The other pool is left, and hints reach the blocks that it had.
    assert_eq!(sessions(&from), [(3, 1, 5, Some(8_000))]);
    assert_eq!(from.session(3, Action::Release), Outcome::Accepted { blocks: 5 });
}

#[test]
fn a_swapped_sequence_has_its_session_when_it_resumes() {
    let (here, host) = (bench(1_000), bench(70));
    let mut sequence = here.open(3, 3, 5);
    sequence.expect_return(Millis(9_000));
    let preempted = block_on(here.pool.preempt(sequence, Preempt::Swap(&host.pool))).unwrap();
    let swapped = preempted.swapped.unwrap().sequence;
    drop(here.pool.allocate(AllocRequest::new(40)).unwrap());
    here.session(3, Action::Release);
    here.time.store(2_000, Relaxed);
    host.time.store(1_070, Relaxed);
    let (resumed, _) = block_on(here.pool.resume(&swapped, ResumeOptions::new())).unwrap();
    drop((swapped, resumed));
    assert_eq!(sessions(&here), [(3, 1, 5, Some(7_000))]);
    assert_eq!(here.session(3, Action::Demote), Outcome::Accepted { blocks: 5 });
    for bench in [&here, &host] {
        bench.pool.audit().unwrap();
    }
}
