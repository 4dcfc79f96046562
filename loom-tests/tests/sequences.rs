//! Theorems: a view of a sequence is whole while its owner goes on; what is read from it under a batch is not reused
//! before the batch ends; blocks that sequences share are freed once, by whoever goes last, and written by nobody.
#![cfg(kvpool_loom)]

use kvpool::block::{Blocks, BlocksConfig};
use kvpool::ids::{BlockId, DeviceId, SequenceId};
use kvpool::sequence::{Batch, BlockTable, Sequence, Sequences};
use kvpool_loom_tests::{check, settle};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

fn pool(frames: usize, block_tokens: usize) -> (Blocks, Sequences) {
    let blocks = Blocks::new(
        BlocksConfig {
            frames,
            frames_max: frames,
            segment_frames: 16,
            magazine_blocks: 0,
            threads: 1,
            has_null_block: false,
            device: DeviceId::Host,
        },
        None,
    );
    let sequences = Sequences::new(blocks.clone(), None, block_tokens);
    (blocks, sequences)
}

fn ids(sequence: &Sequence) -> Vec<BlockId> {
    sequence.blocks().collect()
}

/// The end of every model.
fn finish(blocks: &Blocks) {
    settle(blocks, 1);
    assert_eq!(blocks.audit().unwrap().owned, 0, "leaked");
    assert_eq!(blocks.counts().free(), blocks.total());
}

/// The table grows, is cut, and its places are used again, while another thread reads it.
#[test]
fn a_view_is_whole() {
    check("sequences::a_view_is_whole", || {
        let (blocks, sequences) = pool(4, 1);
        let mut sequence = sequences.open(SequenceId(1)).unwrap();
        Batch::begin(&sequences).append(&mut sequence, 1).unwrap();
        let first = ids(&sequence)[0];
        let view = sequences.view(SequenceId(1)).unwrap();
        let reader = thread::spawn(move || {
            let seen = view.blocks();
            assert!((1..=3).contains(&seen.len()) && seen[0] == first, "{seen:?}");
            assert!(seen.len() < 2 || !seen[1..].contains(&first), "{seen:?}");
            assert!(seen.len() < 3 || seen[1] != seen[2], "{seen:?}");
        });
        let mut batch = Batch::begin(&sequences);
        batch.append(&mut sequence, 1).unwrap();
        sequence.truncate(1).unwrap();
        batch.append(&mut sequence, 2).unwrap();
        batch.finish();
        reader.join().unwrap();
        drop(sequence);
        finish(&blocks);
    });
}

/// A reader finds a frame through a view and uses it until its batch ends; the owner gives the block up, and somebody
/// else gets the frame.
#[test]
fn a_frame_read_from_a_view_outlives_the_batch() {
    check("sequences::a_frame_read_from_a_view_outlives_the_batch", || {
        let (blocks, sequences) = pool(1, 1);
        let bytes = Arc::new(UnsafeCell::new(0u32));
        let mut sequence = sequences.open(SequenceId(1)).unwrap();
        Batch::begin(&sequences).append(&mut sequence, 1).unwrap();
        let view = sequences.view(SequenceId(1)).unwrap();
        let reader = {
            let (sequences, bytes) = (sequences.clone(), bytes.clone());
            thread::spawn(move || {
                let (batch, mut table) = (Batch::begin(&sequences), BlockTable::new());
                batch.block_table([&view], &mut table).unwrap();
                if table.lengths()[0] == 1 {
                    assert_eq!(table.row(0), [0]);
                    // SAFETY: the frame is not reused before the batch ends; the checker verifies it.
                    bytes.with(|bytes| unsafe { *bytes });
                }
                batch.finish();
            })
        };
        drop(sequence);
        let mut next = sequences.open(SequenceId(2)).unwrap();
        if Batch::begin(&sequences).append(&mut next, 1).is_ok() {
            // SAFETY: as above.
            bytes.with_mut(|bytes| unsafe { *bytes += 1 });
        }
        drop(next);
        reader.join().unwrap();
        finish(&blocks);
    });
}

/// Two sequences share a block that is not full, and both write to it at once: neither writes to the shared one.
#[test]
fn copies_on_write_meet() {
    check("sequences::copies_on_write_meet", || {
        let (blocks, sequences) = pool(4, 2);
        let bytes: Arc<Vec<UnsafeCell<u32>>> = Arc::new((0..4).map(|_| UnsafeCell::new(0)).collect());
        let mut parent = sequences.open(SequenceId(1)).unwrap();
        Batch::begin(&sequences).append(&mut parent, 1).unwrap();
        let child = parent.fork(SequenceId(2)).unwrap();
        let write = move |sequences: &Sequences, mut sequence: Sequence, bytes: &[UnsafeCell<u32>]| {
            let mut batch = Batch::begin(sequences);
            let appended = batch.append(&mut sequence, 1).unwrap();
            if let Some(copied) = appended.copied {
                // SAFETY: the source has been in the sequence until the batch, which holds it back; nobody writes to
                // it but its only owner, who saw us go. The checker verifies it.
                bytes[copied.from.index()].with(|bytes| unsafe { *bytes });
            }
            // SAFETY: the tail is the sequence's alone.
            bytes[ids(&sequence)[0].index()].with_mut(|bytes| unsafe { *bytes += 1 });
            batch.finish();
            drop(sequence);
        };
        let other = {
            let (sequences, bytes) = (sequences.clone(), bytes.clone());
            thread::spawn(move || write(&sequences, child, &bytes))
        };
        write(&sequences, parent, &bytes);
        other.join().unwrap();
        finish(&blocks);
    });
}

/// A sequence is forked while the one that it shares its block with goes.
#[test]
fn fork_beside_the_last_release() {
    check("sequences::fork_beside_the_last_release", || {
        let (blocks, sequences) = pool(2, 1);
        let mut parent = sequences.open(SequenceId(1)).unwrap();
        Batch::begin(&sequences).append(&mut parent, 1).unwrap();
        let child = parent.fork(SequenceId(2)).unwrap();
        let thread = thread::spawn(move || drop(parent));
        let grandchild = child.fork(SequenceId(3)).unwrap();
        drop(child);
        let kept = ids(&grandchild);
        assert!(!blocks.word(kept[0]).is_free());
        thread.join().unwrap();
        assert_eq!(blocks.word(kept[0]).refs(), 1);
        drop(grandchild);
        finish(&blocks);
    });
}

/// A batch ends and seals what was filled in it, while the owner, in another batch, takes tokens back and writes anew:
/// what is written is never sealed.
#[test]
fn a_promise_is_not_kept_for_what_was_rewritten() {
    check("sequences::a_promise_is_not_kept_for_what_was_rewritten", || {
        let (blocks, sequences) = pool(3, 2);
        let mut sequence = sequences.open(SequenceId(1)).unwrap();
        let mut filled = Batch::begin(&sequences);
        filled.append(&mut sequence, 2).unwrap();
        let thread = thread::spawn(move || filled.finish());
        sequence.truncate(1).unwrap();
        let mut batch = Batch::begin(&sequences);
        batch.draft(&mut sequence, 1).unwrap();
        let block = ids(&sequence)[0];
        assert!(!blocks.word(block).is_sealed());
        thread.join().unwrap();
        assert!(!blocks.word(block).is_sealed(), "sealed while it is written");
        batch.finish();
        drop(sequence);
        finish(&blocks);
    });
}
