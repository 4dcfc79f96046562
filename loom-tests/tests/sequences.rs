//! Theorems: a view of a sequence is consistent while its owner continues; blocks read from it
//! under a batch are not reused before the batch ends; blocks that sequences share are freed once,
//! by the last release, and are never written.
#![cfg(kvpool_loom)]

use kvpool::block::{AllocRequest, Blocks, BlocksConfig};
use kvpool::sequence::Sequences;
use kvpool::sequence::list::ListOwner;
use kvpool::storage::KvLayout;
use kvpool::{Batch, BlockId, DeviceId, Pool, Sequence, SequenceId, Tokens, Window};
use kvpool_loom_tests::{check, check_to, conclude, join_last};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::Ordering::*;
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
            reserve: 0,
            run_frames: 0,
            device: DeviceId::Host,
        },
        None,
    );
    // SAFETY: no storage.
    let sequences = unsafe { Sequences::new(blocks.clone(), None, block_tokens) };
    (blocks, sequences)
}

/// A cell for each block's bytes: a write concurrent with another access is a causality violation
/// that the checker reports.
struct Bytes(Vec<UnsafeCell<u32>>);

// SAFETY: no thread writes what another thread uses. The models check exactly this.
unsafe impl Sync for Bytes {}

impl Bytes {
    fn new(blocks: usize) -> Self {
        Self((0..blocks).map(|_| UnsafeCell::new(0)).collect())
    }

    fn read(&self, id: BlockId) {
        // SAFETY: the checker verifies it.
        self.0[id.index()].with(|bytes| unsafe { *bytes });
    }

    fn write(&self, id: BlockId) {
        // SAFETY: the checker verifies it.
        self.0[id.index()].with_mut(|bytes| unsafe { *bytes += 1 });
    }
}

fn ids(sequence: &Sequence) -> Vec<BlockId> {
    sequence.blocks().collect()
}

/// Ends a model.
fn finish(blocks: &Blocks) {
    conclude(blocks);
    assert_eq!(blocks.audit().unwrap().owned, 0, "leaked");
    assert_eq!(blocks.counts().free(), blocks.total());
}

/// The list grows and is truncated, and its entries are reused, while another thread reads it.
#[test]
fn a_view_is_whole() {
    check("sequences::a_view_is_whole", || {
        let mut owner = ListOwner::new(1);
        owner.reserve(1);
        owner.stage(0, BlockId(7));
        owner.publish(1);
        let list = owner.list().clone();
        let reader = thread::spawn(move || {
            let seen = list.read(|ids, tokens| {
                assert_eq!(ids.len(), tokens as usize);
                ids.iter().map(|id| id.load(Acquire)).collect::<Vec<_>>()
            });
            let was: [&[u32]; 3] = [&[7], &[7, 8], &[7, 9, 10]];
            assert!(was.contains(&&seen[..]), "{seen:?}");
        });
        owner.reserve(2);
        owner.stage(1, BlockId(8));
        owner.publish(2);
        owner.publish(1);
        owner.reserve(3);
        owner.stage(1, BlockId(9));
        owner.stage(2, BlockId(10));
        owner.publish(3);
        join_last(reader);
    });
}

/// The first block arrives while another thread reads: it finds no room, or room without a valid
/// entry, or the block.
#[test]
fn the_first_block() {
    check_to(3, "sequences::the_first_block", || {
        let mut owner = ListOwner::new(1);
        let list = owner.list().clone();
        let reader = thread::spawn(move || {
            let seen = list.read(|ids, _| ids.iter().map(|id| id.load(Acquire)).collect::<Vec<_>>());
            assert!(seen.is_empty() || seen == [7], "{seen:?}");
        });
        owner.reserve(1);
        owner.stage(0, BlockId(7));
        owner.publish(1);
        join_last(reader);
    });
}

/// A block replaces another: a thread that finds it sees the bytes that were copied there.
#[test]
fn a_replaced_block_is_filled() {
    check_to(3, "sequences::a_replaced_block_is_filled", || {
        let bytes = Arc::new(Bytes::new(2));
        let mut owner = ListOwner::new(1);
        owner.reserve(1);
        owner.stage(0, BlockId(0));
        owner.publish(1);
        let (list, seen) = (owner.list().clone(), bytes.clone());
        let reader = thread::spawn(move || {
            list.read(|ids, _| ids.iter().for_each(|id| seen.read(BlockId(id.load(Acquire)))));
        });
        bytes.write(BlockId(1));
        owner.replace(0, BlockId(1));
        join_last(reader);
    });
}

/// An entry is reused without growth: a reader has the old list or the new one.
#[test]
fn a_rewritten_place_is_not_mixed() {
    check_to(3, "sequences::a_rewritten_place_is_not_mixed", || {
        let mut owner = ListOwner::new(1);
        owner.reserve(2);
        owner.stage(0, BlockId(1));
        owner.stage(1, BlockId(2));
        owner.publish(2);
        let list = owner.list().clone();
        let reader = thread::spawn(move || {
            let seen = list.read(|ids, _| ids.iter().map(|id| id.load(Acquire)).collect::<Vec<_>>());
            let was: [&[u32]; 3] = [&[1, 2], &[], &[3, 4]];
            assert!(was.contains(&&seen[..]) || seen == [3], "{seen:?}");
        });
        owner.publish(0);
        owner.stage(0, BlockId(3));
        owner.publish(1);
        owner.stage(1, BlockId(4));
        owner.publish(2);
        join_last(reader);
    });
}

/// A reader finds a block through a view and reads its bytes until its batch ends; the owner
/// truncates the tokens, and the released block is allocated and written as soon as possible. The
/// fence is the one that every release of a sequence makes.
#[test]
fn a_block_read_through_a_view_outlives_the_batch() {
    check_to(3, "sequences::a_block_read_through_a_view_outlives_the_batch", || {
        let (blocks, sequences) = pool(1, 1);
        let bytes = Arc::new(Bytes::new(1));
        let mut sequence = sequences.open(SequenceId(1)).unwrap();
        let mut step = Batch::begin(&sequences);
        step.append(&mut sequence, 1).unwrap();
        step.finish();
        // Looked up here: the registry's lock would order the two threads.
        let view = sequences.view(SequenceId(1)).unwrap();
        let (other, seen) = (sequences.clone(), bytes.clone());
        let reader = thread::spawn(move || {
            let batch = Batch::begin(&other);
            view.blocks().into_iter().for_each(|id| seen.read(id));
            batch.finish();
        });
        sequence.truncate(0).unwrap();
        take_and_write(&blocks, &bytes);
        join_last(reader);
        drop(sequence);
        finish(&blocks);
    });
}

/// The same with a block that leaves the window: the owner appends a token behind it, and takes the
/// block as soon as it is free. The reader finds the block or the null block in its place.
#[test]
fn a_block_that_leaves_the_window_outlives_the_batch() {
    check_to(2, "sequences::a_block_that_leaves_the_window_outlives_the_batch", || {
        let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(1);
        let pool = Pool::builder(layout.build().unwrap())
            .blocks(3)
            .segment_blocks(64)
            .without_storage()
            .magazine_blocks(0)
            .threads(1)
            .window(Window::new(1).unwrap())
            .build()
            .unwrap();
        let bytes = Arc::new(Bytes::new(4));
        let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
        for _ in 0..2 {
            let mut step = pool.begin_batch();
            step.append(&mut sequence, 1).unwrap();
            step.finish();
        }
        let view = pool.view(SequenceId(1)).unwrap();
        let (other, seen) = (pool.clone(), bytes.clone());
        let reader = thread::spawn(move || {
            let batch = other.begin_batch();
            let listed = view.blocks();
            assert!((1..=3).contains(&listed.len()) && !listed.contains(&BlockId(0)), "{listed:?}");
            listed.into_iter().for_each(|id| seen.read(id));
            batch.finish();
        });
        let mut step = pool.begin_batch();
        step.append(&mut sequence, 1).unwrap();
        assert_eq!(sequence.blocks_given_up(), 1);
        step.finish();
        // The third block is the last one but for the one given up.
        if let Ok(lease) = pool.allocate(AllocRequest::new(1)) {
            bytes.write(lease.blocks()[0]);
        }
        join_last(reader);
        drop(sequence);
        assert_eq!(pool.audit().unwrap().owned, 0, "leaked");
    });
}

/// The same with a block that was copied on write, and released by the batch that copied it.
#[test]
fn a_block_that_was_copied_outlives_the_batch() {
    check_to(1, "sequences::a_block_that_was_copied_outlives_the_batch", || {
        let (blocks, sequences) = pool(2, 2);
        let bytes = Arc::new(Bytes::new(2));
        let mut sequence = sequences.open(SequenceId(1)).unwrap();
        let mut filled = Batch::begin(&sequences);
        filled.append(&mut sequence, 2).unwrap();
        let view = sequences.view(SequenceId(1)).unwrap();
        let (other, seen) = (sequences.clone(), bytes.clone());
        sequence.truncate(1).unwrap();
        let mut batch = Batch::begin(&sequences);
        let reader = thread::spawn(move || {
            let batch = Batch::begin(&other);
            view.blocks().into_iter().for_each(|id| seen.read(id));
            batch.finish();
        });
        // Promised to a batch in flight, so it is copied; afterwards only the batch has the old
        // block.
        let copied = batch.append(&mut sequence, Tokens::Draft(1)).unwrap().copied;
        assert!(copied.is_some());
        filled.finish();
        batch.finish();
        take_and_write(&blocks, &bytes);
        join_last(reader);
        drop(sequence);
        finish(&blocks);
    });
}

/// Allocates a block, if one is free, and writes it.
fn take_and_write(blocks: &Blocks, bytes: &Bytes) {
    let mut taken = None;
    if blocks.allocate(&AllocRequest::new(1), &mut |id| taken = Some(id)).is_ok() {
        let id = taken.expect("it was handed out");
        bytes.write(id);
        blocks.release(&[id]);
    }
}

/// Two sequences share a block that is not full, and both write to it at once: neither writes to
/// the shared one.
#[test]
fn copies_on_write_meet() {
    check_to(1, "sequences::copies_on_write_meet", || {
        let (blocks, sequences) = pool(4, 2);
        let bytes = Arc::new(Bytes::new(4));
        let mut parent = sequences.open(SequenceId(1)).unwrap();
        let mut step = Batch::begin(&sequences);
        step.append(&mut parent, 1).unwrap();
        step.finish();
        let child = parent.fork(SequenceId(2)).unwrap();
        let write = move |sequences: &Sequences, mut sequence: Sequence, bytes: &Bytes| {
            let mut batch = Batch::begin(sequences);
            let appended = batch.append(&mut sequence, 1).unwrap();
            if let Some(copied) = appended.copied {
                bytes.read(copied.from);
            }
            bytes.write(ids(&sequence)[0]);
            batch.finish();
        };
        let other = {
            let (sequences, bytes) = (sequences.clone(), bytes.clone());
            thread::spawn(move || write(&sequences, child, &bytes))
        };
        write(&sequences, parent, &bytes);
        join_last(other);
        finish(&blocks);
    });
}

/// A sequence is forked while the sequence that shares its block is dropped.
#[test]
fn fork_beside_the_last_release() {
    check("sequences::fork_beside_the_last_release", || {
        let (blocks, sequences) = pool(2, 1);
        let mut parent = sequences.open(SequenceId(1)).unwrap();
        let mut step = Batch::begin(&sequences);
        step.append(&mut parent, 1).unwrap();
        step.finish();
        let child = parent.fork(SequenceId(2)).unwrap();
        let thread = thread::spawn(move || drop(parent));
        let grandchild = child.fork(SequenceId(3)).unwrap();
        drop(child);
        let kept = ids(&grandchild);
        assert!(!blocks.word(kept[0]).is_free());
        join_last(thread);
        assert_eq!(blocks.word(kept[0]).refs(), 1);
        drop(grandchild);
        finish(&blocks);
    });
}

/// A batch ends and seals the block filled in it, while the owner, in another batch, truncates
/// tokens and writes new ones: the rewritten block is never sealed.
#[test]
fn a_rewritten_block_is_not_sealed() {
    check("sequences::a_rewritten_block_is_not_sealed", || {
        let (blocks, sequences) = pool(3, 2);
        let mut sequence = sequences.open(SequenceId(1)).unwrap();
        let mut filled = Batch::begin(&sequences);
        filled.append(&mut sequence, 2).unwrap();
        let thread = thread::spawn(move || filled.finish());
        sequence.truncate(1).unwrap();
        let mut batch = Batch::begin(&sequences);
        batch.append(&mut sequence, Tokens::Draft(1)).unwrap();
        let block = ids(&sequence)[0];
        assert!(!blocks.word(block).is_sealed());
        join_last(thread);
        assert!(!blocks.word(block).is_sealed(), "sealed while it is written");
        batch.finish();
        drop(sequence);
        finish(&blocks);
    });
}
