//! Prefix reuse when something goes wrong around it: tokens that are taken back, threads that die, policies that answer
//! nonsense. What is found holds the right bytes, and no block is lost.
#![cfg(not(kvpool_loom))]

use std::panic::{AssertUnwindSafe, catch_unwind};

use kvpool::block::Kept;
use kvpool::error::SequenceError;
use kvpool::ids::{SequenceId, Ticket};
use kvpool::pool::{AllocRequest, Pool};
use kvpool::prefix::{Owner, PrefixConfig};
use kvpool::sequence::{Batch, Sequence};
use kvpool::storage::KvLayout;

fn pool_of(blocks: usize, config: PrefixConfig) -> Pool {
    let layout = KvLayout::named("tiny").unwrap();
    assert_eq!(layout.block_tokens(), 4);
    Pool::builder(layout).blocks(blocks).magazine_blocks(4).threads(1).prefix_cache(config).build().unwrap()
}

fn pool(blocks: usize) -> Pool {
    pool_of(blocks, PrefixConfig::new())
}

/// Opens a prompt and appends what was not cached.
fn admit(pool: &Pool, id: u64, prompt: &[u32]) -> (Sequence, usize) {
    let mut sequence = pool.sequence(SequenceId(id)).tokens(prompt).unwrap();
    let cached = sequence.len();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, prompt.len() - cached).unwrap();
    batch.finish();
    (sequence, cached)
}

/// How many tokens of a prompt are cached.
fn cached(pool: &Pool, prompt: &[u32]) -> usize {
    pool.sequence(SequenceId(u64::MAX)).tokens(prompt).unwrap().len()
}

fn prompt(first: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|token| first * 100_000 + token).collect()
}

#[test]
fn a_sequence_that_begins_anew_is_not_taken_for_what_it_was() {
    let pool = pool(100);
    let (old, new) = (prompt(1, 9), prompt(2, 9));
    let (mut sequence, _) = admit(&pool, 1, &old);
    pool.clear_prefix_cache();
    sequence.truncate(0).unwrap();
    let mut batch = pool.begin_batch();
    batch.append_tokens(&mut sequence, &new).unwrap();
    batch.finish();
    assert_eq!(sequence.announced(), 9);
    drop(sequence);
    assert_eq!(cached(&pool, &old), 0, "its blocks hold other tokens");
    assert_eq!(pool.audit().unwrap().owned, 0);
}

#[test]
fn to_take_back_nothing_keeps_what_was_announced() {
    let pool = pool(100);
    let prompt = prompt(1, 20);
    let mut sequence = pool.sequence(SequenceId(1)).tokens(&prompt).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 10).unwrap();
    sequence.truncate(10).unwrap();
    assert_eq!(sequence.announced(), 20);
    batch.append(&mut sequence, 10).unwrap();
    batch.finish();
    drop(sequence);
    assert_eq!(cached(&pool, &prompt), 16);
}

#[test]
fn ids_are_of_the_tokens_that_they_come_with() {
    let pool = pool(100);
    let prompt = prompt(1, 3);
    let (mut sequence, _) = admit(&pool, 1, &prompt);
    let mut batch = pool.begin_batch();
    batch.draft(&mut sequence, 3).unwrap();
    let unknown = SequenceError::TokensUnknown { id: SequenceId(1), known: 3 };
    assert_eq!(batch.append_tokens(&mut sequence, &[7, 8, 9]), Err(unknown));
    sequence.announce(&[4, 5, 6]).unwrap();
    batch.append_tokens(&mut sequence, &[7, 8, 9]).unwrap();
    batch.finish();
    drop(sequence);
    assert_eq!(cached(&pool, &[100_000, 100_001, 100_002, 7, 8, 9]), 0);
    assert_eq!(cached(&pool, &[100_000, 100_001, 100_002, 4, 5, 6, 7, 8, 9]), 8);

    let mut sequence = pool.sequence(SequenceId(2)).tokens(&[1, 2, 3, 4, 5]).unwrap();
    let mut batch = pool.begin_batch();
    let ahead = SequenceError::TokensAhead { id: SequenceId(2), length: 0, announced: 5 };
    assert_eq!(batch.append_tokens(&mut sequence, &[9, 9]), Err(ahead));
    batch.append(&mut sequence, 5).unwrap();
    batch.append_tokens(&mut sequence, &[9, 9, 9]).unwrap();
    batch.finish();
    assert_eq!(cached(&pool, &[1, 2, 3, 4, 5, 9, 9, 9, 0]), 8);
}

/// The engine's step fails between the append and the store.
#[test]
fn what_a_panic_leaves_behind_is_not_found() {
    let pool = pool(100);
    let fails = |step: &dyn Fn(&mut Sequence, &mut Batch)| {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut sequence = pool.sequence(SequenceId(1)).reuse_tail().tokens(&prompt(1, 11)).unwrap();
            let mut batch = pool.begin_batch();
            step(&mut sequence, &mut batch);
            panic!("the device is lost");
        }));
        assert!(outcome.is_err());
        assert_eq!((cached(&pool, &prompt(1, 11)), pool.stats().evictable), (0, 0));
        assert_eq!(pool.audit().unwrap().owned, 0);
    };
    fails(&|sequence, batch| drop(batch.append(sequence, 11).unwrap()));
    fails(&|sequence, batch| {
        batch.draft(sequence, 11).unwrap();
        sequence.commit(10).unwrap();
    });
    let (sequence, _) = admit(&pool, 1, &prompt(1, 11));
    drop(sequence);
    assert_eq!(cached(&pool, &prompt(1, 11)), 8);
}

/// A thread is stopped between the release of a block and what it tells the cache of it; meanwhile the block is hit and
/// released under a batch.
#[test]
fn a_release_that_is_told_late_does_not_speak_for_a_newer_one() {
    let pool = pool(10);
    let (blocks, cache) = (pool.blocks(), pool.prefix_cache().unwrap());
    let (sequence, _) = admit(&pool, 1, &prompt(1, 40));
    let ids: Vec<_> = sequence.blocks().collect();
    drop(sequence);
    let late: Vec<_> = ids.iter().map(|&id| Kept { id, word: blocks.word(id) }).collect();
    let hit = pool.sequence(SequenceId(2)).tokens(&prompt(1, 40)).unwrap();
    assert_eq!(hit.len(), 36);
    let batch = pool.begin_batch();
    drop(hit);
    cache.keep(blocks, &late, Ticket(0), Owner::default());
    let refused = pool.allocate(AllocRequest::new(2)).map(drop);
    assert!(refused.is_err(), "nine of ten may be read by the batch");
    batch.finish();
    drop(pool.allocate(AllocRequest::new(10)).unwrap());
    pool.audit().unwrap();
}
