//! What the growth of lists must not cost: evictions while free frames suffice or cannot suffice, a
//! cache that empties because units are broken, the reserve, and the room of other lists.
#![cfg(not(kvpool_loom))]

use fastrand::Rng;
use kvpool::prefix::PrefixConfig;
use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, BlockTable, Lease, Pool, Priority, Sequence, SequenceId};
use kvpool_testkit::leases::singles;
use kvpool_testkit::prompts::{admit, pool, prompt};
use kvpool_testkit::steps::append;

const UNIT: u32 = 64;
/// Tokens per block of the layout.
const BLOCK_TOKENS: usize = 4;

fn evicted(pool: &Pool) -> u64 {
    pool.prefix_cache().unwrap().stats().evicted_blocks
}

/// Allocates all free blocks, keeps those whose frames are chosen, and frees the others.
fn keep_owned(pool: &Pool, mut keeps: impl FnMut(u32) -> bool) -> Vec<Lease<'static>> {
    let mut kept = singles(pool, AllocRequest::new(pool.free_blocks()));
    kept.retain(|lease| keeps(lease.frames().next().unwrap().0));
    pool.trim();
    kept
}

fn grow(pool: &Pool, sequence: &mut Sequence, blocks: usize) {
    append(pool, sequence, blocks * BLOCK_TOKENS);
}

fn frames(pool: &Pool, sequence: &Sequence) -> Vec<u32> {
    let mut table = BlockTable::new();
    pool.begin_batch().block_table([sequence], &mut table).unwrap();
    table.row(0).iter().map(|&frame| frame as u32).collect()
}

#[test]
fn a_refused_list_evicts_nothing() {
    let pool = pool(2_048);
    drop(admit(&pool, 1, &prompt(1, 2_000)));
    let lease = pool.allocate(AllocRequest::new(1_500)).unwrap();
    assert!(pool.allocate(AllocRequest::new(1_000)).is_err());
    let mut sequence = pool.sequence(SequenceId(2)).open().unwrap();
    assert!(pool.begin_batch().append(&mut sequence, 1_000 * BLOCK_TOKENS).is_err());
    assert_eq!((pool.stats().evictable, evicted(&pool)), (500, 0));
    drop(lease);
}

/// One owned block in every unit but the first two.
#[test]
fn a_list_evicts_nothing_while_holes_suffice() {
    let pool = pool(2_048);
    let _owned = keep_owned(&pool, |frame| frame >= 2 * UNIT && frame % UNIT == 33);
    drop(admit(&pool, 1, &prompt(1, 2_000)));
    let mut sequence = pool.sequence(SequenceId(2)).open().unwrap();
    grow(&pool, &mut sequence, 150);
    assert_eq!(evicted(&pool), 0);
}

/// A slice of reclaim is due once, and no unit can become whole.
#[test]
fn idle_batches_do_not_drain_the_cache() {
    let pool = pool(24_576);
    let mut owned = keep_owned(&pool, |frame| frame / UNIT == 5 || frame % UNIT == 33);
    for n in 1..=500 {
        drop(admit(&pool, n, &prompt(n as u32, 160)));
    }
    let cached = pool.stats().evictable;
    assert!(cached > 19_000, "{cached}");
    owned.retain(|lease| lease.frames().next().unwrap().0 / UNIT != 5);
    pool.trim();
    let mut sequence = pool.sequence(SequenceId(1_000)).open().unwrap();
    grow(&pool, &mut sequence, UNIT as usize);
    (0..50).for_each(|_| drop(pool.begin_batch()));
    let left = pool.stats().evictable;
    assert!(left + 1_024 > cached, "{cached} blocks were cached, and {left} are");
    drop(owned);
}

/// A share of the blocks, at random places, has owners: the rest is cached nevertheless.
#[test]
fn scattered_owners_do_not_empty_the_cache() {
    for percent in [0, 1, 3, 10] {
        let (pool, mut rng) = (pool(24_576), Rng::with_seed(percent));
        let _owned = keep_owned(&pool, |_| rng.u64(..100) < percent);
        let rest = pool.free_blocks();
        let mut least = usize::MAX;
        for n in 1..=300 {
            drop(admit(&pool, n, &prompt(n as u32, 1_000)));
            if n > 150 {
                least = least.min(pool.stats().evictable);
            }
        }
        assert!(least > rest * 92 / 100, "{percent} % owned: {least} of {rest} blocks are cached");
    }
}

/// The free frames are in the unit that a sequence reserves, and the reserve is short.
#[test]
fn the_reserve_is_filled_from_frames_of_growth() {
    let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(1_024).magazine_blocks(4);
    let pool = builder.threads(1).reserve(8).prefix_cache(PrefixConfig::new()).build().unwrap();
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    grow(&pool, &mut sequence, 49);
    // All but the rest of the sequence's unit, which has the reserve's frames 1 to 8.
    let mut owned = singles(&pool, AllocRequest::new(pool.free_blocks() - 6));
    let frame = |lease: &Lease<'_>| lease.frames().next().unwrap().0;
    assert!(owned.iter().all(|lease| frame(lease) >= UNIT));
    owned.retain(|lease| ![300, 500].contains(&frame(lease)));
    pool.trim();
    let run = pool.allocate(AllocRequest::new(8).contiguous()).unwrap();
    drop(pool.begin_batch());
    assert_eq!(pool.stats().reserved, 8, "refilled from the room of the sequence");
    drop(pool.allocate(AllocRequest::new(8).priority(Priority::Urgent)).unwrap());
    drop(run);
}

/// A list that ends with its unit goes on elsewhere if another list reserves the next one.
#[test]
fn a_list_takes_no_frames_reserved_by_another() {
    let pool = pool(1_024);
    let first = pool.allocate(AllocRequest::new(63)).unwrap();
    pool.trim();
    let mut a = pool.sequence(SequenceId(1)).open().unwrap();
    grow(&pool, &mut a, UNIT as usize);
    let between = pool.allocate(AllocRequest::new(20)).unwrap();
    pool.trim();
    let mut b = pool.sequence(SequenceId(2)).open().unwrap();
    grow(&pool, &mut b, 10);
    drop(between);
    pool.trim();
    grow(&pool, &mut a, 5);
    let (a, b) = (frames(&pool, &a), frames(&pool, &b));
    assert!(a[64..].iter().all(|frame| frame / UNIT != b[0] / UNIT), "{a:?} {b:?}");
    drop(first);
}

/// A sequence that was cut back reserves nothing where it no longer ends.
#[test]
fn a_truncated_sequence_spares_its_last_unit_alone() {
    let pool = pool(1_024);
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    grow(&pool, &mut sequence, 100);
    // The null block's unit lacks one frame.
    let reserved_for_growth = 2 * UNIT as usize - 101;
    assert_eq!(
        (pool.stats().reserved_for_growth, pool.audit().unwrap().reserved_for_growth),
        (reserved_for_growth, reserved_for_growth)
    );
    sequence.truncate(0).unwrap();
    assert_eq!((pool.stats().reserved_for_growth, pool.audit().unwrap().reserved_for_growth), (0, 0));
    drop(sequence);
    assert_eq!((pool.stats().reserved_for_growth, pool.audit().unwrap().reserved_for_growth), (0, 0));
}
