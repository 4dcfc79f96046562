//! Contiguous requests in a full pool whose blocks are evictable in some places: in which window they
//! evict, and when they are refused.
#![cfg(not(kvpool_loom))]

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use kvpool::prefix::PrefixConfig;
use kvpool::storage::KvLayout;
use kvpool::{AllocError, AllocRequest, FrameId, Pool, Run, Sequence, SequenceId};
use kvpool_testkit::steps::append;

/// Frames of a unit, in each of which lies one sequence.
const UNIT: usize = 64;
/// Units of a region, which a walk for a window reads at a time.
const REGION: usize = 128;
/// Tokens per block of the layout.
const BLOCK_TOKENS: usize = 4;

/// A full pool of several regions.
struct Full {
    pool: Pool,
    units: Vec<Option<Sequence>>,
}

impl Full {
    fn new(units: usize) -> Self {
        let pool = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(UNIT * units);
        let pool = pool.without_null_block().magazine_blocks(0).prefix_cache(PrefixConfig::new());
        let (pool, mut by_unit) = (pool.build().unwrap(), Vec::new());
        by_unit.resize_with(units, || None);
        for id in 0..units {
            let tokens: Vec<u32> = (0..UNIT * BLOCK_TOKENS).map(|at| (id << 16 | at) as u32).collect();
            let mut sequence = pool.sequence(SequenceId(id as u64)).tokens(&tokens).unwrap();
            append(&pool, &mut sequence, tokens.len());
            let first = pool.info(sequence.handles().next().unwrap()).unwrap().frame;
            assert_eq!(first.index() % UNIT, 0, "a unit each");
            by_unit[first.index() / UNIT] = Some(sequence);
        }
        Self { pool, units: by_unit }
    }

    /// Makes the blocks in units evictable.
    fn close(&mut self, units: impl IntoIterator<Item = usize>) {
        units.into_iter().for_each(|unit| drop(self.units[unit].take()));
    }
}

fn request() -> AllocRequest {
    AllocRequest::new(2 * UNIT).contiguous()
}

/// The run of two units from this one on.
fn run_at(unit: usize) -> Run {
    Run { start: FrameId((UNIT * unit) as u32), len: 2 * UNIT as u32 }
}

/// A run is found wherever blocks are evictable, also across two regions and in the last one, which is
/// short; and no other block is evicted for it.
#[test]
fn a_run_is_evicted_wherever_it_is() {
    let units = 300;
    let mut full = Full::new(units);
    let pool = full.pool.clone();
    let mut leases = Vec::new();
    let refused = pool.allocate(request()).unwrap_err();
    assert!(matches!(refused, AllocError::Exhausted { .. }), "{refused:?}");
    for first in [REGION - 1, 2 * REGION - 1, units - 2, 0, 5] {
        full.close([first, first + 1]);
        assert_eq!(pool.stats().evictable, 2 * UNIT);
        let lease = pool.allocate(request()).unwrap();
        assert_eq!(lease.runs().collect::<Vec<_>>(), [run_at(first)]);
        leases.push(lease);
    }
}

/// A run is granted if and only if two adjacent units are evictable, from whichever region the walk
/// begins; and a refusal that is remembered ends with the unit that makes a run.
#[test]
fn a_run_is_refused_until_there_is_one() {
    for seed in 0..4 {
        let (units, mut rng) = (300, Rng::with_seed(seed));
        let mut full = Full::new(units);
        let mut closed = vec![false; units];
        let edges = [REGION - 1, REGION, 2 * REGION - 1, 2 * REGION, 0, units - 1];
        loop {
            let unit = if rng.bool() { edges[rng.usize(..edges.len())] } else { rng.usize(..units) };
            full.close([unit]);
            closed[unit] = true;
            let there_is = closed.windows(2).any(|pair| pair[0] && pair[1]);
            let outcome = full.pool.allocate(request());
            assert_eq!(outcome.is_ok(), there_is, "seed {seed}, unit {unit}: {outcome:?}");
            if there_is {
                break;
            }
            for _ in 0..3 {
                full.pool.allocate(request()).unwrap_err();
            }
        }
        full.pool.audit().unwrap();
    }
}

/// A claim that fails holds frames for a moment where two regions meet: a refusal beside it is not
/// remembered.
#[test]
fn a_refusal_beside_claims_is_not_remembered() {
    for _ in 0..40 {
        let mut full = Full::new(300);
        full.close([REGION]);
        drop(full.pool.allocate(AllocRequest::new(UNIT).contiguous()).unwrap());
        full.close([REGION - 1]);
        let stop = AtomicBool::new(false);
        let granted = thread::scope(|scope| {
            scope.spawn(|| {
                // Its last frame is owned.
                let claimed = Run { start: run_at(REGION).start, len: UNIT as u32 + 1 };
                while !stop.load(Relaxed) {
                    assert!(!full.pool.blocks().frames().claim(claimed));
                }
            });
            thread::sleep(Duration::from_millis(1));
            let granted = full.pool.allocate(request()).is_ok();
            stop.store(true, Relaxed);
            granted
        });
        assert!(granted || full.pool.allocate(request()).is_ok(), "nothing holds it back any more");
    }
}

/// The walks begin in regions that a shrink has closed: their windows are not for use.
#[test]
fn a_window_beside_an_open_shrink() {
    let mut full = Full::new(5 * REGION);
    let pool = full.pool.clone();
    full.close([0, 1]);
    let _lease = pool.allocate(request()).unwrap();
    full.close([2, 3]);
    (1..5).for_each(|region| full.close([region * REGION, region * REGION + 1]));
    let _shrinking = pool.blocks().begin_shrink(UNIT * REGION).unwrap();
    let evictable = pool.stats().evictable;
    let lease = pool.allocate(request()).unwrap();
    assert_eq!(lease.runs().collect::<Vec<_>>(), [run_at(2)]);
    assert_eq!(pool.stats().evictable, evictable - 2 * UNIT, "evicted for nothing");
}
