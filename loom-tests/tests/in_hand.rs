//! Theorem: no request sleeps while another thread holds frames that would satisfy it. A thread
//! that takes free frames out of the reach of searches, in order to put them back, may be stopped
//! with them for any time: a request that searches meanwhile finds nothing and falls asleep; when
//! the thread continues, the request is woken.
//!
//! loom's `yield_now` runs the other threads to their end, or to their next yield. A search that
//! finds fewer frames than are counted as free yields before it gives up, so that in a model of two
//! concurrent threads the frames have arrived by that time. Here the other thread is stopped in the
//! wipe of the frames that it puts back, until the request sleeps.
#![cfg(kvpool_loom)]

use std::any::Any;
use std::fmt;

use kvpool::storage::{Elements, ElementsMut, FrameMove, KvLayout, Storage};
use kvpool::{AllocRequest, DeviceId, FrameId, GrowError, Pool, Run, StorageError};
use kvpool_loom_tests::{Stop, block_on, boxed, check, conclude, lull};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering::*};
use loom::thread;

const BLOCKS: usize = 2;

/// Storage without bytes. The first wipe after arming stops its thread.
struct Stopping {
    layout: KvLayout,
    is_armed: Arc<AtomicBool>,
    stop: Arc<Stop>,
}

impl fmt::Debug for Stopping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stopping")
    }
}

impl Storage for Stopping {
    fn layout(&self) -> &KvLayout {
        &self.layout
    }

    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn frames(&self) -> usize {
        BLOCKS
    }

    fn frames_max(&self) -> usize {
        BLOCKS
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    unsafe fn zero(&self, _: &[Run]) -> Result<(), StorageError> {
        if self.is_armed.swap(false, AcqRel) {
            self.stop.here();
        }
        Ok(())
    }

    unsafe fn copy(&self, _: &[FrameMove]) -> Result<(), StorageError> {
        Ok(())
    }

    fn grow(&self, _: usize) -> Result<(), GrowError> {
        Ok(())
    }

    unsafe fn shrink(&self, _: usize) {}

    unsafe fn store(
        &self,
        _: usize,
        _: Elements<'_>,
        _: Elements<'_>,
        _: &[i64],
    ) -> Result<(), StorageError> {
        unreachable!("nothing is stored")
    }

    unsafe fn load(
        &self,
        _: usize,
        _: &[i64],
        _: ElementsMut<'_>,
        _: ElementsMut<'_>,
    ) -> Result<(), StorageError> {
        unreachable!("nothing is loaded")
    }

    unsafe fn pack(&self, _: &[Run], _: &mut [u8]) -> Result<(), StorageError> {
        unreachable!("nothing is packed")
    }

    unsafe fn unpack(&self, _: &[Run], _: &[u8]) -> Result<(), StorageError> {
        unreachable!("nothing is unpacked")
    }
}

/// Two blocks: one is owned, the other free, and its frame was left by a move whose batch has
/// ended. `give_back` finds that frame, and is stopped with it.
fn beside(name: &'static str, give_back: fn(&Pool)) {
    check(name, move || {
        let (is_armed, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(Stop::default()));
        let layout = KvLayout::named("tiny").unwrap();
        let storage = Stopping { layout: layout.clone(), is_armed: is_armed.clone(), stop: stop.clone() };
        let pool = Pool::builder(layout).storage(std::sync::Arc::new(storage)).blocks(BLOCKS);
        let pool = pool.without_null_block().magazine_blocks(0).zero_on_free().build().unwrap();
        let mut held = pool.allocate(AllocRequest::new(1)).unwrap();
        let from = held.frames().next().unwrap();
        held.seal(0..1);
        // Not a sequence's batch, whose end looks for frames left by moves.
        let batch = pool.blocks().begin_batch();
        let to = FrameId(1 - from.0);
        let wave = pool.blocks().begin_wave([(from, to)], &mut |_, _| panic!("it can move"));
        // SAFETY: the frames of this storage have no bytes.
        assert_eq!(unsafe { wave.publish(&mut |_, _| panic!("no other thread has it")) }, 1);
        pool.blocks().end_batch(batch);
        is_armed.store(true, Release);
        let other = pool.clone();
        let thread = thread::spawn(move || give_back(&other));
        stop.wait();
        {
            let mut waiting = boxed(|| pool.allocate_async(AllocRequest::new(1)).into_future());
            lull(waiting.as_mut());
            stop.resume();
            drop(block_on(waiting).unwrap());
        }
        thread.join().unwrap();
        drop(held);
        conclude(pool.blocks());
        assert_eq!((pool.audit().unwrap().owned, pool.stats().waiting), (0, 0));
        assert!(!pool.blocks().is_awaited());
    });
}

/// As the background task of the compactor does.
#[test]
fn of_a_look_at_the_shared_retire_list() {
    beside("in_hand::of_a_look_at_the_shared_retire_list", |pool| {
        assert_eq!(pool.blocks().reclaim_retired(), 1)
    });
}

#[test]
fn of_a_trim() {
    beside("in_hand::of_a_trim", Pool::trim);
}

#[test]
fn of_a_batch_that_ends() {
    beside("in_hand::of_a_batch_that_ends", |pool| drop(pool.begin_batch()));
}

/// By another request, which does not wait, and needs more than is free.
#[test]
fn of_a_request_that_is_refused() {
    beside("in_hand::of_a_request_that_is_refused", |pool| {
        assert!(pool.allocate(AllocRequest::new(2)).is_err());
    });
}

/// By a shrink that collects free frames at the end of the pool, and is abandoned.
#[test]
fn of_a_shrink_that_is_given_up() {
    beside("in_hand::of_a_shrink_that_is_given_up", |pool| {
        let mut shrinking = pool.blocks().begin_shrink(1).unwrap();
        shrinking.collect();
    });
}
