//! Pools with several groups of layers: one length, one hit, all groups or none.
#![cfg(not(any(kvpool_loom, miri)))]

mod drafts;
mod growth;
mod lies;
#[cfg(feature = "model-config")]
mod models;
mod moving;
mod nodes;
mod properties;
mod sharing;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use kvpool::prefix::{HashKey, PrefixConfig, PrefixKeys};
use kvpool::{
    AdmitRequest, AllocError, Append, Batch, BlockTable, Dtype, GroupedSequence, KvLayout, Pool,
    SequenceError, SequenceId, StepError, StorageError, Tokens, TransferError, Window,
};
use kvpool_testkit::storages::{Call, Hooked};
use pollster::block_on;

const WINDOWS: [Option<(usize, u32)>; 3] = [None, Some((24, 0)), Some((9, 5))];

fn pool(blocks: usize, block_tokens: usize) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).dtype(Dtype::F32);
    let cache = PrefixConfig::new().key(HashKey::from_bytes([7; 32]));
    let window = |(tokens, sinks)| Window::new(tokens).unwrap().sinks(sinks);
    Pool::builder(layout.block_tokens(block_tokens).build().unwrap())
        .blocks(blocks)
        .threads(1)
        .prefix_cache(cache)
        .groups(WINDOWS.map(|keeps| keeps.map(window)))
        .build()
        .unwrap()
}

/// What a group stores for the last of these tokens: it depends on all of them, and on the group.
fn stamp(group: usize, tokens: &[u32]) -> f32 {
    let mix = |sum: u32, token: &u32| sum.wrapping_mul(0x01000193) ^ token.wrapping_add(1);
    (tokens.iter().fold(0x811c9dc5 ^ group as u32, mix) >> 8) as f32
}

fn append(
    batch: &mut Batch,
    sequence: &mut GroupedSequence,
    all: &[u32],
    tokens: Tokens<'_>,
) -> Result<(), SequenceError> {
    let new = batch.append_grouped(sequence, tokens)?.tokens;
    for group in 0..WINDOWS.len() {
        let stamps: Vec<f32> = new.clone().map(|position| stamp(group, &all[..=position])).collect();
        batch.store_grouped(sequence, (group, 0), new.clone(), (&stamps[..]).into(), (&stamps[..]).into())?;
    }
    Ok(())
}

/// Checks that the next token finds what it sees in each group.
fn check(pool: &Pool, sequence: &GroupedSequence, all: &[u32]) {
    let batch = &mut pool.begin_batch();
    let length = sequence.len();
    for (group, keeps) in WINDOWS.into_iter().enumerate() {
        assert_eq!(sequence.group(group).len(), length, "group {group}");
        let (window, sinks) = keeps.map_or((usize::MAX, 0), |(window, sinks)| (window, sinks as usize));
        let sees = |&position: &usize| position < sinks || position.saturating_add(window) > length;
        for position in (0..length).filter(sees) {
            let (mut k, mut v) = ([0.0], [0.0]);
            let tokens = position..position + 1;
            batch.load(sequence.group(group), 0, tokens, (&mut k[..]).into(), (&mut v[..]).into()).unwrap();
            let expected = [stamp(group, &all[..=position])];
            assert_eq!((k, v), (expected, expected), "token {position} of {length} in group {group}");
        }
        let mut table = BlockTable::new();
        batch.block_table([sequence.group(group)], &mut table).unwrap();
        let null = table.row(0).iter().filter(|&&frame| frame == 0).count();
        assert_eq!(null, sequence.group(group).blocks_given_up());
    }
}

fn compute(pool: &Pool, id: u64, all: &[u32]) -> GroupedSequence {
    let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(id), all)).unwrap();
    check(pool, &sequence, all);
    let mut batch = pool.begin_batch();
    append(&mut batch, &mut sequence, all, Tokens::Announced(usize::MAX)).unwrap();
    batch.finish();
    assert_eq!((sequence.len(), sequence.reserved_blocks()), (all.len(), 0));
    sequence
}

/// A prompt whose window is cached at one boundary and whose full blocks at a longer one is hit
/// where both are.
#[test]
fn a_hit_is_one_boundary() {
    let (pool, all) = (pool(400, 4), (0..200).collect::<Vec<u32>>());
    let mut first = compute(&pool, 1, &all[..100]);
    // The windows give up what precedes the new end.
    let mut batch = pool.begin_batch();
    append(&mut batch, &mut first, &all, Tokens::Ids(&all[100..160])).unwrap();
    batch.finish();
    drop(first);
    let again = pool.admit_grouped(&AdmitRequest::new(SequenceId(2), &all)).unwrap();
    assert_eq!(again.len(), 160);
    check(&pool, &again, &all);
    drop(again);
    // The third group loses a block of its window: all groups agree on an earlier boundary.
    let lost = {
        let sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(3), &all[..161])).unwrap();
        sequence.group(2).block_hashes()[38]
    };
    assert_eq!(pool.uncache(&[lost]).evicted_blocks, 1);
    let third = pool.admit_grouped(&AdmitRequest::new(SequenceId(4), &all)).unwrap();
    assert_eq!(third.len(), 152, "the window before the lost block");
    check(&pool, &third, &all);
    drop(third);
    // The first group loses its first block: nothing can be hit.
    let lost =
        pool.admit_grouped(&AdmitRequest::new(SequenceId(5), &all)).unwrap().group(0).block_hashes()[0];
    assert_eq!(pool.uncache(&[lost]).evicted_blocks, 1);
    let none = pool.admit_grouped(&AdmitRequest::new(SequenceId(6), &all)).unwrap();
    assert!(none.is_empty());
    drop(none);
    pool.audit().unwrap();
}

#[test]
fn groups_do_not_find_each_others_blocks() {
    let (pool, all) = (pool(400, 4), (0..80).collect::<Vec<u32>>());
    let sequence = compute(&pool, 1, &all);
    let hashes: Vec<_> = (0..3).map(|group| sequence.group(group).block_hashes().to_vec()).collect();
    for ((first, second), third) in hashes[0].iter().zip(&hashes[1]).zip(&hashes[2]) {
        assert!(first != second && second != third && first != third);
    }
    let blocks = |group: usize| sequence.group(group).blocks().collect::<Vec<_>>();
    let shared = blocks(0).into_iter().filter(|id| blocks(1).contains(id) || blocks(2).contains(id));
    assert_eq!(shared.count(), 0);
}

#[test]
fn all_groups_or_none() {
    let (pool, all) = (pool(30, 4), (0..100).collect::<Vec<u32>>());
    // 11 blocks in each group.
    let refused = pool.admit_grouped(&AdmitRequest::new(SequenceId(1), &all[..44])).unwrap_err();
    assert!(
        matches!(refused, SequenceError::Alloc(AllocError::TooLarge { asked: 33, total: 30 })),
        "{refused}"
    );
    assert_eq!((pool.free_blocks(), pool.sequence_count()), (30, 0));
    let mut sequence = compute(&pool, 1, &all[..36]);
    assert_eq!(pool.stats().used, 27);
    // Each group needs one block; the third does not get one.
    let lease = pool.allocate(kvpool::AllocRequest::new(1)).unwrap();
    let mut batch = pool.begin_batch();
    let held = sequence.held_blocks();
    let error = append(&mut batch, &mut sequence, &all, Tokens::Ids(&[36])).unwrap_err();
    assert!(matches!(error, SequenceError::Alloc(AllocError::Exhausted { .. })), "{error}");
    assert_eq!((sequence.len(), sequence.reserved_blocks()), (36, 0));
    assert!(sequence.held_blocks() <= held);
    drop(lease);
    batch.finish();
    check(&pool, &sequence, &all);
    let mut batch = pool.begin_batch();
    append(&mut batch, &mut sequence, &all, Tokens::Ids(&[36])).unwrap();
    batch.finish();
    check(&pool, &sequence, &all);
    // A request waits in one place for the blocks of all groups, and is served by a close.
    let waiting = thread::scope(|scope| {
        let request = AdmitRequest::new(SequenceId(2), &all[50..86]);
        let waits = scope.spawn({
            let pool = &pool;
            move || block_on(pool.admit_grouped_async(&request)).unwrap()
        });
        while pool.stats().waiting == 0 {
            thread::yield_now();
        }
        drop(sequence);
        waits.join().unwrap()
    });
    assert_eq!(waiting.reserved_blocks(), 27);
    drop(waiting);
    pool.audit().unwrap();
    assert_eq!(pool.stats().used, 0);
}

#[test]
fn calls_for_one_list_are_refused() {
    let pool = pool(100, 4);
    let refused =
        |error: SequenceError| assert!(error.to_string().contains("one group of layers"), "{error}");
    refused(pool.sequence(SequenceId(1)).open().unwrap_err());
    refused(pool.sequence(SequenceId(1)).tokens(&[1, 2, 3]).unwrap_err());
    refused(pool.admit(&AdmitRequest::new(SequenceId(1), &[1, 2, 3])).unwrap_err());
    let layout = pool.layout().clone();
    let plain = Pool::builder(layout.clone()).blocks(100).build().unwrap();
    let sequence = plain.sequence(SequenceId(1)).open().unwrap();
    let error = block_on(plain.migrate(sequence, &pool)).expect_err("the target has three groups");
    assert!(error.error.to_string().starts_with("lists of blocks: got 1, expected 3"), "{}", error.error);
    for groups in [0, 65] {
        let error = Pool::builder(layout.clone()).blocks(100).groups(vec![None; groups]).build().unwrap_err();
        assert!(error.to_string().contains("groups"), "{error}");
    }
    // One group is a pool as usual, also by its grouped calls.
    let mut one = plain.admit_grouped(&AdmitRequest::new(SequenceId(2), &[1, 2, 3])).unwrap();
    let mut batch = plain.begin_batch();
    batch.append_grouped(&mut one, 3).unwrap();
    batch.finish();
    let mut foreign = pool.begin_batch();
    assert!(matches!(foreign.append_grouped(&mut one, 3), Err(SequenceError::ForeignSequence { .. })));
}

/// The copy of a shared last block fails in the second group: the first has not grown.
#[test]
fn a_failed_copy_grows_no_group() {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).dtype(Dtype::F32).block_tokens(4);
    let (layout, copies) = (layout.build().unwrap(), Arc::new(AtomicUsize::new(0)));
    let hook = {
        let copies = copies.clone();
        move |call| {
            if call == Call::Copy && copies.fetch_add(1, Relaxed) == 1 {
                return Err(StorageError::Memory { bytes: 1, reason: std::io::ErrorKind::Other });
            }
            Ok(())
        }
    };
    let storage = Hooked::new(layout.clone(), 101, 101, hook);
    let builder = Pool::builder(layout).blocks(100).storage(Arc::new(storage)).threads(1);
    let pool = builder.prefix_cache(PrefixConfig::new()).groups([None; 3]).build().unwrap();
    let all: Vec<u32> = (0..20).collect();
    let admit = |id, tokens| pool.admit_grouped(&AdmitRequest::new(SequenceId(id), tokens)).unwrap();
    let mut sequence = admit(1, &all[..10]);
    let mut batch = pool.begin_batch();
    batch.append_grouped(&mut sequence, Tokens::Announced(10)).unwrap();
    batch.finish();
    let mut fork = sequence.fork(SequenceId(2)).unwrap();
    let mut batch = pool.begin_batch();
    let error = batch.append_grouped(&mut fork, &all[10..15]).unwrap_err();
    assert!(matches!(error, SequenceError::Storage(_)), "{error}");
    for group in 0..3 {
        assert_eq!((fork.group(group).len(), fork.group(group).announced()), (10, 10), "group {group}");
    }
    assert_eq!((fork.reserved_blocks(), copies.load(Relaxed)), (0, 2));
    let appended = batch.append_grouped(&mut fork, &all[10..15]).unwrap();
    assert_eq!((appended.tokens, appended.copies.len()), (10..15, 2), "the first copy was made before");
    batch.finish();
    assert_eq!((fork.len(), sequence.len()), (15, 10));
    // The copy fails under a batch that is abandoned after another one has gone on.
    let mut third = fork.fork(SequenceId(3)).unwrap();
    let mut failed = pool.begin_batch();
    copies.store(0, Relaxed);
    assert!(failed.append_grouped(&mut third, &all[15..16]).is_err());
    third.announce(&all[15..18]).unwrap();
    let mut batch = pool.begin_batch();
    assert_eq!(batch.append_grouped(&mut third, Tokens::Announced(9)).unwrap().tokens, 15..18);
    batch.finish();
    drop(failed);
    let mut batch = pool.begin_batch();
    assert_eq!(batch.append_grouped(&mut third, &all[15..16]).unwrap().tokens, 15..16);
    batch.finish();
    assert!((0..3).all(|group| third.group(group).len() == 16));
    drop((sequence, fork, third));
    pool.audit().unwrap();
    assert_eq!(pool.stats().used, 0);
}

/// Threads admit, grow and close in a pool that is too small for them.
#[test]
fn groups_are_hit_beside_evictions() {
    const ROUNDS: u64 = if cfg!(debug_assertions) { 150 } else { 1_500 };
    let pool = pool(160, 4);
    let hits: usize = thread::scope(|scope| {
        let run = |thread: u64| {
            let pool = &pool;
            move || {
                let (mut random, mut hits) = (fastrand::Rng::with_seed(thread), 0);
                for round in 0..ROUNDS {
                    let (prompt, tokens) = (random.u32(..4), random.usize(8..90));
                    let all: Vec<u32> = [prompt].into_iter().chain(0..tokens as u32).collect();
                    let id = SequenceId(thread << 32 | round);
                    let request = AdmitRequest::new(id, &all).chunk(16);
                    let Ok(mut sequence) = pool.admit_grouped(&request) else { continue };
                    hits += sequence.len();
                    check(pool, &sequence, &all);
                    let mut batch = pool.begin_batch();
                    while sequence.len() < all.len()
                        && append(&mut batch, &mut sequence, &all, Tokens::Announced(16)).is_ok()
                    {
                        batch.finish();
                        batch = pool.begin_batch();
                        check(pool, &sequence, &all);
                    }
                    batch.finish();
                }
                hits
            }
        };
        let threads: Vec<_> = (0..4).map(|thread| scope.spawn(run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(hits > 0, "nothing was hit");
    pool.audit().unwrap();
    assert_eq!(pool.stats().used, 0);
}

/// Without storage the engine makes the copies: it learns of them for each group.
#[test]
fn copies_of_all_groups_are_reported() {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(4).build().unwrap();
    let builder = Pool::builder(layout).blocks(100).without_storage().threads(1);
    let pool = builder.groups([None, Some(Window::new(8).unwrap())]).build().unwrap();
    let all: Vec<u32> = (0..10).collect();
    let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(1), &all)).unwrap();
    let mut batch = pool.begin_batch();
    batch.append_grouped(&mut sequence, 10).unwrap();
    batch.finish();
    let mut fork = sequence.fork(SequenceId(2)).unwrap();
    let shared = [0, 1].map(|group| sequence.group(group).handles().next_back().unwrap());
    let shared = shared.map(|handle| pool.info(handle).unwrap().frame);
    let mut batch = pool.begin_batch();
    let appended = batch.append_grouped(&mut fork, 5).unwrap();
    batch.finish();
    let from: Vec<_> = appended.copies.iter().map(|copy| (copy.group, copy.frames[0].src)).collect();
    assert_eq!((appended.tokens, from), (10..15, vec![(0, shared[0]), (1, shared[1])]));
    assert!(pool.sequence(SequenceId(3)).open().is_err());
    assert!(sequence.group(0).fork(SequenceId(3)).is_err(), "a list alone is not forked");
    let view = pool.view(SequenceId(2)).unwrap();
    assert_eq!((view.blocks().len(), view.group(1).unwrap().blocks().len()), (8, 4));
    assert!(view.group(2).is_none() && view.group(0).is_some());
    let other = Pool::builder(pool.layout().clone()).blocks(100).build().unwrap();
    assert!(block_on(pool.replicate(sequence.group(0), &other)).is_err());
    drop((sequence, fork));
    pool.audit().unwrap();
    assert_eq!((pool.stats().used, pool.sequence_count()), (0, 0));
}

fn lengths(sequence: &GroupedSequence) -> Vec<(usize, usize)> {
    (0..sequence.groups())
        .map(|group| sequence.group(group))
        .map(|part| (part.len(), part.announced()))
        .collect()
}

/// A batch that wrote earlier tokens in one group is withdrawn from all groups alike.
#[test]
fn an_abandoned_batch_is_of_all_groups() {
    let (pool, all) = (pool(300, 4), (0..100).collect::<Vec<u32>>());
    for way in 0..3 {
        let mut sequence = compute(&pool, way, &all[..6]);
        let mut batch = pool.begin_batch();
        append(&mut batch, &mut sequence, &all, Tokens::Ids(&all[6..7])).unwrap();
        let stamps = [0.0; 3];
        match way {
            0 => {
                let (k, v) = ((&stamps[..]).into(), (&stamps[..]).into());
                batch.store_grouped(&mut sequence, (1, 0), 4..7, k, v).unwrap();
            }
            1 => drop(batch.tile_mut_grouped::<f32>(&mut sequence, (2, 0), 1).unwrap().0),
            _ => {}
        }
        drop(batch);
        let left = if way < 2 { 4 } else { 6 };
        let mut batch = pool.begin_batch();
        let appended = batch.append_grouped(&mut sequence, 1_usize);
        assert_eq!(appended.unwrap().tokens, left..left + 1, "way {way}");
        drop(batch);
        sequence.truncate(left.min(4)).unwrap();
        let lengths = lengths(&sequence);
        assert!(lengths.iter().all(|&of| of == lengths[0] && of.0 == 4), "way {way}: {lengths:?}");
    }
    pool.audit().unwrap();
}

/// One group's last block is copied, the others' are written again: the batch is withdrawn alike.
#[test]
fn a_copy_in_one_group_is_withdrawn_from_all() {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(4).build().unwrap();
    let builder = Pool::builder(layout).blocks(100).without_storage().threads(1);
    let pool = builder.prefix_cache(PrefixConfig::new()).groups([None; 3]).build().unwrap();
    let all: Vec<u32> = (0..20).collect();
    let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(1), &all[..8])).unwrap();
    let mut batch = pool.begin_batch();
    batch.append_grouped(&mut sequence, Tokens::Announced(8)).unwrap();
    batch.finish();
    assert_eq!(pool.uncache(&[sequence.group(1).block_hashes()[1]]).kept_blocks, 1);
    sequence.truncate(6).unwrap();
    let mut batch = pool.begin_batch();
    let appended = batch.append_grouped(&mut sequence, &all[6..7]).unwrap();
    let copied: Vec<usize> = appended.copies.iter().map(|copy| copy.group).collect();
    assert_eq!(copied, [0, 2]);
    drop(batch);
    let mut batch = pool.begin_batch();
    assert_eq!(batch.append_grouped(&mut sequence, 1).unwrap().tokens, 4..5);
    batch.finish();
    assert!(lengths(&sequence).iter().all(|&(length, _)| length == 5));
    drop(sequence);
    pool.audit().unwrap();
}

#[test]
fn requests_that_groups_cannot_meet_are_refused() {
    let (pool, all) = (pool(30, 4), (0..100).collect::<Vec<u32>>());
    let admit = |request: AdmitRequest<'_>| pool.admit_grouped(&request).map(drop).unwrap_err();
    let request = || AdmitRequest::new(SequenceId(1), &all[..8]);
    let huge = admit(request().leave(usize::MAX));
    assert!(matches!(huge, SequenceError::Alloc(AllocError::TooLarge { .. })), "{huge}");
    assert!(admit(request().contiguous()).to_string().contains("contiguous"));
    assert!(admit(request().reuse_tail()).to_string().contains("reuse_tail"));
    // 9 blocks in each group; 11 would be 33, and the third group's window needs one less.
    let mut sequence = compute(&pool, 2, &all[..36]);
    let mut batch = pool.begin_batch();
    let error = batch.append_grouped(&mut sequence, &all[36..76]).unwrap_err();
    assert!(matches!(error, SequenceError::Alloc(AllocError::TooLarge { total: 30, .. })), "{error}");
    let error = sequence.reserve(40).unwrap_err();
    assert!(matches!(error, SequenceError::Alloc(AllocError::TooLarge { total: 30, .. })), "{error}");
    assert_eq!((sequence.len(), sequence.reserved_blocks()), (36, 0));
    batch.finish();
    drop(sequence);
    pool.audit().unwrap();
}

/// A step grows all sequences or none, and names those that lack blocks.
#[test]
fn a_step_is_of_all_sequences_or_none() {
    let (pool, all) = (pool(31, 4), (0..100).collect::<Vec<u32>>());
    let [mut one, mut two] = [1, 2].map(|id| compute(&pool, id, &all[id as usize..][..16]));
    let mut fork = two.fork(SequenceId(3)).unwrap();
    let lease = pool.allocate(kvpool::AllocRequest::new(2)).unwrap();
    let mut batch = pool.begin_batch();
    let mut step = [
        Append::new(&mut one, &all[..4]),
        Append::new(&mut two, &all[..8]),
        Append::new(&mut fork, Tokens::Draft(2)),
    ];
    let error = batch.step_grouped(&mut step).unwrap_err();
    let StepError::Lacking { sequences, error } = error else { panic!("{error}") };
    assert_eq!(sequences, [SequenceId(2), SequenceId(3)]);
    assert!(matches!(error, AllocError::Exhausted { .. }), "{error}");
    assert!([&one, &two, &fork].iter().all(|of| (of.len(), of.reserved_blocks()) == (16, 0)));
    let mut step = [Append::new(&mut one, &all[..4]), Append::new(&mut fork, Tokens::Draft(2))];
    let error = batch.step_grouped(&mut [Append::new(&mut two, Tokens::Announced(9))]);
    assert_eq!(error.unwrap()[0].tokens, 16..16);
    let error = batch.step_grouped(&mut step);
    assert!(matches!(error, Err(StepError::Lacking { .. })), "{error:?}");
    batch.finish();
    drop((two, lease));
    let mut batch = pool.begin_batch();
    let appended =
        batch.step_grouped(&mut [Append::new(&mut one, &all[..4]), Append::new(&mut fork, Tokens::Draft(2))]);
    let appended = appended.unwrap();
    assert_eq!([&appended[0].tokens, &appended[1].tokens], [&(16..20), &(16..18)]);
    assert_eq!([one.len(), one.committed(), fork.len(), fork.committed()], [20, 20, 18, 16]);
    assert_eq!((one.announced(), fork.announced()), (20, 16));
    // One that is refused keeps the others from growing.
    let other = self::pool(30, 4);
    let mut foreign = compute(&other, 4, &all[..4]);
    let error = batch.step_grouped(&mut [Append::new(&mut one, 1), Append::new(&mut foreign, 1)]);
    let Err(StepError::Sequence { id: SequenceId(4), error }) = error else { panic!("{error:?}") };
    assert!(matches!(error, SequenceError::ForeignSequence { .. }), "{error}");
    assert_eq!((one.len(), one.reserved_blocks(), foreign.len()), (20, 0, 4));
    batch.finish();
    drop((one, fork, foreign));
    pool.audit().unwrap();
    assert_eq!(pool.stats().used, 0);
}

/// What an admission would take is counted without an id, and a pinned prefix keeps what a hit
/// needs.
#[test]
fn a_prefix_of_groups_is_counted_and_pinned() {
    let (pool, all) = (pool(200, 4), (0..100).collect::<Vec<u32>>());
    let request = AdmitRequest::new(SequenceId(1), &all);
    assert_eq!(pool.blocks_needed(&request).unwrap(), 75);
    let keys = PrefixKeys::new();
    assert!(pool.pin_prefix(&keys, &all).unwrap_err().to_string().contains("100"), "nothing is cached");
    let sequence = compute(&pool, 1, &all[..80]);
    let needed = pool.blocks_needed(&request).unwrap();
    drop(sequence);
    let (free, cold) = (pool.available_blocks(), pool.blocks_needed(&request).unwrap());
    assert!(needed < cold && cold <= 75, "{needed} of {cold}: the prefix is evictable now");
    let admitted = pool.admit_grouped(&request).unwrap();
    assert_eq!((admitted.len(), pool.available_blocks()), (80, free - cold));
    drop(admitted);
    let pinned = pool.pin_prefix(&keys, &all[..80]).unwrap();
    // All blocks, those of 23 tokens, and those of 8 and of the sinks.
    assert_eq!((pinned.tokens(), pinned.blocks().len()), (80, 20 + 6 + 2 + 2));
    pool.evict_cached(0);
    assert_eq!((pool.stats().evictable, pool.stats().used, pool.sequence_count()), (0, 30, 0));
    assert_eq!(pool.blocks_needed(&request).unwrap(), needed);
    let admitted = pool.admit_grouped(&request).unwrap();
    check(&pool, &admitted, &all);
    assert_eq!(admitted.len(), 80);
    drop((admitted, pinned));
    pool.audit().unwrap();
    assert_eq!(pool.stats().used, 0);
}

/// A later store to an earlier open block cannot let a withdrawal cut a group below its window.
#[test]
fn a_store_behind_what_a_group_gave_up() {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).dtype(Dtype::F32).block_tokens(4);
    let builder = Pool::builder(layout.build().unwrap()).blocks(100).threads(1);
    let pool = builder.groups([None, Some(Window::new(4).unwrap())]).build().unwrap();
    let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(1), &[0; 16])).unwrap();
    let (mut earlier, mut later) = (pool.begin_batch(), pool.begin_batch());
    earlier.append_grouped(&mut sequence, Tokens::Draft(16)).unwrap();
    sequence.commit(16).unwrap();
    let stamps = [0.0_f32; 4];
    let (k, v) = ((&stamps[..]).into(), (&stamps[..]).into());
    later.store_grouped(&mut sequence, (0, 0), 12..16, k, v).unwrap();
    earlier.finish();
    later.append_grouped(&mut sequence, 4).unwrap();
    let stored = later.store_grouped(&mut sequence, (0, 0), 4..8, k, v);
    drop(later);
    let mut batch = pool.begin_batch();
    batch.append_grouped(&mut sequence, 1).unwrap();
    let (start, held) = (sequence.len() - 1, sequence.held_blocks());
    let mut table = BlockTable::new();
    batch.block_table([sequence.group(1)], &mut table).unwrap();
    let sees = start.saturating_sub(3) / 4;
    assert!(table.row(0)[sees..].iter().all(|&frame| frame != 0), "{stored:?}: {start}, {:?}", table.row(0));
    assert!(held > 0);
    batch.finish();
    drop(sequence);
    pool.audit().unwrap();
}

/// The maximum of references refuses a fork, which leaves nothing behind.
#[test]
fn a_fork_beyond_the_references() {
    let pool = pool(40, 4);
    let mut sequence = compute(&pool, 1, &[1, 2, 3, 4, 5]);
    let mut forks = Vec::new();
    let error = loop {
        match sequence.fork(SequenceId(2 + forks.len() as u64)) {
            Ok(fork) => forks.push(fork),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, SequenceError::Handle(_)) && forks.len() == 8_190, "{error}: {}", forks.len());
    assert_eq!(pool.sequence_count(), 8_191);
    drop((forks, sequence));
    pool.audit().unwrap();
    assert_eq!(pool.stats().used, 0);
}

/// Batches are abandoned on one thread while another goes on with the same sequence.
#[test]
fn parts_stay_equal_beside_abandoned_batches() {
    const ROUNDS: u64 = if cfg!(debug_assertions) { 200 } else { 3_000 };
    let (pool, all) = (pool(300, 4), (0..100).collect::<Vec<u32>>());
    for round in 0..ROUNDS {
        let mut sequence = compute(&pool, round, &all[..20 + round as usize % 7]);
        let begun = sequence.len();
        let mut abandoned = pool.begin_batch();
        append(&mut abandoned, &mut sequence, &all, Tokens::Ids(&all[begun..begun + 5])).unwrap();
        thread::scope(|scope| {
            scope.spawn(move || drop(abandoned));
            for _ in 0..3 {
                let mut batch = pool.begin_batch();
                let length = sequence.len();
                // Refused if it is withdrawn between the two.
                let next = &all[length..length + 6];
                let _ = batch.append_grouped(&mut sequence, next);
                drop(batch);
            }
        });
        sequence.truncate(begun).unwrap();
        assert_eq!((0..3).map(|group| sequence.group(group).len()).collect::<Vec<_>>(), [begun; 3]);
        check(&pool, &sequence, &all);
    }
    pool.audit().unwrap();
}

/// A wrong block of one group: the sequence caches nothing more in any.
#[test]
fn an_uncached_block_of_one_group_is_of_all() {
    let (pool, all) = (pool(300, 4), (0..100).collect::<Vec<u32>>());
    let mut sequence = compute(&pool, 1, &all[..40]);
    let wrong = sequence.group(1).block_hashes()[8];
    assert_eq!(pool.uncache(&[wrong]).kept_blocks, 1);
    let mut batch = pool.begin_batch();
    append(&mut batch, &mut sequence, &all, Tokens::Ids(&all[40..80])).unwrap();
    batch.finish();
    let cached = pool.cached_blocks().len();
    drop(sequence);
    assert_eq!(pool.cached_blocks().len(), cached);
    let hashes = (0..3).map(|group| {
        let admitted = pool.admit_grouped(&AdmitRequest::new(SequenceId(9), &all)).unwrap();
        pool.has_cached(&admitted.group(group).block_hashes()[10..20])
    });
    assert!(hashes.flatten().all(|is_cached| !is_cached));
    pool.audit().unwrap();
}
