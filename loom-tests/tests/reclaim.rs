//! Theorem: blocks that are evicted ahead of need are lost to no other thread. A hit that meets
//! such an eviction gets the block with its bytes intact or not at all; a batch never sees its
//! frame overwritten; of two threads with the same work one does it; a slice that awaits a batch is
//! not held back after its end; a request that finds nothing is refused only if what it needs is in
//! the hands of the other thread at that moment; and afterwards every block can be allocated.
//!
//! At most 2 preemptions, 1 beside a batch. The watermark is given, as the pools are too small for
//! one of their own.
#![cfg(kvpool_loom)]

use kvpool::block::models::reclaim;
use kvpool_loom_tests::{CachedBlocks, check, check_to, check_wide, join_last};
use loom::thread;

/// A look-up beside a slice.
#[test]
fn beside_a_hit() {
    check_wide(2, "reclaim::beside_a_hit", || {
        let pool = CachedBlocks::new(2);
        pool.keep(1);
        pool.keep(2);
        let other = pool.clone();
        let thread = thread::spawn(move || reclaim(&other.blocks, 2));
        if let Some(found) = pool.hit(1) {
            assert_eq!(pool.read(found), 1);
            pool.leave(found);
        }
        join_last(thread);
        pool.finish();
    });
}

/// Two sequences share a block that was released last by one of them, beside a slice.
#[test]
fn beside_a_release() {
    check("reclaim::beside_a_release", || {
        let pool = CachedBlocks::new(1);
        let block = pool.fill(1);
        let other = pool.clone();
        let thread = thread::spawn(move || reclaim(&other.blocks, 1));
        pool.leave(block);
        join_last(thread);
        pool.finish();
    });
}

/// A batch reads a block that is released and reclaimed meanwhile: its frame has no new owner
/// before the batch has ended.
#[test]
fn beside_a_batch() {
    check_to(1, "reclaim::beside_a_batch", || {
        let pool = CachedBlocks::new(1);
        let block = pool.fill(1);
        let other = pool.clone();
        let batch = pool.blocks.clock().begin();
        let frame = pool.frame(block);
        pool.leave(block);
        let thread = thread::spawn(move || {
            reclaim(&other.blocks, 1);
            if let Some(ids) = other.take(1) {
                other.put(&ids);
            }
        });
        pool.read_frame(frame);
        pool.blocks.end_batch(batch);
        join_last(thread);
        pool.finish();
    });
}

/// A slice that finds a batch which may see all blocks awaits the end of that batch, and no other.
#[test]
fn beside_the_end_of_a_batch() {
    check("reclaim::beside_the_end_of_a_batch", || {
        let pool = CachedBlocks::new(1);
        let block = pool.fill(1);
        let batch = pool.blocks.clock().begin();
        pool.leave(block);
        let other = pool.clone();
        let thread = thread::spawn(move || reclaim(&other.blocks, 1));
        pool.blocks.end_batch(batch);
        let later = pool.blocks.clock().begin();
        let evicted = join_last(thread);
        let evicted = evicted + reclaim(&pool.blocks, 1);
        assert_eq!((evicted, pool.blocks.evictable()), (1, 0), "no batch sees the block");
        pool.blocks.end_batch(later);
        pool.finish();
    });
}

/// Two slices at once, as of a batch's end and the background task: both evict, and together no
/// more than is cached.
#[test]
fn beside_another_slice() {
    check_wide(2, "reclaim::beside_another_slice", || {
        let pool = CachedBlocks::new(2);
        pool.keep(1);
        pool.keep(2);
        let other = pool.clone();
        let thread = thread::spawn(move || reclaim(&other.blocks, 2));
        let evicted = reclaim(&pool.blocks, 2);
        let evicted = evicted + join_last(thread);
        assert_eq!((evicted, pool.blocks.evictable()), (2, 0), "the reclaim debt is paid");
        pool.finish();
    });
}

/// A slice, and a request that needs a block.
#[test]
fn beside_a_request() {
    check_wide(2, "reclaim::beside_a_request", || {
        let pool = CachedBlocks::new(2);
        pool.keep(1);
        pool.keep(2);
        let other = pool.clone();
        let thread = thread::spawn(move || reclaim(&other.blocks, 1));
        let taken = pool.take(1);
        join_last(thread);
        let ids = taken.or_else(|| pool.take(1)).expect("two blocks are unused");
        pool.put(&ids);
        pool.finish();
    });
}
