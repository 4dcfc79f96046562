//! Shrinking a pool while it serves.
//!
//! ```text
//! shrink    a turn;  begin_shrink: allocations avoid the region to be cut
//!           collect the free frames there  ->  none is missing: release the memory, commit
//!           move the used blocks below, in waves, as compaction does  ->  collect again
//!           retired frames become free when batches end; open blocks may be sealed meanwhile
//!           no progress within the caller's patience: undo, and report the obstacles
//! between two awaits: the open shrink is left with the turn. Not polled for too long: the task that
//!           passes over the turn undoes the shrink; the next poll takes a turn and begins again
//! ```
//!
//! The pool is always consistent, and keeps its size if the shrink is dropped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::block::{Core, FrameUse, Shrinking, Tenant};
use crate::error::TurnTask;
use crate::ids::{BlockId, Run as Frames};
use crate::sync::runtime::{after, now, sleep_until, timeout_at};

use super::compactor::Compactor;
use super::copying::Failure;
use super::error::Blocker;
use super::options::DefragOptions;
use super::turns::Turn;
use super::{Bytes, Goal, ResizeError, ResizeReport};

const PATIENCE: Duration = Duration::from_millis(200);

const LOOK_EVERY: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(5));

/// Options of a resize.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ResizeOptions {
    /// Time without progress after which a shrink gives up. A shrink waits for its turn, at most
    /// this long, and then for batches in flight to end and for open blocks to be sealed.
    pub patience: Duration,
    /// Options of the moves: only [`wave_bytes`](DefragOptions::wave_bytes) and
    /// [`copy_deadline`](DefragOptions::copy_deadline) apply.
    pub moves: DefragOptions,
}

impl Default for ResizeOptions {
    fn default() -> Self {
        Self { patience: PATIENCE, moves: DefragOptions::default() }
    }
}

impl ResizeOptions {
    /// Returns the defaults: a patience of 200 ms, and the storage's wave size.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the time without progress after which a shrink gives up.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Sets the options of the moves.
    pub fn moves(mut self, options: DefragOptions) -> Self {
        self.moves = options;
        self
    }
}

impl Compactor {
    /// Shrinks the pool to `blocks` blocks, which must be fewer than it has. Moves blocks beyond
    /// the new end below it, and returns the memory of the removed frames to the system.
    ///
    /// # Errors
    /// [`ResizeError`]; the pool keeps its size, though some blocks may be in other frames.
    pub async fn shrink(&self, blocks: usize, options: ResizeOptions) -> Result<ResizeReport, ResizeError> {
        let turn = self.turn(TurnTask::Resize);
        turn.attend(self.shrink_in(turn.clone(), blocks, options)).await
    }

    async fn shrink_in(
        &self,
        turn: Arc<Turn>,
        blocks: usize,
        options: ResizeOptions,
    ) -> Result<ResizeReport, ResizeError> {
        let started = Instant::now();
        let core: &Core = self.blocks();
        options.moves.check()?;
        let mut run = self.run(&options.moves, turn);
        let mut progress = Progress::new();
        let shrinking = loop {
            // Left with the turn before each await, and undone if the turn is passed over.
            let shrinking = match run.turn.resume() {
                Some(shrinking) => shrinking,
                None => {
                    let taken = self.take(&run.turn, options.moves.copy_deadline);
                    if timeout_at(after(options.patience), taken).await.is_none() {
                        return Err(ResizeError::NoTurn { asked: blocks, holder: self.turn_holder() });
                    }
                    let mut shrinking = self.blocks().begin_shrink(blocks)?;
                    has_room(core, blocks)?;
                    if progress.missing == usize::MAX {
                        run.report.fragmentation_before = core.fragmentation(self.order());
                    }
                    progress.look(shrinking.collect(), false);
                    shrinking
                }
            };
            if shrinking.remaining() == 0 {
                break shrinking;
            }
            // Evictable blocks move while there is room, and are evicted otherwise.
            let over = (core.recount().used() + core.reserve() + core.evictable()).saturating_sub(blocks);
            core.evict_free(over);
            if !self.bytes().are_known() {
                core.evict_region(shrinking.region());
            }
            // Other threads allocate meanwhile: without enough room, no block moves for now.
            let can_move = self.bytes().are_known() && has_room(core, blocks).is_ok();
            let moves_max = if can_move { usize::MAX } else { 0 };
            run.trim_caches();
            let plan = run.look(Goal::Empty { region: shrinking.region() }, moves_max, 0);
            let moved = run.report.moved_blocks;
            run.turn.leave(shrinking);
            let carried_out = run.carry_out(&plan.moves).await;
            carried_out.map_err(|failure| ResizeError::Defrag(failure.told(run.report)))?;
            let Some(mut shrinking) = run.turn.resume() else { continue };
            progress.look(shrinking.collect(), run.report.moved_blocks > moved);
            let is_stuck = progress.missing > 0 && !progress.is_made;
            if is_stuck && now().saturating_duration_since(progress.since) >= options.patience {
                has_room(core, blocks)?;
                return Err(match self.overdue_copy() {
                    Some(copy) => ResizeError::Defrag(Failure::Overdue(copy).told(run.report)),
                    None => blocked(core, &shrinking, blocks),
                });
            }
            run.turn.leave(shrinking);
            if is_stuck {
                sleep_until(now() + progress.pause()).await;
            }
        };
        let (from, total) = (core.total(), shrinking.region().start.index());
        let committed = shrinking.commit(|_| {
            if let Bytes::Storage(storage) = self.bytes() {
                // SAFETY: the frames from `total` on belong to the shrink, which has collected all
                // of them.
                unsafe { storage.shrink(total) };
            }
        });
        assert!(committed.is_ok(), "a shrink that has collected its whole region commits");
        run.report.fragmentation_after = core.fragmentation(self.order());
        run.report.time = started.elapsed();
        Ok(ResizeReport { from, to: blocks, moved: run.report, time: started.elapsed() })
    }
}

/// Progress of a shrink. It outlives a shrink that restarts because its turn was passed over, so
/// that a rarely polled resize gives up, too.
struct Progress {
    missing: usize,
    is_made: bool,
    since: Instant,
    pause: Duration,
}

impl Progress {
    fn new() -> Self {
        Self { missing: usize::MAX, is_made: true, since: now(), pause: LOOK_EVERY.0 }
    }

    fn look(&mut self, missing: usize, has_moved: bool) {
        self.is_made = has_moved || missing < self.missing;
        if self.is_made {
            (self.since, self.pause) = (now(), LOOK_EVERY.0);
        }
        self.missing = missing;
    }

    fn pause(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (2 * pause).min(LOOK_EVERY.1);
        pause
    }
}

fn has_room(core: &Core, blocks: usize) -> Result<(), ResizeError> {
    let floors = core.tenants().map_or(0, |tenants| tenants.floors());
    // The reserve could not be refilled otherwise.
    if floors > blocks.saturating_sub(core.reserve()) {
        return Err(ResizeError::Floors { asked: blocks, floors });
    }
    let protected = core.tenants().map_or(0, |tenants| tenants.protected(Tenant::NONE).0);
    let used = core.recount().used() + core.reserve() + protected;
    if used > blocks { Err(ResizeError::NoRoom { asked: blocks, used }) } else { Ok(()) }
}

fn blocked(core: &Core, shrinking: &Shrinking, asked: usize) -> ResizeError {
    let region: Frames = shrinking.region();
    let mut blocks: Vec<(BlockId, Blocker)> = Vec::new();
    core.for_each_used_frame(&mut |frame, used| {
        if !(region.start.0..region.end()).contains(&frame.0) {
            return;
        }
        let block = core.block_at(frame);
        let why = match used {
            FrameUse::Movable | FrameUse::Evictable => Blocker::Busy,
            FrameUse::Fixed if core.word(block).pins() > 0 => Blocker::Pinned,
            FrameUse::Fixed => Blocker::Open,
        };
        blocks.push((block, why));
    });
    blocks.sort_unstable_by_key(|(block, _)| *block);
    let retired = shrinking.remaining().saturating_sub(blocks.len());
    ResizeError::Blocked { asked, blocks, retired }
}
