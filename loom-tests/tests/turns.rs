//! Theorem: of the tasks that ask for the right to move blocks, one has it at a time, and sees what
//! the one before it did, its copies included. Each of them gets it, also if one gives up at any
//! moment, or is passed over because it is not polled. What a task leaves behind while it is not
//! polled is returned to it or dropped, once, and before the next task has the right. A task that
//! waits for the signal to stop gets it. A thread that sleeps forever is a deadlock, which the
//! checker reports.
//!
//! (The patience of these turns is zero or infinite: a model has no time.)
#![cfg(kvpool_loom)]

use std::future::poll_fn;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use kvpool::TurnTask;
use kvpool::compact::{Stop, Turn, Turns};
use kvpool_loom_tests::{block_on, check, join_last};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

/// What the holder of the right changes.
struct Shared {
    turns: std::sync::Arc<Turns<Open>>,
    moved: UnsafeCell<u32>,
    /// The number of open shrinks.
    open: UnsafeCell<u32>,
}

// SAFETY: loom checks the accesses of the cells.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// An open shrink, of which there may be one.
struct Open(Arc<Shared>);

impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: whoever drops it has the right, or passes over the turn that has it.
        self.0.open.with_mut(|open| unsafe { *open -= 1 });
    }
}

impl Shared {
    fn new() -> Arc<Self> {
        let (moved, open) = (UnsafeCell::new(0), UnsafeCell::new(0));
        Arc::new(Self { turns: std::sync::Arc::default(), moved, open })
    }

    fn turn(&self, patience: Duration) -> std::sync::Arc<Turn<Open>> {
        std::sync::Arc::new(self.turns.turn(TurnTask::Resize, patience))
    }

    fn move_blocks(&self) {
        // SAFETY: only the holder of the right gets here.
        self.moved.with_mut(|moved| unsafe { *moved += 1 });
    }

    fn moved(&self) -> u32 {
        // SAFETY: as above.
        self.moved.with(|moved| unsafe { *moved })
    }
}

fn open(shared: &Arc<Shared>) -> Open {
    // SAFETY: as above.
    shared.open.with_mut(|open| unsafe {
        *open += 1;
        assert_eq!(*open, 1, "the shrink of the turn before is still open");
    });
    Open(shared.clone())
}

fn take_a_turn(shared: &Arc<Shared>, patience: Duration) {
    let turn = shared.turn(patience);
    block_on(poll_fn(|context| turn.poll_held(context)));
    let open = open(shared);
    shared.move_blocks();
    drop(open);
    drop(turn);
}

/// A shrink with one await, after which it continues or begins again.
async fn shrink(shared: &Arc<Shared>, turn: &Turn<Open>) {
    let mut awaits = 1;
    loop {
        let open = match turn.resume() {
            Some(open) => open,
            None => {
                poll_fn(|context| turn.poll_held(context)).await;
                open(shared)
            }
        };
        shared.move_blocks();
        if awaits == 0 {
            drop(open);
            return;
        }
        awaits -= 1;
        turn.leave(open);
        let mut has_slept = false;
        poll_fn(|context| {
            context.waker().wake_by_ref();
            if std::mem::replace(&mut has_slept, true) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

fn poll(future: std::pin::Pin<&mut impl Future<Output = ()>>) -> Poll<()> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn every_task_gets_its_turn() {
    check("turns: three tasks", || {
        let shared = Shared::new();
        let others: Vec<_> = (0..2)
            .map(|_| {
                let shared = shared.clone();
                thread::spawn(move || take_a_turn(&shared, Duration::MAX))
            })
            .collect();
        take_a_turn(&shared, Duration::MAX);
        for other in others {
            other.join().unwrap();
        }
        let turn = shared.turn(Duration::MAX);
        block_on(poll_fn(|context| turn.poll_held(context)));
        assert_eq!(shared.moved(), 3);
    });
}

#[test]
fn a_task_that_gives_up_passes_its_turn_on() {
    check("turns: one gives up", || {
        let shared = Shared::new();
        let (other, quitter) = (shared.clone(), shared.clone());
        let other = thread::spawn(move || take_a_turn(&other, Duration::MAX));
        let quitter = thread::spawn(move || {
            let turn = quitter.turn(Duration::MAX);
            if turn.poll_held(&mut Context::from_waker(Waker::noop())).is_ready() {
                quitter.move_blocks();
            }
        });
        take_a_turn(&shared, Duration::MAX);
        other.join().unwrap();
        join_last(quitter);
        // After the last task gave up, the right is free.
        take_a_turn(&shared, Duration::MAX);
    });
}

#[test]
fn a_task_that_is_not_polled_is_passed_over_and_continues() {
    check("turns: one is passed over", || {
        let shared = Shared::new();
        let other = shared.clone();
        let other = thread::spawn(move || take_a_turn(&other, Duration::ZERO));
        let turn = shared.turn(Duration::MAX);
        {
            let mut work = pin!(turn.attend(shrink(&shared, &turn)));
            // The pause between two polls is any.
            if poll(work.as_mut()).is_pending() {
                block_on(work);
            }
        }
        drop(turn);
        other.join().unwrap();
        assert_eq!(shared.moved(), 3);
        // SAFETY: the other thread has ended.
        shared.open.with(|open| assert_eq!(unsafe { *open }, 0));
    });
}

#[test]
fn a_task_is_passed_over_after_its_copy() {
    check("turns: one copies", || {
        let shared = Shared::new();
        let turn = shared.turn(Duration::MAX);
        let (copied, other) = (shared.clone(), shared.clone());
        let mut share = None;
        let mut work = Box::pin(turn.attend(async {
            poll_fn(|context| turn.poll_held(context)).await;
            turn.leave(open(&shared));
            share = Some(turn.share());
            std::future::pending().await
        }));
        assert!(poll(work.as_mut()).is_pending());
        // Kept, and not polled again: the copy goes on, and only its end lets the other in.
        std::mem::forget(work);
        let share = share.take();
        let copy = thread::spawn(move || {
            copied.move_blocks();
            drop(share);
        });
        let other = thread::spawn(move || {
            let turn = other.turn(Duration::ZERO);
            let noop = || turn.poll_held(&mut Context::from_waker(Waker::noop()));
            if noop().is_ready() {
                drop(open(&other));
                other.move_blocks();
            }
        });
        copy.join().unwrap();
        other.join().unwrap();
        take_a_turn(&shared, Duration::ZERO);
        assert!((2..=3).contains(&shared.moved()));
    });
}

/// The signal is given while a task begins to wait for it, or before, or after.
#[test]
fn a_task_is_stopped() {
    check("a_task_is_stopped", || {
        let stop = Arc::new(Stop::default());
        let giver = stop.clone();
        let giver = thread::spawn(move || giver.give());
        block_on(stop.given());
        assert!(stop.is_given());
        join_last(giver);
    });
}
