use crate::ids::{FrameId, Order, Run};

/// Goal of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Goal {
    /// As many free aligned runs of `2^order` frames as the budget allows, and as are worth the
    /// runs of sequences that they break; see [`FRAGMENTATION_PENALTY`].
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

/// Default price of a break: a plan for [`Goal::Fragmentation`] joins at least two maximal free
/// runs for each run of a sequence that it ends and does not join elsewhere. Joining two free runs
/// saves about one descriptor later; a break costs one now, and therefore counts double.
pub const FRAGMENTATION_PENALTY: u32 = 2;

/// The move of a block to another frame.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Move {
    /// Source frame; movable in the snapshot.
    pub from: FrameId,
    /// Destination frame; free in the snapshot.
    pub to: FrameId,
}

pub(super) const NOWHERE: FrameId = FrameId(u32::MAX);

impl Move {
    pub(super) const fn unplaced(from: FrameId) -> Self {
        Self { from, to: NOWHERE }
    }
}

/// Moves that together empty one region; a part of them gains nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Step {
    /// The emptied region.
    pub region: Run,
    /// Moves before this index empty this region and those of earlier steps.
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
    /// Too few frames are free: fewer than a run's length, or than a region's movable blocks.
    Free {
        /// Free frames; for a region to empty, those outside of it.
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

/// Moves towards a goal; one can stop after any [`Step`].
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Plan {
    /// The moves.
    pub moves: Vec<Move>,
    /// The regions that the moves empty, in order.
    pub steps: Vec<Step>,
    /// Increase in the number of free aligned runs of the goal's order, or else of the snapshot's
    /// order. Negative if a free run had to be filled.
    pub runs_gained: isize,
    /// Pairs of neighbouring blocks of a sequence that become neighbours in memory. Evictable
    /// blocks in adjacent frames count as neighbours in a sequence.
    pub joins: usize,
    /// Pairs of neighbouring blocks of a sequence that cease to be neighbours in memory.
    pub breaks: usize,
    /// Decrease in the number of maximal free runs outside of units reserved for growth.
    pub free_joins: isize,
    /// Increase in the number of growing lists with a free frame after their last block, where the
    /// next block continues the run. May be negative.
    pub rooms_gained: isize,
    /// For [`Goal::Run`]: the run that is free after the moves. `None` with a shortfall.
    pub window: Option<Run>,
    /// For [`Goal::Empty`]: frames of the region whose blocks cannot move.
    pub fixed: Vec<FrameId>,
    /// For [`Goal::Empty`]: frames of the region that are [away](super::FrameKind::Away).
    pub away: Vec<FrameId>,
    /// Why the moves do not reach the goal in full, apart from [`Plan::fixed`] and [`Plan::away`].
    pub shortfall: Option<Shortfall>,
}
