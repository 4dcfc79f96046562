//! Theorem: if a searcher withdraws a false hint while a free makes it true, the hint ends up set:
//! at the end every free run has its hint, at every level of the tree. (The audit in `finish`
//! compares them word by word; otherwise the walk that allocations fall back to would hide a
//! missing hint.)
#![cfg(kvpool_loom)]

use kvpool::{FrameId, Order};
use kvpool_loom_tests::{Touched, check, run};
use loom::thread;

/// An exhausted pool with stale hints; one thread frees a frame while another searches there.
#[test]
fn a_frame_freed_under_a_search() {
    check("hints::a_frame_freed_under_a_search", || {
        let pool = Touched::new(8);
        // Creates a word that has had every class, and lost it again: its hints are stale.
        assert!(pool.frames.claim(run(0, 8)));
        pool.frames.free_run(run(4, 3));
        assert!(pool.frames.claim(run(4, 3)));
        pool.touch(run(0, 8));
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(run(6, 1)));
        let early = pool.frames.refill(1, FrameId(0));
        thread.join().unwrap();
        pool.frames.audit().unwrap();
        let late = pool.frames.refill(1, FrameId(0));
        assert!(early.is_some() != late.is_some(), "the one free frame is found once");
        pool.touch_mask(early.or(late).unwrap());
        pool.frames.free_run(run(0, 8));
        pool.finish();
    });
}

/// More is freed than the searcher takes: the remaining frames need their hint, too.
#[test]
fn a_frame_left_by_a_search() {
    check("hints::a_frame_left_by_a_search", || {
        let pool = Touched::new(8);
        assert!(pool.frames.claim(run(0, 8)));
        pool.frames.free_run(run(4, 3));
        assert!(pool.frames.claim(run(4, 3)));
        pool.touch(run(0, 8));
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(run(5, 2)));
        let early = pool.frames.refill(1, FrameId(0));
        thread.join().unwrap();
        pool.frames.audit().unwrap();
        let late = pool.frames.refill(2, FrameId(0)).expect("at least one is left");
        assert_eq!(early.map_or(0, |mask| mask.len()) + late.len(), 2);
        pool.touch_mask(late);
        pool.frames.free_run(run(0, 8));
        pool.finish();
    });
}

/// The same for whole units.
#[test]
fn a_unit_freed_under_a_search() {
    check("hints::a_unit_freed_under_a_search", || {
        let pool = Touched::new(16);
        assert!(pool.frames.claim(run(0, 16)));
        pool.touch(run(0, 16));
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(run(8, 4)));
        let early = pool.frames.allocate_aligned(Order(2), FrameId(0));
        thread.join().unwrap();
        pool.frames.audit().unwrap();
        let late = pool.frames.allocate_aligned(Order(2), FrameId(0));
        assert!(early.is_some() != late.is_some(), "the one free unit is found once");
        pool.frames.free_run(run(0, 16));
        pool.finish();
    });
}

/// Two groups of hints below one: the upper bit is cleared with the last word of a group, and set
/// with the first.
#[test]
fn the_level_above() {
    check("hints::the_level_above", || {
        let pool = Touched::new(20);
        assert!(pool.frames.claim(run(0, 20)));
        pool.frames.free_run(run(17, 1));
        assert!(pool.frames.claim(run(17, 1)));
        pool.touch(run(0, 20));
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(run(18, 1)));
        let early = pool.frames.refill(1, FrameId(16));
        thread.join().unwrap();
        pool.frames.audit().unwrap();
        let late = pool.frames.refill(1, FrameId(0));
        assert!(early.is_some() != late.is_some(), "the one free frame is found once");
        pool.frames.free_run(run(0, 20));
        pool.frames.audit().unwrap();
    });
}

/// The word that is filled is not the one that was emptied, but another of its group, and more is
/// freed than the searcher takes: neither its second look at its own word nor the walk that it
/// falls back to makes up for a missing bit above.
#[test]
fn another_word_of_the_group() {
    check("hints::another_word_of_the_group", || {
        let pool = Touched::new(24);
        assert!(pool.frames.claim(run(0, 24)));
        pool.frames.free_run(run(17, 1));
        assert!(pool.frames.claim(run(17, 1)));
        pool.touch(run(0, 24));
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(run(21, 2)));
        let early = pool.frames.refill(1, FrameId(16));
        thread.join().unwrap();
        pool.frames.audit().unwrap();
        let late = pool.frames.refill(2, FrameId(16)).expect("at least one is left");
        assert_eq!(early.map_or(0, |mask| mask.len()) + late.len(), 2);
        pool.touch_mask(late);
        pool.frames.free_run(run(0, 24));
        pool.frames.audit().unwrap();
    });
}
