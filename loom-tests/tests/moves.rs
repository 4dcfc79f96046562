//! Theorems: a moving block keeps its bytes for every thread that may read them, including one that
//! read its frame from a table earlier; the vacated frame is reused only when every batch that
//! could have seen it has ended; a concurrent release, pin or other mover cancels the move, and the
//! frames that the move held are free again; a block being copied is not written. In every case,
//! each frame is in one place afterwards.
#![cfg(kvpool_loom)]

use kvpool::FrameId;
use kvpool::block::{AllocRequest, MoveCancelled, models};
use kvpool_loom_tests::{TouchedBlocks, check, check_to, check_wide, end_exploring, join_last};
use loom::thread;

/// Frame 0, which holds the first block of these pools.
const HERE: u32 = 0;
const THERE: u32 = 1;
const ELSEWHERE: u32 = 2;

/// The owner releases the block during the copy, and allocates others and writes their bytes.
#[test]
fn released() {
    check("moves::released", || {
        let pool = TouchedBlocks::new(2, 0);
        let block = pool.take_sealed();
        let mover = pool.clone();
        let thread = thread::spawn(move || mover.relocate(HERE, THERE));
        pool.blocks.release(&[block.id]);
        if let Some(next) = pool.take(1) {
            pool.put(&next);
        }
        let moved = join_last(thread);
        // Open: it may be the next owner's block already.
        assert!(
            matches!(
                moved,
                Ok(()) | Err(MoveCancelled::Released | MoveCancelled::Taken | MoveCancelled::Open)
            ),
            "{moved:?}"
        );
        pool.finish();
    });
}

/// The owner reads the block, which it has pinned, and releases it during the copy: it leaves the
/// frame to the mover, which wipes it.
#[test]
fn left_to_the_mover() {
    check("moves::left_to_the_mover", || {
        let pool = TouchedBlocks::wiped(2);
        let block = pool.take_sealed();
        let mover = pool.clone();
        let thread = thread::spawn(move || {
            let _ = mover.relocate(HERE, THERE);
        });
        pool.blocks.pin(block).unwrap();
        assert_eq!(pool.read(block.id), 1);
        pool.blocks.unpin(block);
        pool.blocks.release(&[block.id]);
        join_last(thread);
        pool.finish();
    });
}

/// A move vacates a frame that a batch may read, and another thread, which ends the batch, reclaims
/// and allocates it.
#[test]
fn left_under_a_batch() {
    check("moves::left_under_a_batch", || {
        let pool = TouchedBlocks::new(2, 0);
        let block = pool.take_sealed();
        let batch = pool.blocks.clock().begin();
        let mover = pool.clone();
        let thread = thread::spawn(move || assert_eq!(mover.relocate(HERE, THERE), Ok(())));
        pool.blocks.end_batch(batch);
        if pool.blocks.reclaim_retired() > 0 {
            let next = pool.take(1).expect("it was reclaimed");
            pool.put(&next);
        }
        join_last(thread);
        pool.blocks.release(&[block.id]);
        pool.finish();
    });
}

/// The same with a magazine, from which a released block is allocated first.
#[test]
fn released_into_a_magazine() {
    check("moves::released_into_a_magazine", || {
        let pool = TouchedBlocks::new(3, 2);
        let block = pool.take_sealed();
        let mover = pool.clone();
        let thread = thread::spawn(move || mover.relocate(block.id.0, (block.id.0 + 2) % 3));
        pool.blocks.release(&[block.id]);
        let next = pool.take(1).expect("another block is free");
        pool.put(&next);
        let _ = join_last(thread);
        pool.finish();
    });
}

/// While a block is pinned it stays where it was when the pin was set.
#[test]
fn pinned() {
    check_to(3, "moves::pinned", || {
        let pool = TouchedBlocks::new(2, 0);
        let block = pool.take_sealed();
        let mover = pool.clone();
        let thread = thread::spawn(move || mover.relocate(HERE, THERE));
        pool.blocks.pin(block).unwrap();
        let frame = pool.blocks.frame(block.id);
        assert_eq!(pool.read_frame(frame), 1);
        assert_eq!(pool.blocks.frame(block.id), frame, "it moved while it was pinned");
        pool.blocks.unpin(block);
        let moved = join_last(thread);
        assert!(matches!(moved, Ok(()) | Err(MoveCancelled::Pinned)));
        assert_eq!(pool.blocks.frame(block.id), FrameId(if moved.is_ok() { THERE } else { HERE }));
        assert_eq!(pool.read(block.id), 1);
        pool.blocks.release(&[block.id]);
        pool.finish();
    });
}

/// Two owners: one shares and releases, the other releases, in any order, and the last frees the
/// frame in which the block is.
#[test]
fn shared() {
    check("moves::shared", || {
        let pool = TouchedBlocks::new(2, 0);
        let block = pool.take_sealed();
        let mover = pool.clone();
        let thread = thread::spawn(move || mover.relocate(HERE, THERE));
        pool.blocks.share(&[block.id]).unwrap();
        pool.blocks.release(&[block.id]);
        pool.blocks.release(&[block.id]);
        let _ = join_last(thread);
        pool.finish();
    });
}

/// The owner writes again: in place if it may, otherwise to a block of its own.
#[test]
fn reopened() {
    check_to(3, "moves::reopened", || {
        let pool = TouchedBlocks::new(3, 0);
        let block = pool.take_sealed();
        let mover = pool.clone();
        let thread = thread::spawn(move || mover.relocate(HERE, THERE));
        let is_open = pool.blocks.reopen(block.id);
        if is_open {
            pool.write(block.id);
        }
        let moved = join_last(thread);
        assert!(matches!(moved, Ok(()) | Err(MoveCancelled::Open)));
        assert_eq!(pool.read(block.id), if is_open { 2 } else { 1 });
        pool.blocks.release(&[block.id]);
        pool.finish();
    });
}

/// A wave is abandoned while a sequence reopens the block and writes to its known frame, since none
/// is published: the reopening comes after the copy.
#[test]
fn reopened_behind_a_copy() {
    check_to(3, "moves::reopened_behind_a_copy", || {
        let pool = TouchedBlocks::new(2, 0);
        let block = models::allocate_listed(&pool.blocks, &AllocRequest::new(1)).unwrap();
        pool.write_frame(FrameId(HERE));
        pool.blocks.seal(pool.blocks.handle(block));
        let mover = pool.clone();
        let thread = thread::spawn(move || {
            let wave = mover.blocks.begin_wave([(FrameId(HERE), FrameId(THERE))], &mut |_, _| ());
            mover.copy(&wave);
        });
        if pool.blocks.reopen(block) {
            pool.write_frame(FrameId(HERE));
        }
        join_last(thread);
        models::release_listed(&pool.blocks, &[block]);
        pool.finish();
    });
}

/// A batch reads the block in the frame that its table names, at any time until it ends, while
/// another thread needs the vacated frame.
#[test]
fn read_from_a_table() {
    check("moves::read_from_a_table", || {
        let pool = TouchedBlocks::new(2, 0);
        let block = pool.take_sealed();
        let reader = pool.clone();
        let thread = thread::spawn(move || {
            for _ in 0..2 {
                let batch = reader.blocks.clock().begin();
                let table = reader.blocks.frame(block.id);
                assert_eq!(reader.read_frame(table), 1, "the bytes of another owner");
                reader.blocks.end_batch(batch);
            }
        });
        let moved = pool.relocate(HERE, THERE);
        assert_eq!(moved, Ok(()));
        // Writes the vacated frame, as soon as it can be allocated.
        if let Some(next) = pool.take(1) {
            pool.write(next[0]);
            pool.put(&next);
        }
        join_last(thread);
        assert_eq!(pool.read(block.id), 1);
        pool.blocks.release(&[block.id]);
        pool.finish();
    });
}

/// Two batches on two threads overlap one move, and the vacated frame is needed in between.
#[test]
fn read_under_two_batches() {
    check_wide(1, "moves::read_under_two_batches", || {
        let pool = TouchedBlocks::new(2, 0);
        let block = pool.take_sealed();
        let threads = [(); 2].map(|()| {
            let reader = pool.clone();
            thread::spawn(move || {
                let batch = reader.blocks.clock().begin();
                assert_eq!(reader.read_frame(reader.blocks.frame(block.id)), 1);
                reader.blocks.end_batch(batch);
            })
        });
        assert_eq!(pool.relocate(HERE, THERE), Ok(()));
        if let Some(next) = pool.take(1) {
            pool.put(&next);
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        end_exploring();
        pool.blocks.release(&[block.id]);
        pool.finish();
    });
}

/// Two movers compete for the same block, with different destinations.
#[test]
fn two_movers_of_one_block() {
    check("moves::two_movers_of_one_block", || {
        let pool = TouchedBlocks::new(3, 0);
        let block = pool.take_sealed();
        let other = pool.clone();
        let thread = thread::spawn(move || other.relocate(HERE, THERE));
        let here = pool.relocate(HERE, ELSEWHERE);
        let there = join_last(thread);
        let at = pool.blocks.frame(block.id);
        match (here, there) {
            (Ok(()), Err(MoveCancelled::Moving | MoveCancelled::Released)) => {
                assert_eq!(at, FrameId(ELSEWHERE))
            }
            (Err(MoveCancelled::Moving | MoveCancelled::Released), Ok(())) => assert_eq!(at, FrameId(THERE)),
            other => panic!("{other:?}"),
        }
        assert_eq!(pool.read(block.id), 1);
        pool.blocks.release(&[block.id]);
        pool.finish();
    });
}

/// Two movers compete for the same destination for different blocks, one of them the source of the
/// other's move.
#[test]
fn two_movers_of_two_blocks() {
    check("moves::two_movers_of_two_blocks", || {
        let pool = TouchedBlocks::new(3, 0);
        let blocks = [pool.take_sealed(), pool.take_sealed()];
        let other = pool.clone();
        let thread = thread::spawn(move || other.relocate(0, 2));
        let second = pool.relocate(1, 2);
        let first = join_last(thread);
        assert!(
            first.is_ok() != second.is_ok() || first == Err(MoveCancelled::Taken),
            "{first:?} {second:?}"
        );
        for block in blocks {
            assert_eq!(pool.read(block.id), 1);
            pool.blocks.release(&[block.id]);
        }
        pool.finish();
    });
}

/// A wave is abandoned while the owner of its block writes to it again and frees it.
#[test]
fn given_up() {
    check_to(3, "moves::given_up", || {
        let pool = TouchedBlocks::new(2, 0);
        let block = pool.take_sealed();
        let mover = pool.clone();
        let thread = thread::spawn(move || {
            let wave = mover.blocks.begin_wave([(FrameId(HERE), FrameId(THERE))], &mut |_, _| ());
            mover.copy(&wave);
            drop(wave);
        });
        if pool.blocks.reopen(block.id) {
            pool.write(block.id);
        }
        pool.blocks.release(&[block.id]);
        join_last(thread);
        pool.finish();
    });
}

/// A run begins its second wave before the first is published, as on a device. They are published on
/// two threads, in any order, while the owner of the first one's block releases it.
#[test]
fn two_waves_in_flight() {
    check_to(3, "moves::two_waves_in_flight", || {
        let pool = TouchedBlocks::new(4, 0);
        let blocks = [pool.take_sealed(), pool.take_sealed()];
        let [first, second] = [(0, 2), (1, 3)].map(|(from, to)| {
            let wave = pool.blocks.begin_wave([(FrameId(from), FrameId(to))], &mut |_, _| ());
            pool.copy(&wave);
            wave
        });
        let thread = thread::spawn(move || {
            // SAFETY: copied above.
            unsafe { second.publish(&mut |_, _| ()) }
        });
        pool.blocks.release(&[blocks[0].id]);
        // SAFETY: as above.
        let _ = unsafe { first.publish(&mut |_, _| ()) };
        assert_eq!(join_last(thread), 1);
        assert_eq!(pool.read(blocks[1].id), 1);
        pool.blocks.release(&[blocks[1].id]);
        pool.finish();
    });
}
