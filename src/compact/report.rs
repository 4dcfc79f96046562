use std::fmt;
use std::time::Duration;

use crate::block::MoveCancelled;

/// Numbers of planned moves that did not take place, by reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct GivenUp {
    /// The destination was allocated first.
    pub taken: usize,
    /// The block was released by its last owner, or was no longer in the source frame.
    pub released: usize,
    /// The block was pinned.
    pub pinned: usize,
    /// The block was reopened, so that its bytes were not final.
    pub open: usize,
    /// Another move had claimed the block.
    pub moving: usize,
    /// The copy failed.
    pub copy_failed: usize,
}

impl GivenUp {
    /// Returns the sum over all reasons.
    pub const fn total(&self) -> usize {
        self.taken + self.released + self.pinned + self.open + self.moving + self.copy_failed
    }

    pub(crate) fn count(&mut self, why: MoveCancelled) {
        match why {
            MoveCancelled::Taken => self.taken += 1,
            MoveCancelled::Released => self.released += 1,
            MoveCancelled::Pinned => self.pinned += 1,
            MoveCancelled::Open => self.open += 1,
            MoveCancelled::Moving => self.moving += 1,
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.taken += other.taken;
        self.released += other.released;
        self.pinned += other.pinned;
        self.open += other.open;
        self.moving += other.moving;
        self.copy_failed += other.copy_failed;
    }
}

impl fmt::Display for GivenUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.total() == 0 {
            return f.write_str("none");
        }
        let reasons = [
            (self.taken, "taken"),
            (self.released, "released"),
            (self.pinned, "pinned"),
            (self.open, "open"),
            (self.moving, "moving"),
            (self.copy_failed, "not copied"),
        ];
        let mut separator = "";
        for (count, why) in reasons.into_iter().filter(|&(count, _)| count > 0) {
            write!(f, "{separator}{count} {why}")?;
            separator = ", ";
        }
        Ok(())
    }
}

/// Result of one compaction.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct DefragReport {
    /// Blocks that were moved to another frame.
    pub moved_blocks: usize,
    /// Bytes of the moved blocks.
    pub moved_bytes: u64,
    /// Evictable blocks dropped from the frames to which blocks moved.
    #[cfg_attr(feature = "serde", serde(default))]
    pub dropped_blocks: usize,
    /// Planned moves that did not take place.
    pub given_up: GivenUp,
    /// Waves: groups of moves that were copied together.
    pub waves: usize,
    /// Time from the first snapshot to the last publication, without waits for other runs.
    pub time: Duration,
    /// Fragmentation rate at the order of the goal before the run, 0 to 1; see
    /// [`Fragmentation::rate`](crate::Fragmentation::rate).
    pub fragmentation_before: f64,
    /// The same after the run. Vacated frames that a batch may still read are not free yet.
    pub fragmentation_after: f64,
    /// The same before the run, over free and evictable frames; see
    /// [`Pool::available_fragmentation`](crate::pool::Pool::available_fragmentation).
    pub available_fragmentation_before: f64,
    /// The same after the run over free and evictable frames.
    pub available_fragmentation_after: f64,
    /// Increase in the number of aligned runs of free and evictable frames of the goal's order.
    /// Negative if other threads have undone more.
    pub runs_gained: isize,
    /// Blocks that could not move at the run's last snapshot: unsealed, pinned, or moving.
    pub fixed_blocks: usize,
}

impl DefragReport {
    /// Returns whether blocks were moved, and the pool is more fragmented than before.
    pub fn is_worse(&self) -> bool {
        let is_more_fragmented = self.available_fragmentation_after > self.available_fragmentation_before;
        self.moved_blocks > 0 && self.runs_gained < 0 && is_more_fragmented
    }
}

/// What the background task does, or why it pauses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum CompactionState {
    /// It moves blocks.
    Moving,
    /// The fragmentation of free and evictable frames is below the
    /// [threshold](super::DefragConfig::threshold), or explained by the growth of sequences.
    Contiguous,
    /// It waits for batches that may read frames vacated by the last run.
    Batches,
    /// The last run found no move that pays, or most of its moves were cancelled.
    NoGain,
    /// It has moved its [share](super::DefragConfig::share) of the allocated blocks.
    Share,
}

impl CompactionState {
    /// Returns the name, as in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Moving => "moving",
            Self::Contiguous => "contiguous",
            Self::Batches => "batches",
            Self::NoGain => "no_gain",
            Self::Share => "share",
        }
    }
}

impl fmt::Display for CompactionState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Moving => "moves blocks",
            Self::Contiguous => "rests: free and evictable blocks are not fragmented enough",
            Self::Batches => "rests: batches in flight may read the frames that were vacated",
            Self::NoGain => "rests: no move pays",
            Self::Share => "rests: its share of the allocated blocks was moved",
        })
    }
}

/// A copy of a wave that has passed its deadline. Its blocks stay in place, and their destination
/// frames stay held, until the copier reports the outcome or drops the callback.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct OverdueCopy {
    /// Blocks of the wave.
    pub blocks: usize,
    /// Bytes of these blocks.
    pub bytes: u64,
    /// Time since the copy began.
    pub waited: Duration,
}

impl fmt::Display for OverdueCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { blocks, bytes, waited } = self;
        write!(f, "the copy of a wave of {blocks} blocks ({bytes} bytes) has been under way for {waited:.1?}")
    }
}

/// Counts of moves since the pool was built, over all compactions, resizes and runs made for
/// waiting requests. Exact even if a run was dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct MoveCounts {
    /// Turns of compactions and shrinks, including those that moved nothing.
    pub runs: u64,
    /// Waves that were copied.
    pub waves: u64,
    /// Blocks that were moved to another frame.
    pub moved_blocks: u64,
    /// Bytes of the moved blocks.
    #[cfg_attr(feature = "serde", serde(default))]
    pub moved_bytes: u64,
    /// Evictable blocks dropped from the frames to which blocks moved.
    #[cfg_attr(feature = "serde", serde(default))]
    pub dropped_blocks: u64,
    /// Planned moves that did not take place, by reason.
    pub given_up: GivenUp,
}

/// Totals over the runs of a background task.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct DefragTotals {
    /// Runs that moved at least one block.
    pub runs: usize,
    /// Runs that ended because a copy failed. Earlier moves are counted below.
    pub failed: usize,
    /// Inspections of the pool, including those of runs.
    pub looks: usize,
    /// Blocks that were moved.
    pub moved_blocks: usize,
    /// Bytes of the moved blocks.
    pub moved_bytes: u64,
    /// Evictable blocks dropped from the frames to which blocks moved.
    #[cfg_attr(feature = "serde", serde(default))]
    pub dropped_blocks: usize,
    /// Planned moves that did not take place.
    pub given_up: GivenUp,
    /// Waves of moves.
    pub waves: usize,
    /// Increase in the number of aligned runs of free and evictable frames, over all runs.
    pub runs_gained: isize,
    /// Time spent in runs.
    pub time: Duration,
    fragmentation_before_sum: f64,
    fragmentation_after_sum: f64,
    available_fragmentation_before_sum: f64,
    available_fragmentation_after_sum: f64,
}

impl DefragTotals {
    /// Returns the mean of [`DefragReport::fragmentation_before`]; 0 without runs.
    pub fn fragmentation_before(&self) -> f64 {
        self.fragmentation_before_sum / self.runs.max(1) as f64
    }

    /// Returns the mean of [`DefragReport::fragmentation_after`]; 0 without runs.
    pub fn fragmentation_after(&self) -> f64 {
        self.fragmentation_after_sum / self.runs.max(1) as f64
    }

    /// Returns the mean of [`DefragReport::available_fragmentation_before`]; 0 without runs.
    pub fn available_fragmentation_before(&self) -> f64 {
        self.available_fragmentation_before_sum / self.runs.max(1) as f64
    }

    /// Returns the mean of [`DefragReport::available_fragmentation_after`]; 0 without runs.
    pub fn available_fragmentation_after(&self) -> f64 {
        self.available_fragmentation_after_sum / self.runs.max(1) as f64
    }

    pub(super) fn add(&mut self, report: &DefragReport) {
        self.looks += 1;
        self.dropped_blocks += report.dropped_blocks;
        self.given_up.add(&report.given_up);
        self.time += report.time;
        if report.moved_blocks > 0 {
            self.runs += 1;
            self.moved_blocks += report.moved_blocks;
            self.moved_bytes += report.moved_bytes;
            self.waves += report.waves;
            self.runs_gained += report.runs_gained;
            self.fragmentation_before_sum += report.fragmentation_before;
            self.fragmentation_after_sum += report.fragmentation_after;
            self.available_fragmentation_before_sum += report.available_fragmentation_before;
            self.available_fragmentation_after_sum += report.available_fragmentation_after;
        }
    }
}

/// Result of a resize.
#[derive(Clone, Copy, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ResizeReport {
    /// Number of blocks before.
    pub from: usize,
    /// Number of blocks after.
    pub to: usize,
    /// Blocks that were moved out of the way, reported as for a compaction.
    pub moved: DefragReport,
    /// Total time, including waits for other runs and for batches.
    pub time: Duration,
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn totals_name_sums_and_means_as_such() {
        let mut totals = DefragTotals::default();
        assert_eq!((totals.fragmentation_before(), totals.fragmentation_after()), (0.0, 0.0));
        for (moved_blocks, before, after) in [(3, 0.5, 0.25), (1, 1.0, 0.25), (0, 0.75, 0.75)] {
            let (fragmentation_before, fragmentation_after) = (before, after);
            totals.add(&DefragReport {
                moved_blocks,
                fragmentation_before,
                fragmentation_after,
                ..DefragReport::default()
            });
        }
        assert_eq!((totals.fragmentation_before(), totals.fragmentation_after()), (0.75, 0.25));
        let shown = format!("{totals:?}");
        assert_eq!(totals.available_fragmentation_before(), 0.0);
        assert!(shown.contains("fragmentation_before_sum: 1.5, fragmentation_after_sum: 0.5"), "{shown}");
        assert!(!shown.contains(" before:") && !shown.contains(" after:"), "{shown}");
    }
}
