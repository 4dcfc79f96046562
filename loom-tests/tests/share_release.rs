//! Theorem: a block is freed once, by its last reference, and only after all accesses of its
//! owners; of two frees through one reference one wins and the other fails because its handle is
//! stale; and a handle of an earlier generation never affects the block's next owner.
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

/// A reference through a handle is granted or refused; once granted, the block is not freed.
#[test]
fn share_against_the_last_release() {
    check("share_release::share_against_the_last_release", || {
        let pool = TouchedBlocks::new(1, 0);
        let (id, handle) = one(&pool);
        let other = pool.clone();
        let thread = thread::spawn(move || match other.blocks.share_handles(&[handle]) {
            Ok(()) => {
                assert!(other.read(id) > 0);
                other.blocks.free(&[handle]).expect("our own reference");
            }
            Err(error) => assert!(matches!(error, HandleError::Stale { .. }), "{error}"),
        });
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
    check("share_release::pin_against_the_last_release", || {
        let pool = TouchedBlocks::new(1, 0);
        let (id, handle) = one(&pool);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let stale = |outcome| matches!(outcome, Err(HandleError::Stale { .. }));
            match other.blocks.pin(handle) {
                // The last release takes the pin with it.
                Ok(()) => {
                    let unpinned = other.blocks.unpin(handle);
                    assert!(unpinned.is_ok() || stale(unpinned));
                }
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

/// Two threads free one reference.
#[test]
fn double_free() {
    check("share_release::double_free", || {
        let pool = TouchedBlocks::new(2, 1);
        let (_, handle) = one(&pool);
        let other = pool.clone();
        let thread = thread::spawn(move || other.blocks.free(&[handle]));
        let mine = pool.blocks.free(&[handle]);
        let theirs = join_last(thread);
        let (won, lost) = if mine.is_ok() { (mine, theirs) } else { (theirs, mine) };
        assert_eq!(won, Ok(()));
        assert!(matches!(lost, Err(HandleError::Stale { .. })), "{lost:?}");
        pool.finish();
    });
}

/// The same while the winner allocates the block again.
#[test]
fn double_free_against_allocate() {
    check_to(3, "share_release::double_free_against_allocate", || {
        let pool = TouchedBlocks::new(1, 0);
        let (_, handle) = one(&pool);
        let other = pool.clone();
        let thread = thread::spawn(move || other.blocks.free(&[handle]));
        let mine = pool.blocks.free(&[handle]);
        if let Some(ids) = pool.take(1) {
            let own = pool.blocks.handle(ids[0]);
            pool.write(ids[0]);
            pool.blocks.free(&[own]).expect("freed by a handle of the past");
        }
        let theirs = join_last(thread);
        assert!(mine.is_ok() != theirs.is_ok(), "{mine:?} {theirs:?}");
        pool.finish();
    });
}

/// One block of a list is freed by another thread at the same moment: the rest of the list is freed
/// nevertheless.
#[test]
fn a_list_against_one_of_it() {
    check("share_release::a_list_against_one_of_it", || {
        let pool = TouchedBlocks::new(3, 0);
        let ids = pool.take(3).unwrap();
        let handles: Vec<BlockHandle> = ids.iter().map(|&id| pool.blocks.handle(id)).collect();
        let other = pool.clone();
        let middle = handles[1];
        let thread = thread::spawn(move || other.blocks.free(&[middle]));
        let mine = pool.blocks.free(&handles);
        let theirs = join_last(thread);
        if mine.is_err() && theirs.is_ok() {
            // Either nothing of the list was freed, or all but that block.
            for handle in [handles[0], handles[2]] {
                let _ = pool.blocks.free(&[handle]);
            }
        } else {
            assert!(mine.is_ok() && theirs.is_err());
        }
        pool.finish();
    });
}

/// The low bits of a block's generation wrap around while a thread frees it by a handle of the
/// previous wrap: the high bits, which are not in the word, distinguish the two.
#[test]
fn a_handle_of_the_turn_before() {
    check("share_release::a_handle_of_the_turn_before", || {
        // Through a magazine: the path through the bitmaps has fences.
        let pool = TouchedBlocks::new(1, 1);
        let stale = pool.blocks.handle(BlockId(0));
        models::before_the_turn(&pool.blocks, BlockId(0));
        let held = pool.take(1).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let freed = other.blocks.free(&[stale]);
            assert!(matches!(freed, Err(HandleError::Stale { .. })), "{freed:?}");
        });
        pool.put(&held);
        let held = pool.take(1).expect("no other thread takes it");
        assert_ne!(pool.blocks.handle(held[0]), stale);
        join_last(thread);
        pool.put(&held);
        pool.finish();
    });
}
