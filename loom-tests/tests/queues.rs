//! Theorem: with a policy of several queues, whose next blocks stand in fronts, every enqueued
//! block is taken once, by a thread that sees its entry, whichever thread brought the entry to the
//! front, took it from there, or exchanged it for another; and the policy sees only places that
//! were given.
//!
//! Entries have two blocks here. Queue 1 is evicted before queue 0: a thread that takes a block of
//! queue 1 leaves the first one of queue 0 in its front.
//!
//! The models explore threads that meet at a front whose block was taken and enqueued again. They
//! leave out an entry that another thread takes from a front for the first time: the stale values
//! of the rank queue's words make that too wide.
#![cfg(kvpool_loom)]

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use kvpool::BlockId;
use kvpool::prefix::models::EnqueuedBlocks;
use kvpool::prefix::policy::{Head, Millis, Place, Policy, Released};
use kvpool_loom_tests::check_to;
use loom::sync::Arc;
use loom::thread;

/// Evicts from queue 1 before queue 0. The state of a place is its rank plus 1, which is not the
/// initial state.
#[derive(Debug, Default)]
struct LastFirst {
    is_wrong: AtomicBool,
}

impl Policy for LastFirst {
    fn name(&self) -> &'static str {
        "last first"
    }

    fn queues(&self) -> usize {
        2
    }

    fn place(&self, _: &Released, _: Millis) -> Place {
        unreachable!("the model places the blocks")
    }

    fn victim(&self, heads: &[Option<Head>], _: Millis) -> Option<usize> {
        if heads.iter().flatten().any(|head| head.state != head.rank + 1) {
            self.is_wrong.store(true, Relaxed);
        }
        heads.iter().rposition(Option::is_some)
    }
}

struct Model {
    enqueued: EnqueuedBlocks,
    policy: std::sync::Arc<LastFirst>,
}

impl Model {
    fn new(blocks: usize) -> Arc<Self> {
        let policy = std::sync::Arc::new(LastFirst::default());
        Arc::new(Self { enqueued: EnqueuedBlocks::new(blocks, policy.clone()), policy })
    }

    /// Files blocks under a rank of a queue.
    fn enqueue(&self, queue: u8, rank: u64, ids: &[u32]) {
        let place = Place { queue, rank, state: rank + 1 };
        self.enqueued.enqueue(&ids.iter().map(|&id| (BlockId(id), place)).collect::<Vec<_>>());
    }

    fn take(&self) -> Vec<u32> {
        self.enqueued.take().into_iter().map(|id| id.0).collect()
    }

    /// Ends a model: together with those that were taken, each of `blocks` is present once.
    fn finish(&self, mut all: Vec<u32>, blocks: u32) {
        loop {
            let entry = self.take();
            if entry.is_empty() {
                break;
            }
            all.extend(entry);
        }
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..blocks), "lost or duplicated: {all:?}");
        assert!(!self.policy.is_wrong.load(Relaxed), "the policy saw a place that was not given");
    }
}

/// A thread is about to take a front while another takes it, files the block again with another one
/// behind it, and brings it back to the front.
#[test]
fn a_front_that_comes_back() {
    check_to(1, "queues::a_front_that_comes_back", || {
        let model = Model::new(4);
        model.enqueue(0, 1, &[0]);
        model.enqueue(1, 1, &[2]);
        assert_eq!(model.take(), [2], "the front of queue 0 is filled too");
        let other = model.clone();
        let thread = thread::spawn(move || {
            let first = other.take();
            other.enqueue(0, 1, &[&first[..], &[1]].concat());
            other.enqueue(1, 1, &[3]);
            other.take()
        });
        let mine = model.take();
        let others = thread.join().unwrap();
        model.finish([mine, others, vec![2]].concat(), 4);
    });
}

/// As above, but the first thread exchanges the front for an entry of a smaller rank, and files the
/// block that came back in the rank queue again, from which it takes it.
#[test]
fn a_front_that_comes_back_and_gives_way() {
    check_to(0, "queues::a_front_that_comes_back_and_gives_way", || {
        let model = Model::new(5);
        model.enqueue(0, 2, &[0]);
        model.enqueue(1, 1, &[2]);
        assert_eq!(model.take(), [2], "the front of queue 0 is filled too");
        model.enqueue(0, 0, &[4]);
        let other = model.clone();
        let thread = thread::spawn(move || {
            let mut taken = other.take();
            let again: Vec<u32> = taken.extract_if(.., |id| *id == 0).collect();
            other.enqueue(0, 2, &[&again[..], &[1]].concat());
            other.enqueue(1, 1, &[3]);
            taken.extend(other.take());
            taken
        });
        let mine = [model.take(), model.take()].concat();
        let others = thread.join().unwrap();
        model.finish([mine, others, vec![2]].concat(), 5);
    });
}
