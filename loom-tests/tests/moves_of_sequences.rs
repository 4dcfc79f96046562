//! Theorems: moves of its blocks do not disturb a sequence: it writes to a block that no thread
//! copies, its releases free each block once and count it so, and a table built during a move, or
//! before it, leads to the tokens' bytes until its batch ends.
#![cfg(kvpool_loom)]

use kvpool::block::{Blocks, BlocksConfig};
use kvpool::sequence::Sequences;
use kvpool::{Batch, BlockTable, DeviceId, FrameId, Sequence, SequenceId};
use kvpool_loom_tests::{check, check_to, conclude, join_last};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

/// A pool of blocks of two tokens, and a cell for each frame: the number of its tokens that are
/// written.
struct Engine {
    blocks: Blocks,
    sequences: Sequences,
    cells: Vec<UnsafeCell<u32>>,
}

// SAFETY: no thread writes what another thread uses. The models check exactly this.
unsafe impl Sync for Engine {}
// SAFETY: as above.
unsafe impl Send for Engine {}

impl Engine {
    fn new(frames: usize) -> Arc<Self> {
        let config = BlocksConfig {
            frames,
            frames_max: frames,
            segment_frames: 16,
            magazine_blocks: 0,
            threads: 1,
            has_null_block: false,
            reserve: 0,
            run_frames: 0,
            device: DeviceId::Host,
        };
        let blocks = Blocks::new(config, None);
        // SAFETY: no storage.
        let sequences = unsafe { Sequences::new(blocks.clone(), None, 2) };
        Arc::new(Self { blocks, sequences, cells: (0..frames).map(|_| UnsafeCell::new(0)).collect() })
    }

    fn read(&self, frame: FrameId) -> u32 {
        // SAFETY: the checker verifies it.
        self.cells[frame.index()].with(|tokens| unsafe { *tokens })
    }

    fn write(&self, frame: FrameId, written: u32) {
        // SAFETY: the checker verifies it.
        self.cells[frame.index()].with_mut(|tokens| unsafe { *tokens = written });
    }

    /// Appends tokens to a sequence of one block, as an engine does that manages its own bytes.
    fn append(&self, sequence: &mut Sequence, tokens: usize) {
        let mut batch = Batch::begin(&self.sequences);
        let appended = batch.append(sequence, tokens).unwrap();
        if let Some(copied) = appended.copied {
            self.write(copied.frames.dst, self.read(copied.frames.src));
        }
        let block = sequence.blocks().next().unwrap();
        self.write(self.blocks.frame(block), sequence.len() as u32);
        batch.finish();
    }

    /// Creates a sequence of one full, sealed block, in frame 0.
    fn sealed(&self) -> Sequence {
        let mut sequence = self.sequences.open(SequenceId(1)).unwrap();
        self.append(&mut sequence, 2);
        let block = sequence.blocks().next().unwrap();
        assert!(self.blocks.word(block).is_sealed() && self.blocks.frame(block) == FrameId(0));
        sequence
    }

    fn relocate(&self, from: u32, to: u32) -> bool {
        let wave = self.blocks.begin_wave([(FrameId(from), FrameId(to))], &mut |_, _| ());
        for (from, to) in wave.moves() {
            self.write(to, self.read(from));
        }
        // SAFETY: the bytes have been copied above.
        unsafe { wave.publish(&mut |_, _| ()) == 1 }
    }

    fn finish(&self, sequence: Sequence) {
        let block = sequence.blocks().next().unwrap();
        assert_eq!(self.read(self.blocks.frame(block)), sequence.len() as u32, "the tokens' bytes");
        drop(sequence);
        conclude(&self.blocks);
        let audit = self.blocks.audit().unwrap();
        assert_eq!((audit.owned, audit.held), (0, 0), "leaked");
        assert_eq!(self.blocks.counted_references(), 0, "lists count out what they took");
        assert_eq!(self.blocks.counts().free(), self.blocks.total());
    }
}

/// The owner truncates a token and writes another in its place, in the block that is being moved.
#[test]
fn rewritten() {
    check("moves_of_sequences::rewritten", || {
        let engine = Engine::new(3);
        let mut sequence = engine.sealed();
        let mover = engine.clone();
        let thread = thread::spawn(move || mover.relocate(0, 2));
        sequence.truncate(1).unwrap();
        engine.append(&mut sequence, 1);
        join_last(thread);
        engine.finish(sequence);
    });
}

/// A table is built from a view while the block moves, and used until its batch ends; another
/// thread needs the vacated frame.
#[test]
fn read_through_a_table() {
    check_to(2, "moves_of_sequences::read_through_a_table", || {
        let engine = Engine::new(2);
        let sequence = engine.sealed();
        let reader = engine.clone();
        let thread = thread::spawn(move || {
            let batch = Batch::begin(&reader.sequences);
            let view = reader.sequences.view(SequenceId(1)).unwrap();
            let mut table = BlockTable::new();
            batch.block_table([&view], &mut table).unwrap();
            assert_eq!(reader.read(FrameId(table.row(0)[0] as u32)), 2, "the bytes of another owner");
            batch.finish();
        });
        assert!(engine.relocate(0, 1));
        let mut other = engine.sequences.open(SequenceId(2)).unwrap();
        let mut batch = Batch::begin(&engine.sequences);
        if batch.append(&mut other, 1).is_ok() {
            let block = other.blocks().next().unwrap();
            engine.write(engine.blocks.frame(block), 9);
        }
        batch.finish();
        drop(other);
        join_last(thread);
        engine.finish(sequence);
    });
}

/// The block fills up in a batch that ends, and seals it, during the move: it moves with all its
/// tokens or not at all.
#[test]
fn sealed_beside_the_mover() {
    check("moves_of_sequences::sealed_beside_the_mover", || {
        let engine = Engine::new(3);
        let mut sequence = engine.sequences.open(SequenceId(1)).unwrap();
        engine.append(&mut sequence, 1);
        let mover = engine.clone();
        let thread = thread::spawn(move || mover.relocate(0, 2));
        engine.append(&mut sequence, 1);
        join_last(thread);
        engine.finish(sequence);
    });
}

/// The sequence is dropped while its block is being moved.
#[test]
fn dropped() {
    check("moves_of_sequences::dropped", || {
        let engine = Engine::new(3);
        let sequence = engine.sealed();
        let mover = engine.clone();
        let thread = thread::spawn(move || mover.relocate(0, 2));
        drop(sequence);
        let mut next = engine.sequences.open(SequenceId(2)).unwrap();
        engine.append(&mut next, 2);
        join_last(thread);
        engine.finish(next);
    });
}
