//! Theorem: a table patched with the moves since it was built is as good as a new one: under the
//! batch that patched it, every entry names a frame that holds the block's bytes until that batch
//! ends, whether a move was listed, or was too recent to be listed.
#![cfg(kvpool_loom)]

use kvpool::block::{Moved, Since};
use kvpool::{BlockHandle, FrameId, Ticket};
use kvpool_loom_tests::{TouchedBlocks, check, check_to, join_last};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering::*};
use loom::thread;

/// A block's entry in a table that lives across batches.
struct Entry {
    block: BlockHandle,
    frame: FrameId,
    since: Ticket,
    /// The bytes of the block.
    bytes: u32,
}

impl Entry {
    /// Builds the entry under a batch of its own.
    fn new(pool: &TouchedBlocks, block: BlockHandle) -> Self {
        let batch = pool.blocks.clock().begin();
        let entry = Self { block, frame: pool.blocks.frame(block.id), since: batch.ticket(), bytes: 1 };
        pool.blocks.end_batch(batch);
        entry
    }

    /// A batch patches the entry and reads through it. Returns false if the table had to be
    /// rebuilt.
    fn step(&mut self, pool: &TouchedBlocks) -> bool {
        self.step_after(pool, || ())
    }

    /// A step with a callback between the batch's beginning and its look.
    fn step_after(&mut self, pool: &TouchedBlocks, then: impl FnOnce()) -> bool {
        let batch = pool.blocks.clock().begin();
        then();
        let mut moves: Vec<Moved> = Vec::new();
        let since = pool.blocks.moved_since(self.since, &mut moves);
        match since {
            Since::Listed => {
                let to = moves.iter().rev().find(|moved| moved.block == self.block.id).map(|moved| moved.to);
                self.frame = to.unwrap_or(self.frame);
            }
            Since::TooLong => self.frame = pool.blocks.frame(self.block.id),
        }
        assert_eq!(pool.read_frame(self.frame), self.bytes, "the bytes of another owner, or older ones");
        self.since = batch.ticket();
        pool.blocks.end_batch(batch);
        since == Since::Listed
    }
}

#[test]
fn patched_under_a_move() {
    check_to(1, "moved_since::patched_under_a_move", || {
        let pool = TouchedBlocks::new(2, 0);
        let block = pool.take_sealed();
        let mut entry = Entry::new(&pool, block);
        let mover = pool.clone();
        let thread = thread::spawn(move || {
            assert_eq!(mover.relocate(0, 1), Ok(()));
            // Writes the vacated frame, as soon as it can be allocated.
            if let Some(next) = mover.take(1) {
                mover.write(next[0]);
                mover.put(&next);
            }
        });
        assert!(entry.step(&pool));
        join_last(thread);
        assert!(entry.step(&pool));
        assert_eq!(entry.frame, FrameId(1));
        pool.blocks.release(&[block.id]);
        pool.finish();
    });
}

/// The owner writes a block again whose move is published, and not listed yet: the entry does not
/// stay in the old frame, which lacks what was written.
#[test]
fn written_again_before_its_move_is_listed() {
    check("moved_since::written_again_before_its_move_is_listed", || {
        let pool = TouchedBlocks::new(2, 0);
        let block = pool.take_sealed();
        let mut entry = Entry::new(&pool, block);
        let mover = pool.clone();
        let thread = thread::spawn(move || {
            let _ = mover.relocate(0, 1);
        });
        if pool.blocks.reopen(block.id) {
            pool.write(block.id);
            entry.bytes = 2;
        }
        assert!(entry.step(&pool));
        join_last(thread);
        assert!(entry.step(&pool));
        pool.blocks.release(&[block.id]);
        pool.finish();
    });
}

/// Another block moves while a batch asks: earlier moves are listed, even though the slot after
/// them is being written.
#[test]
fn beside_another_move() {
    check("moved_since::beside_another_move", || {
        let pool = TouchedBlocks::new(3, 0);
        let (block, other) = (pool.take_sealed(), pool.take_sealed());
        assert!(pool.blocks.reopen(other.id));
        pool.write(other.id);
        pool.blocks.seal(other);
        let mut entry = Entry::new(&pool, block);
        assert_eq!(pool.relocate(0, 2), Ok(()));
        let (mover, probed) = (pool.clone(), Arc::new(AtomicU32::new(0)));
        let probe = probed.clone();
        let thread = thread::spawn(move || {
            probe.store(1, Relaxed);
            mover.relocate(1, 0)
        });
        // The mover reads the log's head before it changes it, so the checker does not play the
        // change against our look there: it lets the mover go first where both access this.
        assert!(entry.step_after(&pool, || _ = probed.load(Relaxed)), "two moves are remembered");
        assert_eq!(entry.frame, FrameId(2));
        join_last(thread).unwrap();
        pool.blocks.release(&[block.id, other.id]);
        pool.finish();
    });
}

/// More moves than the log remembers, while a batch reads it: the entry that it can no longer read
/// was another block's move.
#[test]
fn overtaken() {
    check("moved_since::overtaken", || {
        let pool = TouchedBlocks::new(3, 0);
        let (block, other) = (pool.take_sealed(), pool.take_sealed());
        assert!(pool.blocks.reopen(other.id));
        pool.write(other.id);
        pool.blocks.seal(other);
        let mut entry = Entry::new(&pool, block);
        assert_eq!(pool.relocate(0, 2), Ok(()));
        assert_eq!(pool.relocate(1, 0), Ok(()));
        let mover = pool.clone();
        let thread = thread::spawn(move || mover.relocate(0, 1));
        entry.step(&pool);
        join_last(thread).unwrap();
        entry.step(&pool);
        assert!(entry.step(&pool), "no further move happens");
        assert_eq!(entry.frame, FrameId(2));
        pool.blocks.release(&[block.id, other.id]);
        pool.finish();
    });
}
