//! Theorem: a block is freed once, by its last reference, and only after all accesses of its
//! owners; and a handle of an earlier generation never affects the block's next owner.
#![cfg(kvpool_loom)]

use kvpool::block::models;
use kvpool::{BlockHandle, BlockId, HandleError};
use kvpool_loom_tests::{TouchedBlocks, check, check_to, join_last};
use loom::sync::Arc;
use loom::thread;

fn one(pool: &Arc<TouchedBlocks>) -> (BlockId, BlockHandle) {
    let id = pool.take(1).unwrap()[0];
    (id, pool.blocks.handle(id))
}

/// The next owner writes what the previous owners read: all reads must have happened before. No
/// magazines, so that only the word and the bitmaps order the accesses.
#[test]
fn two_owners_go() {
    check("share_release::two_owners_go", || {
        let pool = TouchedBlocks::new(1, 0);
        let (id, _) = one(&pool);
        pool.blocks.share(&[id]).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            assert!(other.read(id) > 0);
            other.blocks.release(&[id]);
        });
        assert!(pool.read(id) > 0);
        pool.blocks.release(&[id]);
        if let Some(next) = pool.take(1) {
            pool.put(&next);
        }
        join_last(thread);
        pool.finish();
    });
}

#[test]
fn pin_against_the_last_release() {
    check_to(3, "share_release::pin_against_the_last_release", || {
        let pool = TouchedBlocks::new(1, 0);
        let (id, handle) = one(&pool);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let stale = |outcome| matches!(outcome, Err(HandleError::Stale { .. }));
            match other.blocks.pin(handle) {
                // The last release takes the pin with it.
                Ok(()) => other.blocks.unpin(handle),
                refused => assert!(stale(refused)),
            }
        });
        pool.blocks.release(&[id]);
        let (next, handle) = one(&pool);
        assert_eq!(
            pool.blocks.info(handle).unwrap().pins,
            0,
            "the old owner's pin is on the new owner's block"
        );
        pool.put(&[next]);
        join_last(thread);
        pool.finish();
    });
}

/// The low bits of a block's generation wrap around while a thread uses a handle of the previous
/// wrap: the high bits, which are not in the word, distinguish the two.
fn a_handle_of_the_turn_before(
    name: &'static str,
    by: fn(&TouchedBlocks, BlockHandle) -> Result<(), HandleError>,
) {
    check(name, move || {
        // Through a magazine: the path through the bitmaps has fences.
        let pool = TouchedBlocks::new(1, 1);
        let stale = pool.blocks.handle(BlockId(0));
        models::before_the_turn(&pool.blocks, BlockId(0));
        let held = pool.take(1).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let outcome = by(&other, stale);
            assert!(matches!(outcome, Err(HandleError::Stale { .. })), "{outcome:?}");
        });
        pool.put(&held);
        let held = pool.take(1).expect("no other thread takes it");
        assert_ne!(pool.blocks.handle(held[0]), stale);
        join_last(thread);
        pool.put(&held);
        pool.finish();
    });
}

#[test]
fn a_pin_by_a_handle_of_the_turn_before() {
    a_handle_of_the_turn_before("share_release::a_pin_by_a_handle_of_the_turn_before", |pool, stale| {
        pool.blocks.pin(stale)
    });
}

#[test]
fn a_look_by_a_handle_of_the_turn_before() {
    a_handle_of_the_turn_before("share_release::a_look_by_a_handle_of_the_turn_before", |pool, stale| {
        pool.blocks.info(stale).map(drop)
    });
}
