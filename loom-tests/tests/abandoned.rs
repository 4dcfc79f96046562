//! Theorem: no block is found that holds a token which was appended under an abandoned batch, or
//! one that was appended behind such a token, whichever of them ends first, and also through a fork
//! or a sequence that has closed.
//!
//! Theorem: what was appended under batches that finish is found, whenever its sequence closes; and
//! a closed sequence keeps no block once its batches have ended.
//!
//! Not covered: more abandoned batches than the log keeps; more writers than a set of batches
//! names; devices, whose batches end in callbacks (the same steps, on another thread).
#![cfg(kvpool_loom)]

use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::storage::KvLayout;
use kvpool::{Pool, SequenceId, Tokens};
use kvpool_loom_tests::{check_to, conclude, join_last};
use loom::thread;

const BLOCK_TOKENS: usize = 4;
const PROMPT: [u32; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];

fn open() -> Pool {
    let key = HashKey::from_bytes([7; 32]);
    Pool::builder(KvLayout::named("tiny").unwrap())
        .blocks(4)
        .without_null_block()
        .segment_blocks(4)
        .without_storage()
        .magazine_blocks(0)
        .prefix_cache(PrefixConfig::new().key(key))
        .build()
        .unwrap()
}

/// Returns the number of tokens that are found, and checks that nothing is lost.
fn found(pool: &Pool) -> usize {
    let found = pool.sequence(SequenceId(9)).tokens(&PROMPT).unwrap().len();
    conclude(pool.blocks());
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, pool.sequence_count()), (0, 0), "{report:?}");
    found
}

/// A block is filled by two batches, of which the first one is abandoned while the second appends
/// and finishes, and the sequence goes on and closes.
#[test]
fn a_block_of_two_batches() {
    check_to(2, "abandoned::a_block_of_two_batches", || {
        let pool = open();
        let mut sequence = pool.sequence(SequenceId(1)).tokens(&PROMPT).unwrap();
        let mut first = pool.begin_batch();
        first.append(&mut sequence, 2).unwrap();
        let thread = thread::spawn(move || drop(first));
        let mut second = pool.begin_batch();
        let new = second.append(&mut sequence, 2).unwrap();
        assert!(new.tokens == (0..2) || new.tokens == (2..4));
        second.finish();
        sequence.commit(0).unwrap();
        drop(sequence);
        join_last(thread);
        assert_eq!(found(&pool), 0);
    });
}

/// The second batch fills a block of its own behind that of the first.
#[test]
fn a_block_behind_one_that_is_lost() {
    check_to(2, "abandoned::a_block_behind_one_that_is_lost", || {
        let pool = open();
        let mut sequence = pool.sequence(SequenceId(1)).tokens(&PROMPT).unwrap();
        let mut first = pool.begin_batch();
        first.append(&mut sequence, BLOCK_TOKENS).unwrap();
        let thread = thread::spawn(move || drop(first));
        let mut second = pool.begin_batch();
        let new = second.append(&mut sequence, BLOCK_TOKENS).unwrap();
        second.finish();
        join_last(thread);
        assert_eq!(sequence.len(), if new.tokens.start == 0 { BLOCK_TOKENS } else { 0 });
        // Computes the first block, so that one behind it would be found.
        let mut third = pool.begin_batch();
        let rest = Tokens::Announced(BLOCK_TOKENS - sequence.len());
        third.append(&mut sequence, rest).unwrap();
        third.finish();
        drop(sequence);
        assert_eq!(found(&pool), BLOCK_TOKENS);
    });
}

/// A fork of the tokens writes on while they are withdrawn.
#[test]
fn a_fork_of_lost_tokens() {
    check_to(1, "abandoned::a_fork_of_lost_tokens", || {
        let pool = open();
        let mut sequence = pool.sequence(SequenceId(1)).tokens(&PROMPT).unwrap();
        let mut first = pool.begin_batch();
        first.append(&mut sequence, BLOCK_TOKENS).unwrap();
        let mut fork = sequence.fork(SequenceId(2)).unwrap();
        let thread = thread::spawn(move || drop(first));
        drop(sequence);
        fork.commit(0).unwrap();
        drop(fork);
        join_last(thread);
        assert_eq!(found(&pool), 0);
    });
}

/// A sequence closes while its batch finishes.
#[test]
fn a_close_beside_the_end() {
    check_to(2, "abandoned::a_close_beside_the_end", || {
        let pool = open();
        let mut sequence = pool.sequence(SequenceId(1)).tokens(&PROMPT).unwrap();
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, BLOCK_TOKENS).unwrap();
        let thread = thread::spawn(move || batch.finish());
        drop(sequence);
        join_last(thread);
        assert_eq!(found(&pool), BLOCK_TOKENS);
    });
}

/// A sequence closes while one of its batches finishes and the other is abandoned.
#[test]
fn a_close_beside_two_ends() {
    check_to(1, "abandoned::a_close_beside_two_ends", || {
        let pool = open();
        let mut sequence = pool.sequence(SequenceId(1)).tokens(&PROMPT).unwrap();
        let mut first = pool.begin_batch();
        first.append(&mut sequence, BLOCK_TOKENS).unwrap();
        let mut second = pool.begin_batch();
        second.append(&mut sequence, BLOCK_TOKENS).unwrap();
        let thread = thread::spawn(move || first.finish());
        let other = thread::spawn(move || drop(second));
        drop(sequence);
        join_last(thread);
        join_last(other);
        assert_eq!(found(&pool), BLOCK_TOKENS);
    });
}
