//! Which blocks to move where.
//!
//! # Why the sparsest regions first is not only good but best
//!
//! A *region* is an aligned run of `R = 2^k` frames. It can be emptied if it holds only free and movable frames, some of
//! them movable. A *hole* is a free frame of a region that is not wholly free; let there be `H` of them.
//!
//! Say a plan empties `e` regions with `m` blocks in them. Their `eR - m` free frames are holes that cannot be filled, so
//! that `m <= H - (eR - m)`, that is, **`eR <= H`: which regions are emptied does not matter, only how many**. Filling a
//! region that is wholly free buys `R` more holes and costs one run, and gains nothing either. Therefore
//! `min(H / R, regions that can be emptied)` is the most that can be gained, any regions will do, and the cheapest are
//! those with the fewest blocks. Taken in ascending order of cost, every prefix is again the best for what it costs, which
//! is what a budget, or a run that is broken off, needs. `tests` compares with an exhaustive search.
//!
//! What is left open is decided in favour of what comes after:
//!
//! - among equally sparse regions: those that no run of a sequence crosses into, then those that complete a free unit;
//! - destinations: the fullest regions' holes, so that sparse regions stay cheap;
//! - who goes where: so that most neighbours in a sequence become or stay neighbours in memory (`place`).
//!
//! # Invariants
//!
//! ```text
//! sources are movable, destinations are free; each at most once; no destination is in what the plan empties
//! moves.len() <= moves_max
//! steps cover the moves, in order;  after a step its region is free  (Goal::Fragmentation and Goal::Run)
//! applied in full:  free_runs + runs_gained,  links + joins - breaks
//! ```
//!
//! The time is linear in frames, moves and the sequences' extents; nothing is sorted by comparison or hashed.

mod choose;
mod donors;
mod map;
mod place;
mod window;

use crate::ids::{FrameId, Order, Run};

use self::map::Map;
use super::snapshot::Snapshot;

/// What a plan is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Goal {
    /// As many free aligned runs of `2^order` as the budget buys.
    Fragmentation {
        /// The runs' order.
        order: Order,
    },
    /// One free run of `len` frames, wherever it costs least.
    Run {
        /// The run's length in frames.
        len: u32,
    },
    /// Everything that can move out of `region` goes elsewhere.
    Empty {
        /// What is to be emptied.
        region: Run,
    },
}

/// A block goes from one frame to another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Move {
    /// Where it is; movable in the snapshot.
    pub from: FrameId,
    /// Where it goes; free in the snapshot.
    pub to: FrameId,
}

/// Moves that are worth their bytes only together: those that empty one region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Step {
    /// What is emptied.
    pub region: Run,
    /// The plan's moves before this number empty it and the regions of earlier steps.
    pub end: usize,
}

/// Why a plan does not reach its goal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Shortfall {
    /// More moves are needed than the caller allows.
    Budget {
        /// Moves that the whole goal needs.
        needed: usize,
    },
    /// Fewer frames are free than needed: for a run its length, for a region destinations for what is in it.
    Free {
        /// Frames that are free, outside of a region that is to be emptied.
        free: usize,
        /// Free frames that are needed.
        needed: usize,
    },
    /// Every place for the run has frames that can neither move nor be used.
    Fixed,
    /// The run, or the end of the region, does not lie within the pool.
    Outside {
        /// Frames that the pool has.
        frames: usize,
    },
}

/// Which blocks should move where, in an order in which it can be broken off after any [`Step`].
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Plan {
    /// The moves.
    pub moves: Vec<Move>,
    /// What the moves empty, in their order.
    pub steps: Vec<Step>,
    /// Free aligned runs that there are more afterwards, of the goal's order; for goals without one, of the
    /// snapshot's. Negative if a free run had to be filled.
    pub runs_gained: isize,
    /// Pairs of blocks, next to each other in a sequence, that become neighbours in memory.
    pub joins: usize,
    /// Pairs of such blocks that are neighbours in memory before, and not after.
    pub breaks: usize,
    /// [`Goal::Run`]: the run that is free afterwards. `None` with a shortfall.
    pub window: Option<Run>,
    /// [`Goal::Empty`]: frames of the region whose blocks cannot move.
    pub fixed: Vec<FrameId>,
    /// [`Goal::Empty`]: frames of the region that are free and out of reach.
    pub away: Vec<FrameId>,
    /// Why the goal is not reached in full by these moves. [`Plan::fixed`] and [`Plan::away`] are no shortfall.
    pub shortfall: Option<Shortfall>,
}

/// The best moves towards `goal`, at most `moves_max`. Pure and deterministic; a million frames take some milliseconds.
///
/// A plan that gains nothing is empty: planning again on what a full plan leaves behind moves no block.
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
        // Each step gains its run, and no destination is in a free one: there are holes enough.
        runs_gained: steps.len() as isize,
        shortfall: chosen.shortfall(),
        joins: links.joins,
        breaks: links.breaks,
        moves,
        steps,
        ..Plan::default()
    }
}

/// A move whose destination is not known yet.
const fn unplaced(from: FrameId) -> Move {
    Move { from, to: place::NOWHERE }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
