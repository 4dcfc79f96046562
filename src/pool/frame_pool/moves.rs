//! Compaction in two steps: the pool proposes pairs of frames, the engine copies, then commits.
//!
//! ```text
//! propose   snapshot, plan;  sources marked as moving, destinations held       a wave of `block::moving`
//! copy      by the engine, which owns the bytes; may take any time
//! commit    each block without references is in its new frame, under all its keys;  others stay
//! or drop   nothing has moved
//! ```
//!
//! Only cached frames without references move. A hit in between pins the block, which cancels its
//! move, even if all references are dropped again: an owner may have written to the frame.

use crate::block::Wave;
use crate::compact::{FRAGMENTATION_PENALTY, GivenUp, Goal, MoveCancelled, Snapshot, plan};
use crate::ids::FrameId;

use super::frame_pool::{FramePool, Shared};

/// Moves that a pool proposes: the engine copies each pair, and [commits](Self::commit). Until then
/// the destinations are held, and the sources are not evicted. Dropping it cancels all moves.
#[must_use = "moves that are dropped are cancelled"]
pub struct FrameMoves {
    pool: FramePool,
    wave: Wave,
}

/// Outcome of committed moves.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct MovedFrames {
    /// Source and destination of each block that moved.
    pub moved: Vec<(u32, u32)>,
    /// Frames whose blocks stayed, and why.
    pub stayed: Vec<(u32, MoveCancelled)>,
}

impl FramePool {
    /// Proposes at most `moves_max` moves of cached frames without references towards a goal, and
    /// holds both frames of each pair. Frames with references stay.
    ///
    /// For [`Goal::Fragmentation`], each group of moves frees an aligned run of the order, cheapest
    /// first, as long as the gain exceeds the cost of separating neighbouring cached frames at the
    /// [penalty](FRAGMENTATION_PENALTY) of compaction. `Goal::Run` makes one run for a contiguous
    /// request. Visits every frame, and takes the free frames out of magazines.
    ///
    /// ```
    /// # use kvpool::{AllocRequest, FrameGroup, FramePool, Order, compact::Goal};
    /// let pool = FramePool::builder(256).build()?;
    /// let mut table = Vec::new();
    /// pool.allocate(AllocRequest::new(256), &mut table)?;
    /// for &frame in table.iter().filter(|&&frame| frame % 4 == 0) {
    ///     pool.register(&[(frame, pool.key(FrameGroup(0), &frame.to_le_bytes())?)])?;
    /// }
    /// pool.free(&table)?; // One frame in four is cached, the others are free.
    /// let moves = pool.propose_moves(Goal::Fragmentation { order: Order(4) }, 1_000);
    /// for (from, to) in moves.pairs() {
    ///     // The engine copies the bytes of frame `from` to frame `to`.
    ///     assert_ne!(from, to);
    /// }
    /// assert!(!moves.commit().moved.is_empty());
    /// assert!(pool.fragmentation().rate < 0.1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn propose_moves(&self, goal: Goal, moves_max: usize) -> FrameMoves {
        self.propose_moves_with_penalty(goal, moves_max, FRAGMENTATION_PENALTY)
    }

    /// Proposes moves like [`propose_moves`](Self::propose_moves), with another penalty per break,
    /// in free aligned runs of the order. The default rejects nearly every plan where free frames
    /// lie between long stretches of cached ones, which may belong together. A penalty of 0 creates
    /// all runs that the free frames can form, until traffic fragments them again.
    pub fn propose_moves_with_penalty(
        &self,
        goal: Goal,
        moves_max: usize,
        fragmentation_penalty: u32,
    ) -> FrameMoves {
        let Shared { blocks, order, .. } = &*self.0;
        blocks.trim();
        let plan = plan(&Snapshot::of_frames(blocks, *order), goal, moves_max, fragmentation_penalty);
        self.moves_of(plan.moves.iter().map(|step| (step.from, step.to)))
    }

    internal! {
        /// Begins those of these moves that are currently possible.
        fn moves_of(&self, pairs: impl IntoIterator<Item = (FrameId, FrameId)>) -> FrameMoves {
            let mut given_up = GivenUp::default();
            let wave = self.0.blocks.begin_wave(pairs, &mut |_, why| given_up.count(why));
            self.0.count_moves(|counts| {
                counts.runs += 1;
                counts.given_up.add(&given_up);
            });
            FrameMoves { pool: self.clone(), wave }
        }
    }
}

impl FrameMoves {
    /// Returns the source and destination frame of each copy to make. No frame occurs twice.
    pub fn pairs(&self) -> impl ExactSizeIterator<Item = (u32, u32)> + '_ {
        self.wave.moves().map(|(from, to)| (from.0, to.0))
    }

    /// Returns the number of pairs.
    pub fn len(&self) -> usize {
        self.wave.len()
    }

    /// Returns whether there are no pairs.
    pub fn is_empty(&self) -> bool {
        self.wave.is_empty()
    }

    /// Commits the moves, except those of frames that got references or were uncached meanwhile.
    /// The engine must have copied the bytes of all pairs: lookups now return the new frames.
    pub fn commit(self) -> MovedFrames {
        let mut outcome = MovedFrames { moved: self.pairs().collect(), stayed: Vec::new() };
        let mut cancelled = |from: FrameId, why| outcome.stayed.push((from.0, why));
        // SAFETY: the pool has no storage; the engine owns the bytes, and states that it copied.
        unsafe { self.wave.publish_in_place(&mut cancelled) };
        let stayed = &outcome.stayed;
        outcome.moved.retain(|(from, _)| stayed.iter().all(|(stayed, _)| stayed != from));
        self.pool.0.count_moves(|counts| {
            counts.waves += u64::from(!outcome.moved.is_empty() || !outcome.stayed.is_empty());
            counts.moved_blocks += outcome.moved.len() as u64;
            outcome.stayed.iter().for_each(|&(_, why)| counts.given_up.count(why));
        });
        outcome
    }

    /// Cancels all moves, like dropping.
    pub fn cancel(self) {}
}
