//! Counts of requests and blocks that an operator compares: each request once, each block once.
#![cfg(not(kvpool_loom))]

use kvpool::prefix::PrefixConfig;
use kvpool::storage::KvLayout;
use kvpool::{AdmitRequest, AllocRequest, Pool, Preempt, SequenceId};
use kvpool_testkit::prompts::{admit, pool, prompt};
use proptest::prelude::*;

fn counts(pool: &Pool) -> (u64, u64, u64) {
    let stats = pool.prefix_cache().unwrap().stats();
    (stats.lookups, stats.lookup_blocks, stats.hit_blocks)
}

/// Requests that share nothing, each preempted once: no lookup of theirs is a hit.
#[tokio::test]
async fn a_resumed_request_is_no_hit() {
    let pool = pool(100);
    for number in 0..5 {
        let long = prompt(number, 42);
        let (sequence, _) = admit(&pool, u64::from(number), &long);
        pool.preempt(sequence, Preempt::Recompute).await.unwrap();
        let (_, cached) = admit(&pool, u64::from(number), &long);
        assert_eq!(cached, 40);
    }
    assert_eq!(counts(&pool), (5, 50, 0));
}

/// An engine that opens a sequence, has no room for its first append, and tries again later.
#[test]
fn a_refused_request_is_counted_once() {
    let pool = pool(16);
    let long = prompt(1, 42);
    drop(admit(&pool, 1, &long));
    let before = counts(&pool);
    let rest = pool.allocate(AllocRequest::new(6)).unwrap();
    for _ in 0..50 {
        let mut sequence = pool.sequence(SequenceId(2)).tokens(&long).unwrap();
        assert_eq!(sequence.len(), 40);
        pool.begin_batch().append(&mut sequence, 2).unwrap_err();
    }
    drop(rest);
    let (sequence, cached) = admit(&pool, 2, &long);
    assert_eq!((sequence.len(), cached), (42, 40));
    let after = counts(&pool);
    assert_eq!((after.0 - before.0, after.1 - before.1, after.2 - before.2), (1, 10, 10));
}

fn small(blocks: usize, block_tokens: usize) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(block_tokens);
    let layout = layout.build().unwrap();
    let config = PrefixConfig::new();
    Pool::builder(layout).blocks(blocks).without_storage().prefix_cache(config).build().unwrap()
}

/// The cached prefix of a request is among the blocks that are available for the rest of it.
#[test]
fn the_evictable_prefix_of_a_request_is_needed_too() {
    let pool = pool(10);
    drop(admit(&pool, 1, &prompt(1, 24)));
    let rest = pool.allocate(AllocRequest::new(4)).unwrap();
    let longer = [&prompt(1, 24)[..], &prompt(2, 16)].concat();
    let request = AdmitRequest::new(SequenceId(2), &longer);
    let (needed, available) = (pool.blocks_needed(&request).unwrap(), pool.available_blocks());
    let refused = pool.admit(&request);
    assert_eq!(needed <= available, refused.is_ok(), "{needed} of {available}: {refused:?}");
    drop(rest);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    /// While no thread uses the pool, the number of needed blocks says whether a request is
    /// admitted, and by how many the available ones become fewer.
    #[test]
    fn the_number_of_needed_blocks_predicts_an_admission(
        block_tokens in prop::sample::select(vec![1usize, 2, 3, 16]),
        blocks in 4usize..24,
        requests in prop::collection::vec((0u32..3, 1usize..20, 0usize..20, 0usize..6, 0usize..8), 1..24),
    ) {
        let pool = small(blocks, block_tokens);
        let mut open = Vec::new();
        for (id, (family, shared, own, headroom, closes)) in requests.into_iter().enumerate() {
            let tokens = |blocks: usize| blocks * block_tokens / 2;
            let mut prompt: Vec<u32> = (0..tokens(shared) as u32).map(|n| family << 16 | n).collect();
            prompt.extend((0..1 + tokens(own) as u32).map(|n| (id as u32 + 9) << 16 | n));
            let request = AdmitRequest::new(SequenceId(id as u64), &prompt).headroom(tokens(headroom));
            let request = if id % 3 == 0 && block_tokens > 1 { request.reuse_tail() } else { request };
            let (needed, available) = (pool.blocks_needed(&request), pool.available_blocks());
            match pool.admit(&request) {
                Ok(mut sequence) => {
                    let needed = needed.unwrap();
                    prop_assert!(needed <= available, "{needed} of {available}");
                    let left = pool.available_blocks();
                    // A block that is cached in part is held beside its copy, if there is room for
                    // both.
                    prop_assert!(left + needed == available || left + needed + 1 == available);
                    let mut batch = pool.begin_batch();
                    let missing = prompt.len() - sequence.len();
                    batch.append(&mut sequence, missing).unwrap();
                    batch.finish();
                    open.push(sequence);
                }
                Err(error) => {
                    let fits = needed.is_ok_and(|needed| needed <= available);
                    prop_assert!(!fits, "{available} available: {error}");
                }
            }
            if closes < open.len() {
                drop(open.swap_remove(closes));
            }
        }
    }
}
