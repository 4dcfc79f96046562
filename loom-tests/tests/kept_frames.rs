//! Theorem: a table that a batch copies from the frames that a sequence keeps is as good as one
//! that it reads from the block words: every entry names a frame that holds the block's bytes until
//! the batch ends, whatever moves meanwhile, however far the log of moves has wrapped. A batch that
//! writes to a reopened block writes to the frame that the block is in.
#![cfg(kvpool_loom)]

use kvpool::block::{Blocks, BlocksConfig};
use kvpool::sequence::Sequences;
use kvpool::{Append, Batch, BlockTable, DeviceId, FrameId, Sequence, SequenceId};
use kvpool_loom_tests::{TouchedBlocks, check, check_to, join_last};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering::Relaxed};
use loom::thread;

/// A pool with bytes, and a sequence with one full, sealed block of `block_tokens` tokens in frame
/// 0, in which stands a 1.
struct Model {
    pool: Arc<TouchedBlocks>,
    sequences: Sequences,
    sequence: Sequence,
}

impl Model {
    fn new(frames: usize, block_tokens: usize) -> Self {
        let config = BlocksConfig {
            frames,
            frames_max: frames,
            segment_frames: 8,
            magazine_blocks: 0,
            threads: 2,
            has_null_block: false,
            reserve: 0,
            run_frames: 0,
            device: DeviceId::Host,
        };
        let blocks = Blocks::new(config, None);
        // SAFETY: no storage.
        let sequences = unsafe { Sequences::new(blocks.clone(), None, block_tokens) };
        let mut sequence = sequences.open(SequenceId(1)).unwrap();
        let mut batch = Batch::begin(&sequences);
        batch.append(&mut sequence, block_tokens).unwrap();
        let pool = TouchedBlocks::around(blocks);
        pool.write_frame(FrameId(0));
        batch.finish();
        let model = Self { pool, sequences, sequence };
        assert_eq!(model.row(&Batch::begin(&model.sequences)), [0]);
        model
    }

    /// Returns the frames that a batch's table names.
    fn row(&self, batch: &Batch) -> Vec<i32> {
        let mut table = BlockTable::new();
        batch.block_table([&self.sequence], &mut table).unwrap();
        table.entries().to_vec()
    }

    /// A batch builds a table, and reads the first block through it.
    fn step(&self) -> i32 {
        let batch = Batch::begin(&self.sequences);
        let frame = self.read(&batch);
        batch.finish();
        frame
    }

    /// Reads the first block through a table of this batch.
    fn read(&self, batch: &Batch) -> i32 {
        let frame = self.row(batch)[0];
        assert_eq!(self.pool.read_frame(FrameId(frame as u32)), 1, "the bytes of another owner");
        frame
    }

    fn finish(self) {
        drop(self.sequence);
        self.pool.finish();
    }
}

/// Moves the block in a frame, and writes the vacated frame as soon as it can be allocated.
fn relocate_and_reuse(pool: &TouchedBlocks, from: u32, to: u32) {
    assert_eq!(pool.relocate(from, to), Ok(()));
    if let Some(next) = pool.take(1) {
        pool.write(next[0]);
        pool.put(&next);
    }
}

/// Tables are built while the block moves, and afterwards.
#[test]
fn a_table_under_a_move() {
    check_to(1, "kept_frames::a_table_under_a_move", || {
        let model = Model::new(2, 1);
        let mover = model.pool.clone();
        let thread = thread::spawn(move || relocate_and_reuse(&mover, 0, 1));
        model.step();
        join_last(thread);
        assert_eq!(model.step(), 1);
        model.finish();
    });
}

/// The block has moved, and moves again while an append takes note of the first move.
#[test]
fn an_append_under_a_move() {
    check_to(1, "kept_frames::an_append_under_a_move", || {
        let mut model = Model::new(4, 1);
        let other = model.pool.take(1).unwrap();
        assert_eq!(model.pool.relocate(0, 2), Ok(()));
        let mover = model.pool.clone();
        // The append takes frame 3.
        let thread = thread::spawn(move || assert_eq!(mover.relocate(2, 0), Ok(())));
        let mut batch = Batch::begin(&model.sequences);
        batch.append(&mut model.sequence, 1).unwrap();
        model.read(&batch);
        batch.finish();
        join_last(thread);
        assert_eq!(model.step(), 0);
        model.pool.put(&other);
        model.finish();
    });
}

/// The only move so far is being published while an append takes note of it: what the log counts,
/// its slots and the block's word show. The block is not the one that an empty slot names.
#[test]
fn an_append_beside_the_log() {
    check("kept_frames::an_append_beside_the_log", || {
        let mut model = Model::new(4, 1);
        let mut batch = Batch::begin(&model.sequences);
        batch.append(&mut model.sequence, 1).unwrap();
        assert_eq!(model.row(&batch), [0, 1]);
        model.pool.write_frame(FrameId(1));
        batch.finish();
        let (mover, probed) = (model.pool.clone(), Arc::new(AtomicU32::new(0)));
        let probe = probed.clone();
        let thread = thread::spawn(move || {
            probe.store(1, Relaxed);
            assert_eq!(mover.relocate(1, 3), Ok(()));
        });
        let mut batch = Batch::begin(&model.sequences);
        // As in `moved_since`: the mover loads the log's head before it changes it, so the checker
        // would not let it go on here.
        let _ = probed.load(Relaxed);
        batch.append(&mut model.sequence, 1).unwrap();
        batch.finish();
        join_last(thread);
        let batch = Batch::begin(&model.sequences);
        assert_eq!(model.row(&batch)[1], 3);
        batch.finish();
        model.finish();
    });
}

/// More moves than the log remembers, while an append reads it: the one that it cannot read any
/// more was this block's. Its old frame has other bytes.
#[test]
fn a_wrapped_log() {
    check("kept_frames::a_wrapped_log", || {
        let mut model = Model::new(4, 1);
        let other = model.pool.take(1).unwrap()[0];
        model.pool.write(other);
        let handle = model.pool.blocks.handle(other);
        model.pool.blocks.seal(handle);
        assert_eq!(model.pool.relocate(0, 2), Ok(()));
        assert_eq!(model.pool.relocate(1, 0), Ok(()));
        let mover = model.pool.clone();
        let thread = thread::spawn(move || assert_eq!(mover.relocate(0, 1), Ok(())));
        let mut batch = Batch::begin(&model.sequences);
        batch.append(&mut model.sequence, 1).unwrap();
        assert_eq!(model.read(&batch), 2);
        batch.finish();
        join_last(thread);
        assert_eq!(model.step(), 2);
        model.pool.blocks.release(&[other]);
        model.finish();
    });
}

/// A block is reopened while it moves: the batch that writes to it finds the frame that it is in.
/// The append returns whether the block was copied, or refuses.
fn reopened<E>(append: impl Fn(&mut Batch, &mut Sequence) -> Result<bool, E>) {
    let mut model = Model::new(2, 2);
    let id = model.sequence.blocks().next().unwrap();
    model.sequence.truncate(1).unwrap();
    let mover = model.pool.clone();
    let thread = thread::spawn(move || _ = mover.relocate(0, 1));
    let mut batch = Batch::begin(&model.sequences);
    // Refused if the destination of the move is the only free frame, and the block is moving.
    if let Ok(false) = append(&mut batch, &mut model.sequence) {
        let mut slots = Vec::new();
        batch.slot_mapping(&model.sequence, 1..2, &mut slots).unwrap();
        let frame = FrameId((slots[0] / 2) as u32);
        assert_eq!(frame, model.pool.blocks.frame(id), "written where the block is not");
        model.pool.write_frame(frame);
    }
    batch.finish();
    join_last(thread);
    model.finish();
}

#[test]
fn a_reopened_block() {
    check("kept_frames::a_reopened_block", || {
        reopened(|batch, sequence| batch.append(sequence, 1).map(|appended| appended.copied.is_some()));
    });
}

#[test]
fn a_block_reopened_by_a_step() {
    check("kept_frames::a_block_reopened_by_a_step", || {
        reopened(|batch, sequence| {
            batch.step(&mut [Append::new(sequence, 1)]).map(|stepped| !stepped.copied.is_empty())
        });
    });
}
