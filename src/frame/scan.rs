//! The last resort: a walk over the bitmap itself, without hints, that can say "there is none".
//!
//! A walk that finds nothing is believed only if no frame was in transit while it went on (`transit`); otherwise it
//! is made again, a bounded number of times, so that a thread that is stopped in mid-split stops nobody else for long.
//! The walk is no snapshot: a frame freed behind it, while the last one ahead of it is taken by somebody else, is
//! missed, although at every moment one was free. A caller that is refused while others free can only ask again.

use std::ops::ControlFlow;

use super::bits::{ALL, runs};
use super::map::Map;
use crate::config::{FAN, FAN_LOG2};
use crate::ids::{FrameId, Run};
use crate::sync::{Ordering, fence, yield_now};

/// Walks that are made before frames in transit are given up on.
const ROUNDS: usize = if cfg!(kvpool_loom) { 3 } else { 64 };

/// Walks after which the processor is given to a thread that may be stopped in mid-passage.
const ROUNDS_BUSY: usize = if cfg!(kvpool_loom) { 0 } else { 4 };

/// What one try came to.
pub(super) enum Attempt<T> {
    /// It succeeded.
    Found(T),
    /// There was nothing.
    Missed,
    /// There was something, and others took it.
    Lost,
}

impl Map<'_> {
    /// Repeats an attempt until it succeeds, or until its failure can be believed. An attempt that fails may have been in
    /// transit itself, `own` times: these it need not fear.
    pub(super) fn settle<T>(self, own: u64, mut attempt: impl FnMut() -> Attempt<T>) -> Option<T> {
        for round in 0..ROUNDS {
            let before = self.traffic();
            match attempt() {
                Attempt::Found(found) => return Some(found),
                Attempt::Missed => {
                    // Acquire: orders the attempt's loads before the second reading, as in a sequence lock.
                    fence(Ordering::Acquire);
                    if before.is_still() && self.traffic() == before.after(own) {
                        return None;
                    }
                }
                Attempt::Lost => {}
            }
            if round >= ROUNDS_BUSY {
                yield_now();
            }
        }
        None
    }

    /// Takes a run of `len` frames that starts at a multiple of `align`, the lowest one there is, at any place: across
    /// words and segments. `None` if there is none.
    #[cold]
    pub(super) fn scan_run(self, len: u32, align: u32) -> Option<Run> {
        self.settle(0, || {
            let mut outcome = Attempt::Missed;
            self.walk(true, len, |free| {
                let Some(start) = free.start.0.checked_next_multiple_of(align) else {
                    return ControlFlow::Break(());
                };
                if u64::from(start) + u64::from(len) > u64::from(free.end()) {
                    return ControlFlow::Continue(());
                }
                let run = Run { start: FrameId(start), len };
                if let Attempt::Found(()) = self.claim_run(run) {
                    outcome = Attempt::Found(run);
                    return ControlFlow::Break(());
                }
                // Somebody was faster; go on behind it. Reached by the models in `runs`.
                outcome = Attempt::Lost;
                ControlFlow::Continue(())
            });
            outcome
        })
    }

    /// Takes up to `want` frames of the first open unit that has any. `None` if no frame is free.
    #[cold]
    pub(super) fn scan_frames(self, want: u32) -> Option<(usize, u64)> {
        self.settle(0, || {
            let mut outcome = Attempt::Missed;
            for unit in 0..self.directory.leaves() {
                let free = self.directory.free_in_unit(unit, true);
                if free == 0 {
                    continue;
                }
                if free == ALL
                    && let Some(run) = self.split(unit, want.min(FAN as u32))
                {
                    let mask = super::bits::ones(run.start.0 & (FAN as u32 - 1), run.len);
                    return Attempt::Found((unit, mask));
                }
                if let Some(mask) = self.drain(unit, want) {
                    return Attempt::Found((unit, mask));
                }
                // The unit that a shrink cuts is not split as a whole unit; what lies before the cut is taken by name.
                if free != ALL
                    && let Some((pos, len)) = runs(free).next()
                {
                    let run = Run { start: FrameId((unit << FAN_LOG2) as u32 + pos), len: len.min(want) };
                    if let Attempt::Found(()) = self.claim_run(run) {
                        return Attempt::Found((unit, super::bits::ones(pos, run.len)));
                    }
                }
                outcome = Attempt::Lost;
            }
            outcome
        })
    }

    /// Visits every maximal free run of at least `len` frames, and perhaps shorter ones, ascending; with `open`, without
    /// the closed units. What is visited is exact when nothing changes meanwhile.
    pub(super) fn walk(self, open: bool, len: u32, visit: impl FnMut(Run) -> ControlFlow<()>) {
        let mut runs = Joined { run: Run { start: FrameId(0), len: 0 }, visit };
        if self.walk_pieces(open, len, |start, len| runs.push(start, len)).is_continue() && runs.run.len > 0 {
            let _ = (runs.visit)(runs.run);
        }
    }

    /// Visits the free runs of each unit, or whole group, as `(start, len)`.
    fn walk_pieces(
        self,
        open: bool,
        len: u32,
        mut visit: impl FnMut(u32, u32) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let shape = self.directory.shape;
        for index in 0..self.directory.groups() {
            let Some(group) = self.directory.group(index) else { break };
            let first = shape.first_unit(index);
            let closed = if open { group.closed.load(Ordering::Relaxed) } else { 0 };
            // Acquire, as in `free_in_unit`.
            let units = group.units.load(Ordering::Acquire) & !closed;
            if units == shape.group_mask() {
                // The whole group at once: a pool that is mostly free is walked by its groups.
                visit((first << FAN_LOG2) as u32, (shape.units_in_group() << FAN_LOG2) as u32)?;
                continue;
            }
            // A long run has whole units, so that only what borders on one need be looked at; the first and the last
            // unit may border on another group's.
            let edges = 1 | 1 << (shape.units_in_group() - 1);
            let is_long = len >= 2 * FAN as u32;
            let mut worth =
                if is_long { units | units << 1 | units >> 1 | edges } else { !0 } & shape.group_mask();
            while worth != 0 {
                let unit = first + worth.trailing_zeros() as usize;
                worth &= worth - 1;
                if unit >= self.directory.leaves() {
                    break;
                }
                for (pos, len) in runs(self.directory.free_in_unit(unit, open)) {
                    visit((unit << FAN_LOG2) as u32 + pos, len)?;
                }
            }
        }
        ControlFlow::Continue(())
    }
}

/// Joins pieces that touch into maximal runs.
struct Joined<F> {
    run: Run,
    visit: F,
}

impl<F: FnMut(Run) -> ControlFlow<()>> Joined<F> {
    fn push(&mut self, start: u32, len: u32) -> ControlFlow<()> {
        if self.run.end() == start {
            self.run.len += len;
            return ControlFlow::Continue(());
        }
        let done = std::mem::replace(&mut self.run, Run { start: FrameId(start), len });
        if done.len > 0 { (self.visit)(done) } else { ControlFlow::Continue(()) }
    }
}
