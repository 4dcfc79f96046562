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
use super::snapshot::Snapshot;

/// Goal of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Goal {
    /// As many free aligned runs of `2^order` frames as the budget allows.
    Fragmentation {
        /// Order of the runs.
        order: Order,
    },
    /// One free run of `len` frames, at the cheapest place.
    Run {
        /// Length of the run in frames.
        len: u32,
    },
    /// Move all movable blocks out of `region`.
    Empty {
        /// Region to empty.
        region: Run,
    },
}

/// The move of a block from one frame to another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Move {
    /// Source frame; movable in the snapshot.
    pub from: FrameId,
    /// Destination frame; free in the snapshot.
    pub to: FrameId,
}

/// Moves that together empty one region. A part of them gains nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Step {
    /// The emptied region.
    pub region: Run,
    /// The plan's moves before this index empty this region and those of earlier steps.
    pub end: usize,
}

/// Why a plan does not reach its goal in full.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Shortfall {
    /// The goal needs more moves than the limit.
    Budget {
        /// Moves that the whole goal needs.
        needed: usize,
    },
    /// Too few frames are free: for a run, its length; for a region, a destination for each of its
    /// movable blocks.
    Free {
        /// Free frames; for a region to empty, only those outside of it.
        free: usize,
        /// Free frames needed.
        needed: usize,
    },
    /// Every possible place for the run contains a frame that can be neither vacated nor used.
    Fixed,
    /// The run is longer than the pool, or the region ends beyond it.
    Outside {
        /// Number of frames in the pool.
        frames: usize,
    },
}

/// Moves towards a goal, in an order that allows to stop after any [`Step`].
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Plan {
    /// The moves.
    pub moves: Vec<Move>,
    /// The regions that the moves empty, in order.
    pub steps: Vec<Step>,
    /// Increase in the number of free aligned runs of the goal's order, or of the snapshot's order
    /// for goals without one. Negative if a free run had to be filled.
    pub runs_gained: isize,
    /// Pairs of blocks, neighbours in a sequence, that become neighbours in memory.
    pub joins: usize,
    /// Pairs of blocks, neighbours in a sequence, that are neighbours in memory before but not
    /// after.
    pub breaks: usize,
    /// For [`Goal::Run`]: the run that is free after the moves. `None` with a shortfall.
    pub window: Option<Run>,
    /// For [`Goal::Empty`]: frames of the region whose blocks cannot move.
    pub fixed: Vec<FrameId>,
    /// For [`Goal::Empty`]: frames of the region that are [away](super::FrameKind::Away): free, but
    /// not in the bitmaps.
    pub away: Vec<FrameId>,
    /// Why these moves do not reach the goal in full. [`Plan::fixed`] and [`Plan::away`] do not
    /// count as a shortfall.
    pub shortfall: Option<Shortfall>,
}

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
        map.each_movable(region, |from| moves.push(unplaced(from)));
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

/// Returns a move without a destination yet.
const fn unplaced(from: FrameId) -> Move {
    Move { from, to: place::NOWHERE }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
