//! Theorem: the bit of a unit reserved for growth has one owner, and sparing hides no frame: a
//! request is refused only if no frame is free, reserved for growth or not.
//!
//! The bits are Relaxed and advice alone, so the models check what must hold for every value that a
//! search may read of them. Exhaustive, without a bound on preemptions.
#![cfg(kvpool_loom)]

use kvpool::FrameId;
use kvpool_loom_tests::{Touched, check, run};
use loom::thread;

/// A list grows into the unit that it spares while another thread takes the last free frames.
#[test]
fn growth_beside_the_last_frames() {
    check("spare::growth_beside_the_last_frames", || {
        let pool = Touched::new(4);
        assert!(pool.frames.claim(run(0, 2)));
        pool.touch(run(0, 2));
        let other = pool.clone();
        assert!(pool.frames.begin_growth_unit(FrameId(0)));
        let thread = thread::spawn(move || {
            let got = other.frames.refill(1, FrameId(0)).expect("two are free, and the list takes one");
            other.put_mask(got);
        });
        if let Some(len) = pool.frames.extend(FrameId(2), 1, true) {
            pool.touch(run(2, len));
            pool.put(run(2, len));
        }
        pool.frames.end_growth_unit(FrameId(0));
        thread.join().unwrap();
        pool.put(run(0, 2));
        pool.finish();
    });
}

/// Two lists spare one unit: one of them owns the bit, and after it has ended the sparing, the bit
/// is clear.
#[test]
fn one_owner() {
    check("spare::one_owner", || {
        let pool = Touched::new(4);
        assert!(pool.frames.claim(run(0, 1)));
        pool.touch(run(0, 1));
        let other = pool.clone();
        let thread = thread::spawn(move || other.frames.begin_growth_unit(FrameId(1)));
        let mine = pool.frames.begin_growth_unit(FrameId(2));
        let others = thread.join().unwrap();
        assert!(mine != others, "exactly one thread set the bit");
        pool.frames.end_growth_unit(FrameId(0));
        assert!(!pool.frames.is_reserved_for_growth(FrameId(0)));
        pool.put(run(0, 1));
        pool.finish();
    });
}

/// Frames are freed into a reserved for growth unit, and found there by a search that has no
/// others.
#[test]
fn freed_frames_are_found() {
    check("spare::freed_frames_are_found", || {
        let pool = Touched::new(4);
        assert!(pool.frames.claim(run(0, 4)));
        pool.touch(run(0, 4));
        assert!(pool.frames.begin_growth_unit(FrameId(0)));
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(run(1, 2)));
        let early = pool.frames.refill(1, FrameId(0));
        thread.join().unwrap();
        let late = pool.frames.refill(2, FrameId(0)).expect("a frame is free");
        early.into_iter().chain([late]).for_each(|mask| pool.put_mask(mask));
        pool.put(run(0, 1));
        pool.put(run(3, 1));
        pool.finish();
    });
}
