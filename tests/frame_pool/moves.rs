//! Proposals of moves: what they gain, and that they never lose.

use std::collections::BTreeSet;

use kvpool::compact::Goal;
use kvpool::{FramePool, Order};
use proptest::collection::vec;
use proptest::prelude::*;

use super::{allocate, key};

/// State of a frame, to build a pool of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Cached,
    Owned,
}
use State::*;

/// Builds a pool without a null block whose frames have these states.
fn pool_of(states: &[State]) -> FramePool {
    let pool = FramePool::builder(states.len()).without_null_block().build().unwrap();
    let all = allocate(&pool, states.len());
    let named: Vec<u32> = all.iter().copied().filter(|&frame| states[frame as usize] == Cached).collect();
    let keys: Vec<_> = named.iter().map(|&frame| (frame, key(&pool, u64::from(frame)))).collect();
    pool.register(&keys).unwrap();
    let freed: Vec<u32> = all.into_iter().filter(|&frame| states[frame as usize] != Owned).collect();
    pool.free(&freed).unwrap();
    pool
}

fn free_runs(states: &[State], order: u8) -> usize {
    states.chunks_exact(1 << order).filter(|run| run.iter().all(|&state| state == Free)).count()
}

/// Proposes moves at no price of breaks, checks each pair, commits all of them, and returns their number.
fn compact(pool: &FramePool, states: &mut [State], order: u8, moves_max: usize) -> usize {
    let moves = pool.propose_moves_with_penalty(Goal::Fragmentation { order: Order(order) }, moves_max, 0);
    let pairs: Vec<(u32, u32)> = moves.pairs().collect();
    assert!(pairs.len() <= moves_max, "{} moves of {moves_max}", pairs.len());
    let named: BTreeSet<u32> = pairs.iter().flat_map(|&(from, to)| [from, to]).collect();
    assert_eq!(named.len(), 2 * pairs.len(), "no frame occurs twice: {pairs:?}");
    for &(from, to) in &pairs {
        assert_eq!((states[from as usize], states[to as usize]), (Cached, Free), "{from} to {to}");
    }
    let outcome = moves.commit();
    assert_eq!((outcome.moved.len(), outcome.stayed.len()), (pairs.len(), 0));
    for (from, to) in pairs {
        states.swap(from as usize, to as usize);
    }
    for (frame, state) in (0..).zip(states.iter()) {
        let cached = pool.info(&[frame], &mut Vec::new()).is_ok();
        assert_eq!(cached, *state != Free, "frame {frame} is {state:?}");
    }
    pool.audit().unwrap();
    named.len() / 2
}

#[test]
fn free_frames_between_cached_ones_are_gathered_at_any_place() {
    // 64 free frames in 16 runs of 4, within a region of the order, across one, and far apart.
    for (period, first) in [(16, 0), (16, 8), (16, 14), (17, 0), (20, 3), (64, 0), (64, 30)] {
        let is_free = |frame: usize| (frame + period - first) % period < 4;
        let states: Vec<State> =
            (0..16 * period).map(|frame| if is_free(frame) { Free } else { Cached }).collect();
        let pool = pool_of(&states);
        for order in [3, 4, 5] {
            let mut states = states.clone();
            let pool = if order == 3 { pool.clone() } else { pool_of(&states) };
            let moved = compact(&pool, &mut states, order, usize::MAX);
            assert!(moved > 0, "4 of {period} from {first}, order {order}");
            // All of the 64 frames but those of the last region that holes are too few for.
            let possible = 64 >> order;
            let runs = free_runs(&states, order);
            assert!(runs + 1 >= possible, "{runs} of {possible}: 4 of {period} from {first}, order {order}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 200 }, ..ProptestConfig::default() })]

    #[test]
    fn a_proposal_loses_no_run(
        // Stretches of one state, as requests leave them.
        stretches in vec((prop_oneof![3 => Just(Free), 5 => Just(Cached), 1 => Just(Owned)], 1_usize..40), 1..40),
        order in 1_u8..6,
        moves_max in prop_oneof![Just(usize::MAX), 0_usize..60],
    ) {
        let mut states: Vec<State> =
            stretches.into_iter().flat_map(|(state, len)| std::iter::repeat_n(state, len)).collect();
        let pool = pool_of(&states);
        let before = free_runs(&states, order);
        let moved = compact(&pool, &mut states, order, moves_max);
        let after = free_runs(&states, order);
        prop_assert!(after >= before + usize::from(moved > 0), "{before} to {after} by {moved} moves");
        if moves_max == usize::MAX {
            prop_assert_eq!(compact(&pool, &mut states, order, moves_max), 0, "one proposal gains all");
        }
    }
}
