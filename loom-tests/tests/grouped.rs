//! Theorem: an admission to several groups of layers hits one boundary in all of them, whatever is
//! evicted meanwhile, and a refused one, or one that goes on at a shorter boundary, gives back each
//! reference that it took. The same with a state: a boundary is hit only with all blocks of its
//! checkpoint.
//!
//! Not covered: more than one preemption beside a checkpoint, windows (the search for a boundary is arithmetic, tested in the library), and more
//! than two groups.
#![cfg(kvpool_loom)]

use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::storage::KvLayout;
use kvpool::{AdmitRequest, Pool, SequenceId, Tokens};
use kvpool_loom_tests::{check_to, conclude, join_last};
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

/// Another thread evicts a block of the tokens or of the checkpoint while the prompt is hit. Without
/// memory for both, the sequence is admitted without its hit.
#[test]
fn a_checkpoint_beside_an_eviction() {
    for blocks in [6, 5] {
        check_to(1, &format!("grouped::a_checkpoint_beside_an_eviction_{blocks}"), move || {
            let prompt = [1; 2 * BLOCK_TOKENS];
            let pool = Pool::builder(KvLayout::named("tiny").unwrap())
                .blocks(blocks)
                .without_null_block()
                .segment_blocks(4)
                .without_storage()
                .magazine_blocks(0)
                .prefix_cache(PrefixConfig::new().key(HashKey::from_bytes([7; 32])))
                .states([2])
                .build()
                .unwrap();
            let request = AdmitRequest::new(SequenceId(1), &prompt[..BLOCK_TOKENS]);
            let mut first = pool.admit_grouped(&request).unwrap();
            let mut batch = pool.begin_batch();
            batch.append_grouped(&mut first, Tokens::Announced(BLOCK_TOKENS)).unwrap();
            batch.finish();
            // Its run becomes a checkpoint.
            drop(first);
            assert_eq!(pool.stats().evictable, 3);
            let other = pool.clone();
            let thread = thread::spawn(move || {
                other.evict_cached(2);
            });
            let sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(2), &prompt)).unwrap();
            let (len, held) = (sequence.len(), sequence.held_blocks());
            assert!(len == 0 || len == BLOCK_TOKENS, "{len}");
            assert_eq!(held, len / BLOCK_TOKENS + 2);
            assert_eq!(sequence.state(0).len(), 2);
            join_last(thread);
            drop(sequence);
            close(&pool);
        });
    }
}
