//! Checks the invariants of plans. `optimum` compares with exhaustive search.

use std::collections::HashSet;

use fastrand::Rng;
use proptest::prelude::*;

use super::*;
use crate::compact::{FRAGMENTATION_PENALTY, FrameKind, FrameState, Shortfall};
use crate::ids::SequenceId;

mod optimum;

const ALL: usize = usize::MAX;

fn plan(snapshot: &Snapshot, goal: Goal, moves_max: usize) -> Plan {
    super::plan(snapshot, goal, moves_max, FRAGMENTATION_PENALTY)
}

/// Composition of a random pool, as weights.
#[derive(Clone, Copy, Debug)]
struct Mix {
    free: u32,
    away: u32,
    movable: u32,
    fixed: u32,
    evictable: u32,
    /// One in so many units is reserved for growth; 0 for none.
    reserved_for_growth: u32,
    /// Number of sequences that own the blocks; 0 for none.
    sequences: u32,
    /// Mean length of runs of frames of the same kind.
    run: u32,
}

/// Returns a pool in which each kind of frame forms runs, and the blocks of a sequence are in
/// ascending places. Every other sequence grows.
fn pool(rng: &mut Rng, frames: usize, order: u8, mix: Mix) -> Snapshot {
    let mut places = vec![0; mix.sequences as usize];
    // Outside of the pool, until a block is there.
    let mut ends = vec![FrameId(u32::MAX); mix.sequences as usize];
    let mut states = Vec::with_capacity(frames);
    let (mut kind, mut sequence) = (FrameKind::Free, 0);
    while states.len() < frames {
        if states.is_empty() || rng.u32(0..mix.run) == 0 {
            let all = mix.free + mix.away + mix.movable + mix.fixed + mix.evictable;
            let mut at = rng.u32(0..all);
            let weights = [
                (FrameKind::Free, mix.free),
                (FrameKind::Away, mix.away),
                (FrameKind::Movable, mix.movable),
                (FrameKind::Fixed, mix.fixed),
                (FrameKind::Evictable, mix.evictable),
            ];
            for (of, weight) in weights {
                if at < weight {
                    kind = of;
                    break;
                }
                at -= weight;
            }
            sequence = rng.u32(0..mix.sequences.max(1));
        }
        let has_block = matches!(kind, FrameKind::Movable | FrameKind::Fixed) && mix.sequences > 0;
        states.push(match kind {
            FrameKind::Evictable => FrameState::evictable(FrameId(states.len() as u32)),
            _ => FrameState::new(kind, has_block.then(|| (sequence, places[sequence as usize]))),
        });
        if has_block {
            ends[sequence as usize] = FrameId(states.len() as u32 - 1);
            // Skip a place now and then, as if another sequence shared the block and named it.
            places[sequence as usize] += if rng.u32(0..20) == 0 { 2 } else { 1 };
        }
    }
    for unit in states.chunks_mut(64) {
        // A unit that is entirely free is not reserved for growth.
        let is_used = unit.iter().any(|state| !state.kind().is_free());
        if is_used && mix.reserved_for_growth > 0 && rng.u32(0..mix.reserved_for_growth) == 0 {
            let free = unit.iter_mut().filter(|state| state.kind().is_free());
            free.for_each(|state| *state = FrameState::RESERVED_FOR_GROWTH);
        }
    }
    let sequences = (0..u64::from(mix.sequences)).map(SequenceId).collect();
    Snapshot::new(Order(order), states, sequences).with_ends(ends.into_iter().step_by(2))
}

fn mixes() -> impl Strategy<Value = Mix> {
    (0u32..10, 0u32..2, 0u32..10, 0u32..2, 0u32..4, 0u32..4, 0u32..12, 1u32..8).prop_map(
        |(free, away, movable, fixed, evictable, reserved_for_growth, sequences, run)| Mix {
            free: free + 1,
            away,
            movable,
            fixed,
            reserved_for_growth,
            evictable,
            sequences,
            run,
        },
    )
}

/// Checks the plan's invariants by applying it step by step; returns the pool afterwards.
fn check(before: &Snapshot, order: Order, plan: &Plan, moves_max: usize) -> Snapshot {
    assert!(plan.moves.len() <= moves_max, "{} moves, but the limit is {moves_max}", plan.moves.len());
    let sources: HashSet<_> = plan.moves.iter().map(|one| one.from).collect();
    let targets: HashSet<_> = plan.moves.iter().map(|one| one.to).collect();
    assert_eq!((sources.len(), targets.len()), (plan.moves.len(), plan.moves.len()), "a frame occurs twice");
    assert!(sources.is_disjoint(&targets), "a destination is also a source");
    for step in &plan.steps {
        assert!(
            step.region.frames().all(|frame| !targets.contains(&frame)),
            "{} is emptied and filled",
            step.region
        );
    }
    assert_eq!(plan.steps.last().map_or(0, |step| step.end), plan.moves.len());
    let mut after = before.clone();
    after.apply(plan);
    // A move into a frame reserved for growth leaves a free one.
    let free = |of: &Snapshot| of.count(FrameKind::Free) + of.count(FrameKind::ReservedForGrowth);
    assert_eq!(free(before), free(&after));
    for kind in [FrameKind::Movable, FrameKind::Fixed, FrameKind::Away, FrameKind::Evictable] {
        assert_eq!(before.count(kind), after.count(kind));
    }
    assert_eq!(after.rooms() as isize, before.rooms() as isize + plan.rooms_gained);
    assert_eq!(after.links() + plan.breaks, before.links() + plan.joins);
    assert_eq!(after.free_runs(order) as isize, before.free_runs(order) as isize + plan.runs_gained);
    after
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 400 }, failure_persistence: None, ..Default::default() })]

    #[test]
    fn defragmenting_keeps_its_promises(
        mix in mixes(), seed: u64, frames in 0usize..700, order in 0u8..8, budget in prop_oneof![Just(ALL), 0usize..60]
    ) {
        let order = Order(order);
        let before = pool(&mut Rng::with_seed(seed), frames, order.0, mix);
        let goal = Goal::Fragmentation { order };
        let cheap = |snapshot: &Snapshot, moves_max| super::plan(snapshot, goal, moves_max, 0);
        let plan = cheap(&before, budget);
        let after = check(&before, order, &plan, budget);
        prop_assert_eq!(after.count(FrameKind::ReservedForGrowth), before.count(FrameKind::ReservedForGrowth));
        prop_assert_eq!(plan.runs_gained, plan.steps.len() as isize);
        prop_assert!(after.fragmentation(order) <= before.fragmentation(order));

        // Every step gains a run, and costs no more than the next step.
        let (mut part, mut done, mut price) = (before.clone(), 0, 0);
        for (index, step) in plan.steps.iter().enumerate() {
            part.apply_moves(&plan.moves[done..step.end]);
            prop_assert_eq!(part.free_runs(order), before.free_runs(order) + index + 1);
            prop_assert!(step.region.frames().all(|frame| part.frames()[frame.index()].kind() == FrameKind::Free));
            prop_assert!(step.end - done >= price);
            (price, done) = (step.end - done, step.end);
        }

        prop_assert_eq!(&cheap(&before, budget), &plan, "not deterministic");
        let again = cheap(&after, ALL);
        match plan.shortfall {
            None => prop_assert_eq!(again, Plan::default(), "not idempotent"),
            Some(Shortfall::Budget { needed }) => {
                prop_assert_eq!(cheap(&before, needed).shortfall, None);
                prop_assert!(cheap(&before, needed - 1).shortfall.is_some());
                prop_assert!(needed > budget && !again.moves.is_empty());
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn a_plan_pays_for_what_it_breaks(
        mix in mixes(), seed: u64, frames in 0usize..700, order in 0u8..8, price in 1u32..20,
        budget in prop_oneof![Just(ALL), 0usize..60]
    ) {
        let order = Order(order);
        let mut pool = pool(&mut Rng::with_seed(seed), frames, order.0, mix);
        let goal = Goal::Fragmentation { order };
        // Each plan raises the worth of the pool, so that repeated planning ends.
        for round in 0.. {
            let plan = super::plan(&pool, goal, budget, price);
            prop_assert_eq!(&super::plan(&pool, goal, budget, price), &plan, "not deterministic");
            if plan.moves.is_empty() {
                break;
            }
            prop_assert!(round < 1_000, "no end");
            let after = check(&pool, order, &plan, budget);
            prop_assert_eq!(after.count(FrameKind::ReservedForGrowth), pool.count(FrameKind::ReservedForGrowth));
            let links = after.links() as i64 + after.rooms() as i64 - pool.links() as i64 - pool.rooms() as i64;
            prop_assert_eq!(plan.runs_gained, plan.steps.len() as isize);
            let free = |of: &Snapshot| {
                of.frames().chunk_by(|a, b| a.kind() == b.kind()).filter(|run| run[0].kind() == FrameKind::Free).count()
            };
            let joins = free(&pool) as i64 - free(&after) as i64;
            prop_assert!(joins == plan.free_joins as i64 && joins + i64::from(price) * links >= 0, "{:?}", plan);
            pool = after;
        }
    }

    #[test]
    fn a_run_is_cleared_where_it_costs_least(
        mix in mixes(), seed: u64, frames in 1usize..300, len in 0u32..100, budget in prop_oneof![Just(ALL), 0usize..20]
    ) {
        let before = pool(&mut Rng::with_seed(seed), frames, 4, mix);
        let plan = plan(&before, Goal::Run { len }, budget);
        let order = Order(4.min(frames.ilog2() as u8));
        let after = check(&before, order, &plan, budget);

        let kinds: Vec<_> = before.frames().iter().map(|state| state.kind()).collect();
        let price = |window: &[FrameKind]| {
            let stuck = window.iter().any(|kind| matches!(kind, FrameKind::Fixed | FrameKind::Away));
            (!stuck).then(|| window.iter().filter(|kind| kind.can_move()).count())
        };
        let cheapest = kinds.windows(len.max(1) as usize).filter_map(price).min();
        let free = before.count(FrameKind::Free) + before.count(FrameKind::ReservedForGrowth);
        match plan.shortfall {
            None => {
                let window = plan.window.unwrap();
                prop_assert_eq!(window.len, len);
                prop_assert!(window.frames().all(|frame| after.frames()[frame.index()].kind().is_free()));
                prop_assert!(len == 0 || Some(plan.moves.len()) == cheapest);
            }
            Some(Shortfall::Budget { needed }) => prop_assert!(Some(needed) == cheapest && needed > budget),
            Some(Shortfall::Free { needed, .. }) => prop_assert!(needed == len as usize && free < needed),
            Some(Shortfall::Fixed) => prop_assert_eq!(cheapest, None),
            Some(Shortfall::Outside { .. }) => prop_assert!(len as usize > frames),
        }
        prop_assert_eq!(plan.window.is_none(), plan.shortfall.is_some());
        prop_assert!(plan.window.is_some() || plan.moves.is_empty());
    }

    #[test]
    fn a_region_is_emptied_as_far_as_it_can_be(
        mix in mixes(), seed: u64, frames in 1usize..300, cut in (0u32..300, 0u32..300),
        budget in prop_oneof![Just(ALL), 0usize..20]
    ) {
        let before = pool(&mut Rng::with_seed(seed), frames, 3, mix);
        let start = cut.0 % frames as u32;
        let region = Run { start: FrameId(start), len: cut.1 % (frames as u32 - start + 1) };
        let plan = plan(&before, Goal::Empty { region }, budget);
        let after = check(&before, Order(3.min(frames.ilog2() as u8)), &plan, budget);

        let inside = |of: &Snapshot, kind| -> Vec<FrameId> {
            region.frames().filter(|frame| of.frames()[frame.index()].kind() == kind).collect()
        };
        prop_assert_eq!(&plan.fixed, &inside(&before, FrameKind::Fixed));
        prop_assert_eq!(&plan.away, &inside(&before, FrameKind::Away));
        let can_move = |of: &Snapshot| {
            inside(of, FrameKind::Movable).len() + inside(of, FrameKind::Evictable).len()
        };
        let needed = can_move(&before);
        let room: usize = [FrameKind::Free, FrameKind::ReservedForGrowth]
            .map(|kind| before.count(kind) - inside(&before, kind).len())
            .iter()
            .sum();
        prop_assert_eq!(plan.moves.len(), needed.min(room).min(budget));
        prop_assert_eq!(plan.shortfall.is_none(), can_move(&after) == 0);
    }
}

/// Returns a pool from a drawing, with regions separated by blanks. A letter is a block of a
/// sequence, in ascending places; a capital letter is a fixed one; `.` free; `_` reserved for
/// growth; `-` away; `*` a block without a sequence; `+` evictable.
fn drawn(text: &str) -> Snapshot {
    let mut places = [0; 26];
    let states = text.bytes().filter(|c| *c != b' ').zip(0..).map(|(c, frame)| match c {
        b'_' => FrameState::RESERVED_FOR_GROWTH,
        b'+' => FrameState::evictable(FrameId(frame)),
        b'.' => FrameState::FREE,
        b'-' => FrameState::AWAY,
        b'*' => FrameState::new(FrameKind::Movable, None),
        _ => {
            let sequence = c.to_ascii_lowercase() - b'a';
            let place = &mut places[usize::from(sequence)];
            *place += 1;
            let kind = if c.is_ascii_uppercase() { FrameKind::Fixed } else { FrameKind::Movable };
            FrameState::new(kind, Some((u32::from(sequence), *place - 1)))
        }
    });
    Snapshot::new(Order(2), states.collect(), (0..26).map(SequenceId).collect())
}

fn pairs(plan: &Plan) -> Vec<(u32, u32)> {
    plan.moves.iter().map(|one| (one.from.0, one.to.0)).collect()
}

const FOURS: Goal = Goal::Fragmentation { order: Order(2) };

#[test]
fn the_sparsest_goes_into_the_fullest() {
    let plan = super::plan(&drawn("**.. *... ***. **.."), FOURS, 1, 0);
    assert_eq!(pairs(&plan), [(4, 11)]);
    assert_eq!(plan.shortfall, Some(Shortfall::Budget { needed: 3 }));
}

#[test]
fn what_is_free_stays_whole() {
    // Four holes would gain a run, but there are only three outside of the free run.
    assert_eq!(plan(&drawn(".... *.** **.* *.**"), FOURS, ALL), Plan::default());
    // A fixed frame keeps its region in use, and other holes of the region can be filled.
    assert_eq!(pairs(&plan(&drawn(".... *... **** A.-."), FOURS, ALL)), [(4, 13)]);
    // So can the holes beyond the last whole region.
    assert_eq!(pairs(&plan(&drawn("*... ***- .."), FOURS, ALL)), [(0, 8)]);
}

#[test]
fn a_piece_of_a_sequence_stays_together_and_meets_its_neighbours() {
    // The last a goes after the others, and both b go to a hole that takes them together.
    let plan = plan(&drawn("aaa. C..C bb.. CC.. ..a. ****"), FOURS, 3);
    assert_eq!(pairs(&plan), [(18, 3), (8, 5), (9, 6)]);
    assert_eq!((plan.joins, plan.breaks), (1, 0));
}

#[test]
fn a_chain_too_long_for_its_anchor_leaves_its_end_elsewhere() {
    // One of the three fits after its predecessor; the other two go to a hole of two.
    let snapshot = drawn("abb. .bbb **.. a*** ***a");
    let plan = plan(&snapshot, Goal::Empty { region: Run { start: FrameId(4), len: 4 } }, ALL);
    assert_eq!(pairs(&plan), [(5, 3), (6, 10), (7, 11)]);
    assert_eq!((plan.joins, plan.breaks), (1, 1));
}

#[test]
fn among_equals_no_sequence_is_broken_and_units_are_completed() {
    // The first of the sparse regions continues a run of its sequence.
    let plan = plan(&drawn("***a a... ***. ...a ***."), FOURS, 1);
    assert_eq!(plan.steps[0].region.start, FrameId(12));

    let region = |text: &str| text.repeat(16);
    let sparse = "*...............";
    let text = [
        // A unit with another region in use, and a unit that lacks one region.
        [sparse, &region("."), &region("*"), &region(".")].concat(),
        [&region("."), &region("."), sparse, &region(".")].concat(),
        [&region("."), sparse, &region("A"), "*********......."].concat(),
    ];
    let goal = Goal::Fragmentation { order: Order(4) };
    assert_eq!(self::plan(&drawn(&text.concat()), goal, 1).steps[0].region.start, FrameId(64 + 32));
}

#[test]
fn a_free_run_is_filled_only_if_there_is_no_other_way() {
    let snapshot = drawn("**** .... **.. ....");
    let region = Run { start: FrameId(0), len: 4 };
    let plan = plan(&snapshot, Goal::Empty { region }, ALL);
    assert_eq!(plan.runs_gained, 0);
    assert_eq!(plan.moves.iter().filter(|one| [10, 11].contains(&one.to.0)).count(), 2);
    assert_eq!(self::plan(&snapshot, Goal::Empty { region }, 2).runs_gained, 0);
}

#[test]
fn a_torn_or_made_up_snapshot_is_planned_all_the_same() {
    let rng = &mut Rng::with_seed(3);
    for round in 0..200 {
        let states = (0..200).map(|_| {
            let kind =
                [FrameKind::Free, FrameKind::Movable, FrameKind::Movable, FrameKind::Fixed][rng.usize(0..4)];
            // Blocks that occur twice, unlisted sequences, gaps larger than the pool.
            let place = [rng.u32(0..8), rng.u32(0..300), rng.u32(..)][rng.usize(0..3)];
            FrameState::new(kind, Some((rng.u32(0..6), place)))
        });
        let before = Snapshot::new(Order(1), states.collect(), vec![SequenceId(0); 4]);
        let order = Order(1 + round % 2);
        let plan = plan(&before, Goal::Fragmentation { order }, ALL);
        check(&before, order, &plan, ALL);
    }
}

#[test]
fn what_does_not_lie_in_the_pool_is_refused() {
    let snapshot = drawn("*... *...");
    let outside = Some(Shortfall::Outside { frames: 8 });
    assert_eq!(plan(&snapshot, Goal::Run { len: 9 }, ALL).shortfall, outside);
    let region = Run { start: FrameId(7), len: u32::MAX };
    assert_eq!(plan(&snapshot, Goal::Empty { region }, ALL).shortfall, outside);
    assert_eq!(plan(&snapshot, Goal::Fragmentation { order: Order(255) }, ALL), Plan::default());
    let none = Snapshot::new(Order(4), Vec::new(), Vec::new());
    for goal in [FOURS, Goal::Run { len: 0 }, Goal::Empty { region: Run { start: FrameId(0), len: 0 } }] {
        assert_eq!((plan(&none, goal, ALL).moves.len(), plan(&none, goal, ALL).shortfall), (0, None));
    }
}

/// Lists that begin in whole units: each ends with holes after its last block.
#[test]
fn a_plan_that_breaks_long_runs_for_little_gain_is_empty() {
    let text: Vec<String> =
        ('a'..='h').map(|list| [list.to_string().repeat(40), ".".repeat(24)].concat()).collect();
    let goal = Goal::Fragmentation { order: Order(4) };
    let snapshot = drawn(&text.concat());
    let dear = super::plan(&snapshot, goal, ALL, 0);
    assert_eq!((dear.runs_gained, dear.joins, dear.breaks), (4, 0, 4), "a run for each break");
    assert_eq!(plan(&snapshot, goal, ALL), Plan::default());

    let stray = |text: &String| format!("{}*{}", &text[..50], &text[51..]);
    let strays: Vec<String> = text.iter().map(stray).collect();
    let cheap = plan(&drawn(&strays.concat()), goal, ALL);
    assert!(cheap.runs_gained == 8 && cheap.breaks == 0, "{cheap:?}");
}

#[test]
fn of_several_steps_those_that_pay_are_made() {
    // Region 1 ends a run of two regions, region 2 holds a stray block.
    let snapshot = drawn("aaaa a... *... **B. **C.");
    let plan = super::plan(&snapshot, FOURS, ALL, 4);
    assert_eq!(plan.steps.len(), 1, "{plan:?}");
    assert_eq!((plan.steps[0].region.start, plan.breaks), (FrameId(8), 0));
    let both = super::plan(&snapshot, FOURS, ALL, 0);
    assert_eq!((both.steps.len(), both.breaks), (2, 1));
}

#[test]
fn growth_frames_are_for_their_list() {
    let reserved_for_growth = drawn("a___ *... ***_ A***");
    assert_eq!(
        plan(&reserved_for_growth, FOURS, ALL),
        Plan::default(),
        "one frame is free outside of its region"
    );
    assert_eq!(pairs(&plan(&drawn("a___ *... ***. A***"), FOURS, ALL)), [(4, 11)]);
    assert_eq!(pairs(&plan(&drawn("a__- *... ***_ A**."), FOURS, ALL)), [(4, 15)]);
    let run = plan(&reserved_for_growth, Goal::Run { len: 4 }, ALL);
    assert_eq!((run.window.unwrap().start, run.moves.len()), (FrameId(0), 1));
}

#[test]
fn the_frame_behind_a_growing_list_is_filled_last() {
    let text = "Aaa. *... *ab. ****";
    let growing = |end| drawn(text).with_ends([FrameId(end)]);
    assert_eq!(pairs(&plan(&growing(2), FOURS, ALL)), [(4, 11)]);
    assert_eq!(pairs(&plan(&growing(10), FOURS, ALL)), [(4, 3)]);
    assert_eq!(growing(2).rooms(), 1);
    // The only other hole is after a growing list.
    let only = drawn("Aaa. *... ****").with_ends([FrameId(2)]);
    assert_eq!(plan(&only, FOURS, ALL), Plan::default(), "a room is worth two free runs");
    let forced = super::plan(&only, FOURS, ALL, 1);
    assert_eq!((pairs(&forced), forced.rooms_gained), (vec![(4, 3)], -1));
}

#[test]
fn a_stray_evictable_block_moves_and_a_run_of_them_stays() {
    let goal = Goal::Fragmentation { order: Order(2) };
    assert_eq!(pairs(&plan(&drawn("+... ***. ***. **.."), goal, ALL)), [(0, 7)]);
    let run = drawn("+++. AAA. BBB. CCC.");
    assert_eq!(plan(&run, goal, ALL), Plan::default());
    assert_eq!(super::plan(&run, goal, ALL, 0).breaks, 2);
    let together = plan(&drawn("++.. **.. ****"), goal, ALL);
    assert_eq!((pairs(&together), together.breaks), (vec![(0, 6), (1, 7)], 0));
}
