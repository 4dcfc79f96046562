//! Theorem: a pool of blocks grows while other threads allocate: a new block's rows in the table
//! exist before any thread can allocate its frame, in an existing bucket and in a new one, and a
//! block is allocated once.
//!
//! Theorem: a thread that has grown a table finds all rows up to the size that it asked for, and
//! sees them complete, also those of another thread that grew it at the same time; and every row
//! that is counted is complete.
#![cfg(kvpool_loom)]

use kvpool::block::AllocRequest;
use kvpool::block::models::Rows;
use kvpool_loom_tests::{TouchedBlocks, check, check_to, check_wide};
use loom::sync::Arc;
use loom::thread;

/// Three blocks become six: the table needs another bucket.
#[test]
fn beside_allocate() {
    check_wide(3, "growth_of_the_pool::beside_allocate", || {
        let pool = TouchedBlocks::growing(3, 6, 0);
        let held = pool.take(3).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || other.blocks.grow(3, &mut |_| Ok(())).unwrap());
        if let Some(got) = pool.take(1) {
            assert!(got[0].0 >= 3, "one of the new blocks");
            pool.put(&got);
        }
        thread.join().unwrap();
        pool.put(&held);
        assert_eq!(pool.blocks.total(), 6);
        pool.finish();
    });
}

/// A handle is valid, and its block can be freed, from the moment that the block was allocated,
/// even if the growing thread has not returned yet.
#[test]
fn beside_a_new_block() {
    check("growth_of_the_pool::beside_a_new_block", || {
        let pool = TouchedBlocks::growing(3, 6, 0);
        let held = pool.take(3).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || other.blocks.grow(3, &mut |_| Ok(())).unwrap());
        let mut got = None;
        if pool.blocks.allocate(&AllocRequest::new(1), &mut |id| got = Some(id)).is_ok() {
            let id = got.unwrap();
            pool.blocks.info(pool.blocks.handle(id)).unwrap();
            pool.blocks.release(&[id]);
        }
        thread.join().unwrap();
        pool.put(&held);
        pool.finish();
    });
}

/// Two threads grow the pool: both succeed, or the second is refused because the size exceeds the
/// maximum.
#[test]
fn two_growers() {
    check("growth_of_the_pool::two_growers", || {
        let pool = TouchedBlocks::growing(2, 6, 0);
        let other = pool.clone();
        let thread = thread::spawn(move || other.blocks.grow(2, &mut |_| Ok(())).unwrap());
        pool.blocks.grow(2, &mut |_| Ok(())).unwrap();
        thread.join().unwrap();
        assert_eq!(pool.blocks.total(), 6);
        pool.finish();
    });
}

/// Two threads grow a table, each by a size of its own.
#[test]
fn two_growers_of_a_table() {
    check_to(3, "growth_of_the_pool::two_growers_of_a_table", || {
        let rows = Arc::new(Rows::new(1));
        let other = rows.clone();
        let thread = thread::spawn(move || {
            other.grow(4);
            assert_eq!((other.row(1), other.row(3)), (1, 3));
        });
        rows.grow(2);
        assert_eq!(rows.row(1), 1);
        thread.join().unwrap();
        assert_eq!(rows.count(), 4);
    });
}

/// Rows are counted while a thread adds some.
#[test]
fn a_table_is_counted() {
    check_to(3, "growth_of_the_pool::a_table_is_counted", || {
        let rows = Arc::new(Rows::new(1));
        let other = rows.clone();
        // Not the other way round: the checker would not play the first load against the change.
        let thread = thread::spawn(move || assert!([1, 2, 3, 4].contains(&other.count())));
        rows.grow(4);
        thread.join().unwrap();
    });
}
