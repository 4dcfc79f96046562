//! Sequences and cached blocks of several groups go to a node and come back: whole, or not at all.

use super::moving::{STATES, check, compute, is_idle, pool, tokens};
use super::*;
use crate::transfer::nodes::linked;

const NO_KEYS: PrefixKeys<'static> = PrefixKeys::new();

fn hit(pool: &Pool, all: &[u32]) -> usize {
    let sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(99), all)).unwrap();
    check(pool, &sequence, all);
    sequence.len()
}

#[test]
fn sequences_go_to_a_node() {
    for states in [&STATES[..], &[]] {
        let (here, there, all) = (pool(400, states), pool(400, states), tokens(103));
        let (node, _remotes) = linked(&here, &there);
        let sequence = compute(&here, 1, &all);
        let blocks = sequence.held_blocks();
        let report = block_on(here.replicate_to_node(&sequence, "other")).unwrap();
        assert_eq!((report.tokens, report.carried.blocks), (103, blocks));
        // The id is open there: the sequence comes back unchanged.
        let failed = block_on(here.migrate_to_node(sequence, "other")).unwrap_err();
        assert!(matches!(failed.error, TransferError::Sequence(_)), "{failed}");
        check(&here, &failed.sequence, &all);
        let copy = node.arrival();
        check(&there, &copy, &all);
        drop(copy);
        block_on(here.migrate_to_node(*failed.sequence, "other")).unwrap();
        assert!(here.view(SequenceId(1)).is_none(), "it is closed here");
        let sequence = node.arrival();
        check(&there, &sequence, &all);
        let closed = sequence.preempt();
        assert_eq!(closed.tokens_lost, 103 - hit(&there, &all));
        [here, there].iter().for_each(is_idle);
    }
}

#[test]
fn cached_blocks_go_to_a_node_and_come_back() {
    for states in [&STATES[..], &[]] {
        let (here, there, all) = (pool(400, states), pool(400, states), tokens(123));
        let (_node, _remotes) = linked(&here, &there);
        drop(compute(&here, 1, &all[..103]));
        let cached: Vec<usize> = here.cached_blocks_by_group().iter().map(Vec::len).collect();
        let report = block_on(here.offload_to_node("other", 400)).unwrap();
        assert_eq!((report.evicted_blocks, hit(&here, &all)), (cached.iter().sum(), 0), "{report:?}");
        let at_node: Vec<usize> = there.cached_blocks_by_group().iter().map(Vec::len).collect();
        assert_eq!((at_node, hit(&there, &all)), (cached, 100), "each block is of its group");
        let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
        let needed = there.prompt_blocks(&NO_KEYS, &all).unwrap().needed_blocks(100);
        assert_eq!((back.cached_blocks, back.carried.blocks), (25, needed), "{back:?}");
        assert_eq!((hit(&here, &all), here.cached_blocks().len()), (100, needed));
        let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
        assert_eq!((back.cached_blocks, back.carried.blocks), (25, 0), "it is here");
        [here, there].iter().for_each(is_idle);
    }
}

/// A boundary that one group lacks is no hit. The node says so of first blocks of checkpoints; of the
/// others, the blocks that come say it.
#[test]
fn what_the_node_lacks_is_a_shorter_prefix() {
    let whole = pool(400, &STATES).prompt_blocks(&NO_KEYS, &tokens(90)).unwrap();
    for lost in whole.needed(80) {
        let (here, there, all) = (pool(400, &STATES), pool(400, &STATES), tokens(90));
        let (_node, _remotes) = linked(&here, &there);
        for length in [43, 83] {
            drop(compute(&there, 1, &all[..length]));
        }
        assert_eq!(there.uncache(&[lost.hash()]).evicted_blocks, 1);
        let expected = whole.boundary(usize::MAX, &mut |hash| there.is_cached(hash));
        assert!([0, 40].contains(&expected), "{lost:?}: {expected}");
        let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
        assert_eq!((back.cached_blocks * 4, hit(&here, &all)), (expected, expected), "{lost:?}: {back:?}");
        [here, there].iter().for_each(is_idle);
    }
}

/// With less room, a shorter prefix comes, or none; what is a hit here stays one.
#[test]
fn less_room_is_a_shorter_prefix() {
    let (there, all) = (pool(400, &STATES), tokens(90));
    for length in [23, 43, 83] {
        drop(compute(&there, 1, &all[..length]));
    }
    for room in 1..45 {
        let here = pool(100, &STATES);
        let (_node, _remotes) = linked(&here, &there);
        let held = here.allocate(kvpool::AllocRequest::new(here.free_blocks() - room)).unwrap();
        let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
        drop(held);
        let expected = [(35, 80), (25, 40), (19, 20)].into_iter().find(|&(needed, _)| room >= needed);
        let expected = expected.map_or(0, |(_, tokens)| tokens);
        assert_eq!((back.cached_blocks * 4, hit(&here, &all)), (expected, expected), "{room}: {back:?}");
        is_idle(&here);
    }
    is_idle(&there);
}
