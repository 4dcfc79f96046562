//! Theorem: blocks that were released together share an entry of the eviction queue, and each of
//! them that is evictable is in an entry afterwards, whatever happened to the others meanwhile:
//! some are evicted and the rest is put back, one is hit and released again while it is enqueued,
//! two threads evict, or a batch may see them.
//!
//! Entries have two blocks here. At most 2 preemptions.
#![cfg(kvpool_loom)]

use std::iter::from_fn;

use kvpool_loom_tests::{CachedBlocks, check, check_wide, join_last};
use loom::sync::Arc;
use loom::thread;

/// Creates a pool with three evictable blocks, which were released together: two entries.
fn released_together() -> Arc<CachedBlocks> {
    let pool = CachedBlocks::new(3);
    let ids = [1, 2, 3].map(|n| pool.fill(n));
    pool.leave_all(&ids);
    pool
}

/// Requires that `left` blocks are evicted without a walk over the words.
fn finish(pool: &CachedBlocks, left: usize) {
    let evicted = from_fn(|| pool.evict().then_some(())).count();
    assert_eq!((evicted, pool.blocks.evictable()), (left, 0), "an evictable block is in no entry");
    pool.finish();
}

/// Each of two threads evicts one block: the rest of an entry is put back.
#[test]
fn two_evictions() {
    check("entries::two_evictions", || {
        let pool = released_together();
        let other = pool.clone();
        let thread = thread::spawn(move || other.evict());
        let mine = pool.evict();
        let others = join_last(thread);
        finish(&pool, 3 - usize::from(mine) - usize::from(others));
    });
}

/// A block in the middle of an entry is hit and released while the entry is taken.
#[test]
fn released_again_beside_an_eviction() {
    check("entries::released_again_beside_an_eviction", || {
        let pool = released_together();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            if let Some(found) = other.hit(2) {
                assert_eq!(other.read(found), 1);
                other.leave(found);
            }
        });
        let mine = pool.evict();
        join_last(thread);
        finish(&pool, 3 - usize::from(mine));
    });
}

/// All blocks of an entry are hit, and released in another order, while one is evicted.
#[test]
fn released_in_another_order() {
    check_wide(2, "entries::released_in_another_order", || {
        let pool = released_together();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let found: Vec<_> = [2, 1].iter().filter_map(|&n| other.hit(n)).collect();
            other.leave_all(&found);
        });
        let mine = pool.evict();
        join_last(thread);
        finish(&pool, 3 - usize::from(mine));
    });
}

/// Blocks that a batch may see keep their entry, and are evicted once it has ended.
#[test]
fn seen_by_a_batch() {
    check("entries::seen_by_a_batch", || {
        let pool = CachedBlocks::new(3);
        let ids = [1, 2, 3].map(|n| pool.fill(n));
        let batch = pool.blocks.clock().begin();
        pool.leave_all(&ids);
        let other = pool.clone();
        let thread = thread::spawn(move || other.evict());
        pool.blocks.end_batch(batch);
        let evicted = join_last(thread);
        finish(&pool, 3 - usize::from(evicted));
    });
}
