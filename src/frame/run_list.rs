use std::ops::Deref;

use smallvec::SmallVec;

use crate::ids::{FrameId, Run};

/// A list of runs in which each added frame joins the last run if adjacent. Unsorted.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct RunList(SmallVec<[Run; 16]>);

impl RunList {
    /// Returns an empty list.
    #[inline]
    pub fn new() -> Self {
        Self(SmallVec::new())
    }

    /// Adds a frame: joins it to the last run if it is adjacent to either end.
    #[inline]
    pub fn push(&mut self, frame: FrameId) {
        self.join(Run { start: frame, len: 1 });
    }

    /// Adds frames: each ascending or descending stretch joins the last run if adjacent.
    pub fn push_all(&mut self, frames: &[u32]) {
        let mut rest = frames;
        while let Some(&first) = rest.first() {
            // A stretch in which each frame follows the one before, or precedes it.
            let step = if rest.get(1).is_some_and(|&next| next < first) { -1_i32 as u32 } else { 1 };
            let mut len = 1;
            while rest.get(len).is_some_and(|&next| next == first.wrapping_add(step.wrapping_mul(len as u32)))
            {
                len += 1;
            }
            let start = if step == 1 { first } else { rest[len - 1] };
            self.join(Run { start: FrameId(start), len: len as u32 });
            rest = &rest[len..];
        }
    }

    #[inline]
    fn join(&mut self, run: Run) {
        match self.0.last_mut().and_then(|last| Some((last.join(run)?, last))) {
            Some((joined, last)) => *last = joined,
            None => self.0.push(run),
        }
    }

    /// Adds a run at the end: joins it to the last run only if it follows that run.
    #[inline]
    pub fn append(&mut self, run: Run) {
        match self.0.last_mut() {
            Some(last) if last.end() == run.start.0 => last.len += run.len,
            _ => self.0.push(run),
        }
    }

    /// Returns whether no frame is in two runs.
    pub fn are_disjoint(&self) -> bool {
        let are_ascending = |runs: &[Run]| runs.is_sorted_by(|a, b| a.end() <= b.start.0);
        if are_ascending(self) || self.is_sorted_by(|a, b| a.start.0 >= b.end()) {
            return true;
        }
        let mut sorted = self.0.clone();
        sorted.sort_unstable_by_key(|run| run.start);
        are_ascending(&sorted)
    }

    /// Removes and returns all runs.
    pub fn drain(&mut self) -> impl Iterator<Item = Run> + '_ {
        self.0.drain(..)
    }
}

impl Deref for RunList {
    type Target = [Run];

    #[inline]
    fn deref(&self) -> &[Run] {
        &self.0
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn adjacent_frames_join_the_last_run() {
        let run = |start, len| Run { start: FrameId(start), len };
        let mut runs = RunList::new();
        for frame in [4, 5, 3, 9, 10, 2] {
            runs.push(FrameId(frame));
        }
        assert_eq!(*runs, [run(3, 3), run(9, 2), run(2, 1)]);
        runs.append(run(3, 4));
        assert_eq!(runs[2], run(2, 5));
        runs.append(run(1, 1));
        assert_eq!(runs[3], run(1, 1), "in order");
        assert_eq!(runs.drain().count(), 4);
        runs.push_all(&[4, 5, 3, 9, 8, 8, 7, 20]);
        assert_eq!(*runs, [run(3, 3), run(8, 2), run(7, 2), run(20, 1)]);
        assert_eq!(runs.drain().count(), 4);
        runs.push_all(&[u32::MAX - 1, u32::MAX - 2, 0]);
        assert_eq!(*runs, [run(u32::MAX - 2, 2), run(0, 1)]);
        runs.push_all(&[50, 51, 40, 41, 60]);
        assert!(runs.are_disjoint(), "in no order");
        runs.push_all(&[41]);
        assert!(!runs.are_disjoint());
        assert_eq!(runs.drain().count(), 6);
        runs.push_all(&[u32::MAX - 1, u32::MAX - 2, 0]);
        runs.push_all(&[]);
        assert_eq!(runs.drain().count(), 2);
        assert!(runs.is_empty());
    }
}
