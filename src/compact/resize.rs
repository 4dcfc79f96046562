//! A pool that gets another size while it serves.
//!
//! ```text
//! shrink    the compaction lock;  begin_shrink: allocations avoid what is to go
//!           collect what is free there  ->  nothing is missing: release the memory, commit
//!           move the rest below, in waves, as a compaction does  ->  collect again
//!           what is retired comes free when batches end; what is open may be sealed by then
//!           no progress for as long as the caller is patient: all of it back, and what stood in the way is told
//! ```
//!
//! The pool is whole at every moment, and allocations go on. Dropped in between, it has the size that it had.

use std::time::{Duration, Instant};

use tokio::time::{Instant as Tick, sleep};

use crate::block::{Core, FrameUse, Shrinking};
use crate::ids::{BlockId, Run as Frames};

use super::compactor::{COPY_DEADLINE, Compactor, Failure, WAVE_BYTES};
use super::error::Blocker;
use super::{Bytes, DefragOptions, Goal, ResizeError, ResizeReport};

/// How long a shrink waits for what does not move.
const PATIENCE: Duration = Duration::from_millis(200);

/// Between two looks at what is to become free: from the shorter to the longer.
const LOOK_EVERY: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(5));

/// How a pool is given another size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ResizeOptions {
    /// How long a shrink goes on without any progress before it gives up: for batches in flight to end, and open blocks to
    /// be sealed.
    pub patience: Duration,
    /// Bytes that are copied together.
    pub wave_bytes: usize,
    /// How long the copy of a wave may take, see [`DefragOptions::copy_deadline`].
    pub copy_deadline: Duration,
}

impl Default for ResizeOptions {
    fn default() -> Self {
        Self { patience: PATIENCE, wave_bytes: WAVE_BYTES, copy_deadline: COPY_DEADLINE }
    }
}

impl ResizeOptions {
    /// A fifth of a second, short waves.
    pub fn new() -> Self {
        Self::default()
    }

    /// Wait so long for what does not move.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Copy so many bytes together.
    pub fn wave_bytes(mut self, bytes: usize) -> Self {
        self.wave_bytes = bytes;
        self
    }

    /// Let the copy of a wave take so long.
    pub fn copy_deadline(mut self, deadline: Duration) -> Self {
        self.copy_deadline = deadline;
        self
    }
}

impl Compactor {
    /// Takes away all blocks but `blocks`, which are fewer than there are: what is in use beyond moves below. The memory of
    /// what goes is given back to the system.
    ///
    /// On a tokio runtime with its time driver enabled.
    ///
    /// # Errors
    ///
    /// [`ResizeError`]; the pool has the size that it had, though some blocks may be in other frames.
    pub async fn shrink(&self, blocks: usize, options: ResizeOptions) -> Result<ResizeReport, ResizeError> {
        let started = Instant::now();
        let core: &Core = self.blocks();
        let copies = DefragOptions::new().wave_bytes(options.wave_bytes).copy_deadline(options.copy_deadline);
        let mut run = self.begin(&copies).await;
        let from = core.total();
        let mut shrinking = self.blocks().begin_shrink(blocks)?;
        has_room(core, blocks)?;
        run.report.fragmentation_before = core.fragmentation(self.order());
        let mut progress = Progress::new(shrinking.collect());
        while progress.missing > 0 {
            // What is kept only for its bytes is moved as far as there is room, and else evicted.
            let over = (core.recount().used() + core.reserve() + core.evictable()).saturating_sub(blocks);
            core.evict_free(over);
            if !self.bytes().are_known() {
                core.evict_region(shrinking.region());
            }
            // Others allocate meanwhile: what there is no room for stays for now.
            let can_move = self.bytes().are_known() && has_room(core, blocks).is_ok();
            let moves_max = if can_move { usize::MAX } else { 0 };
            run.trim_caches();
            let plan = run.look(Goal::Empty { region: shrinking.region() }, moves_max);
            let moved = run.report.moved_blocks;
            let carried_out = run.carry_out(&plan.moves).await;
            carried_out.map_err(|failure| ResizeError::Defrag(failure.told(run.report)))?;
            progress.look(shrinking.collect(), run.report.moved_blocks > moved);
            if progress.missing > 0 && !progress.is_made {
                if progress.since.elapsed() >= options.patience {
                    has_room(core, blocks)?;
                    return Err(match self.overdue_copy() {
                        Some(copy) => ResizeError::Defrag(Failure::Overdue(copy).told(run.report)),
                        None => blocked(core, &shrinking, blocks),
                    });
                }
                sleep(progress.pause()).await;
            }
        }
        let total = shrinking.region().start.index();
        let committed = shrinking.commit(|_| {
            if let Bytes::Storage(storage) = self.bytes() {
                // SAFETY: the frames from `total` on are the shrink's, which has collected all of them.
                unsafe { storage.shrink(total) };
            }
        });
        assert!(committed.is_ok(), "nothing is missing");
        run.report.fragmentation_after = core.fragmentation(self.order());
        run.report.time = started.elapsed();
        Ok(ResizeReport { from, to: blocks, moved: run.report, time: started.elapsed() })
    }
}

/// Whether a shrink gets anywhere.
struct Progress {
    missing: usize,
    is_made: bool,
    /// By the clock that it sleeps by, so that who holds that one holds both.
    since: Tick,
    pause: Duration,
}

impl Progress {
    fn new(missing: usize) -> Self {
        Self { missing, is_made: true, since: Tick::now(), pause: LOOK_EVERY.0 }
    }

    fn look(&mut self, missing: usize, has_moved: bool) {
        self.is_made = has_moved || missing < self.missing;
        if self.is_made {
            (self.since, self.pause) = (Tick::now(), LOOK_EVERY.0);
        }
        self.missing = missing;
    }

    fn pause(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (2 * pause).min(LOOK_EVERY.1);
        pause
    }
}

/// Whether what is in use fits into so many blocks, beside the reserve.
fn has_room(core: &Core, blocks: usize) -> Result<(), ResizeError> {
    let used = core.recount().used() + core.reserve();
    if used > blocks { Err(ResizeError::NoRoom { asked: blocks, used }) } else { Ok(()) }
}

/// What is in the way of a shrink.
fn blocked(core: &Core, shrinking: &Shrinking, asked: usize) -> ResizeError {
    let region: Frames = shrinking.region();
    let mut blocks: Vec<(BlockId, Blocker)> = Vec::new();
    core.for_each_used_frame(&mut |frame, used| {
        if !(region.start.0..region.end()).contains(&frame.0) {
            return;
        }
        let block = core.block_at(frame);
        let why = match used {
            FrameUse::Movable => Blocker::Busy,
            FrameUse::Fixed if core.word(block).pins() > 0 => Blocker::Pinned,
            FrameUse::Fixed => Blocker::Open,
        };
        blocks.push((block, why));
    });
    blocks.sort_unstable_by_key(|(block, _)| *block);
    let retired = shrinking.remaining().saturating_sub(blocks.len());
    ResizeError::Blocked { asked, blocks, retired }
}
