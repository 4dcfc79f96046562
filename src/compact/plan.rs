//! Planning: which blocks should move where.
//!
//! # Why emptying the sparsest regions first is optimal
//!
//! A *region* is an aligned run of `R = 2^k` frames. It can be emptied if it holds only free and
//! movable frames, and at least one movable one. A *hole* is a free frame of a region that is not
//! entirely free; let there be `H` holes.
//!
//! Suppose that a plan empties `e` regions that contain `m` blocks. The `eR - m` free frames in
//! them are holes that cannot be filled, so that `m <= H - (eR - m)`, which is **`eR <= H`: the
//! number of emptied regions is limited, but not their choice**. Filling a region that is entirely
//! free adds `R` holes at the cost of one run, and gains nothing. Therefore at most
//! `min(H / R, regions that can be emptied)` runs can be gained, any regions will do, and the
//! cheapest are those with the fewest blocks. If they are emptied in ascending order of cost, every
//! prefix is optimal for its cost; a budget, or a run that stops early, needs this property.
//! `tests` compares with an exhaustive search.
//!
//! The remaining choices favour later plans:
//!
//! - among equally sparse regions: first those whose borders no run of a sequence crosses, then
//!   those that complete a free unit;
//! - destinations: the holes of the fullest regions, so that sparse regions stay cheap;
//! - the assignment of blocks to holes: as many neighbours in a sequence as possible become or stay
//!   neighbours in memory (`place`).
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
//! The time is linear in frames, moves and the extents of sequences. No comparison sort and no
//! hashing is used.

mod choose;
mod donors;
mod map;
mod place;
mod window;

use crate::ids::{FrameId, Order, Run};

use self::map::Map;
use super::goal::{Goal, Move, Plan, Step};
use super::snapshot::Snapshot;

/// Returns the best plan towards `goal` with at most `moves_max` moves.
///
/// Pure and deterministic; takes some milliseconds per million frames.
///
/// A plan without gain is empty: planning again after all moves of an unlimited plan returns no
/// move.
pub fn plan(snapshot: &Snapshot, goal: Goal, moves_max: usize) -> Plan {
    let map = Map::of(snapshot);
    match goal {
        Goal::Fragmentation { order } => defragment(&map, order, moves_max),
        Goal::Run { len } => window::run(&map, len, moves_max),
        Goal::Empty { region } => window::empty(&map, region, moves_max),
    }
}

fn defragment(map: &Map<'_>, order: Order, moves_max: usize) -> Plan {
    let Some(order) = map.order(order) else { return Plan::default() };
    let chosen = choose::sparsest(map, order, moves_max);
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
        // Each step gains a run, and no destination is in a free run, because there are enough
        // holes.
        runs_gained: steps.len() as isize,
        shortfall: chosen.shortfall(),
        joins: links.joins,
        breaks: links.breaks,
        moves,
        steps,
        ..Plan::default()
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
