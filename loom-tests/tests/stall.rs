//! Theorem: a thread that is stopped in the middle of any operation stops no other. The stopped
//! thread waits in a place that the pool's interface reaches (a callback) for an event that happens
//! only after all others are done: if one of them waited for it, the model would not end. And
//! during an operation that may be stopped at every one of its steps, the others' calls return, and
//! can use all frames except those in its hands.
#![cfg(kvpool_loom)]

use std::task::{Context, Poll, Wake, Waker};

use kvpool::frame::OwnerCell;
use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, FrameId, Pool};
use kvpool_loom_tests::{Stop, Touched, TouchedBlocks, check, check_to, conclude, join_last, run};
use loom::sync::Arc;
use loom::thread;

/// An owner stopped inside its cell turns visitors back, and a visitor the owner; a second cell is
/// open to both.
#[test]
fn inside_a_cell() {
    for owner_stops in [true, false] {
        check_to(3, "stall::inside_a_cell", move || {
            let shared = Arc::new((OwnerCell::new(0), Stop::default()));
            let other = shared.clone();
            let thread = thread::spawn(move || {
                let (cell, stop) = &*other;
                // SAFETY: of the two threads, this one enters if the other does not.
                let ran = unsafe {
                    if owner_stops { cell.enter(|_| stop.here()) } else { cell.visit(|_| stop.here()) }
                };
                assert!(ran.is_some());
            });
            let (cell, stop) = &*shared;
            stop.wait();
            // SAFETY: as above.
            let turned = unsafe { if owner_stops { cell.visit(|_| ()) } else { cell.enter(|_| ()) } };
            assert!(turned.is_none());
            stop.resume();
            join_last(thread);
            assert!(cell.visit(|_| ()).is_some());
        });
    }
}

/// Stopped with blocks just allocated to it: other threads allocate and free all the rest.
#[test]
fn while_blocks_are_handed_out() {
    check("stall::while_blocks_are_handed_out", || {
        let pool = TouchedBlocks::new(4, 0);
        let stop = Arc::new(Stop::default());
        let (other, there) = (pool.clone(), stop.clone());
        let thread = thread::spawn(move || {
            let request = kvpool::block::AllocRequest::new(1);
            let mut got = vec![];
            other
                .blocks
                .allocate(&request, &mut |id| {
                    there.here();
                    got.push(id);
                })
                .unwrap();
            other.blocks.release(&got);
        });
        stop.wait();
        let rest = pool.take(3).expect("all blocks except the stopped thread's");
        assert!(pool.take(1).is_none(), "refused without waiting");
        pool.put(&rest);
        stop.resume();
        join_last(thread);
        pool.finish();
    });
}

/// Stopped while it prepares new memory, with the growth lock held: allocations and frees continue.
/// (Only other growers wait.)
#[test]
fn while_the_pool_grows() {
    check("stall::while_the_pool_grows", || {
        let pool = TouchedBlocks::growing(2, 4, 0);
        let stop = Arc::new(Stop::default());
        let (other, there) = (pool.clone(), stop.clone());
        let thread = thread::spawn(move || {
            let mut prepare = |_| {
                there.here();
                Ok(())
            };
            other.blocks.grow(2, &mut prepare).unwrap();
        });
        stop.wait();
        let all = pool.take(2).expect("all blocks of the old size");
        assert!(pool.take(1).is_none(), "refused without waiting");
        pool.put(&all);
        stop.resume();
        join_last(thread);
        pool.finish();
    });
}

/// A batch that never ends holds back the frames retired under it, and nothing else.
#[test]
fn in_a_batch() {
    check("stall::in_a_batch", || {
        let pool = TouchedBlocks::new(3, 0);
        let seen = pool.take(1).unwrap();
        let stop = Arc::new(Stop::default());
        let (other, there) = (pool.clone(), stop.clone());
        let thread = thread::spawn(move || {
            let batch = other.blocks.clock().begin();
            there.here();
            other.blocks.end_batch(batch);
        });
        stop.wait();
        pool.put(&seen);
        let rest = pool.take(2).expect("the blocks that the batch does not see");
        assert!(pool.take(1).is_none(), "refused without waiting");
        stop.resume();
        join_last(thread);
        let late = pool.take(1).expect("the batch has ended");
        pool.put(&late);
        pool.put(&rest);
        pool.finish();
    });
}

/// Stopped while it wakes a waiting request: any thread can allocate the block, and frees continue.
#[test]
fn in_a_waker() {
    struct Waking(Stop);
    impl Wake for Waking {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.here();
        }
    }
    check("stall::in_a_waker", || {
        let layout = KvLayout::named("tiny").unwrap();
        let pool = Pool::builder(layout).blocks(2).without_null_block().without_storage().magazine_blocks(0);
        let pool = pool.build().unwrap();
        let held = [(); 2].map(|()| pool.allocate_owned(AllocRequest::new(1)).unwrap());
        let waking = std::sync::Arc::new(Waking(Stop::default()));
        let waker = Waker::from(waking.clone());
        let mut future = Box::pin(pool.allocate_async(AllocRequest::new(2)).into_future());
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        let [first, second] = held;
        let thread = thread::spawn(move || drop(first));
        waking.0.wait();
        let one = pool.allocate(AllocRequest::new(1)).expect("the block that the stopped thread freed");
        drop((one, second));
        let Poll::Ready(both) = future.as_mut().poll(&mut Context::from_waker(&waker)) else {
            panic!("all are free")
        };
        drop(both);
        drop(future);
        waking.0.resume();
        join_last(thread);
        conclude(pool.blocks());
        assert_eq!(pool.audit().unwrap().owned, 0);
    });
}

/// A split may be stopped at each step while another thread requests frames twice: it is answered
/// before the first continues, and gets at least the other unit.
#[test]
fn at_each_step_of_a_split() {
    check_to(3, "stall::at_each_step_of_a_split", || {
        let pool = Touched::new(8);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let got = other.take(1, 0).expect("eight are free, and the other thread has at most four");
            other.put(got);
        });
        let got = pool.take(4, 4).expect("of two units, a split hides one");
        pool.put(got);
        join_last(thread);
        pool.finish();
    });
}

/// The same for a merge: one frame is freed, and completes its unit.
#[test]
fn at_each_step_of_a_merge() {
    check_to(3, "stall::at_each_step_of_a_merge", || {
        let pool = Touched::new(8);
        let held = pool.take(1, 0).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || other.put(held));
        assert!(pool.pass(run(4, 4)), "a unit that no other thread accesses");
        let one = pool.frames.refill(1, FrameId(4)).expect("a unit is free throughout");
        pool.put_mask(one);
        join_last(thread);
        pool.finish();
    });
}
