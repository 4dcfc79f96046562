//! Cached blocks without owners go to another pool's cache, and come back from there.

use kvpool::prefix::{KvEvent, PrefixKeys};
use kvpool::{AllocError, AllocRequest, Pool, SequenceId};

use super::kv::{BLOCK_TOKENS, admit, cached, check, is_idle, other, plain, pool, pools, prompt};

const NO_KEYS: PrefixKeys<'static> = PrefixKeys::new();

/// Admits prompts of ten full blocks and a part, and releases them one after another.
fn fill(pool: &Pool, prompts: u32) -> Vec<Vec<u32>> {
    let prompts: Vec<Vec<u32>> = (0..prompts).map(|first| prompt(first, 42)).collect();
    prompts.iter().for_each(|prompt| drop(admit(pool, 0, prompt).unwrap()));
    prompts
}

#[tokio::test]
async fn the_coldest_blocks_go_first_and_come_back() {
    let (here, there) = pools(100);
    let prompts = fill(&here, 4);
    let report = here.offload(&there, 15).await.unwrap();
    assert_eq!((report.carried.blocks, report.evicted_blocks), (15, 15), "{report:?}");
    assert_eq!((report.present_blocks, report.leaving_blocks, report.warm_blocks), (0, 0, 0));
    let counts = |pool: &Pool| [0, 1, 2, 3].map(|first: usize| cached(pool, &prompts[first]));
    assert_eq!(counts(&here), [0, 5, 10, 10], "the end of the second has gone");
    assert_eq!(counts(&there), [10, 0, 0, 0], "the beginning of the second is not there");
    assert_eq!(there.stats().evictable, 15);
    let back = here.bring_back(&there, &NO_KEYS, &prompts[1]).await.unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks), (10, 5));
    assert_eq!(counts(&here), [0, 10, 10, 10]);
    let back = here.bring_back(&there, &NO_KEYS, &prompts[1]).await.unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks), (10, 0), "the prefix is cached here");
    let back = here.bring_back(&there, &NO_KEYS, &prompts[0]).await.unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks), (10, 10));
    assert_eq!((counts(&here), counts(&there)), ([10; 4], [10, 0, 0, 0]));
    [here, there].iter().for_each(is_idle);
}

/// Blocks that both pools have are not copied again.
#[tokio::test]
async fn blocks_present_in_both_pools_are_only_evicted() {
    let (here, there) = pools(100);
    let prompts = fill(&here, 2);
    here.offload(&there, 10).await.unwrap();
    here.bring_back(&there, &NO_KEYS, &prompts[0]).await.unwrap();
    let report = here.offload(&there, 100).await.unwrap();
    assert_eq!((report.present_blocks, report.carried.blocks, report.evicted_blocks), (10, 10, 20));
    assert_eq!([0, 1].map(|first: usize| cached(&there, &prompts[first])), [10, 10]);
    assert_eq!(here.audit().unwrap().evictable, 0);
    let report = here.offload(&there, 100).await.unwrap();
    assert_eq!((report.carried.blocks, report.present_blocks), (0, 0), "nothing is left to go");
    [here, there].iter().for_each(is_idle);
}

/// Tokens with keys are found again only under the same keys.
#[tokio::test]
async fn keys_separate_prefixes() {
    let (here, there) = pools(100);
    let (tokens, red) = (prompt(1, 41), PrefixKeys::new().salt(b"red"));
    let mut sequence = here.sequence(SequenceId(1)).keys(red).tokens(&tokens).unwrap();
    let mut batch = here.begin_batch();
    super::kv::extend(&mut batch, &mut sequence, &tokens).unwrap();
    batch.finish();
    drop(sequence);
    here.offload(&there, 100).await.unwrap();
    assert_eq!(here.bring_back(&there, &NO_KEYS, &tokens).await.unwrap().cached_blocks, 0);
    assert_eq!(here.bring_back(&there, &red, &tokens).await.unwrap().cached_blocks, 10);
    let sequence = here.sequence(SequenceId(1)).keys(red).tokens(&tokens).unwrap();
    assert_eq!(sequence.len(), 40);
    check(&here, &sequence, &tokens);
}

/// A block that a batch in flight may see keeps its frame, can still be hit, and is evicted first.
#[tokio::test]
async fn blocks_that_a_batch_sees_leave_later() {
    let (here, there) = pools(64);
    let prompts = fill(&here, 2);
    let sequence = here.sequence(SequenceId(1)).tokens(&prompts[1]).unwrap();
    let batch = here.begin_batch();
    drop(sequence);
    // The first prompt is still the coldest; the second was used again.
    let report = here.offload(&there, 15).await.unwrap();
    assert_eq!(
        (report.carried.blocks, report.evicted_blocks, report.leaving_blocks),
        (15, 0, 15),
        "{report:?}"
    );
    assert_eq!(cached(&here, &prompts[0]), 10, "a hit makes them warm again");
    batch.finish();
    let report = here.offload(&there, 5).await.unwrap();
    assert_eq!((report.carried.blocks, report.evicted_blocks), (5, 5), "leaving blocks do not go twice");
    let counts = |pool: &Pool| [0, 1].map(|first: usize| cached(pool, &prompts[first]));
    assert_eq!((counts(&here), counts(&there)), ([10, 0], [10, 10]));
    [here, there].iter().for_each(is_idle);
}

/// Leaving blocks are evicted first, before colder ones.
#[tokio::test]
async fn leaving_blocks_are_evicted_before_all_others() {
    let (here, there) = pools(64);
    let prompts = fill(&here, 3);
    let batch = here.begin_batch();
    let report = here.offload(&there, 10).await.unwrap();
    assert_eq!(report.leaving_blocks, 10);
    batch.finish();
    // Thirty are evictable, and as many are missing.
    drop(here.allocate(AllocRequest::new(64 - 30 + 10)).unwrap());
    let counts = [0, 1, 2].map(|first: usize| cached(&here, &prompts[first]));
    assert_eq!(counts, [0, 10, 10]);
    assert_eq!(cached(&there, &prompts[0]), 10);
}

/// As many go as fit; the others stay, and their order is unchanged.
#[tokio::test]
async fn less_room_there() {
    let (here, there) = (pool(plain(), 100), pool(other(), 12));
    let prompts = fill(&here, 3);
    let held = there.allocate(AllocRequest::new(5)).unwrap();
    let report = here.offload(&there, 30).await.unwrap();
    assert_eq!((report.carried.blocks, report.evicted_blocks), (7, 7), "{report:?}");
    assert_eq!([0, 1, 2].map(|first: usize| cached(&here, &prompts[first])), [3, 10, 10]);
    drop(held);
    // Blocks that went earlier make room for these.
    let report = here.offload(&there, 8).await.unwrap();
    assert_eq!((report.carried.blocks, report.evicted_blocks), (8, 8));
    assert_eq!([0, 1, 2].map(|first: usize| cached(&here, &prompts[first])), [0, 5, 10]);
    [here, there].iter().for_each(is_idle);
}

/// From the first block on, as many as fit.
#[tokio::test]
async fn less_room_here() {
    let (here, there) = (pool(plain(), 12), pool(other(), 100));
    let prompts = fill(&there, 1);
    let held = here.allocate(AllocRequest::new(8)).unwrap();
    let back = here.bring_back(&there, &NO_KEYS, &prompts[0]).await.unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks), (4, 4));
    assert_eq!([cached(&here, &prompts[0]), cached(&there, &prompts[0])], [4, 10]);
    let rest = here.allocate(AllocRequest::new(4)).unwrap();
    let refused = here.bring_back(&there, &NO_KEYS, &prompts[0]).await.unwrap_err();
    assert!(matches!(refused, kvpool::TransferError::Alloc(AllocError::Exhausted { .. })), "{refused}");
    drop((held, rest));
    [here, there].iter().for_each(is_idle);
}

/// Blocks cached on either side by turns form one prefix afterwards.
#[tokio::test]
async fn a_prefix_of_both_sides() {
    let (here, there) = pools(100);
    let tokens = prompt(1, 42);
    drop(admit(&there, 1, &tokens).unwrap());
    let whole = admit(&here, 1, &tokens).unwrap();
    // Keep the first three, and lose the rest.
    let head = here.sequence(SequenceId(2)).tokens(&tokens[..3 * BLOCK_TOKENS + 1]).unwrap();
    drop(whole);
    drop(here.allocate(AllocRequest::new(97)).unwrap());
    drop(head);
    assert_eq!(cached(&here, &tokens), 3);
    let back = here.bring_back(&there, &NO_KEYS, &tokens).await.unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks), (10, 7));
    assert_eq!(cached(&here, &tokens), 10);
    // Its end is evicted first, as for any prompt.
    drop(here.allocate(AllocRequest::new(94)).unwrap());
    assert_eq!(cached(&here, &tokens), 6);
    [here, there].iter().for_each(is_idle);
}

#[tokio::test]
async fn events_are_sent() {
    let (here, there) = pools(100);
    let prompts = fill(&here, 1);
    let mut events = there.prefix_cache().unwrap().events().subscribe().unwrap();
    let mut own = here.prefix_cache().unwrap().events().subscribe().unwrap();
    here.offload(&there, 100).await.unwrap();
    let (mut stored, mut removed) = (0, 0);
    while let Some(numbered) = events.try_recv() {
        stored += usize::from(matches!(numbered.event, KvEvent::Stored { .. }));
    }
    while let Some(numbered) = own.try_recv() {
        removed += usize::from(matches!(numbered.event, KvEvent::Removed { .. }));
    }
    assert_eq!((stored, removed), (10, 10));
    here.bring_back(&there, &NO_KEYS, &prompts[0]).await.unwrap();
    let mut last = None;
    for place in 0..10 {
        let numbered = own.try_recv().unwrap();
        let KvEvent::Stored { hash, parent, tokens, .. } = numbered.event else { panic!("{numbered:?}") };
        assert_eq!(parent, last, "block {place}");
        assert_eq!(tokens[..], prompts[0][place * BLOCK_TOKENS..][..BLOCK_TOKENS]);
        last = Some(hash);
    }
}
