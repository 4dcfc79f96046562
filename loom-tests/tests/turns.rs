//! Theorem: of the tasks that ask for the right to move blocks, one has it at a time, and sees what
//! the one before it did. Each of them gets it, also if one gives up at any moment. A thread that
//! sleeps forever is a deadlock, which the checker reports.
#![cfg(kvpool_loom)]

use std::pin::pin;
use std::task::{Context, Poll};

use kvpool::compact::Turns;
use kvpool_loom_tests::{block_on, check, join_last};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

/// What the holder of the right changes.
struct Shared {
    turns: std::sync::Arc<Turns>,
    moved: UnsafeCell<u32>,
}

// SAFETY: loom checks the accesses of the cell.
unsafe impl Sync for Shared {}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self { turns: std::sync::Arc::default(), moved: UnsafeCell::new(0) })
    }

    fn move_blocks(&self) {
        // SAFETY: only the holder of the right gets here.
        self.moved.with_mut(|moved| unsafe { *moved += 1 });
    }

    fn take_a_turn(&self) {
        let turn = block_on(self.turns.take());
        self.move_blocks();
        drop(turn);
    }
}

#[test]
fn every_task_gets_its_turn() {
    check("turns: three tasks", || {
        let shared = Shared::new();
        let others: Vec<_> = (0..2)
            .map(|_| {
                let shared = shared.clone();
                thread::spawn(move || shared.take_a_turn())
            })
            .collect();
        shared.take_a_turn();
        for other in others {
            other.join().unwrap();
        }
        let _turn = block_on(shared.turns.take());
        // SAFETY: as above.
        shared.moved.with(|moved| assert_eq!(unsafe { *moved }, 3));
    });
}

#[test]
fn a_task_that_gives_up_passes_its_turn_on() {
    check("turns: one gives up", || {
        let shared = Shared::new();
        let (other, quitter) = (shared.clone(), shared.clone());
        let other = thread::spawn(move || other.take_a_turn());
        let quitter = thread::spawn(move || {
            let mut next = pin!(quitter.turns.take());
            let waker = std::task::Waker::noop();
            if let Poll::Ready(_turn) = next.as_mut().poll(&mut Context::from_waker(waker)) {
                quitter.move_blocks();
            }
        });
        shared.take_a_turn();
        other.join().unwrap();
        join_last(quitter);
        // After the last task gave up, the right is free.
        shared.take_a_turn();
    });
}
