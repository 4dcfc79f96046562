//! Theorem: frames that move between threads' magazines, the depot and the bitmaps have one owner
//! throughout and are never lost; and an allocation obtains a free block wherever it is: also in
//! the magazine of a thread that sleeps, has ended, or is using its magazine at that moment.
#![cfg(kvpool_loom)]

use kvpool::FrameId;
use kvpool::frame::{Depot, Magazine};
use kvpool_loom_tests::{TouchedBlocks, check, check_to, check_wide, settle};
use loom::thread;

/// The depot alone: a magazine is taken and put back while another thread is about to take it.
#[test]
fn a_top_that_comes_back() {
    check_to(3, "magazines::a_top_that_comes_back", || {
        let depot = loom::sync::Arc::new(Depot::new(3));
        for frame in 0..2 {
            let mut magazine = Magazine::default();
            magazine.push(FrameId(frame));
            assert!(depot.push(magazine).is_ok());
        }
        let other = loom::sync::Arc::clone(&depot);
        let thread = thread::spawn(move || other.pop());
        let (first, second) = (depot.pop(), depot.pop());
        let again = first.map(|magazine| depot.push(magazine));
        assert!(!matches!(again, Some(Err(_))), "there is room for three");
        let theirs = thread.join().unwrap();
        let left = std::iter::from_fn(|| depot.pop());
        let mut frames: Vec<u32> = left
            .chain(second)
            .chain(theirs)
            .flat_map(|m| m.iter().map(|f| f.0).collect::<Vec<_>>())
            .collect();
        frames.sort_unstable();
        assert_eq!(frames, [0, 1]);
    });
}

/// Two threads fill and empty magazines of two; full ones go through the depot, which holds one.
#[test]
fn exchange() {
    check_to(3, "magazines::exchange", || {
        let pool = TouchedBlocks::new(8, 1);
        let other = pool.clone();
        let held = pool.take(3).unwrap();
        let thread = thread::spawn(move || {
            let got = other.take(1).expect("five are free throughout");
            other.put(&got);
        });
        // One by one: into the magazine, the other one, the depot.
        held.iter().for_each(|&id| pool.put(&[id]));
        thread.join().unwrap();
        pool.finish();
    });
}

/// More magazines than the depot takes.
#[test]
fn a_full_depot() {
    check("magazines::a_full_depot", || {
        let pool = TouchedBlocks::new(10, 1);
        let held = pool.take(10).unwrap();
        // Two in the magazines, four in the depot.
        held[..6].iter().for_each(|&id| pool.put(&[id]));
        let other = pool.clone();
        let theirs = held[6..9].to_vec();
        let thread = thread::spawn(move || theirs.iter().for_each(|&id| other.put(&[id])));
        pool.put(&held[9..]);
        thread.join().unwrap();
        pool.finish();
    });
}

/// A thread sleeps with frames in its magazines (an unused handle is the same case): another thread
/// needs all blocks.
#[test]
fn taken_back_from_an_idle_thread() {
    check("magazines::taken_back_from_an_idle_thread", || {
        let pool = TouchedBlocks::new(4, 2);
        // Sleeps from here on.
        let held = pool.take(1).unwrap();
        pool.put(&held);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let got = other.take(4).expect("all are free");
            other.put(&got);
        });
        thread.join().unwrap();
        pool.finish();
    });
}

/// The owner allocates and frees one block while another thread needs all the rest.
#[test]
fn taken_back_from_an_owner_at_work() {
    check_to(1, "magazines::taken_back_from_an_owner_at_work", || {
        let pool = TouchedBlocks::new(4, 2);
        let held = pool.take(1).unwrap();
        pool.put(&held);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let rest = other.take(3).expect("the owner has at most one");
            other.put(&rest);
        });
        // At least one is free for this thread at every moment.
        let got = pool.take(1).expect("the other thread has at most three");
        pool.put(&got);
        thread.join().unwrap();
        pool.finish();
    });
}

/// A thread arrives while another one leaves, whose thread cache it takes over: it sees all that
/// the former owner wrote there.
#[test]
fn a_thread_cache_taken_over_at_once() {
    check_wide(1, "magazines::a_thread_cache_taken_over_at_once", || {
        let pool = TouchedBlocks::new(4, 1);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let got = other.take(1).expect("at most one is held");
            other.put(&got);
        });
        // The first use of the pool by this thread.
        let got = pool.take(1).expect("at most one is held");
        pool.put(&got);
        thread.join().unwrap();
        pool.finish();
    });
}

/// Threads leave while others arrive: an abandoned thread cache is empty, or its contents are found
/// by the next thread.
#[test]
fn a_thread_cache_left_and_taken_over() {
    check_wide(1, "magazines::a_thread_cache_left_and_taken_over", || {
        let pool = TouchedBlocks::new(4, 1);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let got = other.take(1).expect("at most one is held");
            other.put(&got);
        });
        thread.join().unwrap();
        // Takes over an abandoned thread cache, beside the end of the thread that left it.
        settle(&pool.blocks, 0);
        pool.check_all_free();
    });
}
