//! The last resort: a walk without hints, which alone can conclude that no suitable frame is free.
//!
//! It is conclusive only if no frame was in transit meanwhile; otherwise it is repeated, a bounded
//! number of times. It is not a snapshot: it misses a frame freed behind it while another thread
//! takes the last one ahead of it.

use std::ops::ControlFlow;

use super::bits::{ALL, runs};
use super::map::Map;
use crate::config::{FAN, FAN_LOG2};
use crate::ids::{FrameId, Run};
use crate::sync::{Ordering, fence, yield_now};

const ROUNDS: usize = if cfg!(kvpool_loom) { 3 } else { 64 };

/// Number of walks after which the thread yields, in case another one was descheduled in a passage.
const ROUNDS_BUSY: usize = if cfg!(kvpool_loom) { 0 } else { 4 };

pub(super) enum Attempt<T> {
    Found(T),
    Missed,
    Lost,
}

impl Map<'_> {
    /// Repeats an attempt until it succeeds or fails conclusively, with `own` passages of its own.
    pub(super) fn settle<T>(self, own: u64, mut attempt: impl FnMut() -> Attempt<T>) -> Option<T> {
        for round in 0..ROUNDS {
            let before = self.traffic();
            match attempt() {
                Attempt::Found(found) => return Some(found),
                Attempt::Missed => {
                    // Acquire: orders the attempt's loads before the second reading (a seqlock).
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

    /// Claims the lowest run of `len` frames at a multiple of `align`, across words and segments.
    #[cold]
    pub(super) fn scan_run(self, len: u32, align: u32) -> Option<Run> {
        self.settle(0, || {
            let mut outcome = Attempt::Missed;
            self.walk(true, len, FrameId(0), |free| {
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
                // Another thread was faster: continue after it. Reached by the models in `runs`.
                outcome = Attempt::Lost;
                ControlFlow::Continue(())
            });
            outcome
        })
    }

    /// Claims up to `want` frames of the first open unit that has any.
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
                // The unit of a shrink's cut cannot be split: claim a run before the cut by name.
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

    /// Visits every maximal free run of at least `len` frames, and perhaps shorter ones, ascending.
    /// With `open`, omits the closed units. Begins at the unit of `from`, whose first run may have
    /// begun before.
    pub(super) fn walk(self, open: bool, len: u32, from: FrameId, visit: impl FnMut(Run) -> ControlFlow<()>) {
        let mut runs = Joined { run: Run { start: FrameId(0), len: 0 }, visit };
        let from = from.index() >> FAN_LOG2;
        let walked = self.walk_pieces(open, len, from, |start, len| runs.push(start, len));
        if walked.is_continue() && runs.run.len > 0 {
            let _ = (runs.visit)(runs.run);
        }
    }

    fn walk_pieces(
        self,
        open: bool,
        len: u32,
        from: usize,
        mut visit: impl FnMut(u32, u32) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let shape = self.directory.shape;
        for index in shape.unit_place(from).0..self.directory.groups() {
            let Some(group) = self.directory.group(index) else { break };
            let first = shape.first_unit(index);
            let skipped = from.saturating_sub(first);
            let closed = if open { group.closed.load(Ordering::Relaxed) } else { 0 };
            // Acquire, as in `free_in_unit`.
            let units = group.units.load(Ordering::Acquire) & !closed;
            if units == shape.group_mask() && skipped == 0 {
                // A mostly free pool is walked by whole groups.
                visit((first << FAN_LOG2) as u32, (shape.units_in_group() << FAN_LOG2) as u32)?;
                continue;
            }
            // A long run contains whole units, so only units next to a whole unit are read, and the
            // first and last unit, which may border on another group's.
            let edges = 1 | 1 << (shape.units_in_group() - 1);
            let is_long = len >= 2 * FAN as u32;
            let mut worth =
                if is_long { units | units << 1 | units >> 1 | edges } else { !0 } & shape.group_mask();
            worth &= !0 << skipped;
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
