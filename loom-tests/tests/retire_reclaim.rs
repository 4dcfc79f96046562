//! Theorem: a frame is not used again while a batch that could see its old owner is in flight, whether the owner itself
//! gave the frame up (ordered by happens-before) or another thread unlinked it from a table that batches read (ordered
//! by two fences); and once all those batches have ended, it is used again.
#![cfg(kvpool_loom)]

use kvpool::batch::Clock;
use kvpool_loom_tests::{TouchedBlocks, check, check_to};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering::*, fence};
use loom::thread;

/// A clock, two frames, and a block's entry in a table: the frame where the block is.
struct Moved {
    clock: Clock,
    entry: AtomicU32,
    frames: [UnsafeCell<u32>; 2],
}

// SAFETY: that a frame is written by nobody while a batch reads it is what the models check.
unsafe impl Sync for Moved {}

impl Moved {
    fn new() -> Arc<Self> {
        let frames = [UnsafeCell::new(1), UnsafeCell::new(0)];
        Arc::new(Self { clock: Clock::default(), entry: AtomicU32::new(0), frames })
    }

    /// A batch that reads the block wherever it is.
    fn batch(&self) {
        let batch = self.clock.begin();
        // Acquire: the copy's bytes.
        let frame = self.entry.load(Acquire) as usize;
        // SAFETY: the batch is in flight.
        assert_eq!(self.frames[frame].with(|bytes| unsafe { *bytes }), 1, "the bytes of another owner");
        let _ = self.clock.end(batch);
    }

    /// Moves the block, retires its old frame and, as soon as it may, uses that for something else. True if it was.
    fn relocate(&self, looks: usize) -> bool {
        // SAFETY: nobody knows of frame 1.
        self.frames[1].with_mut(|bytes| unsafe { *bytes = 1 });
        self.entry.store(1, Release);
        // Readers may hold the old entry: pairs with the fence in `begin`. This is the clock's half of the protocol; the fences of
        // those who unlink are modelled where they are made, in `moves` and `sequences`.
        fence(SeqCst);
        let tag = self.clock.newest();
        let reusable = (0..looks).any(|_| self.clock.ended(tag));
        if reusable {
            // SAFETY: no batch sees frame 0 any more.
            self.frames[0].with_mut(|bytes| unsafe { *bytes = 2 });
        }
        reusable
    }
}

#[test]
fn unlinked_by_another_thread() {
    check_to(3, "retire_reclaim::unlinked_by_another_thread", || {
        let shared = Moved::new();
        let reader = shared.clone();
        let thread = thread::spawn(move || {
            reader.batch();
            reader.batch();
        });
        let early = shared.relocate(2);
        thread.join().unwrap();
        assert!(early || shared.clock.ended(shared.clock.newest()), "all have ended");
    });
}

/// Two threads begin batches in the two slots of a chunk, and in those of each other.
#[test]
fn two_readers() {
    check_to(3, "retire_reclaim::two_readers", || {
        let shared = Moved::new();
        let threads = [(); 2].map(|()| {
            let reader = shared.clone();
            thread::spawn(move || reader.batch())
        });
        shared.relocate(1);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(shared.clock.ended(shared.clock.newest()));
    });
}

/// All slots are taken: the reader's batch is in a chunk that is added while the mover looks.
#[test]
fn a_chunk_is_added() {
    check("retire_reclaim::a_chunk_is_added", || {
        let shared = Moved::new();
        let held = [shared.clock.begin(), shared.clock.begin()];
        let reader = shared.clone();
        let thread = thread::spawn(move || reader.batch());
        held.into_iter().for_each(|batch| assert!(!shared.clock.end(batch)));
        shared.relocate(2);
        thread.join().unwrap();
        assert!(shared.clock.ended(shared.clock.newest()));
    });
}

/// Two batches begin when all slots are taken: both add a chunk, and one of them goes on in the other's.
#[test]
fn two_add_a_chunk() {
    check_to(3, "retire_reclaim::two_add_a_chunk", || {
        let clock = Arc::new(Clock::default());
        let held = [clock.begin(), clock.begin()];
        let other = clock.clone();
        let thread = thread::spawn(move || {
            let batch = other.begin();
            let _ = other.end(batch);
        });
        let batch = clock.begin();
        let _ = clock.end(batch);
        thread.join().unwrap();
        held.into_iter().for_each(|batch| assert!(!clock.end(batch)));
        assert!(clock.ended(clock.newest()));
    });
}

/// The owner begins a batch over its block, gives the batch to the thread that waits for the device, and frees the block
/// at once. It gets the frame back only after the device is done with it.
#[test]
fn freed_by_the_owner() {
    check("retire_reclaim::freed_by_the_owner", || {
        let pool = TouchedBlocks::new(1, 0);
        let id = pool.take(1).unwrap()[0];
        let batch = pool.blocks.clock().begin();
        let other = pool.clone();
        let device = thread::spawn(move || {
            other.read(id);
            other.blocks.end_batch(batch);
        });
        pool.blocks.release(&[id]);
        if let Some(next) = pool.take(1) {
            pool.put(&next);
        }
        device.join().unwrap();
        let next = pool.take(1).expect("no batch holds it back any more");
        pool.put(&next);
        pool.finish();
    });
}

/// Two batches over the owner's frame, on two devices, that end in either order while the owner asks what it may do.
#[test]
fn freed_under_two_batches() {
    check_to(3, "retire_reclaim::freed_under_two_batches", || {
        let shared = Moved::new();
        let devices = [(); 2].map(|()| {
            let (batch, shared) = (shared.clock.begin(), shared.clone());
            thread::spawn(move || {
                // SAFETY: the batch is in flight.
                assert_eq!(shared.frames[0].with(|bytes| unsafe { *bytes }), 1);
                let _ = shared.clock.end(batch);
            })
        });
        if shared.clock.idle_or_tag().is_none_or(|tag| shared.clock.ended(tag)) {
            // SAFETY: no batch sees frame 0 any more.
            shared.frames[0].with_mut(|bytes| unsafe { *bytes = 2 });
        }
        devices.into_iter().for_each(|device| device.join().unwrap());
        assert!(shared.clock.idle_or_tag().is_none());
    });
}

/// A ticket that the clock has given and calls ended is that of a batch that is over, whoever asks and whenever.
#[test]
fn what_has_ended_is_over() {
    check_to(3, "retire_reclaim::what_has_ended_is_over", || {
        let shared = Moved::new();
        let device = shared.clone();
        let thread = thread::spawn(move || {
            let batch = device.clock.begin();
            // SAFETY: the batch is in flight.
            device.frames[0].with_mut(|bytes| unsafe { *bytes = 2 });
            device.entry.store(1, Relaxed);
            let _ = device.clock.end(batch);
        });
        // An access that conflicts with nothing but one: where the checker lets the other thread go first.
        shared.entry.load(Relaxed);
        let newest = shared.clock.newest();
        if newest.0 == 1 && shared.clock.ended(newest) {
            // SAFETY: the one batch is over.
            assert_eq!(shared.frames[0].with(|bytes| unsafe { *bytes }), 2);
        }
        thread.join().unwrap();
    });
}
