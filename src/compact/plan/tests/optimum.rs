//! Compares the planner with exhaustive search, on small pools.

use super::*;

/// One bit per frame.
type Bits = u32;

fn bits(snapshot: &Snapshot, kind: FrameKind) -> Bits {
    let of = |(frame, state): (usize, &FrameState)| Bits::from(state.kind() == kind) << frame;
    snapshot.frames().iter().enumerate().map(of).sum()
}

fn free_runs(free: Bits, frames: usize, order: u8) -> usize {
    let run = (1 << (1 << order)) - 1;
    (0..frames >> order).filter(|index| free >> (index << order) & run == run).count()
}

fn subsets(of: Bits, count: u32, found: &mut dyn FnMut(Bits)) {
    fn go(rest: Bits, count: u32, taken: Bits, found: &mut dyn FnMut(Bits)) {
        if count == 0 {
            return found(taken);
        }
        if rest.count_ones() < count {
            return;
        }
        let bit = rest & rest.wrapping_neg();
        go(rest & !bit, count - 1, taken | bit, found);
        go(rest & !bit, count, taken, found);
    }
    go(of, count, 0, found);
}

/// Returns the highest number of free runs that any plan of at most `moves_max` moves reaches, the
/// fewest moves for that number, and every set of frames that the movable blocks can then occupy.
/// The number of moves is the number of frames that are newly occupied.
fn optimum(snapshot: &Snapshot, order: u8, moves_max: usize) -> (usize, u32, Vec<Bits>) {
    let (free, movable) = (bits(snapshot, FrameKind::Free), bits(snapshot, FrameKind::Movable));
    let frames = snapshot.frames().len();
    let (mut runs, mut moves, mut ends) = (0, 0, Vec::new());
    subsets(free | movable, movable.count_ones(), &mut |after| {
        let cost = (after & !movable).count_ones();
        if cost as usize > moves_max {
            return;
        }
        let gained = free_runs((free | movable) & !after, frames, order);
        if ends.is_empty() || gained > runs || gained == runs && cost < moves {
            (runs, moves) = (gained, cost);
            ends.clear();
        }
        if (gained, cost) == (runs, moves) {
            ends.push(after);
        }
    });
    (runs, moves, ends)
}

/// Returns the maximum number of links over all final states and assignments of blocks.
fn most_links(snapshot: &Snapshot, ends: &[Bits]) -> usize {
    fn go(states: &mut Vec<FrameState>, sources: &[usize], targets: Bits, best: &mut usize) {
        let Some((&source, rest)) = sources.split_first() else {
            let links = states.windows(2).filter(|pair| pair[0].is_linked_to(pair[1])).count();
            return *best = links.max(*best);
        };
        for to in (0..states.len()).filter(|to| targets >> to & 1 == 1) {
            states.swap(source, to);
            go(states, rest, targets & !(1 << to), best);
            states.swap(source, to);
        }
    }
    let movable = bits(snapshot, FrameKind::Movable);
    let mut best = 0;
    for &after in ends {
        let left = movable & !after;
        let sources: Vec<usize> = (0..snapshot.frames().len()).filter(|f| left >> f & 1 == 1).collect();
        go(&mut snapshot.frames().to_vec(), &sources, after & !movable, &mut best);
    }
    best
}

fn small(rng: &mut Rng, frames: usize, order: u8) -> Snapshot {
    let mix = Mix {
        free: rng.u32(1..8),
        away: rng.u32(0..2),
        movable: rng.u32(1..8),
        fixed: rng.u32(0..2),
        reserved_for_growth: 0,
        evictable: 0,
        sequences: rng.u32(0..4),
        run: rng.u32(1..4),
    };
    pool(rng, frames, order, mix)
}

#[test]
fn no_plan_gains_more_or_moves_less() {
    let rng = &mut Rng::with_seed(12);
    let rounds = if cfg!(miri) { 2 } else { 600 };
    let (mut worth, mut same_runs, mut moves_worst, mut moves_sum) = (0, 0, 0.0_f64, 0.0);
    for round in 0..rounds {
        let frames = if cfg!(miri) { 8 } else { rng.usize(12..=if round % 20 == 0 { 20 } else { 15 }) };
        let order = rng.u8(1..=2);
        let snapshot = small(rng, frames, order);
        let moves_max = if rng.bool() { ALL } else { rng.usize(0..5) };
        let plan = crate::compact::plan(&snapshot, Goal::Fragmentation { order: Order(order) }, moves_max, 0);
        let (runs, moves, _) = optimum(&snapshot, order, moves_max);
        if moves == 0 {
            assert!(plan.moves.is_empty(), "moves without gain: {snapshot:?}");
            continue;
        }
        worth += 1;
        let got = snapshot.free_runs(Order(order)) + plan.runs_gained as usize;
        assert!(got <= runs, "better than the optimum: {snapshot:?}");
        same_runs += usize::from(got == runs);
        let ratio = plan.moves.len() as f64 / f64::from(moves);
        moves_worst = moves_worst.max(ratio);
        moves_sum += ratio;
    }
    println!("{worth} of {rounds} pools can gain a run");
    println!(
        "as many runs as the best plan in {same_runs}; moves relative to it: mean {:.4}, worst {moves_worst:.4}",
        moves_sum / f64::from(worth)
    );
    // An exact optimum, not a bound of a heuristic: see the proof in the docs of `plan`.
    assert!(worth > rounds / 4 && same_runs == worth as usize && moves_worst == 1.0);
}

#[test]
fn sequences_lie_nearly_as_well_as_they_can() {
    let rng = &mut Rng::with_seed(99);
    let rounds = if cfg!(miri) { 2 } else { 3000 };
    let (mut looked_at, mut best, mut equal) = (0, 0, 0);
    let (mut ours_runs, mut best_runs, mut worst) = (0, 0, 0);
    for _ in 0..rounds {
        let frames = if cfg!(miri) { 8 } else { rng.usize(10..=14) };
        let order = rng.u8(1..=2);
        let snapshot = small(rng, frames, order);
        let (_, moves, ends) = optimum(&snapshot, order, ALL);
        let assignments = (1..=moves as usize).product::<usize>() * ends.len();
        if snapshot.sequences().is_empty() || moves == 0 || assignments > 20_000 {
            continue;
        }
        let mut after = snapshot.clone();
        after.apply(&crate::compact::plan(&snapshot, Goal::Fragmentation { order: Order(order) }, ALL, 0));
        let most = most_links(&snapshot, &ends);
        assert!(after.links() <= most, "better than the optimum: {snapshot:?}");
        let blocks = snapshot.frames().iter().filter(|state| state.block().is_some()).count();
        looked_at += 1;
        equal += usize::from(after.links() == most);
        worst = worst.max(most - after.links());
        best += most;
        ours_runs += blocks - after.links();
        best_runs += blocks - most;
    }
    let ratio = ours_runs as f64 / best_runs as f64;
    println!("{looked_at} pools, {best} links at best; equal in {equal}, at most {worst} fewer");
    println!("runs of sequences: {ratio:.4} of the fewest");
    assert!(looked_at > rounds / 20);
    assert!(ratio < 1.08 && equal * 10 > looked_at * 7, "{ratio}, {equal} of {looked_at}");
}
