use std::ops::Range;
use std::sync::Arc;

use super::*;
use crate::block::{Blocks, BlocksConfig};
use crate::error::{AllocError, SequenceError};
use crate::ids::{BlockHandle, BlockId, DeviceId, FrameId, SequenceId};
use crate::storage::{Dtype, FrameMove, HostStorage, KvLayout, Storage};
use crate::sync::{AtomicBool, Ordering};

const TOKENS: usize = 4;

/// Returns the sequences of a pool with `blocks` blocks of four tokens, one f32 each for K and V.
fn pool(blocks: usize) -> Sequences {
    build(blocks, true, true)
}

fn build(blocks: usize, bytes: bool, has_null_block: bool) -> Sequences {
    let frames = blocks + has_null_block as usize;
    let config = BlocksConfig {
        frames,
        frames_max: frames,
        segment_frames: 64,
        magazine_blocks: 0,
        threads: 1,
        has_null_block,
        reserve: 0,
        run_frames: 0,
        device: DeviceId::Host,
    };
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(TOKENS).dtype(Dtype::F32);
    let storage = HostStorage::new(layout.build().unwrap(), frames, frames).unwrap();
    let storage = bytes.then_some(Arc::new(storage) as Arc<dyn Storage>);
    // SAFETY: the storage was created here, for these blocks.
    unsafe { Sequences::new(Blocks::new(config, None), storage, TOKENS) }
}

fn blocks(sequences: &Sequences) -> &Blocks {
    &sequences.0.blocks
}

fn ids(sequence: &Sequence) -> Vec<BlockId> {
    sequence.blocks().collect()
}

fn sealed(sequences: &Sequences, sequence: &Sequence) -> Vec<bool> {
    sequence.blocks().map(|id| blocks(sequences).word(id).is_sealed()).collect()
}

fn free(sequences: &Sequences) -> usize {
    blocks(sequences).counts().free()
}

/// Appends tokens whose K is `from`, `from + 1`, .. and whose V is the negative.
fn write(batch: &mut Batch, sequence: &mut Sequence, tokens: usize, from: f32) -> Appended {
    let appended = batch.append(sequence, tokens).unwrap();
    store(batch, sequence, appended.tokens.clone(), from).unwrap();
    appended
}

fn store(
    batch: &mut Batch,
    sequence: &mut Sequence,
    tokens: Range<usize>,
    from: f32,
) -> Result<(), SequenceError> {
    let k: Vec<f32> = (0..tokens.len()).map(|i| from + i as f32).collect();
    let v: Vec<f32> = k.iter().map(|k| -k).collect();
    batch.store(sequence, 0, tokens, (&k).into(), (&v).into())
}

fn read(sequences: &Sequences, sequence: &Sequence) -> Vec<f32> {
    let (mut k, mut v) = (vec![0.0f32; sequence.len()], vec![0.0f32; sequence.len()]);
    Batch::begin(sequences).load(sequence, 0, 0..sequence.len(), (&mut k).into(), (&mut v).into()).unwrap();
    assert!(k.iter().zip(&v).all(|(k, v)| *k == -v));
    k
}

#[test]
fn threads_may_hand_everything_over() {
    fn send<T: Send>() {}
    fn sync<T: Sync>() {}
    send::<Sequence>();
    send::<Batch>();
    send::<SequenceView>();
    sync::<SequenceView>();
    sync::<Sequences>();
}

fn write_step(sequences: &Sequences, sequence: &mut Sequence, tokens: usize, first: f32) {
    let mut batch = Batch::begin(sequences);
    write(&mut batch, sequence, tokens, first);
    batch.finish();
}

#[test]
fn a_batch_names_the_blocks_that_it_will_seal() {
    let sequences = pool(10);
    let named = |batch: &Batch| batch.blocks_to_seal().map(|handle| handle.id).collect::<Vec<_>>();
    let (mut first, mut second) =
        (sequences.open(SequenceId(1)).unwrap(), sequences.open(SequenceId(2)).unwrap());
    let (mut batch, mut other) = (Batch::begin(&sequences), Batch::begin(&sequences));
    batch.append(&mut first, 9).unwrap();
    batch.append(&mut second, Tokens::Draft(5)).unwrap();
    assert_eq!((named(&batch), first.settled_blocks()), (ids(&first)[..2].to_vec(), 2));
    assert_eq!(second.settled_blocks(), 0, "drafted tokens are not final");
    // Another batch in flight wrote to the block: the sequence seals it, later.
    other.append(&mut first, 3).unwrap();
    assert_eq!((named(&other), first.settled_blocks()), (Vec::new(), 2));
    batch.finish();
    other.finish();
    assert!(!sealed(&sequences, &first)[2]);
    first.commit(12).unwrap();
    assert_eq!((sealed(&sequences, &first), first.settled_blocks()), (vec![true; 3], 3));
}

#[test]
fn a_batch_seals_what_was_filled_in_it_when_it_ends() {
    let sequences = pool(10);
    let mut sequence = sequences.open(SequenceId(1)).unwrap();
    let mut batch = Batch::begin(&sequences);
    batch.append(&mut sequence, 10).unwrap();
    assert_eq!(sealed(&sequences, &sequence), [false; 3]);
    batch.finish();
    assert_eq!(sealed(&sequences, &sequence), [true, true, false]);
    // Filled by another batch, after the first has ended.
    let mut step = Batch::begin(&sequences);
    step.append(&mut sequence, 6).unwrap();
    step.finish();
    assert_eq!(sealed(&sequences, &sequence), [true; 4]);
}

#[test]
fn a_block_is_sealed_when_all_its_writers_have_ended() {
    for first_ends_first in [true, false] {
        let sequences = pool(10);
        let mut sequence = sequences.open(SequenceId(1)).unwrap();
        let (mut a, mut b) = (Batch::begin(&sequences), Batch::begin(&sequences));
        a.append(&mut sequence, 3).unwrap();
        b.append(&mut sequence, 1).unwrap();
        let (first, second) = if first_ends_first { (a, b) } else { (b, a) };
        first.finish();
        sequence.commit(0).unwrap();
        assert_eq!(sealed(&sequences, &sequence), [false]);
        second.finish();
        sequence.commit(0).unwrap();
        assert_eq!(sealed(&sequences, &sequence), [true]);
    }
}

/// Steps always overlap, as in a pipelined engine: blocks are sealed soon after they are full.
#[test]
fn overlapping_steps_do_not_put_sealing_off_for_ever() {
    let sequences = pool(20);
    let mut sequence = sequences.open(SequenceId(1)).unwrap();
    let mut in_flight = Batch::begin(&sequences);
    for _ in 0..40 {
        let mut next = Batch::begin(&sequences);
        next.append(&mut sequence, 1).unwrap();
        std::mem::replace(&mut in_flight, next).finish();
        let late = sealed(&sequences, &sequence).iter().filter(|&&sealed| !sealed).count();
        assert!(late <= 2, "{late} full blocks are open at {} tokens", sequence.len());
    }
}

#[test]
fn drafts_are_final_when_they_are_committed() {
    let sequences = pool(10);
    let mut sequence = sequences.open(SequenceId(1)).unwrap();
    write_step(&sequences, &mut sequence, 3, 0.0);
    let mut batch = Batch::begin(&sequences);
    let drafted = batch.append(&mut sequence, Tokens::Draft(7)).unwrap();
    assert_eq!((drafted.tokens.clone(), drafted.new_blocks), (3..10, 2));
    store(&mut batch, &mut sequence, drafted.tokens, 3.0).unwrap();
    batch.finish();
    assert_eq!((sequence.committed(), sealed(&sequences, &sequence)), (3, vec![false; 3]));
    sequence.commit(5).unwrap();
    assert_eq!(sealed(&sequences, &sequence), [true, false, false]);
    sequence.truncate(5).unwrap();
    assert_eq!((sequence.block_count(), free(&sequences)), (2, 8));
    sequence.commit(1).unwrap();
    assert_eq!((sequence.len(), sequence.committed()), (5, 5));
    let mut batch = Batch::begin(&sequences);
    assert_eq!(write(&mut batch, &mut sequence, 1, 50.0).copied, None, "a drafted block is not promised");
    assert_eq!(read(&sequences, &sequence), [0.0, 1.0, 2.0, 3.0, 4.0, 50.0]);
    // An append makes earlier drafted tokens final.
    batch.append(&mut sequence, Tokens::Draft(1)).unwrap();
    batch.append(&mut sequence, 1).unwrap();
    assert_eq!(sequence.committed(), 8);
    batch.finish();
    assert_eq!(sealed(&sequences, &sequence), [true, true]);
}

#[test]
fn final_tokens_can_be_taken_back() {
    let sequences = pool(10);
    let mut sequence = sequences.open(SequenceId(1)).unwrap();
    write_step(&sequences, &mut sequence, 8, 0.0);
    sequence.truncate(6).unwrap();
    assert_eq!((sequence.committed(), sealed(&sequences, &sequence)), (6, vec![true, true]));
    let mut batch = Batch::begin(&sequences);
    assert!(matches!(
        store(&mut batch, &mut sequence, 5..6, 0.0),
        Err(SequenceError::NotWritable { position: 5, .. })
    ));
    assert_eq!(write(&mut batch, &mut sequence, 1, 60.0).copied, None);
    assert_eq!(sealed(&sequences, &sequence), [true, false], "reopened");
    assert_eq!(read(&sequences, &sequence), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 60.0]);
    sequence.truncate(0).unwrap();
    batch.finish();
    assert_eq!((sequence.is_empty(), blocks(&sequences).counts().used()), (true, 0));
}

#[test]
fn a_promised_block_is_copied() {
    let sequences = pool(10);
    let mut sequence = sequences.open(SequenceId(1)).unwrap();
    let mut promised = Batch::begin(&sequences);
    write(&mut promised, &mut sequence, 4, 0.0);
    let mut other = Batch::begin(&sequences);
    let refused = store(&mut other, &mut sequence, 1..3, 7.0);
    assert!(matches!(refused, Err(SequenceError::NotWritable { position: 1, .. })), "{refused:?}");
    sequence.truncate(2).unwrap();
    let old = ids(&sequence)[0];
    assert_eq!(write(&mut other, &mut sequence, 1, 20.0).copied.unwrap().from, old);
    promised.finish();
    assert_eq!(sealed(&sequences, &sequence), [false]);
    assert!(!blocks(&sequences).word(old).is_sealed());
    assert_eq!(read(&sequences, &sequence), [0.0, 1.0, 20.0]);
}

#[test]
fn a_batch_takes_its_own_promise_back() {
    let sequences = pool(10);
    let mut sequence = sequences.open(SequenceId(1)).unwrap();
    let mut batch = Batch::begin(&sequences);
    write(&mut batch, &mut sequence, 4, 0.0);
    sequence.truncate(2).unwrap();
    assert_eq!(write(&mut batch, &mut sequence, 1, 20.0).copied, None);
    batch.finish();
    assert_eq!(sealed(&sequences, &sequence), [false]);
    assert_eq!(read(&sequences, &sequence), [0.0, 1.0, 20.0]);
}

fn batch_row(batch: &Batch, sequence: &Sequence) -> Vec<i32> {
    let mut table = BlockTable::new();
    batch.block_table([sequence], &mut table).unwrap();
    table.row(0).to_vec()
}

/// Moves the first block of a sequence without bytes `times` times, to any free frame.
fn move_first(sequences: &Sequences, sequence: &Sequence, times: usize) {
    let pool = blocks(sequences);
    for _ in 0..times {
        let from = pool.frame(ids(sequence)[0]);
        let has_moved = (0..10).any(|to| {
            let wave = pool.begin_wave([(from, FrameId(to))], &mut |_, _| ());
            // SAFETY: the pool has no storage.
            unsafe { wave.publish(&mut |_, why| panic!("{why:?}")) == 1 }
        });
        assert!(has_moved);
    }
}

/// A table shows current frames: kept, read one by one from the log, or all read anew.
#[test]
fn tables_follow_moves() {
    let sequences = build(10, false, false);
    let pool = blocks(&sequences);
    let mut sequence = sequences.open(SequenceId(1)).unwrap();
    let mut step = Batch::begin(&sequences);
    step.append(&mut sequence, 3 * TOKENS).unwrap();
    step.finish();
    let fork = sequence.fork(SequenceId(2)).unwrap();
    let is_kept = |sequence: &Sequence| sequence.frames.as_of(pool.moves_logged()).is_some();
    for times in [1, 2, 301, if cfg!(miri) { 601 } else { 20_001 }] {
        assert!(is_kept(&sequence));
        move_first(&sequences, &sequence, times);
        assert!(!is_kept(&sequence) && !is_kept(&fork));
        let frames: Vec<i32> = sequence.blocks().map(|id| pool.frame(id).0 as i32).collect();
        let mut batch = Batch::begin(&sequences);
        assert_eq!([&sequence, &fork].map(|sequence| batch_row(&batch, sequence)), [&frames[..]; 2]);
        batch.append(&mut sequence, Tokens::Draft(1)).unwrap();
        assert!(is_kept(&sequence));
        assert_eq!(batch_row(&batch, &sequence)[..3], frames);
        sequence.truncate(3 * TOKENS).unwrap();
        let mut slots = Vec::new();
        batch.slot_mapping(&sequence, 0..1, &mut slots).unwrap();
        assert_eq!(slots, [i64::from(frames[0]) * TOKENS as i64]);
    }
    let second = fork.fork(SequenceId(3)).unwrap();
    assert!(!is_kept(&second), "as stale as the sequence it was forked from");
    assert_eq!(
        batch_row(&Batch::begin(&sequences), &second),
        batch_row(&Batch::begin(&sequences), &sequence)
    );
}

#[test]
fn a_view_follows_and_ends_empty() {
    let sequences = pool(10);
    let mut sequence = sequences.open(SequenceId(3)).unwrap();
    let view = sequences.view(SequenceId(3)).unwrap();
    assert!(view.is_empty() && view.id() == SequenceId(3));
    let mut batch = Batch::begin(&sequences);
    batch.append(&mut sequence, 30).unwrap();
    assert_eq!((view.len(), view.blocks()), (30, ids(&sequence)));
    sequence.truncate(9).unwrap();
    batch.append(&mut sequence, 4).unwrap();
    assert_eq!((view.len(), view.blocks()), (13, ids(&sequence)));
    let mut slots = Vec::new();
    batch.slot_mapping(&view, 12..13, &mut slots).unwrap();
    assert_eq!(slots, [ids(&sequence)[3].0 as i64 * TOKENS as i64]);
    drop(sequence);
    assert!(view.is_empty() && view.blocks().is_empty());
    batch.finish();
}

#[test]
fn views_see_whole_lists() {
    let sequences = pool(400);
    let rounds = if cfg!(miri) { 20 } else { 3_000 };
    let mut sequence = sequences.open(SequenceId(1)).unwrap();
    let view = sequences.view(SequenceId(1)).unwrap();
    let reading = AtomicBool::new(true);
    kvpool_testkit::threads::scope(|scope| {
        scope.spawn(|| {
            let mut table = BlockTable::new();
            while reading.load(Ordering::Relaxed) {
                let batch = Batch::begin(&view.sequences);
                batch.block_table([&view], &mut table).unwrap();
                let blocks = (table.lengths()[0] as usize).div_ceil(TOKENS);
                let (row, padding) = table.row(0).split_at(blocks);
                assert!(padding.iter().all(|&frame| frame == 0));
                let mut seen: Vec<i32> = row.to_vec();
                seen.sort_unstable();
                seen.dedup();
                assert!(seen.len() == blocks && !seen.contains(&0), "{row:?}");
            }
        });
        let stop = Stop(&reading);
        for round in 0..rounds {
            let mut batch = Batch::begin(&sequences);
            match batch.append(&mut sequence, 1 + round * 7 % 90) {
                // The reader's batch holds back the truncated blocks.
                Ok(_) | Err(SequenceError::Alloc(AllocError::Exhausted { .. })) => {}
                Err(error) => panic!("{error}"),
            }
            let keep = sequence.len().min(round * 13 % 700);
            sequence.truncate(keep).unwrap();
            batch.finish();
        }
        drop(stop);
    });
    drop(sequence);
    assert_eq!(blocks(&sequences).counts().used(), 0);
}

/// Stops the other threads of a test, even if this one panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[test]
fn stale_promises_are_harmless() {
    let sequences = pool(2);
    let mut first = sequences.open(SequenceId(1)).unwrap();
    let mut batch = Batch::begin(&sequences);
    batch.append(&mut first, 4).unwrap();
    let handle: BlockHandle = blocks(&sequences).handle(ids(&first)[0]);
    drop(first);
    batch.finish();
    assert!(!blocks(&sequences).word(handle.id).is_sealed());
    blocks(&sequences).audit().unwrap();
}

/// Slices stay valid while another thread moves, copies and writes blocks. For Miri.
#[test]
fn tiles_stay_while_other_threads_write() {
    let sequences = pool(12);
    let pool = blocks(&sequences);
    let storage = sequences.0.storage.clone().unwrap();
    let mut sequence = sequences.open(SequenceId(1)).unwrap();
    write_step(&sequences, &mut sequence, 2 * TOKENS + 1, 0.0);
    let first = ids(&sequence)[0];
    let (from, to) = (pool.frame(first), FrameId(11));
    let batch = Batch::begin(&sequences);
    let tiles = [0, 1, 2].map(|index| batch.tile::<f32>(&sequence, 0, index).unwrap());
    kvpool_testkit::threads::scope(|scope| {
        scope.spawn(|| {
            let mut fork = sequence.fork(SequenceId(2)).unwrap();
            write_step(&sequences, &mut fork, TOKENS, 50.0);
            let mut other = sequences.open(SequenceId(3)).unwrap();
            write_step(&sequences, &mut other, TOKENS, 70.0);
            let mut batch = Batch::begin(&sequences);
            batch.append(&mut other, 1).unwrap();
            batch.tile_mut::<f32>(&mut other, 0, 1).unwrap().0.fill(80.0);
            batch.finish();
        });
        scope.spawn(|| {
            let wave = pool.begin_wave([(from, to)], &mut |frame, why| panic!("{frame}: {why:?}"));
            // SAFETY: the wave holds these frames.
            unsafe { storage.copy(&[FrameMove::new(from, to)]) }.unwrap();
            // SAFETY: copied just now.
            assert_eq!(unsafe { wave.publish(&mut |frame, why| panic!("{frame}: {why:?}")) }, 1);
        });
        for (index, (k, v)) in tiles.iter().enumerate() {
            let want = (0..k.len()).map(|token| (index * TOKENS + token) as f32);
            assert!(k.iter().zip(want).zip(*v).all(|((&k, want), &v)| k == want && v == -want), "{tiles:?}");
        }
    });
    assert_eq!((pool.frame(first), tiles.map(|(k, _)| k.len())), (to, [4, 4, 1]));
    assert_eq!(tiles[0].0, [0.0, 1.0, 2.0, 3.0], "in the frame that the block has left");
    assert_eq!(batch.tile::<f32>(&sequence, 0, 0).unwrap(), tiles[0], "in its new frame");
    batch.finish();
    drop(sequence);
    pool.audit().unwrap();
}
