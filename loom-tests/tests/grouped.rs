//! Theorem: an admission to several groups of layers hits one boundary in all of them, whatever is
//! evicted meanwhile, and a refused one, or one that goes on at a shorter boundary, gives back each
//! reference that it took. The same with a state: a boundary is hit only with all blocks of its
//! checkpoint. No checkpoint is found that holds the effect of an abandoned batch. Of two appends
//! that compete for the blocks of one, one succeeds. A reservation in line gets the blocks of all
//! groups, although they are freed one by one.
//!
//! Not covered: more than two preemptions, windows (the search for a boundary is
//! arithmetic, tested in the library), more than two groups, and memory that does not suffice for a
//! sequence beside its own checkpoint (the refusal in between makes the model too large).
#![cfg(kvpool_loom)]

use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::storage::KvLayout;
use kvpool::{AdmitRequest, AllocRequest, Pool, SequenceId, Tokens};
use kvpool_loom_tests::{block_on, check_to, conclude, join_last};
use loom::thread;

/// Tokens per block of the layout.
const BLOCK_TOKENS: usize = 4;

/// Creates a pool of `blocks` blocks in which the first block of `prompt` is cached in two groups.
fn cached(blocks: usize, prompt: &[u32]) -> Pool {
    let pool = Pool::builder(KvLayout::named("tiny").unwrap())
        .blocks(blocks)
        .without_null_block()
        .segment_blocks(4)
        .without_storage()
        .magazine_blocks(0)
        .prefix_cache(PrefixConfig::new().key(HashKey::from_bytes([7; 32])))
        .groups([None, None])
        .build()
        .unwrap();
    let request = AdmitRequest::new(SequenceId(1), &prompt[..BLOCK_TOKENS]);
    let mut first = pool.admit_grouped(&request).unwrap();
    let mut batch = pool.begin_batch();
    batch.append_grouped(&mut first, Tokens::Announced(BLOCK_TOKENS)).unwrap();
    batch.finish();
    drop(first);
    assert_eq!(pool.stats().evictable, 2);
    pool
}

/// Creates a pool of `blocks` blocks for two groups.
fn empty(blocks: usize) -> Pool {
    let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(blocks).without_null_block();
    let builder = builder.segment_blocks(4).without_storage().magazine_blocks(0);
    builder.groups([None, None]).build().unwrap()
}

fn close(pool: &Pool) {
    conclude(pool.blocks());
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, pool.stats().waiting, pool.sequence_count()), (0, 0, 0), "{report:?}");
}

/// Another thread evicts the block of one group while the prompt is hit.
#[test]
fn a_hit_beside_an_eviction() {
    check_to(2, "grouped::a_hit_beside_an_eviction", || {
        let prompt = [1; 2 * BLOCK_TOKENS];
        let pool = cached(6, &prompt);
        let other = pool.clone();
        let thread = thread::spawn(move || {
            other.evict_cached(1);
        });
        let sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(2), &prompt)).unwrap();
        let (len, blocks) = (sequence.len(), sequence.held_blocks());
        assert!(len == 0 || len == BLOCK_TOKENS, "{len}");
        assert_eq!([0, 1].map(|group| sequence.group(group).len()), [len; 2]);
        assert_eq!((blocks, blocks + sequence.reserved_blocks()), (2 * len / BLOCK_TOKENS, 4));
        join_last(thread);
        drop(sequence);
        close(&pool);
    });
}

/// Another thread evicts a block of the tokens or of the checkpoint while the prompt is hit.
#[test]
fn a_checkpoint_beside_an_eviction() {
    for (blocks, run) in [(6, 2), (4, 1)] {
        check_to(2, &format!("grouped::a_checkpoint_beside_an_eviction_{blocks}"), move || {
            let prompt = [1; 2 * BLOCK_TOKENS];
            let pool = Pool::builder(KvLayout::named("tiny").unwrap())
                .blocks(blocks)
                .without_null_block()
                .segment_blocks(4)
                .without_storage()
                .magazine_blocks(0)
                .prefix_cache(PrefixConfig::new().key(HashKey::from_bytes([7; 32])))
                .states([run])
                .build()
                .unwrap();
            let request = AdmitRequest::new(SequenceId(1), &prompt[..BLOCK_TOKENS]);
            let mut first = pool.admit_grouped(&request).unwrap();
            let mut batch = pool.begin_batch();
            batch.append_grouped(&mut first, Tokens::Announced(BLOCK_TOKENS)).unwrap();
            batch.finish();
            // Its run becomes a checkpoint.
            drop(first);
            assert_eq!(pool.stats().evictable, 1 + run);
            let other = pool.clone();
            let thread = thread::spawn(move || {
                other.evict_cached(run);
            });
            let sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(2), &prompt)).unwrap();
            let (len, held) = (sequence.len(), sequence.held_blocks());
            assert!(len == 0 || len == BLOCK_TOKENS, "{len}");
            // With a hit, also all blocks of the checkpoint.
            let of_checkpoint = if len > 0 { run } else { 0 };
            assert_eq!(held, len / BLOCK_TOKENS + run + of_checkpoint);
            assert_eq!(pool.view(SequenceId(2)).unwrap().blocks().len(), held);
            assert_eq!(sequence.state(0).len(), run);
            join_last(thread);
            drop(sequence);
            close(&pool);
        });
    }
}

/// A batch is abandoned while another one, which keeps the state behind both, ends, and the sequence
/// is closed.
#[test]
fn a_checkpoint_beside_an_abandoned_batch() {
    check_to(1, "grouped::a_checkpoint_beside_an_abandoned_batch", || {
        let prompt = [1; 2 * BLOCK_TOKENS];
        let pool = Pool::builder(KvLayout::named("tiny").unwrap())
            .blocks(7)
            .without_null_block()
            .segment_blocks(8)
            .without_storage()
            .magazine_blocks(0)
            .prefix_cache(PrefixConfig::new().key(HashKey::from_bytes([7; 32])))
            .states([1])
            .build()
            .unwrap();
        let request = AdmitRequest::new(SequenceId(1), &prompt);
        let mut sequence = pool.admit_grouped(&request).unwrap();
        let mut lost = pool.begin_batch();
        lost.append_grouped(&mut sequence, Tokens::Announced(1)).unwrap();
        let mut batch = pool.begin_batch();
        batch.append_grouped(&mut sequence, Tokens::Announced(BLOCK_TOKENS - 1)).unwrap();
        let thread = thread::spawn(move || drop(lost));
        // Before or after the other thread's call.
        let _ = batch.checkpoint(&mut sequence);
        batch.finish();
        drop(sequence);
        join_last(thread);
        let mut again = pool.admit_grouped(&AdmitRequest::new(SequenceId(2), &prompt)).unwrap();
        assert_eq!(again.len(), 0);
        let mut batch = pool.begin_batch();
        batch.append_grouped(&mut again, Tokens::Announced(BLOCK_TOKENS)).unwrap();
        batch.finish();
        again.commit(BLOCK_TOKENS).unwrap();
        // The tokens are cached, and a state behind them is not.
        let third = pool.admit_grouped(&AdmitRequest::new(SequenceId(3), &prompt)).unwrap();
        assert_eq!(third.len(), 0);
        drop(third);
        again.truncate(0).unwrap();
        drop(again);
        close(&pool);
    });
}

/// Two threads append a block in each group, and there is one for each group of one sequence.
#[test]
fn two_appends_compete() {
    check_to(2, "grouped::two_appends_compete", || {
        let pool = empty(2);
        let open = |id| {
            let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(id), &[1])).unwrap();
            assert_eq!(sequence.release_reservation(), 2);
            sequence
        };
        let [mut one, mut two] = [open(1), open(2)];
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let mut batch = other.begin_batch();
            let outcome = batch.append_grouped(&mut two, BLOCK_TOKENS).map(drop);
            batch.finish();
            (outcome.is_ok(), two)
        });
        let mut batch = pool.begin_batch();
        let first = batch.append_grouped(&mut one, BLOCK_TOKENS).is_ok();
        batch.finish();
        let (second, two) = join_last(thread);
        assert!(first != second, "{first}, {second}");
        assert_eq!([&one, &two].map(|of| of.held_blocks() + of.reserved_blocks()).iter().sum::<usize>(), 2);
        drop((one, two));
        close(&pool);
    });
}

/// A sequence waits for a block in each group, while another thread frees the two blocks one by one:
/// it gets both.
#[test]
fn a_reservation_in_line() {
    check_to(1, "grouped::a_reservation_in_line", || {
        let pool = empty(2);
        let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(1), &[1])).unwrap();
        assert_eq!(sequence.release_reservation(), 2);
        let held = [(); 2].map(|()| pool.allocate_owned(AllocRequest::new(1)).unwrap());
        let thread = thread::spawn(move || drop(held));
        block_on(pool.reserve_grouped_async(&mut sequence, BLOCK_TOKENS)).unwrap();
        assert_eq!(sequence.reserved_blocks(), 2);
        drop(sequence);
        join_last(thread);
        close(&pool);
    });
}
