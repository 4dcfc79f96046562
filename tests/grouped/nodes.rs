//! Sequences and cached blocks of several groups go to a node and come back, whatever it lacks,
//! refuses or says.

use kvpool::AllocRequest;

use super::moving::{STATES, check, compute, is_idle, pool, tokens};
use super::*;
use crate::transfer::nodes::{Manner, linked};

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
        let (node, _remotes) = linked(&here, &there, Manner::default());
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
        let (_node, _remotes) = linked(&here, &there, Manner::default());
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

/// A boundary that one group lacks is no hit. The node says so of first blocks of checkpoints; of
/// the others, the blocks that come say it.
#[test]
fn what_the_node_lacks_is_a_shorter_prefix() {
    let whole = pool(400, &STATES).prompt_blocks(&NO_KEYS, &tokens(90)).unwrap();
    for lost in whole.needed(80) {
        let (here, there, all) = (pool(400, &STATES), pool(400, &STATES), tokens(90));
        let (_node, _remotes) = linked(&here, &there, Manner::default());
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

/// With less room, a shorter prefix comes, or none.
#[test]
fn less_room_is_a_shorter_prefix() {
    let (there, all) = (pool(400, &STATES), tokens(90));
    for length in [23, 43, 83] {
        drop(compute(&there, 1, &all[..length]));
    }
    for room in 1..45 {
        let here = pool(100, &STATES);
        let (_node, _remotes) = linked(&here, &there, Manner::default());
        let held = here.allocate(AllocRequest::new(here.free_blocks() - room)).unwrap();
        let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
        drop(held);
        let expected = [(35, 80), (25, 40), (19, 20)].into_iter().find(|&(needed, _)| room >= needed);
        let expected = expected.map_or(0, |(_, tokens)| tokens);
        assert_eq!((back.cached_blocks * 4, hit(&here, &all)), (expected, expected), "{room}: {back:?}");
        is_idle(&here);
    }
    is_idle(&there);
}

/// Blocks that are here need no room, also if a running sequence owns them.
#[test]
fn owned_blocks_need_no_room() {
    let (here, there, all) = (pool(200, &STATES), pool(400, &STATES), tokens(203));
    let (_node, _remotes) = linked(&here, &there, Manner::default());
    drop(compute(&there, 1, &all));
    let running = compute(&here, 2, &all[..163]);
    let needed = here.prompt_blocks(&NO_KEYS, &all).unwrap().needed(200);
    let missing = needed.iter().filter(|block| !here.is_cached(block.hash())).count();
    let held = here.allocate(AllocRequest::new(here.free_blocks() - missing)).unwrap();
    let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks), (50, missing), "{back:?}");
    drop(held);
    assert_eq!(hit(&here, &all), 200);
    check(&here, &running, &all[..163]);
    drop(running);
    [here, there].iter().for_each(is_idle);
}

/// What is a hit here stays one, whatever the node sends of a longer one, in a pool without spare
/// room.
#[test]
fn a_hit_stays_one() {
    for blocks_max in 1..36 {
        for spare in [0, 2, 9, 40] {
            let (here, there, all) = (pool(100, &STATES), pool(400, &STATES), tokens(90));
            let manner = Manner { blocks_max: Some(blocks_max), fails_after: Some(1), ..Manner::default() };
            let (_node, _remotes) = linked(&here, &there, manner);
            drop(compute(&there, 1, &all[..83]));
            drop(compute(&here, 1, &all[..43]));
            let held = here.allocate(AllocRequest::new(here.free_blocks() - spare)).unwrap();
            let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
            drop(held);
            assert_eq!(back.cached_blocks * 4, hit(&here, &all), "{blocks_max}, {spare}: {back:?}");
            assert!(back.cached_blocks >= 10, "{blocks_max}, {spare}: {back:?}");
            is_idle(&here);
        }
    }
}

/// A node sends as many blocks at once as its quota allows: the rest is fetched.
#[test]
fn a_node_with_a_quota_sends_all() {
    for blocks_max in [1, 7, 64] {
        let (here, there, all) = (pool(400, &STATES), pool(400, &STATES), tokens(203));
        let manner = Manner { blocks_max: Some(blocks_max), ..Manner::default() };
        let (node, _remotes) = linked(&here, &there, manner);
        drop(compute(&there, 1, &all));
        let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
        assert_eq!((back.cached_blocks, back.carried.blocks, hit(&here, &all)), (50, 65, 200));
        assert_eq!(node.fetched.lock().unwrap().len(), 65_usize.div_ceil(blocks_max));
    }
}

/// Neither a node that has nothing nor one that says otherwise is asked many times, and none if all
/// is here.
#[test]
fn a_node_that_sends_nothing_is_soon_left_alone() {
    for lies in [false, true] {
        for states in [&STATES[..], &[]] {
            let (here, there, all) = (pool(4000, states), pool(40, states), tokens(1600));
            let (node, _remotes) = linked(&here, &there, Manner { lies, ..Manner::default() });
            let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
            assert_eq!((back.cached_blocks, back.carried.blocks), (0, 0));
            let fetches = node.fetched.lock().unwrap().len();
            assert!(if lies { (1..=4).contains(&fetches) } else { fetches == 0 }, "{fetches}");
            assert!(node.asked.lock().unwrap().len() <= 2);
        }
    }
    let (here, there, all) = (pool(400, &STATES), pool(400, &STATES), tokens(203));
    let (node, _remotes) = linked(&here, &there, Manner::default());
    drop(compute(&here, 1, &all));
    let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
    assert_eq!((back.cached_blocks, node.asked.lock().unwrap().len()), (50, 0));
    assert!(node.fetched.lock().unwrap().is_empty());
}

fn of_one_list(blocks: usize, window: Option<usize>) -> Pool {
    let cache = PrefixConfig::new().key(HashKey::from_bytes([7; 32]));
    let builder = Pool::builder(super::moving::plain()).blocks(blocks).threads(1).prefix_cache(cache);
    match window {
        Some(tokens) => builder.window(Window::new(tokens).unwrap()),
        None => builder,
    }
    .build()
    .unwrap()
}

fn fill(pool: &Pool, all: &[u32]) -> kvpool::Sequence {
    let mut sequence = pool.admit(&AdmitRequest::new(SequenceId(1), all)).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, Tokens::Announced(usize::MAX)).unwrap();
    batch.finish();
    sequence
}

/// More blocks than one message names: the end of the prompt is evicted first.
#[test]
fn a_long_chain_comes_in_parts() {
    let (here, there, all) = (of_one_list(5000, None), of_one_list(5000, None), tokens(18_001));
    let (node, _remotes) = linked(&here, &there, Manner::default());
    drop(fill(&there, &all));
    let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks), (4500, 4500));
    assert_eq!(*node.fetched.lock().unwrap(), [4096, 404]);
    here.evict_cached(4300);
    assert_eq!(hit_of_one(&here, &all), 4300 * 4);
    // A running sequence owns the first of them, and there is room for some of the others.
    let (here, running) = (of_one_list(60, None), &all[..120]);
    let (_node, _remotes) = linked(&here, &there, Manner::default());
    let running = fill(&here, running);
    let held = here.allocate(AllocRequest::new(here.free_blocks() - 12)).unwrap();
    let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks), (42, 12));
    drop((held, running));
    [here, there].iter().for_each(is_idle);
}

/// One list with a window: the node is asked, and what is here is not fetched.
#[test]
fn a_window_alone_comes_at_one_boundary() {
    let pool = |window| of_one_list(400, window);
    for window in [None, Some(9), Some(33)] {
        let (here, there, all) = (pool(window), pool(window), tokens(1201));
        let (node, _remotes) = linked(&here, &there, Manner::default());
        let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
        assert_eq!(back.carried.blocks, 0);
        // A chain is fetched without a question.
        assert_eq!(node.fetched.lock().unwrap().len(), usize::from(window.is_none()), "{window:?}");
        drop(fill(&there, &all));
        let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
        let needed = here.prompt_blocks(&NO_KEYS, &all).unwrap().needed_blocks(1200);
        assert_eq!((back.cached_blocks, back.carried.blocks), (300, needed), "{window:?}");
        assert_eq!(hit_of_one(&here, &all), 1200);
    }
    // A window of 75 blocks, of which 40 find room: the boundary behind the first 40.
    let (here, there, all) = (of_one_list(60, Some(300)), of_one_list(400, Some(300)), tokens(1201));
    let (_node, _remotes) = linked(&here, &there, Manner::default());
    drop(fill(&there, &all));
    let held = here.allocate(AllocRequest::new(here.free_blocks() - 40)).unwrap();
    let back = block_on(here.bring_back_from_node("other", &NO_KEYS, &all)).unwrap();
    drop(held);
    assert_eq!((back.cached_blocks, hit_of_one(&here, &all[..165])), (40, 160), "{back:?}");
}

fn hit_of_one(pool: &Pool, all: &[u32]) -> usize {
    pool.admit(&AdmitRequest::new(SequenceId(99), all)).unwrap().len()
}
