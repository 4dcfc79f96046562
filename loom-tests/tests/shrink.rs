//! Theorem: while a pool shrinks, other threads allocate and free. A removed frame belonged to the
//! shrinker alone before its memory was given up, wherever it was before: in the bitmaps, in the
//! middle of a merge, in a magazine. No frame beyond the new end is allocated after the commit. An
//! allocation that the remaining frames can meet is not refused. An abandoned shrink leaves the
//! pool as it was. And growth brings every frame back, once.
#![cfg(kvpool_loom)]

use kvpool::{FrameId, GrowError};
use kvpool_loom_tests::{Touched, TouchedBlocks, check, check_to, conclude, join_last, run};
use loom::thread;

/// Collects once, and commits if no frame is missing: an access to every removed frame stands for
/// giving up its memory.
fn shrink(pool: &Touched, to: usize) -> bool {
    let mut shrink = pool.frames.begin_shrink(to).unwrap();
    let missing = pool.frames.collect(&mut shrink, |run| pool.touch(run));
    if missing == 0 {
        pool.touch(shrink.region());
        pool.frames.commit_shrink(&shrink);
    } else {
        pool.frames.abandon_shrink(&shrink);
    }
    pool.frames.end_shrink(shrink);
    missing == 0
}

/// Ends a model: whether or not the pool shrank, every frame is present exactly once.
fn finish(pool: &Touched, total: usize) {
    assert_eq!(pool.frames.total(), total);
    pool.finish();
    assert_eq!(pool.take(total as u32 + 1, 0), None);
}

/// A whole unit and half of another are removed, during the free that completes one of them, and
/// merges it.
#[test]
fn beside_free() {
    check_to(3, "shrink::beside_free", || {
        let pool = Touched::new(12);
        assert!(pool.frames.claim(run(8, 2)));
        pool.touch(run(8, 2));
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(run(8, 2)));
        let shrank = shrink(&pool, 6);
        join_last(thread);
        finish(&pool, if shrank { 6 } else { 12 });
        assert!(shrank || shrink(&pool, 6), "all is free now");
        finish(&pool, 6);
    });
}

/// During frees of two frames of one leaf, and an allocation from it.
#[test]
fn beside_free_and_allocate() {
    check("shrink::beside_free_and_allocate", || {
        let pool = Touched::new(8);
        assert!(pool.frames.claim(run(0, 5)));
        pool.touch(run(0, 5));
        let other = pool.clone();
        let thread = thread::spawn(move || {
            if let Some(got) = other.take(1, 4) {
                other.put(got);
            }
        });
        let mut open = pool.frames.begin_shrink(4).unwrap();
        pool.put(run(4, 1));
        pool.frames.collect(&mut open, |run| pool.touch(run));
        join_last(thread);
        assert_eq!(pool.frames.collect(&mut open, |run| pool.touch(run)), 0, "every frame was freed");
        pool.frames.commit_shrink(&open);
        pool.frames.end_shrink(open);
        pool.put(run(0, 4));
        finish(&pool, 4);
    });
}

/// The remaining part of a cut unit can be allocated throughout, though the unit was whole: while
/// the shrink begins and collects,
#[test]
fn remaining_frames_are_not_refused_at_the_beginning() {
    check("shrink::remaining_frames_are_not_refused_at_the_beginning", || {
        let pool = Touched::new(8);
        assert!(pool.frames.claim(run(0, 4)));
        let other = pool.clone();
        let thread =
            thread::spawn(move || other.frames.refill(1, FrameId(4)).expect("two stay free throughout"));
        let mut open = pool.frames.begin_shrink(6).unwrap();
        pool.frames.collect(&mut open, |run| pool.touch(run));
        let got = join_last(thread);
        pool.frames.abandon_shrink(&open);
        pool.frames.end_shrink(open);
        pool.put_mask(got);
        pool.put(run(0, 4));
        finish(&pool, 8);
    });
}

/// and while it ends. (The search is repeated only once if frames are in transit, so that the
/// checker plays every step of it against the end.)
#[test]
fn remaining_frames_are_not_refused_at_the_end() {
    check_to(3, "shrink::remaining_frames_are_not_refused_at_the_end", || {
        let pool = Touched::new(8);
        assert!(pool.frames.claim(run(0, 4)));
        let mut open = pool.frames.begin_shrink(6).unwrap();
        assert_eq!(pool.frames.collect(&mut open, |run| pool.touch(run)), 0);
        let other = pool.clone();
        let thread = thread::spawn(move || other.frames.extend(FrameId(4), 3, false));
        pool.frames.commit_shrink(&open);
        pool.frames.end_shrink(open);
        assert_eq!(join_last(thread), Some(2), "exactly these stay free throughout");
        pool.touch(run(4, 2));
        pool.put(run(0, 6));
        finish(&pool, 6);
    });
}

/// Growth brings frames back during an allocation of them.
#[test]
fn grown_again() {
    check("shrink::grown_again", || {
        let pool = Touched::new(8);
        assert!(shrink(&pool, 3));
        let held = pool.take(3, 0).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let added = other.frames.grow(5, &mut |added| {
                other.touch(added);
                Ok(())
            });
            assert_eq!(added, Ok(run(3, 5)));
        });
        if let Some(got) = pool.take(1, 4) {
            assert!(got.start.0 >= 3);
            pool.put(got);
        }
        join_last(thread);
        pool.put(held);
        finish(&pool, 8);
    });
}

/// Growth during a shrink: refused while it is open, otherwise on top of its result.
#[test]
fn beside_growth() {
    check("shrink::beside_growth", || {
        let pool = TouchedBlocks::growing(6, 12, 0);
        let other = pool.clone();
        let thread = thread::spawn(move || match other.blocks.grow(2, &mut |_| Ok(())) {
            Ok(()) => 2,
            Err(GrowError::Busy) => 0,
            Err(other) => panic!("{other}"),
        });
        let mut open = pool.blocks.begin_shrink(3).unwrap();
        let before = pool.blocks.total();
        assert_eq!(open.collect(), 0);
        open.commit(|gone| assert_eq!(gone, run(3, before as u32 - 3))).unwrap();
        let added = join_last(thread);
        // If growth came first, its frames are removed again.
        let total = if before == 8 { 3 } else { 3 + added };
        assert_eq!(pool.blocks.total(), total);
        pool.finish();
    });
}

/// A block in a magazine, in a retire list, or in the hands of a freeing thread: collected
/// eventually, and audited in every state in between.
#[test]
fn out_of_magazines() {
    check("shrink::out_of_magazines", || {
        let pool = TouchedBlocks::new(3, 2);
        let held = pool.take(3).unwrap();
        let (kept, going): (Vec<_>, Vec<_>) = held.into_iter().partition(|id| id.0 < 2);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            other.put(&going);
            // Allocates it again, if possible: from its own magazine, which isolation does not
            // reach.
            if let Some(again) = other.take(1) {
                other.put(&again);
            }
        });
        let mut open = pool.blocks.begin_shrink(2).unwrap();
        open.collect();
        join_last(thread);
        conclude(&pool.blocks);
        assert_eq!(open.collect(), 0, "wherever it was freed to");
        let report = pool.blocks.audit().unwrap();
        assert_eq!((report.held, report.owned), (1, 2));
        let region = open.region();
        open.commit(|gone| assert_eq!(gone, region)).unwrap();
        assert!(pool.take(1).is_none(), "of two blocks, two are owned");
        pool.put(&kept);
        pool.finish();
        pool.blocks.grow(1, &mut |_| Ok(())).unwrap();
        pool.finish();
    });
}

/// An abandoned shrink during an allocation that needs the collected frames.
#[test]
fn given_up() {
    check("shrink::given_up", || {
        let pool = Touched::new(8);
        let mut open = pool.frames.begin_shrink(3).unwrap();
        assert_eq!(pool.frames.collect(&mut open, |run| pool.touch(run)), 0);
        let other = pool.clone();
        let thread = thread::spawn(move || other.take(4, 0));
        pool.frames.abandon_shrink(&open);
        pool.frames.end_shrink(open);
        if let Some(got) = join_last(thread) {
            pool.put(got);
        }
        finish(&pool, 8);
    });
}
