//! What was computed before a clear is not found after it, whichever way it comes back.

use kvpool::prefix::PrefixKeys;
use kvpool::storage::{Arrangement, KvPlanes};
use kvpool::{Pool, Preempt, Sequence, SequenceId};

use super::kv::{admit, check, is_idle, pool, prompt, sized, store};

/// Returns the number of cached tokens of a prompt, without its last one; checks them.
fn hits(pool: &Pool, tokens: &[u32]) -> usize {
    let sequence = pool.sequence(SequenceId(u64::MAX)).tokens(tokens).unwrap();
    check(pool, &sequence, tokens);
    sequence.len()
}

const NO_KEYS: PrefixKeys<'static> = PrefixKeys::new();
const SIZES: [usize; 5] = [1, 2, 3, 4, 16];

/// Three pools with blocks of this many tokens.
fn three(block_tokens: usize) -> [Pool; 3] {
    [
        (Arrangement::LayerFirst, KvPlanes::Separate),
        (Arrangement::BlockFirst, KvPlanes::Joined),
        (Arrangement::BlockFirst, KvPlanes::Separate),
    ]
    .map(|(arrangement, parts)| pool(sized(block_tokens, arrangement, parts), 200))
}

async fn go(from: &Pool, to: &Pool, sequence: Sequence) -> Sequence {
    from.migrate(sequence, to).await.unwrap().0
}

/// Appends further tokens, and stores them.
fn extend(pool: &Pool, sequence: &mut Sequence, tokens: &[u32]) {
    let (first, mut batch) = (sequence.len(), pool.begin_batch());
    batch.append(sequence, tokens).unwrap();
    store(&mut batch, sequence, first, tokens);
    batch.finish();
}

/// Swapped out, the first pool cleared, swapped in: its old blocks are not found, and its ids are
/// known.
#[tokio::test]
async fn a_swapped_sequence_that_comes_back_after_a_clear() {
    for block_tokens in SIZES {
        let [a, b, _] = three(block_tokens);
        let (tokens, more) = (prompt(1, 87), prompt(2, 40));
        let sequence = admit(&a, 7, &tokens).unwrap();
        let swapped = a.preempt(sequence, Preempt::Swap(&b)).await.unwrap().swapped.unwrap();
        a.clear_prefix_cache();
        let mut sequence = go(&b, &a, swapped.sequence).await;
        assert_eq!((sequence.len(), sequence.announced()), (87, 87), "blocks of {block_tokens}");
        extend(&a, &mut sequence, &more);
        drop(sequence);
        let all = [tokens.clone(), more].concat();
        assert_eq!(hits(&a, &all), 0, "blocks of {block_tokens}");
        // The second pool was not cleared.
        assert!(hits(&b, &tokens) >= 87 - block_tokens, "blocks of {block_tokens}");
        [a, b].iter().for_each(is_idle);
    }
}

/// Known tokens, a clear, and a swap there and back: the ids are still known.
#[tokio::test]
async fn ids_survive_a_swap_after_a_clear() {
    for block_tokens in SIZES {
        let [a, b, _] = three(block_tokens);
        let (tokens, more) = (prompt(1, 87), prompt(2, 5));
        let sequence = admit(&a, 7, &tokens).unwrap();
        a.clear_prefix_cache();
        let swapped = a.preempt(sequence, Preempt::Swap(&b)).await.unwrap().swapped.unwrap();
        let mut sequence = go(&b, &a, swapped.sequence).await;
        assert_eq!((sequence.len(), sequence.announced()), (87, 87), "blocks of {block_tokens}");
        extend(&a, &mut sequence, &more);
        // Tokens that are not announced make those behind them unknown, here as anywhere.
        let mut batch = a.begin_batch();
        batch.append(&mut sequence, 1).unwrap();
        let refused = batch.append(&mut sequence, &more).unwrap_err();
        assert_eq!(refused, kvpool::SequenceError::TokensUnknown { id: SequenceId(7), known: 92 });
        batch.finish();
        drop(sequence);
        assert_eq!([&a, &b].map(|pool| hits(pool, &tokens)), [0, 0], "blocks of {block_tokens}");
        [a, b].iter().for_each(is_idle);
    }
}

/// Over two other pools, in one of which it goes on.
#[tokio::test]
async fn a_sequence_that_comes_back_by_a_detour() {
    for (block_tokens, computes) in SIZES.iter().flat_map(|&size| [(size, false), (size, true)]) {
        let [a, b, c] = three(block_tokens);
        let (mut tokens, more) = (prompt(1, 50), prompt(2, 33));
        let mut sequence = go(&a, &b, admit(&a, 7, &tokens).unwrap()).await;
        if computes {
            extend(&b, &mut sequence, &more);
            tokens.extend(more);
        }
        let sequence = go(&b, &c, sequence).await;
        a.clear_prefix_cache();
        drop(go(&c, &a, sequence).await);
        tokens.push(0);
        assert_eq!(hits(&a, &tokens), 0, "blocks of {block_tokens}, {computes}");
        // What is cached in the others does not come back either.
        for from in [&b, &c] {
            assert!(hits(from, &tokens) > 0);
            let back = a.bring_back(from, &NO_KEYS, &tokens).await.unwrap();
            assert_eq!((back.cached_blocks, back.carried.blocks), (0, 0), "blocks of {block_tokens}");
        }
        [a, b, c].iter().for_each(is_idle);
    }
}

/// Cached blocks that were offloaded before the clear, over one pool and over two.
#[tokio::test]
async fn offloaded_blocks_that_come_back_after_a_clear() {
    for (block_tokens, over_two) in SIZES.iter().flat_map(|&size| [(size, false), (size, true)]) {
        let [a, b, c] = three(block_tokens);
        let tokens = prompt(1, 50);
        drop(admit(&a, 7, &tokens).unwrap());
        a.offload(&b, 200).await.unwrap();
        if over_two {
            b.offload(&c, 200).await.unwrap();
        }
        let from = if over_two { &c } else { &b };
        let back = a.bring_back(from, &NO_KEYS, &tokens).await.unwrap();
        assert_eq!(back.cached_blocks, 50 / block_tokens, "no clear");
        a.clear_prefix_cache();
        let back = a.bring_back(from, &NO_KEYS, &tokens).await.unwrap();
        assert_eq!((back.cached_blocks, back.carried.blocks), (0, 0), "blocks of {block_tokens}");
        assert_eq!(hits(&a, &tokens), 0, "blocks of {block_tokens}");
        assert!(hits(from, &tokens) > 0, "it was not cleared");
        [a, b, c].iter().for_each(is_idle);
    }
}

/// Another request that hits blocks that came from the first pool, and computes more behind them.
#[tokio::test]
async fn blocks_that_were_computed_behind_imported_ones() {
    for block_tokens in SIZES {
        let [a, b, _] = three(block_tokens);
        let tokens = prompt(1, 90);
        drop(admit(&a, 7, &tokens[..48]).unwrap());
        a.offload(&b, 200).await.unwrap();
        drop(admit(&b, 8, &tokens).unwrap());
        a.clear_prefix_cache();
        // The first ones are computed anew, so that what is behind them would be found.
        drop(admit(&a, 7, &tokens[..48]).unwrap());
        let first = hits(&a, &tokens);
        let back = a.bring_back(&b, &NO_KEYS, &tokens).await.unwrap();
        assert_eq!((back.cached_blocks, back.carried.blocks), (48 / block_tokens, 0), "{block_tokens}");
        assert_eq!(hits(&a, &tokens), first, "blocks of {block_tokens}");
        [a, b].iter().for_each(is_idle);
    }
}

/// The blocks that are computed anew take the place of the old ones in the second pool.
#[tokio::test]
async fn new_blocks_replace_old_ones_in_the_second_pool() {
    for block_tokens in SIZES {
        let [a, b, _] = three(block_tokens);
        let tokens = prompt(1, 50);
        for round in 0..3 {
            drop(admit(&a, 7, &tokens).unwrap());
            let there = a.offload(&b, 200).await.unwrap();
            assert_eq!((there.carried.blocks, there.present_blocks), (50 / block_tokens, 0), "{round}");
            let back = a.bring_back(&b, &NO_KEYS, &tokens).await.unwrap();
            assert_eq!(back.cached_blocks, 50 / block_tokens, "blocks of {block_tokens}, round {round}");
            a.clear_prefix_cache();
        }
        [a, b].iter().for_each(is_idle);
    }
}

/// A sequence from after the clear does not take up blocks from before it, which the second pool
/// still has.
#[tokio::test]
async fn a_new_sequence_shares_no_old_blocks() {
    for block_tokens in SIZES {
        let [a, b, _] = three(block_tokens);
        let tokens = prompt(1, 50);
        drop(go(&a, &b, admit(&a, 7, &tokens).unwrap()).await);
        assert!(hits(&b, &tokens) > 0);
        a.clear_prefix_cache();
        let sequence = admit(&a, 8, &tokens).unwrap();
        let (sequence, report) = a.migrate(sequence, &b).await.unwrap();
        assert_eq!(report.shared_blocks, 0, "blocks of {block_tokens}");
        drop(go(&b, &a, sequence).await);
        assert_eq!(hits(&a, &tokens), 49 / block_tokens * block_tokens, "blocks of {block_tokens}");
        [a, b].iter().for_each(is_idle);
    }
}

/// A clear of a pool in which nothing was computed takes nothing from the others.
#[tokio::test]
async fn a_cleared_second_pool_spoils_nothing() {
    for block_tokens in SIZES {
        let [a, b, _] = three(block_tokens);
        let tokens = prompt(1, 50);
        let sequence = go(&a, &b, admit(&a, 7, &tokens).unwrap()).await;
        b.clear_prefix_cache();
        assert_eq!(hits(&b, &tokens), 0);
        let sequence = go(&b, &a, sequence).await;
        let sequence = go(&a, &b, sequence).await;
        drop(go(&b, &a, sequence).await);
        let whole = 49 / block_tokens * block_tokens;
        assert_eq!([&a, &b].map(|pool| hits(pool, &tokens)), [whole, whole], "blocks of {block_tokens}");
        [a, b].iter().for_each(is_idle);
    }
}
