//! Cached blocks of several groups go to another pool's cache and come back: a hit is a boundary at
//! which one of the two pools has what each group needs.

use kvpool::prefix::{BlockHash, KvEvent};
use kvpool::{AllocRequest, GroupKeeps, Preempt};
use proptest::prelude::*;

use super::moving::{STATES, check, compute, compute_request, is_idle, pool, tokens};
use super::*;

const NO_KEYS: PrefixKeys<'static> = PrefixKeys::new();

/// Admits a prompt, checks all bytes of its hit, and returns its length.
fn hit(pool: &Pool, all: &[u32]) -> usize {
    let sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(99), all)).unwrap();
    check(pool, &sequence, all);
    sequence.len()
}

fn hashes_of(pool: &Pool, group: usize) -> Vec<BlockHash> {
    pool.cached_blocks_by_group()[group].iter().map(|&(_, hash)| hash).collect()
}

/// All blocks leave, of all groups and states, and those that a hit needs come back.
#[test]
fn a_prompt_goes_and_comes_back() {
    for states in [&STATES[..], &[]] {
        let (near, far, all) = (pool(400, states), pool(400, states), tokens(123));
        drop(compute(&near, 1, &all[..103]));
        let cached: Vec<usize> = near.cached_blocks_by_group().iter().map(Vec::len).collect();
        let report = block_on(near.offload(&far, 400)).unwrap();
        assert_eq!((report.evicted_blocks, hit(&near, &all)), (cached.iter().sum(), 0), "{report:?}");
        let there: Vec<usize> = far.cached_blocks_by_group().iter().map(Vec::len).collect();
        assert_eq!((there, hit(&far, &all)), (cached, 100), "each block is of its group");
        let back = block_on(near.bring_back(&far, &NO_KEYS, &all)).unwrap();
        // Of the windows of 24 and 9 tokens, 6 and 2 blocks, and those of 5 sinks.
        let needed = 25 + 6 + 2 + 2 + states.iter().sum::<usize>();
        assert_eq!((back.cached_blocks, back.carried.blocks), (25, needed), "{back:?}");
        assert_eq!((hit(&near, &all), near.cached_blocks().len()), (100, needed));
        let back = block_on(near.bring_back(&far, &NO_KEYS, &all)).unwrap();
        assert_eq!((back.cached_blocks, back.carried.blocks), (25, 0), "it is here");
        drop(compute(&near, 2, &all));
        [near, far].iter().for_each(is_idle);
    }
}

/// What comes is announced by group, and a checkpoint behind the last block before it.
#[test]
fn blocks_that_come_are_announced_by_group() {
    let (near, far, all) = (pool(400, &STATES), pool(400, &STATES), tokens(43));
    drop(compute(&far, 1, &all));
    let mut events = near.prefix_cache().unwrap().events().subscribe().unwrap();
    block_on(near.bring_back(&far, &NO_KEYS, &all)).unwrap();
    let (groups, mut stored) = (near.cache_groups(), vec![0; 5]);
    let last = *far.prompt_blocks(&NO_KEYS, &all).unwrap().needed(40).last().unwrap();
    assert!(hashes_of(&far, 0).contains(&last.hash()) || last.without() == 36);
    while let Some(numbered) = events.try_recv() {
        let KvEvent::Stored { hash, parent, tokens, group, .. } = numbered.event else { continue };
        let of_state = groups[group as usize].keeps == GroupKeeps::State;
        assert!(hashes_of(&near, group as usize).contains(&hash));
        assert_eq!((tokens.len(), of_state && parent.is_none()), (if of_state { 0 } else { 4 }, false));
        stored[group as usize] += 1;
    }
    assert_eq!(stored, [10, 6, 4, 3, 2]);
}

/// A boundary that one group lacks is no hit, wherever the others have it.
#[test]
fn a_group_alone_is_no_hit() {
    for group in 0..5 {
        let (near, far, all) = (pool(400, &STATES), pool(400, &STATES), tokens(90));
        for length in [43, 83] {
            drop(compute(&far, 1, &all[..length]));
        }
        let whole = far.prompt_blocks(&NO_KEYS, &all).unwrap();
        let (needed, blocks) = (whole.needed(80), |hash| hashes_of(&far, group).contains(&hash));
        let lost = needed.iter().rev().find(|block| blocks(block.hash())).unwrap();
        assert_eq!(far.uncache(&[lost.hash()]).evicted_blocks, 1);
        let back = block_on(near.bring_back(&far, &NO_KEYS, &all)).unwrap();
        assert_eq!(back.cached_blocks, 10, "group {group}: {back:?}");
        assert_eq!((hit(&near, &all), near.cached_blocks().len()), (40, whole.needed_blocks(40)));
        drop(compute(&near, 2, &all));
        [near, far].iter().for_each(is_idle);
    }
}

/// With less room, a shorter prefix comes, or none: never blocks without those of the other groups.
#[test]
fn less_room_is_a_shorter_prefix() {
    let (far, all) = (pool(400, &STATES), tokens(90));
    for length in [23, 43, 83] {
        drop(compute(&far, 1, &all[..length]));
    }
    for room in 1..40 {
        let near = pool(100, &STATES);
        let held = near.allocate(AllocRequest::new(near.free_blocks() - room)).unwrap();
        match block_on(near.bring_back(&far, &NO_KEYS, &all)) {
            Ok(back) => {
                let needed = far.prompt_blocks(&NO_KEYS, &all).unwrap().needed_blocks(back.cached_blocks * 4);
                assert_eq!(near.cached_blocks().len(), needed, "{room}: {back:?}");
            }
            Err(error) => assert!(error.to_string().contains("no room") && room < 19, "{room}: {error}"),
        }
        drop(held);
        let expected = [(35, 80), (25, 40), (19, 20)].into_iter().find(|&(needed, _)| room >= needed);
        assert_eq!(hit(&near, &all), expected.map_or(0, |(_, tokens)| tokens), "{room}");
        is_idle(&near);
    }
}

#[test]
fn pools_of_other_groups_are_refused_by_name() {
    let (states, lists, all) = (pool(100, &STATES), pool(100, &[]), tokens(43));
    drop(compute(&states, 1, &all));
    for error in [
        block_on(states.offload(&lists, 9)).unwrap_err(),
        block_on(lists.bring_back(&states, &NO_KEYS, &all)).unwrap_err(),
    ] {
        assert!(error.to_string().contains("states"), "{error}");
    }
    let export = states.export_cached(3).unwrap();
    let error = lists.import(&export.manifest().unwrap()).unwrap_err();
    assert!(error.to_string().contains("states"), "{error}");
    drop(export);
    assert_eq!(hit(&states, &all), 40);
    for what in ["import_prefix", "blocks_of_hashes"] {
        let error = match what {
            "import_prefix" => states.import_prefix(0, &[]).unwrap_err().to_string(),
            _ => states.blocks_of_hashes(&[]).unwrap_err().to_string(),
        };
        assert!(error.contains("5 groups of layers"), "{error}");
    }
    [states, lists].iter().for_each(is_idle);
}

/// A sequence that was swapped out, and the cached blocks of others, beside each other.
#[test]
fn swaps_and_offloads_share_a_pool() {
    let (near, far, all) = (pool(400, &STATES), pool(400, &STATES), tokens(123));
    drop(compute(&near, 1, &all[..103]));
    let again = compute(&near, 2, &all);
    let swapped = block_on(near.preempt(again, Preempt::Swap(&far))).unwrap().swapped.unwrap();
    block_on(near.offload(&far, 400)).unwrap();
    assert_eq!(hit(&near, &all), 0);
    let (back, _) = block_on(near.resume(&swapped.sequence, kvpool::ResumeOptions::new())).unwrap();
    check(&near, &back, &all);
    drop((swapped, back));
    assert_eq!(block_on(near.bring_back(&far, &NO_KEYS, &all)).unwrap().cached_blocks, 30);
    assert_eq!(hit(&near, &all), 120);
    [near, far].iter().for_each(is_idle);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Whatever is where, a prompt is hit afterwards where the blocks of both pools together are a
    /// hit for each group, and with the bytes of its tokens.
    #[test]
    fn a_hit_is_what_both_pools_have(
        with_states in any::<bool>(), lengths in prop::collection::vec((1usize..110, any::<bool>()), 1..5),
        away in 0usize..200, lost in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let states = if with_states { &STATES[..] } else { &[] };
        let (near, far, all) = (pool(600, states), pool(600, states), tokens(120));
        for (id, (length, is_near)) in lengths.into_iter().enumerate() {
            drop(compute(if is_near { &near } else { &far }, id as u64, &all[..length]));
        }
        block_on(near.offload(&far, away.max(1))).unwrap();
        // Evicted in the order of the pool, or at any place.
        far.evict_cached(far.cached_blocks().len() - lost.len().min(far.cached_blocks().len()));
        let has = |pool: &Pool| pool.cached_blocks().into_iter().map(|(_, hash)| hash).collect::<Vec<_>>();
        let (here, there) = (has(&near), has(&far));
        let blocks = near.prompt_blocks(&NO_KEYS, &all).unwrap();
        let both = blocks.boundary(usize::MAX, &mut |hash| here.contains(&hash) || there.contains(&hash));
        let back = block_on(near.bring_back(&far, &NO_KEYS, &all)).unwrap();
        prop_assert_eq!((back.cached_blocks * 4, hit(&near, &all)), (both, both));
        drop(compute(&near, 9, &all));
        [near, far].iter().for_each(is_idle);
    }
}

/// A hit that is here stays one, though the pool is too small for what would make it longer.
#[test]
fn a_shorter_hit_is_not_evicted_for_a_longer_one() {
    let (near, far, all) = (pool(60, &STATES), pool(400, &STATES), tokens(123));
    drop(compute(&far, 1, &all[..43]));
    drop(compute(&far, 1, &all[..103]));
    block_on(near.bring_back(&far, &NO_KEYS, &all[..43])).unwrap();
    assert_eq!(hit(&near, &all[..43]), 40);
    // Others are used later, so that the hit would be evicted first.
    let rest = near.free_blocks() - 4;
    let lease = near.allocate(AllocRequest::new(rest)).unwrap();
    let back = block_on(near.bring_back(&far, &NO_KEYS, &all)).unwrap();
    drop(lease);
    assert_eq!((back.cached_blocks, hit(&near, &all[..43])), (10, 40), "{back:?}");
    [near, far].iter().for_each(is_idle);
}

/// A cache numbers its uncache calls by itself: after one, no state is found that others computed from
/// what was uncached, and one that it computed before.
#[test]
fn states_behind_uncached_blocks_are_found_by_no_pool() {
    let (first, second, host, all) = (pool(400, &STATES), pool(400, &STATES), pool(400, &STATES), tokens(43));
    second.uncache(&[BlockHash::new(7, 7)]);
    drop(compute(&second, 1, &all));
    block_on(second.offload(&host, 400)).unwrap();
    let wrong = host.prompt_blocks(&NO_KEYS, &all).unwrap().needed(40).last().unwrap().hash();
    for pool in [&first, &second, &host] {
        pool.uncache(&[wrong]);
    }
    drop(compute(&first, 1, &all));
    let before = first.cached_blocks_by_group()[3].len();
    first.evict_cached(0);
    let back = block_on(first.bring_back(&host, &NO_KEYS, &all)).unwrap();
    assert_eq!((before, back.cached_blocks, hit(&first, &all)), (STATES[0], 0, 0), "{back:?}");
    [first, second, host].iter().for_each(is_idle);
}

/// A transfer is no request that hits a checkpoint: later ones of its session dominate it.
#[test]
fn lookups_of_transfers_are_no_hits() {
    let (near, far) = (pool(400, &STATES), pool(400, &STATES));
    let all = tokens(123);
    let mut at = 0;
    for length in [43, 63, 83, 103] {
        let back = block_on(near.bring_back(&far, &NO_KEYS, &all[..length])).unwrap();
        assert_eq!(back.cached_blocks * 4, at);
        at = length / 4 * 4;
        let request = AdmitRequest::new(SequenceId(1), &all[..length]).session(kvpool::SessionId(1));
        drop(compute_request(&near, &request, &all[..length]));
    }
    // Two checkpoints are dominated: 10 blocks, before any others.
    drop(near.allocate(AllocRequest::new(near.free_blocks() + 10)).unwrap());
    for (tokens, expected) in [(43, 0), (63, 0), (83, 80), (103, 100)] {
        assert_eq!(hit(&near, &all[..tokens]), expected, "{tokens} tokens");
    }
    [near, far].iter().for_each(is_idle);
}
