//! Planning: which blocks should move where.
//!
//! # Why emptying the sparsest regions first is optimal
//!
//! A *region* is an aligned run of `R = 2^k` frames. It can be emptied if it holds only free and
//! movable frames, and at least one movable one. A *hole* is a free frame of a region that is not
//! entirely free; there are `H` holes.
//!
//! A plan that empties `e` regions with `m` blocks cannot fill the `eR - m` holes in them, so that
//! `m <= H - (eR - m)`, which is **`eR <= H`: the number of emptied regions is limited, but not
//! their choice**. At most `min(H / R, regions that can be emptied)` runs can be gained, and the
//! cheapest are those with the fewest blocks. In ascending order of cost, every prefix is optimal
//! for its cost, as a budget requires. `tests` compares with an exhaustive search.
//!
//! # The price of breaks
//!
//! A free run becomes at least one run of a later sequence, and each run of a sequence is a
//! descriptor in every transfer. A plan for [`Goal::Fragmentation`] thus has a worth, in runs:
//!
//! ```text
//! worth = free_joins + price * (joins + rooms_gained - breaks)
//! ```
//!
//! `free_joins` is the decrease in the number of maximal free runs, and a *room* is a free frame
//! after the last block of a growing list. While the worth is less than half of `free_joins`, the
//! steps with negative worth are dropped; a plan whose worth stays negative is empty. Repeated
//! planning ends, because each plan gains free runs and lowers no worth. Other goals have no price.
//!
//! The remaining choices favour later plans:
//!
//! - among equally sparse regions, first those whose borders no run of a sequence crosses, then
//!   those that complete a free unit;
//! - as destinations, the holes of the fullest regions, so that sparse regions stay cheap;
//! - an assignment of blocks to holes that makes or keeps as many neighbours in a sequence as
//!   possible neighbours in memory (`place`).
//!
//! # Invariants
//!
//! ```text
//! sources are movable, destinations are free; each occurs at most once; no destination is in a
//! region that the plan empties
//! moves.len() <= moves_max
//! steps cover the moves, in order
//! after a step its region is free  (Goal::Fragmentation and Goal::Run)
//! after all moves:  free_runs + runs_gained,  links + joins - breaks
//! ```
//!
//! The time is linear in frames, moves and sequences' extents, without comparison sorts or hashing.

mod choose;
mod donors;
mod map;
mod place;
mod steps;
mod window;

use crate::ids::{FrameId, Order, Run};

use self::map::{Map, ReservedForGrowth};
use self::steps::Gain;
use super::goal::{Goal, Move, Plan, Step};
use super::snapshot::Snapshot;

const ROUNDS: usize = 4;

/// Returns the best plan towards `goal` with at most `moves_max` moves, at a price of each break in
/// maximal free runs ([`FRAGMENTATION_PENALTY`](super::FRAGMENTATION_PENALTY) by default).
///
/// Pure and deterministic; takes some milliseconds per million frames. A plan without gain is
/// empty. After all moves of an unlimited plan, planning again returns no move at a price of 0; at
/// a higher one it may return further moves that pay, a limited number of times.
pub fn plan(snapshot: &Snapshot, goal: Goal, moves_max: usize, fragmentation_penalty: u32) -> Plan {
    match goal {
        Goal::Fragmentation { order } => {
            let map = Map::of(snapshot, ReservedForGrowth::Kept);
            map.order(order)
                .map_or_else(Plan::default, |order| worthwhile(&map, order, moves_max, fragmentation_penalty))
        }
        Goal::Run { len } => window::run(&Map::of(snapshot, ReservedForGrowth::Taken), len, moves_max),
        Goal::Empty { region } => {
            window::empty(&Map::of(snapshot, ReservedForGrowth::Taken), region, moves_max)
        }
    }
}

fn worthwhile(map: &Map<'_>, order: Order, moves_max: usize, fragmentation_penalty: u32) -> Plan {
    let mut plan = defragment(map, order, moves_max, fragmentation_penalty > 0);
    let price = i64::from(fragmentation_penalty);
    let mut gains = Vec::new();
    for _ in 0..ROUNDS {
        let links = plan.joins as i64 - plan.breaks as i64 + plan.rooms_gained as i64;
        let free_joins = plan.free_joins as i64;
        // Half of the gain must be left, so that steps that gain much do not hide many that lose.
        if free_joins + 2 * price * links >= 0 && free_joins + price * links >= 0 || price == 0 {
            return plan;
        }
        if gains.is_empty() {
            gains = steps::gains(map, &plan);
        }
        if gains.iter().all(|gain| gain.worth(price) >= 0) {
            return if free_joins + price * links >= 0 { plan } else { Plan::default() };
        }
        (plan, gains) = without(map, &plan, &gains, price);
    }
    Plan::default()
}

fn without(map: &Map<'_>, plan: &Plan, gains: &[Gain], price: i64) -> (Plan, Vec<Gain>) {
    let mut kept = Plan { shortfall: plan.shortfall, ..Plan::default() };
    let mut start = 0;
    for (step, gain) in plan.steps.iter().zip(gains) {
        if gain.worth(price) >= 0 {
            kept.moves.extend_from_slice(&plan.moves[start..step.end]);
            kept.steps.push(Step { region: step.region, end: kept.moves.len() });
        }
        start = step.end;
    }
    let gains = steps::gains(map, &kept);
    for gain in &gains {
        kept.joins += gain.joins;
        kept.breaks += gain.breaks;
    }
    kept.runs_gained = kept.steps.len() as isize;
    kept.free_joins = map.free_joins(&kept.moves);
    kept.rooms_gained = map.rooms_gained(&kept.moves);
    (kept, gains)
}

fn defragment(map: &Map<'_>, order: Order, moves_max: usize, spares_runs: bool) -> Plan {
    let chosen = choose::sparsest(map, order, moves_max, spares_runs);
    if chosen.regions.is_empty() {
        return Plan { shortfall: chosen.shortfall(), ..Plan::default() };
    }
    let mut moves = Vec::with_capacity(chosen.moves);
    let mut steps = Vec::with_capacity(chosen.regions.len());
    let mut emptied = map.none();
    for &region in &chosen.regions {
        let region = Run { start: FrameId(region << order.0), len: order.frames() as u32 };
        map::set(&mut emptied, region);
        map.each_movable(region, |from| moves.push(Move::unplaced(from)));
        steps.push(Step { region, end: moves.len() });
    }
    let leaving: Vec<u64> =
        emptied.iter().zip(&map.movable).map(|(region, movable)| region & movable).collect();
    let links = place::place(map, order, &emptied, &leaving, &mut moves);
    Plan {
        // Each step gains a run. No destination is in a free run, because there are enough holes.
        runs_gained: steps.len() as isize,
        shortfall: chosen.shortfall(),
        joins: links.joins,
        breaks: links.breaks,
        free_joins: map.free_joins(&moves),
        rooms_gained: map.rooms_gained(&moves),
        moves,
        steps,
        ..Plan::default()
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
