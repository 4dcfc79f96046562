//! Theorem: a frame is not reused while a batch that could see its old owner is in flight, whether
//! the owner itself released the frame (ordered by happens-before) or another thread unlinked it
//! from a table that batches read (ordered by two fences); and when all those batches have ended,
//! it is reused.
#![cfg(kvpool_loom)]

use kvpool::clock::Clock;
use kvpool_loom_tests::{TouchedBlocks, check, check_to, join_last};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering::*, fence};
use loom::thread;

/// A clock, two frames, and a block's entry in a table: the frame that holds the block.
struct Moved {
    clock: Clock,
    entry: AtomicU32,
    frames: [UnsafeCell<u32>; 2],
}

// SAFETY: no thread writes a frame while a batch reads it. The models check exactly this.
unsafe impl Sync for Moved {}

impl Moved {
    fn new() -> Arc<Self> {
        let frames = [UnsafeCell::new(1), UnsafeCell::new(0)];
        Arc::new(Self { clock: Clock::default(), entry: AtomicU32::new(0), frames })
    }

    /// A batch that reads the block in its current frame.
    fn batch(&self) {
        self.batch_from(0);
    }

    /// A batch that takes the first empty slot from this one on.
    fn batch_from(&self, first: usize) {
        let batch = self.clock.begin_from(first);
        // Acquire: the copy's bytes.
        let frame = self.entry.load(Acquire) as usize;
        // SAFETY: the batch is in flight.
        assert_eq!(self.frames[frame].with(|bytes| unsafe { *bytes }), 1, "the bytes of another owner");
        let _ = self.clock.end(batch);
    }

    /// Moves the block, retires its old frame and, as soon as possible, reuses that frame. Returns
    /// whether it was reused.
    fn relocate(&self, looks: usize) -> bool {
        // SAFETY: no other thread knows of frame 1.
        self.frames[1].with_mut(|bytes| unsafe { *bytes = 1 });
        self.entry.store(1, Release);
        // Readers may hold the old entry: pairs with the fence in `begin`. This is the clock's half
        // of the protocol; the fences of the unlinking threads are modelled where they are issued,
        // in `moves` and `sequences`.
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
        join_last(thread);
        assert!(early || shared.clock.ended(shared.clock.newest()), "all have ended");
    });
}

/// Two threads begin batches in the two slots of a chunk, each in either slot.
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

/// Two threads begin batches in the two slots of a chunk, each from its own one on.
#[test]
fn two_readers_apart() {
    check_to(3, "retire_reclaim::two_readers_apart", || {
        let shared = Moved::new();
        let threads = [0, 1].map(|first| {
            let reader = shared.clone();
            thread::spawn(move || reader.batch_from(first))
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
        join_last(thread);
        assert!(shared.clock.ended(shared.clock.newest()));
    });
}

/// A batch has left a slot behind the first chunk. Another one takes that slot, or opens it again,
/// while the mover looks for the oldest batch, and so closes the slot and lowers the mark.
#[test]
fn beside_a_lowered_mark() {
    check("retire_reclaim::beside_a_lowered_mark", || {
        let shared = Moved::new();
        let held = [shared.clock.begin(), shared.clock.begin()];
        let burst = shared.clock.begin();
        let _ = shared.clock.end(burst);
        let reader = shared.clone();
        let thread = thread::spawn(move || reader.batch());
        shared.clock.oldest();
        held.into_iter().for_each(|batch| assert!(!shared.clock.end(batch)));
        shared.relocate(2);
        join_last(thread);
        assert!(shared.clock.ended(shared.clock.newest()));
    });
}

/// The mover and another thread look for the oldest batch while two batches begin and end: what one
/// of them has found serves the other.
#[test]
fn two_look() {
    check_to(2, "retire_reclaim::two_look", || {
        let shared = Moved::new();
        let held = shared.clock.begin();
        let reader = shared.clone();
        let threads = [
            thread::spawn(move || reader.batch()),
            thread::spawn({
                let shared = shared.clone();
                move || {
                    shared.clock.oldest();
                    let _ = shared.clock.end(held);
                }
            }),
        ];
        shared.relocate(2);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(shared.clock.ended(shared.clock.newest()));
    });
}

/// The thread that reuses the frame did not see the end of its batch itself: another thread did,
/// which lowered the mark below that batch's slot, and found a newer batch to be the oldest.
///
/// By itself, a thread scans if that other one is stopped while it looks. The checker does not stop
/// a thread that holds a lock: therefore the second case.
#[test]
fn what_another_found() {
    for (name, oldest) in [("found", Clock::oldest as fn(&Clock) -> _), ("scanned", Clock::scan_oldest)] {
        check_to(3, &format!("retire_reclaim::what_another_found, {name}"), move || {
            let shared = Moved::new();
            let first = [shared.clock.begin(), shared.clock.begin()];
            let reader = shared.clock.begin();
            first.into_iter().for_each(|batch| assert!(!shared.clock.end(batch)));
            let tag = shared.clock.newest();
            let newer = shared.clock.begin();
            let (device, looker) = (shared.clone(), shared.clone());
            let device = thread::spawn(move || {
                // SAFETY: the batch is in flight.
                assert_eq!(device.frames[0].with(|bytes| unsafe { *bytes }), 1);
                let _ = device.clock.end(reader);
            });
            let looker = thread::spawn(move || {
                looker.clock.oldest();
            });
            if tag < oldest(&shared.clock) {
                // SAFETY: no batch sees frame 0 any more.
                shared.frames[0].with_mut(|bytes| unsafe { *bytes = 2 });
            }
            device.join().unwrap();
            looker.join().unwrap();
            assert!(shared.clock.ended(tag));
            assert!(!shared.clock.end(newer));
        });
    }
}

/// Two batches begin when all slots are taken: both add a chunk, and one of them continues in the
/// other's.
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
        join_last(thread);
        held.into_iter().for_each(|batch| assert!(!clock.end(batch)));
        assert!(clock.ended(clock.newest()));
    });
}

/// The owner begins a batch over its block, passes the batch to the thread that waits for the
/// device, and frees the block at once. It can allocate the frame only when the device is done with
/// it.
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
        join_last(device);
        let next = pool.take(1).expect("no batch holds it back any more");
        pool.put(&next);
        pool.finish();
    });
}

/// Two batches over the owner's frame, on two devices, end in either order while the owner asks
/// whether it may reuse the frame.
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

/// If the clock has issued a ticket and calls it ended, its batch is over, for any thread at any
/// time.
#[test]
fn an_ended_batch_is_over() {
    check_to(3, "retire_reclaim::an_ended_batch_is_over", || {
        let shared = Moved::new();
        let device = shared.clone();
        let thread = thread::spawn(move || {
            let batch = device.clock.begin();
            // SAFETY: the batch is in flight.
            device.frames[0].with_mut(|bytes| unsafe { *bytes = 2 });
            device.entry.store(1, Relaxed);
            let _ = device.clock.end(batch);
        });
        // An access with only one conflict, at which the checker lets the other thread go first.
        shared.entry.load(Relaxed);
        let newest = shared.clock.newest();
        if newest.0 == 1 && shared.clock.ended(newest) {
            // SAFETY: the only batch is over.
            assert_eq!(shared.frames[0].with(|bytes| unsafe { *bytes }), 2);
        }
        join_last(thread);
    });
}
