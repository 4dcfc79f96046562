//! Sequences of several groups leave for another pool and come back, with the bytes of all lists and
//! states, in pools with storage; all of it, or nothing.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kvpool::transfer::{Imported, Manifest};
use kvpool::{AllocRequest, Preempt, ResumeOptions, Retry};

use super::*;

/// Frames of 32 bytes, in two states.
pub(super) const STATES: [usize; 2] = [3, 2];

pub(super) fn plain() -> KvLayout {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).dtype(Dtype::F32);
    layout.block_tokens(4).build().unwrap()
}

fn builder(blocks: usize, states: &[usize]) -> kvpool::PoolBuilder {
    let window = |(tokens, sinks)| Window::new(tokens).unwrap().sinks(sinks);
    Pool::builder(plain())
        .blocks(blocks)
        .threads(1)
        .groups(WINDOWS.map(|keeps| keeps.map(window)))
        .states(states.iter().copied())
}

pub(super) fn pool(blocks: usize, states: &[usize]) -> Pool {
    let cache = PrefixConfig::new().key(HashKey::from_bytes([7; 32]));
    builder(blocks, states).prefix_cache(cache).build().unwrap()
}

/// Bytes of a state behind these tokens.
fn bytes(state: usize, tokens: &[u32]) -> Vec<u8> {
    let word = |at| (super::stamp(100 + state * 1000 + at, tokens) as u32).to_le_bytes();
    (0..STATES[state] * 8).flat_map(word).collect()
}

pub(super) fn append(pool: &Pool, sequence: &mut GroupedSequence, all: &[u32], tokens: usize) {
    let mut batch = pool.begin_batch();
    step(&mut batch, sequence, all, tokens).unwrap();
    batch.finish();
}

/// Appends tokens of `all`, and keeps a checkpoint if they end at a boundary.
fn step(
    batch: &mut Batch,
    sequence: &mut GroupedSequence,
    all: &[u32],
    tokens: usize,
) -> Result<(), SequenceError> {
    let from = sequence.len();
    let new = &all[from..from + tokens];
    let announced = sequence.group(0).announced();
    sequence.announce(&all[announced.min(from + tokens)..from + tokens])?;
    let held = sequence.state_tokens();
    let before: Vec<_> = (0..sequence.states()).map(|state| bytes(state, &all[..held])).collect();
    super::append(batch, sequence, all, Tokens::Announced(new.len()))?;
    for (state, before) in before.iter().enumerate() {
        let mut read = vec![0; before.len()];
        batch.load_state(sequence, state, &mut read).unwrap();
        assert!(held == 0 || read == *before, "state {state} behind {held} tokens");
        batch.store_state(sequence, state, &bytes(state, &all[..from + tokens])).unwrap();
    }
    if sequence.states() > 0 && sequence.len().is_multiple_of(4) {
        batch.checkpoint(sequence)?;
    }
    Ok(())
}

pub(super) fn compute(pool: &Pool, id: u64, all: &[u32]) -> GroupedSequence {
    compute_request(pool, &AdmitRequest::new(SequenceId(id), all), all)
}

pub(super) fn compute_request(pool: &Pool, request: &AdmitRequest<'_>, all: &[u32]) -> GroupedSequence {
    let mut sequence = pool.admit_grouped(request).unwrap();
    while let Some(cut) = sequence.next_cut() {
        let tokens = cut - sequence.len();
        append(pool, &mut sequence, all, tokens);
    }
    let rest = all.len() - sequence.len();
    append(pool, &mut sequence, all, rest);
    sequence
}

pub(super) fn check(pool: &Pool, sequence: &GroupedSequence, all: &[u32]) {
    super::check(pool, sequence, all);
    let batch = pool.begin_batch();
    for (state, frames) in STATES.into_iter().enumerate().take(sequence.states()) {
        let held = sequence.state_tokens();
        let (expected, mut read) = (bytes(state, &all[..held]), vec![0; frames * 32]);
        batch.load_state(sequence, state, &mut read).unwrap();
        assert!(held == 0 || read == expected, "state {state} behind {held} tokens");
    }
    batch.finish();
}

pub(super) fn is_idle(pool: &Pool) {
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, report.held, pool.sequence_count()), (0, 0, 0), "{report:?}");
}

pub(super) fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|token| token * 7).collect()
}

/// Swapped, resumed with room to grow, continued; with and without states, of all kinds of lengths.
#[test]
fn a_sequence_goes_and_comes_back() {
    for states in [&STATES[..], &[]] {
        let (near, far, all) = (pool(400, states), pool(400, states), tokens(260));
        for length in [0, 1, 4, 5, 9, 17, 31, 32, 100, 103, 160] {
            let mut sequence = near.admit_grouped(&AdmitRequest::new(SequenceId(9), &[1])).unwrap();
            if length > 0 {
                drop(sequence);
                sequence = compute(&near, 9, &all[..length]);
            }
            let (held, reserved) = (sequence.held_blocks(), sequence.reserved_blocks());
            let gone = block_on(near.preempt(sequence, Preempt::Swap(&far))).unwrap();
            assert_eq!((gone.tokens_kept, gone.tokens_lost), (length, 0));
            assert_eq!(gone.freed_blocks + gone.cached_blocks, held + reserved);
            let away = gone.swapped.unwrap();
            assert_eq!((away.sequence.len(), away.sequence.held_blocks()), (length, held));
            check(&far, &away.sequence, &all);
            let options = ResumeOptions::new().headroom(20).leave(3);
            let (mut back, report) = block_on(near.resume(&away.sequence, options)).unwrap();
            assert_eq!(report.carried.blocks + report.shared_blocks, held, "{length}: {report:?}");
            assert!(length < 8 || report.shared_blocks > 0, "its cached blocks are found: {report:?}");
            assert_eq!((back.len(), far.sequence_count()), (length, 1));
            drop(away);
            check(&near, &back, &all);
            let room = near.available_blocks();
            append(&near, &mut back, &all, 20);
            assert!(near.available_blocks() + sum(states) >= room, "no list needs blocks");
            for _ in 0..40 {
                append(&near, &mut back, &all, 1);
                check(&near, &back, &all);
            }
            drop(back);
            [&near, &far].into_iter().for_each(is_idle);
            near.evict_cached(0);
        }
    }
}

fn sum(states: &[usize]) -> usize {
    states.iter().sum()
}

/// Before its first append behind a hit, a state is in its checkpoint. What arrived is found in the
/// other pool, also a state that was kept there without a copy.
#[test]
fn hits_go_too_and_can_be_hit() {
    let (near, far, all) = (pool(400, &STATES), pool(400, &STATES), tokens(200));
    drop(compute(&near, 1, &all[..100]));
    let hit = near.admit_grouped(&AdmitRequest::new(SequenceId(2), &all[..120])).unwrap();
    assert_eq!(hit.len(), 100);
    let (mut moved, report) = block_on(near.migrate(hit, &far)).unwrap();
    assert_eq!((moved.len(), report.tokens), (100, 100));
    check(&far, &moved, &all);
    let again = far.admit_grouped(&AdmitRequest::new(SequenceId(3), &all)).unwrap();
    assert!(again.is_empty(), "no state was kept here");
    drop(again);
    append(&far, &mut moved, &all, 20);
    drop(moved);
    let again = far.admit_grouped(&AdmitRequest::new(SequenceId(3), &all)).unwrap();
    assert_eq!(again.len(), 120);
    check(&far, &again, &all);
    // A copy in a pool with the blocks of its tokens shares them, and copies its states.
    let (copy, report) = block_on(far.replicate(&again, &near)).unwrap();
    assert!(report.shared_blocks >= 25 && report.carried.blocks >= 5, "{report:?}");
    check(&near, &copy, &all);
    drop((again, copy));
    [&near, &far].into_iter().for_each(is_idle);
}

/// An abandoned batch takes the states with it: the sequence arrives without tokens.
#[test]
fn what_was_abandoned_stays() {
    let (near, far, all) = (pool(400, &STATES), pool(400, &STATES), tokens(100));
    let mut sequence = compute(&near, 1, &all[..50]);
    let mut batch = near.begin_batch();
    step(&mut batch, &mut sequence, &all, 10).unwrap();
    let error = near.export_copy(&sequence).map(drop).unwrap_err();
    assert!(matches!(error, TransferError::BeingWritten { .. }), "{error}");
    drop(batch);
    assert!(sequence.is_empty());
    let (mut moved, report) = block_on(near.migrate(sequence, &far)).unwrap();
    assert_eq!((moved.len(), report.tokens, moved.group(0).announced()), (0, 0, 60));
    append(&far, &mut moved, &all, 60);
    check(&far, &moved, &all);
    drop(moved);
    [&near, &far].into_iter().for_each(is_idle);
}

/// Unknown tokens that were final are lost with the states: new ones can be announced, as here.
#[test]
fn a_sequence_that_begins_again_is_not_cut() {
    let (near, far, all) = (pool(400, &STATES), pool(400, &STATES), tokens(100));
    let mut sequence = near.admit_grouped(&AdmitRequest::new(SequenceId(1), &all[..1])).unwrap();
    let mut batch = near.begin_batch();
    batch.append_grouped(&mut sequence, Tokens::Final(8)).unwrap();
    batch.finish();
    assert!(sequence.announce(&all[1..2]).is_err());
    let mut batch = near.begin_batch();
    batch.append_grouped(&mut sequence, Tokens::Final(4)).unwrap();
    drop(batch);
    let (mut moved, _) = block_on(near.migrate(sequence, &far)).unwrap();
    assert_eq!((moved.len(), moved.announced()), (0, 1));
    moved.announce(&all[1..20]).unwrap();
    append(&far, &mut moved, &all, 20);
    check(&far, &moved, &all);
    drop(moved);
    [&near, &far].into_iter().for_each(is_idle);
}

/// A batch that was abandoned wrote to earlier tokens: the states are of tokens that are withdrawn,
/// so the sequence begins again wherever it goes.
#[test]
fn a_state_of_withdrawn_tokens_stays() {
    let (near, far, all) = (pool(400, &STATES), pool(400, &STATES), tokens(100));
    let mut sequence = compute(&near, 1, &all[..50]);
    let mut batch = near.begin_batch();
    batch
        .store_grouped(&mut sequence, (1, 0), 49..50, (&[1.0f32][..]).into(), (&[1.0f32][..]).into())
        .unwrap();
    drop(batch);
    let (mut moved, report) = block_on(near.migrate(sequence, &far)).unwrap();
    assert_eq!((moved.len(), report.tokens, moved.announced()), (0, 0, 50));
    append(&far, &mut moved, &all, 60);
    check(&far, &moved, &all);
    drop(moved);
    [&near, &far].into_iter().for_each(is_idle);
}

/// A batch has only written a state: transfers wait for its end, but not beyond their deadline.
#[test]
fn transfers_wait_for_batches_that_write_a_state() {
    let (near, far, all) = (pool(400, &STATES), pool(400, &STATES), tokens(100));
    let mut sequence = compute(&near, 1, &all[..50]);
    let mut batch = near.begin_batch();
    batch.store_state(&mut sequence, 1, &bytes(1, &all[..50])).unwrap();
    let soon = || Instant::now() + Duration::from_millis(20);
    let (sent, received) = std::sync::mpsc::channel();
    let to = far.clone();
    let from = near.clone();
    // On a thread, because a spin would never return.
    let waiter = std::thread::spawn(move || {
        let error = block_on(from.replicate(&sequence, &to).until(soon())).unwrap_err();
        sent.send(error).unwrap();
        let error = block_on(from.migrate(sequence, &to).until(soon())).unwrap_err();
        sent.send(error.error).unwrap();
        let long = Instant::now() + Duration::from_secs(60);
        block_on(from.migrate(*error.sequence, &to).until(long)).unwrap().0
    });
    for _ in 0..2 {
        let error = received.recv_timeout(Duration::from_secs(20)).expect("a deadline");
        assert!(matches!(error, TransferError::BeingWritten { .. }), "{error}");
    }
    batch.finish();
    let moved = waiter.join().unwrap();
    check(&far, &moved, &all);
    drop(moved);
    [&near, &far].into_iter().for_each(is_idle);
}

/// Neither an error nor a dropped future leaves anything behind, and the sequence is as before.
#[test]
fn all_groups_go_or_none() {
    let (near, all) = (pool(400, &STATES), tokens(200));
    let sequence = compute(&near, 1, &all[..100]);
    let held = sequence.held_blocks();
    let small = pool(held - 1, &STATES);
    let error = block_on(near.migrate(sequence, &small)).unwrap_err();
    assert!(matches!(error.error, TransferError::Alloc(AllocError::TooLarge { .. })), "{}", error.error);
    is_idle(&small);
    let far = pool(held, &STATES);
    // One block is missing; then enough are free, but no run.
    for leased in [vec![0], vec![5, 8, 11, 14]] {
        let mut leases: Vec<_> =
            (0..held).map(|_| far.allocate_owned(AllocRequest::new(1)).unwrap()).collect();
        let mut place = 0;
        leases.retain(|_| (place += 1, leased.contains(&(place - 1))).1);
        let refused = block_on(near.replicate(&*error.sequence, &far)).unwrap_err();
        assert!(matches!(refused, TransferError::Alloc(_)), "{refused}");
        assert_eq!((far.sequence_count(), far.free_blocks()), (0, held - leases.len()));
        let soon = Instant::now() + Duration::from_millis(5);
        let waited = block_on(far.resume(&*error.sequence, ResumeOptions::new()).until(soon)).unwrap_err();
        assert_ne!(waited.retry(), Retry::Never, "{waited}");
        drop(leases);
        is_idle(&far);
    }
    check(&near, &error.sequence, &all);
    // Kept without a poll, or dropped while it waits.
    let sequence = *error.sequence;
    let copy = near.replicate(&sequence, &far);
    assert_eq!(far.sequence_count(), 0);
    drop(copy);
    let lease = far.allocate_owned(AllocRequest::new(1)).unwrap();
    {
        let mut moved = pin!(near.migrate(sequence, &far).into_future());
        let poll = moved.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(poll, Poll::Pending));
        assert_eq!((far.sequence_count(), far.stats().waiting), (1, 1));
    }
    drop(lease);
    [&near, &far].into_iter().for_each(is_idle);
}

/// While a transfer may read its states, a sequence does not overwrite them.
#[test]
fn a_state_that_is_read_is_not_written() {
    let (near, all) = (pool(400, &STATES), tokens(200));
    let mut sequence = compute(&near, 1, &all[..50]);
    let export = near.export_copy(&sequence).unwrap();
    let mut batch = near.begin_batch();
    let refused = |error| matches!(error, SequenceError::NotWritable { position: 50, .. });
    assert!(refused(batch.append_grouped(&mut sequence, &all[50..51]).unwrap_err()));
    assert!(refused(batch.store_state(&mut sequence, 0, &bytes(0, &all)).unwrap_err()));
    batch.finish();
    let piece = export.piece(&(0..export.len() as u32).collect::<Vec<_>>()).unwrap();
    drop(export);
    let mut batch = near.begin_batch();
    assert!(refused(step(&mut batch, &mut sequence, &all, 1).unwrap_err()), "a transport holds it");
    batch.finish();
    drop(piece);
    append(&near, &mut sequence, &all, 1);
    check(&near, &sequence, &all);
    drop(sequence);
    is_idle(&near);
}

/// The manifest of a sequence with all kinds of lists.
fn manifest(sequence: &GroupedSequence, near: &Pool) -> Manifest {
    near.export_copy(sequence).unwrap().manifest().unwrap()
}

#[test]
fn other_groups_are_refused_by_name() {
    let (near, all) = (pool(400, &STATES), tokens(100));
    let mut sequence = compute(&near, 1, &all[..50]);
    let manifest = manifest(&sequence, &near);
    let window = |tokens| Some(Window::new(tokens).unwrap());
    let (plain, of) = (plain(), |builder: kvpool::PoolBuilder| builder.blocks(400).build().unwrap());
    let sinks = Some(Window::new(9).unwrap().sinks(5));
    let groups = |groups: [_; 3]| Pool::builder(plain.clone()).groups(groups);
    for (far, want) in [
        (of(Pool::builder(plain.clone())), "lists of blocks: got 3, expected 1, as in the target"),
        (of(groups([None, window(24), window(9)]).states(STATES)), {
            "list of blocks at index 2: got a window of 9 tokens and 5 sinks in blocks of 4, \
             expected a window of 9 tokens in blocks of 4, as in the target"
        }),
        (of(groups([None, window(24), sinks]).list_tokens([4, 8, 4]).states(STATES)), {
            "list of blocks at index 1: got a window of 24 tokens in blocks of 4, \
             expected a window of 24 tokens in blocks of 8"
        }),
        (of(groups([None, window(24), sinks])), "states: got frames [3, 2], expected frames []"),
        (
            of(groups([None, window(24), sinks]).states([2, 3])),
            "states: got frames [3, 2], expected frames [2, 3]",
        ),
    ] {
        let error = block_on(near.migrate(sequence, &far)).unwrap_err();
        assert!(matches!(error.error, TransferError::Invalid(_)));
        assert!(error.error.to_string().starts_with(want), "{}", error.error);
        sequence = *error.sequence;
        let error = far.import(&manifest).map(drop).unwrap_err();
        assert!(error.to_string().starts_with(want), "{error}");
        is_idle(&far);
    }
    // One of its lists is no sequence of its own.
    let far = pool(400, &STATES);
    let error = block_on(near.replicate(sequence.group(1), &far)).unwrap_err();
    assert!(matches!(error, TransferError::Sequence(_)), "{error}");
    check(&near, &sequence, &all);
}

/// A manifest and packed blocks carry everything; lies about groups are found before memory is taken.
#[cfg(feature = "serde")]
#[test]
fn a_manifest_carries_all_groups() {
    use serde_json::{Value, json};

    let (near, far, all) = (pool(400, &STATES), pool(400, &STATES), tokens(100));
    let export = near.export(compute(&near, 1, &all[..61])).unwrap();
    let manifest = export.manifest().unwrap();
    assert_eq!(manifest.blocks(), export.len());
    let honest = serde_json::to_value(&manifest).unwrap();
    let list = "/contents/Sequence/lists/1";
    for (path, value, want) in [
        (format!("{list}/front"), json!(99), "checksums"),
        ("/contents/Sequence/lists/0/front".into(), json!(1), "blocks given up"),
        (format!("{list}/keeps/block_tokens"), json!(0), ""),
        (format!("{list}/keeps/window"), json!([0, 0]), "window: got 0"),
        (format!("{list}/keeps/window"), json!([u32::MAX, u32::MAX]), ""),
        (format!("{list}/known/tokens/8"), json!(9), "list of blocks at index 1: got one with other tokens"),
        (
            format!("{list}/known/hashes/2"),
            honest.pointer(&format!("{list}/known/hashes/3")).unwrap().clone(),
            { "hashes at index 2" },
        ),
        (format!("{list}/known/hashes"), json!([]), "hashes"),
        ("/contents/Sequence/lists".into(), json!([]), "checksums"),
        ("/contents/Sequence/lists".into(), json!(vec![honest.pointer(list).unwrap(); 5000]), ""),
        ("/contents/Sequence/states".into(), json!(vec![0; 5000]), ""),
        ("/contents/Sequence/states".into(), json!([u32::MAX, u32::MAX]), "blocks"),
        ("/contents/Sequence/length".into(), json!(u32::MAX), ""),
    ] {
        let mut lie: Value = honest.clone();
        *lie.pointer_mut(&path).unwrap() = value;
        let error = far.import(&serde_json::from_value(lie).unwrap()).unwrap_err();
        assert!(matches!(error, TransferError::Invalid(_)), "{path}: {error}");
        assert!(error.to_string().starts_with(want), "{path}: {error}");
    }
    is_idle(&far);
    let manifest: Manifest = serde_json::from_value(honest).unwrap();
    drop(far.import(&manifest).unwrap());
    is_idle(&far);
    let mut import = far.import(&manifest).unwrap();
    let missing = import.missing().to_vec();
    assert_eq!(missing.len(), manifest.blocks());
    for &place in &missing {
        let mut packed = export.packed(place).unwrap();
        packed[3] ^= 1;
        let wrong = import.write(place, None, &packed).unwrap_err();
        assert!(matches!(wrong, TransferError::Checksum { .. }), "{wrong}");
        packed[3] ^= 1;
        import.write(place, None, &packed).unwrap();
    }
    assert!(import.verify().unwrap().is_empty());
    let Imported::Grouped(mut arrived) = import.commit().unwrap() else { panic!("it has several lists") };
    let _ = export.finish();
    check(&far, &arrived, &all);
    append(&far, &mut arrived, &all, 30);
    check(&far, &arrived, &all);
    drop(arrived);
    [&near, &far].into_iter().for_each(is_idle);
}

/// The storage fails while a state is restored, and while it is kept: nothing has changed.
#[test]
fn failed_copies_of_states_change_nothing() {
    let (fails, copies) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let hook = {
        let (fails, copies) = (fails.clone(), copies.clone());
        move |call| {
            copies.fetch_add(usize::from(call == Call::Copy), Relaxed);
            match call == Call::Copy && fails.load(Relaxed) {
                true => Err(StorageError::Memory { bytes: 1, reason: std::io::ErrorKind::Other }),
                false => Ok(()),
            }
        }
    };
    let storage = Arc::new(Hooked::new(plain(), 201, 201, hook));
    let builder = builder(200, &STATES).storage(storage).prefix_cache(PrefixConfig::new());
    let (pool, all) = (builder.build().unwrap(), tokens(100));
    let mut first = compute(&pool, 1, &all[..62]);
    append(&pool, &mut first, &all, 1);
    fails.store(true, Relaxed);
    let (cached, used) = (pool.cached_blocks().len(), pool.stats().used);
    let mut batch = pool.begin_batch();
    let error = step(&mut batch, &mut first, &all, 1).unwrap_err();
    assert!(matches!(error, SequenceError::Storage(_)), "{error}");
    assert_eq!((first.len(), pool.cached_blocks().len()), (64, cached));
    assert_eq!(pool.stats().used, used + usize::from(used < first.held_blocks()));
    batch.finish();
    drop(first);
    let mut hit = pool.admit_grouped(&AdmitRequest::new(SequenceId(2), &all)).unwrap();
    assert_eq!(hit.len(), 64);
    let mut batch = pool.begin_batch();
    let error = batch.store_state(&mut hit, 0, &bytes(0, &all)).unwrap_err();
    assert!(matches!(error, SequenceError::Invalid { .. }), "{error}");
    let error = step(&mut batch, &mut hit, &all, 5).unwrap_err();
    assert!(matches!(error, SequenceError::Storage(_)), "{error}");
    fails.store(false, Relaxed);
    let before = copies.load(Relaxed);
    step(&mut batch, &mut hit, &all, 5).unwrap();
    batch.finish();
    assert_eq!(copies.load(Relaxed), before + STATES.len());
    let mut batch = pool.begin_batch();
    let short = batch.store_state(&mut hit, 0, &[0; 95]).unwrap_err();
    assert!(matches!(short, SequenceError::Storage(_)), "{short}");
    assert!(matches!(batch.load_state(&hit, 2, &mut []), Err(SequenceError::Invalid { .. })));
    batch.finish();
    check(&pool, &hit, &all);
    drop(hit);
    is_idle(&pool);
}

/// A model with unequal blocks and a state, in host memory: frames go as they are, and only the engine
/// knows what lies in them.
#[test]
fn a_model_in_host_memory_goes_and_comes_back() {
    use kvpool::storage::groups::{GroupOptions, LayerCache, LayerGroups, Reach, Row};

    let cache = |row, reach| vec![LayerCache { row, reach }];
    let heads = |kv_heads| Row::Heads { kv_heads, k_dim: 64, v_dim: 64 };
    let window = || cache(heads(8), Reach::Window { tokens: 128, sinks: 0 });
    let layers = [
        window(),
        window(),
        cache(heads(2), Reach::All),
        cache(heads(2), Reach::Compressed { ratio: 4 }),
        cache(Row::bytes(100_000), Reach::State),
    ];
    let model = LayerGroups::of_layers(&layers, GroupOptions::new()).unwrap();
    let pool = || Pool::layered(&model).unwrap().host_storage().blocks(2_000).build().unwrap();
    let (near, far) = (pool(), pool());
    let frame = near.layout().packed_bytes();
    assert_eq!(frame as u64, model.frame_bytes());
    let prompt: Vec<u32> = (0..1_000).collect();
    let mut sequence = near.admit_grouped(&AdmitRequest::new(SequenceId(1), &prompt)).unwrap();
    for _ in 0..4 {
        let mut batch = near.begin_batch();
        batch.append_grouped(&mut sequence, Tokens::Final(250)).unwrap();
        batch.finish();
    }
    assert!(near.layout().block_tokens() != sequence.group(1).block_tokens());
    let bytes = |list: usize, place: usize| vec![(list * 100 + place) as u8 | 1; frame];
    let frames = |pool: &Pool, sequence: &GroupedSequence, list: usize| {
        let (mut table, batch) = (BlockTable::new(), pool.begin_batch());
        batch.block_table([sequence.group(list)], &mut table).unwrap();
        batch.finish();
        let frames = table.row(0).iter().enumerate().filter(|&(_, &frame)| frame != 0);
        frames
            .map(|(place, &frame)| (place, kvpool::Run { start: kvpool::FrameId(frame as u32), len: 1 }))
            .collect::<Vec<_>>()
    };
    let state: Vec<u8> = (0..sequence.state(0).len() * frame).map(|at| at as u8 ^ (at >> 8) as u8).collect();
    for list in 0..sequence.groups() {
        for (place, run) in frames(&near, &sequence, list) {
            // SAFETY: the frames belong to the sequence, and nothing else runs.
            unsafe { near.storage().unwrap().unpack(&[run], &bytes(list, place)) }.unwrap();
        }
    }
    let mut batch = near.begin_batch();
    batch.store_state(&mut sequence, 0, &state).unwrap();
    let mut k = [0; 8];
    let rows = kvpool::storage::ElementsMut::new(Dtype::Fp8E4M3, &mut k).unwrap();
    let none = kvpool::storage::ElementsMut::none();
    let error = batch.load(sequence.group(1), 0, 999..1_000, rows, none).unwrap_err();
    assert!(error.to_string().contains("tokens of a block"), "{error}");
    batch.finish();
    let gone = block_on(near.preempt(sequence, Preempt::Swap(&far))).unwrap();
    let swapped = gone.swapped.unwrap().sequence;
    let (back, _) = block_on(near.resume(&swapped, ResumeOptions::new())).unwrap();
    for (pool, sequence) in [(&far, &swapped), (&near, &back)] {
        for list in 0..sequence.groups() {
            for (place, run) in frames(pool, sequence, list) {
                let mut read = vec![0; frame];
                // SAFETY: as above.
                unsafe { pool.storage().unwrap().pack(&[run], &mut read) }.unwrap();
                assert!(read == bytes(list, place), "block {place} of list {list}");
            }
        }
        let (mut read, batch) = (vec![0; state.len()], pool.begin_batch());
        batch.load_state(sequence, 0, &mut read).unwrap();
        batch.finish();
        assert!(read == state);
    }
    drop((swapped, back));
    [&near, &far].into_iter().for_each(is_idle);
}
