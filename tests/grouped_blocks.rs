//! An append to several groups of layers takes its blocks by one request: it evicts nothing if it is
//! refused, and one of two that compete for the last blocks gets them.
#![cfg(not(any(kvpool_loom, miri)))]

use std::sync::Barrier;
use std::thread;

use kvpool::prefix::PrefixConfig;
use kvpool::{
    AdmitRequest, AllocError, AllocRequest, Append, GroupedSequence, KvLayout, Pool, SequenceError,
    SequenceId, StepError, Tokens, Window,
};
use proptest::prelude::*;

const BLOCK_TOKENS: usize = 4;

/// A pool without storage for groups that keep all tokens.
fn pool(groups: usize, blocks: usize, is_cached: bool) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(BLOCK_TOKENS);
    let builder = Pool::builder(layout.build().unwrap()).blocks(blocks).without_storage().threads(1);
    let builder = builder.groups(vec![None; groups]);
    let builder = if is_cached { builder.prefix_cache(PrefixConfig::new()) } else { builder };
    builder.build().unwrap()
}

/// Admits a sequence of these tokens, and computes them.
fn compute(pool: &Pool, id: u64, all: &[u32]) -> GroupedSequence {
    let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(id), all)).unwrap();
    let mut batch = pool.begin_batch();
    match pool.prefix_cache() {
        Some(_) => batch.append_grouped(&mut sequence, Tokens::Announced(all.len())).unwrap(),
        None => batch.append_grouped(&mut sequence, all.len()).unwrap(),
    };
    batch.finish();
    sequence
}

fn is_refused(error: &SequenceError) -> bool {
    matches!(error, SequenceError::Alloc(AllocError::Exhausted { .. }))
}

#[test]
fn a_refused_append_evicts_nothing() {
    let all: Vec<u32> = (0..200).collect();
    for (groups, blocks) in [(1, 30), (3, 30), (4, 2_500)] {
        let pool = pool(groups, blocks, true);
        drop(compute(&pool, 1, &all[100..100 + 2 * BLOCK_TOKENS]));
        let mut sequence = compute(&pool, 2, &all[..2 * BLOCK_TOKENS]);
        let cached = pool.cached_blocks();
        let evictable = pool.stats().evictable;
        assert_eq!(evictable, 2 * groups);
        let lease = pool.allocate(AllocRequest::new(pool.free_blocks())).unwrap();
        // Each group alone finds its blocks, all together do not.
        let tokens = (evictable / groups + 1) * BLOCK_TOKENS;
        let mut batch = pool.begin_batch();
        let new = &all[2 * BLOCK_TOKENS..2 * BLOCK_TOKENS + tokens];
        let error = batch.append_grouped(&mut sequence, new).unwrap_err();
        assert!(is_refused(&error), "{error}");
        let error = sequence.reserve(tokens).unwrap_err();
        assert!(is_refused(&error), "{error}");
        assert_eq!((pool.stats().evictable, sequence.reserved_blocks()), (evictable, 0), "{groups} groups");
        assert_eq!(pool.cached_blocks(), cached);
        // One block less for each group is as many as there are.
        batch.append_grouped(&mut sequence, &new[BLOCK_TOKENS..]).unwrap();
        batch.finish();
        assert_eq!((pool.stats().evictable, pool.free_blocks()), (0, 0));
        drop((lease, sequence));
        pool.audit().unwrap();
    }
}

/// Two threads append where the free blocks suffice for one of them.
#[test]
fn one_of_two_appends_gets_the_blocks() {
    const ROUNDS: usize = if cfg!(debug_assertions) { 500 } else { 10_000 };
    const GROUPS: usize = 4;
    let pool = pool(GROUPS, 3 * GROUPS, false);
    let (mut one, mut two) = (compute(&pool, 1, &[0; BLOCK_TOKENS]), compute(&pool, 2, &[0; BLOCK_TOKENS]));
    assert_eq!(pool.free_blocks(), GROUPS);
    for round in 0..ROUNDS {
        let gate = Barrier::new(2);
        let append = |sequence: &mut GroupedSequence| {
            gate.wait();
            let mut batch = pool.begin_batch();
            let outcome = batch.append_grouped(sequence, BLOCK_TOKENS);
            batch.finish();
            outcome.inspect_err(|error| assert!(is_refused(error), "{error}")).is_ok()
        };
        let (first, second) = thread::scope(|scope| {
            let first = scope.spawn(|| append(&mut one));
            let second = append(&mut two);
            (first.join().unwrap(), second)
        });
        assert!(first != second, "round {round}: {first}, {second}");
        one.truncate(BLOCK_TOKENS).unwrap();
        two.truncate(BLOCK_TOKENS).unwrap();
    }
    drop((one, two));
    pool.audit().unwrap();
    assert_eq!(pool.stats().used, 0);
}

/// A sealed last block is reopened, for which no block is needed.
#[test]
fn a_reopened_block_is_not_counted() {
    for groups in [1, 3] {
        let pool = pool(groups, 2 * groups, false);
        let mut sequence = compute(&pool, 1, &[0; 2 * BLOCK_TOKENS]);
        assert_eq!(pool.free_blocks(), 0);
        sequence.truncate(BLOCK_TOKENS + 1).unwrap();
        let mut batch = pool.begin_batch();
        let appended = batch.append_grouped(&mut sequence, BLOCK_TOKENS - 1).unwrap();
        assert_eq!((appended.new_blocks, appended.copies.len()), (0, 0));
        // Now it is promised to this batch.
        sequence.truncate(BLOCK_TOKENS + 2).unwrap();
        assert!(batch.append_grouped(&mut sequence, BLOCK_TOKENS).is_err(), "another block does not fit");
        let appended = batch.append_grouped(&mut sequence, BLOCK_TOKENS - 2).unwrap();
        assert_eq!((appended.new_blocks, appended.copies.len()), (0, 0));
        assert_eq!(batch.blocks_to_seal().len(), groups);
        batch.finish();
        let group = sequence.group(groups - 1);
        assert_eq!(
            (group.len(), group.settled_blocks(), sequence.reserved_blocks()),
            (2 * BLOCK_TOKENS, 2, 0)
        );
        drop(sequence);
        pool.audit().unwrap();
    }
    // The same in a step of sequences of one group.
    let pool = pool(1, 2, false);
    let mut sequence = pool.sequence(SequenceId(1)).open().unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 2 * BLOCK_TOKENS).unwrap();
    batch.finish();
    sequence.truncate(BLOCK_TOKENS + 1).unwrap();
    let mut batch = pool.begin_batch();
    let refused = batch.step(&mut [Append::new(&mut sequence, BLOCK_TOKENS)]).unwrap_err();
    assert!(matches!(refused, StepError::Sequence { .. } | StepError::Lacking { .. }), "{refused}");
    assert_eq!((sequence.len(), sequence.settled_blocks()), (BLOCK_TOKENS + 1, 1), "reopened");
    assert_eq!(batch.step(&mut [Append::new(&mut sequence, BLOCK_TOKENS - 1)]).unwrap().new_blocks, 0);
    batch.finish();
    assert_eq!((sequence.len(), sequence.settled_blocks()), (2 * BLOCK_TOKENS, 2));
    drop(sequence);
    pool.audit().unwrap();
}

/// Lists of several groups grow behind their own ends, as lists of one group do.
#[test]
fn each_list_grows_at_its_end() {
    let pool = pool(4, 4_096, false);
    let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(1), &[0; BLOCK_TOKENS])).unwrap();
    let mut batch = pool.begin_batch();
    for _ in 0..400 {
        batch.append_grouped(&mut sequence, BLOCK_TOKENS).unwrap();
    }
    for group in 0..4 {
        let ids: Vec<u32> = sequence.group(group).blocks().map(|id| id.0).collect();
        let runs = 1 + ids.windows(2).filter(|pair| pair[0] + 1 != pair[1]).count();
        // Units of 16 frames, most of them whole.
        assert!(runs <= 400 / 8, "group {group} lies in {runs} runs of {} blocks", ids.len());
    }
    batch.finish();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 40 } else { 300 }))]
    /// An append is granted if and only if the blocks of all groups are available; a refused one
    /// changes no number.
    #[test]
    fn an_append_is_granted_if_all_groups_fit(
        windows in prop::collection::vec(prop::option::of(1..30_usize), 1..5),
        blocks in 4..60_usize,
        steps in prop::collection::vec((any::<bool>(), 1..40_usize), 1..30),
    ) {
        let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(BLOCK_TOKENS);
        let builder = Pool::builder(layout.build().unwrap()).blocks(blocks).without_storage().threads(1);
        let windows: Vec<_> = windows.iter().map(|of| of.map(|tokens| Window::new(tokens).unwrap())).collect();
        let (pool, groups) = (builder.groups(windows.clone()).build().unwrap(), windows.len());
        let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(1), &[0])).unwrap();
        sequence.release_reservation();
        for (appends, tokens) in steps {
            let length = sequence.len();
            if !appends {
                let _ = sequence.truncate(length.saturating_sub(tokens % 10));
                continue;
            }
            let mut batch = pool.begin_batch();
            let outcome = batch.append_grouped(&mut sequence, tokens);
            let fresh = (length + tokens).div_ceil(BLOCK_TOKENS) - length.div_ceil(BLOCK_TOKENS);
            match outcome {
                Ok(appended) => prop_assert_eq!(appended.new_blocks, groups * fresh),
                Err(error) => {
                    prop_assert!(groups * fresh > pool.free_blocks(), "{error}: {} free", pool.free_blocks());
                    prop_assert_eq!((sequence.len(), sequence.reserved_blocks()), (length, 0));
                }
            }
            batch.finish();
            pool.audit().unwrap();
        }
        drop(sequence);
        prop_assert_eq!(pool.stats().used, 0);
    }
}
