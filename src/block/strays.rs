//! Retired frames of threads that could not enter a home of their own at that moment.

use crate::ids::{Run, Ticket};
use crate::sync::{AtomicU64, AtomicUsize, Ordering::*, UnboundedQueue};

/// See the [module](self).
#[derive(Default)]
pub(super) struct Strays {
    runs: UnboundedQueue<(Run, Ticket)>,
    /// Frames of these runs. Counted up before a push and down after a pop, so that it never reads too low.
    frames: AtomicUsize,
    newest_tag: AtomicU64,
}

impl Strays {
    pub(super) fn push(&self, run: Run, tag: Ticket) {
        // Relaxed, here and below: statistics; the queue orders the frames themselves.
        self.frames.fetch_add(run.len as usize, Relaxed);
        self.newest_tag.fetch_max(tag.0, Relaxed);
        self.runs.push((run, tag));
    }

    pub(super) fn pop(&self) -> Option<(Run, Ticket)> {
        let (run, tag) = self.runs.pop()?;
        self.frames.fetch_sub(run.len as usize, Relaxed);
        Some((run, tag))
    }

    /// Runs: how often to pop in order to have seen each.
    pub(super) fn len(&self) -> usize {
        self.runs.len()
    }

    /// Frames, and the newest tag that any had.
    pub(super) fn mirror(&self) -> (usize, Ticket) {
        (self.frames.load(Relaxed), Ticket(self.newest_tag.load(Relaxed)))
    }
}
