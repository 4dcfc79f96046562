//! Theorem: a request is refused by what an earlier one found only if it would find the same. After
//! a free, an eviction's worth of a release, or the end of a batch, the next request succeeds.
//!
//! The models cannot see the accesses of the count of free frames: `tally` has them.
#![cfg(kvpool_loom)]

use kvpool::{AllocRequest, BlockId};
use kvpool_loom_tests::{CachedBlocks, TouchedBlocks, check, check_wide, join_last};
use loom::thread;

/// A batch that may have seen the only evictable block ends while requests are refused because of it.
#[test]
fn a_batch_ends() {
    check("refused::a_batch_ends", || {
        let pool = CachedBlocks::new(1);
        let batch = pool.blocks.clock().begin();
        pool.keep(1);
        let other = pool.clone();
        let thread = thread::spawn(move || other.blocks.end_batch(batch));
        let early = pool.take(1).or_else(|| pool.take(1));
        join_last(thread);
        let ids = early.or_else(|| pool.take(1)).expect("no batch sees it");
        pool.put(&ids);
        pool.finish();
    });
}

/// A block is released while a request finds only one that a batch sees. The releasing thread may not
/// know of the batch: then its block can be evicted before the batch ends.
#[test]
fn released_beside_a_refusal() {
    check_wide(2, "refused::released_beside_a_refusal", || {
        let pool = CachedBlocks::new(2);
        let block = pool.fill(2);
        let other = pool.clone();
        let thread = thread::spawn(move || other.leave(block));
        let batch = pool.blocks.clock().begin();
        pool.keep(1);
        let early = pool.take(1);
        join_last(thread);
        let taken = early.or_else(|| pool.take(1));
        let is_evictable = taken.is_some() || !pool.can_evict(block);
        assert!(is_evictable, "refused beside a block that no batch sees");
        pool.blocks.end_batch(batch);
        taken.into_iter().for_each(|ids| pool.put(&ids));
        pool.finish();
    });
}

/// As before, and a hit takes the other block away, so that the number of evictable blocks is the
/// same.
#[test]
fn a_hit_makes_up_for_a_release() {
    check_wide(2, "refused::a_hit_makes_up_for_a_release", || {
        let pool = CachedBlocks::new(2);
        let block = pool.fill(2);
        let other = pool.clone();
        let thread = thread::spawn(move || other.leave(block));
        let batch = pool.blocks.clock().begin();
        pool.keep(1);
        let early = pool.take(1);
        let hit = pool.hit(1);
        join_last(thread);
        let taken = early.or_else(|| pool.take(1));
        let is_evictable = taken.is_some() || !pool.can_evict(block);
        assert!(is_evictable, "refused beside a block that no batch sees");
        pool.blocks.end_batch(batch);
        hit.into_iter().for_each(|id| pool.leave(id));
        taken.into_iter().for_each(|ids| pool.put(&ids));
        pool.finish();
    });
}

/// A block is freed that completes a run, while requests for a run are refused.
#[test]
fn a_run_is_completed() {
    check("refused::a_run_is_completed", || {
        let pool = TouchedBlocks::new(2, 0);
        let ids = pool.take(2).expect("both are free");
        pool.put(&ids[..1]);
        let (other, last) = (pool.clone(), ids[1]);
        let thread = thread::spawn(move || other.put(&[last]));
        let early = run_of_two(&pool).or_else(|| run_of_two(&pool));
        join_last(thread);
        let ids = early.or_else(|| run_of_two(&pool)).expect("both are free");
        pool.blocks.release(&ids);
        kvpool_loom_tests::conclude(&pool.blocks);
        assert_eq!(pool.blocks.audit().unwrap().in_bitmap, 2);
    });
}

/// A block is released that completes a window, while requests for a run are refused. The next one
/// succeeds as soon as the block can be evicted, even if its releaser is stopped there.
#[test]
fn a_window_is_completed() {
    check("refused::a_window_is_completed", || {
        let pool = CachedBlocks::new(2);
        pool.keep(1);
        let block = pool.fill(2);
        let other = pool.clone();
        let thread = thread::spawn(move || other.leave(block));
        let early = run_of_two(&pool);
        let is_complete = early.is_some() || pool.can_evict(block);
        let early = early.or_else(|| run_of_two(&pool));
        assert!(early.is_some() || !is_complete, "refused beside a window");
        join_last(thread);
        let ids = early.or_else(|| run_of_two(&pool)).expect("both can be evicted");
        pool.blocks.release(&ids);
        pool.finish();
    });
}

fn run_of_two(pool: &TouchedBlocks) -> Option<Vec<BlockId>> {
    let mut ids = Vec::new();
    let request = AllocRequest::new(2).contiguous();
    pool.blocks.allocate(&request, &mut |id| ids.push(id)).ok().map(|()| ids)
}
