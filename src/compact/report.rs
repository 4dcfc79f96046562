//! What a compaction did, and why it left what it left.

use std::fmt;
use std::time::Duration;

use crate::block::GaveWay;

/// Blocks that were to move and did not, by why.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct GivenUp {
    /// Somebody allocated the destination first.
    pub taken: usize,
    /// Its last owner released it, or it was elsewhere by then.
    pub released: usize,
    /// It was pinned.
    pub pinned: usize,
    /// Its bytes were not final: it was reopened.
    pub open: usize,
    /// Another move had it.
    pub moving: usize,
    /// The copy failed.
    pub copy_failed: usize,
}

impl GivenUp {
    /// All of them.
    pub const fn total(&self) -> usize {
        self.taken + self.released + self.pinned + self.open + self.moving + self.copy_failed
    }

    pub(super) fn count(&mut self, why: GaveWay) {
        match why {
            GaveWay::Taken => self.taken += 1,
            GaveWay::Released => self.released += 1,
            GaveWay::Pinned => self.pinned += 1,
            GaveWay::Open => self.open += 1,
            GaveWay::Moving => self.moving += 1,
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
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

/// What one compaction came to.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[non_exhaustive]
pub struct DefragReport {
    /// Blocks that are in another frame now.
    pub moved_blocks: usize,
    /// Their bytes.
    pub moved_bytes: u64,
    /// Blocks that were to move and did not.
    pub given_up: GivenUp,
    /// Waves of moves that were copied together.
    pub waves: usize,
    /// From the first look at the pool to the last publication, without the wait for another run to end.
    pub time: Duration,
    /// [Fragmentation](crate::block::Core::fragmentation) at the goal's order before, from 0 to 1.
    pub fragmentation_before: f64,
    /// The same afterwards. Frames that were left, and that some batch in flight may still read, are not free yet.
    pub fragmentation_after: f64,
    /// Free runs of the goal's order that there are more of afterwards. Others allocate and free meanwhile, so that it may
    /// be negative.
    pub runs_gained: isize,
}

/// A copy of a wave that was not over by its deadline. Its blocks stay where they are, and hold their destinations, until
/// the copier says how it ended, or drops the callback.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct OverdueCopy {
    /// Blocks of the wave.
    pub blocks: usize,
    /// Their bytes.
    pub bytes: u64,
    /// How long it has been under way.
    pub waited: Duration,
}

impl fmt::Display for OverdueCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { blocks, bytes, waited } = self;
        write!(f, "the copy of a wave of {blocks} blocks ({bytes} bytes) has been under way for {waited:.1?}")
    }
}

/// What the runs of a background task came to, all together: sums, but for the means that its
/// methods give.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[non_exhaustive]
pub struct DefragTotals {
    /// Runs that moved at least one block.
    pub runs: usize,
    /// Runs that ended because a copy failed; what they had moved before counts below.
    pub failed: usize,
    /// Looks at the pool, runs among them.
    pub looks: usize,
    /// Blocks moved.
    pub moved_blocks: usize,
    /// Their bytes.
    pub moved_bytes: u64,
    /// Blocks that were to move and did not.
    pub given_up: GivenUp,
    /// Waves.
    pub waves: usize,
    /// Free aligned runs of the task's order that were gained, less those that were lost meanwhile.
    pub runs_gained: isize,
    /// Time in runs.
    pub time: Duration,
    /// Shares of fragmentation, from 0 to 1 each, before and after each of the `runs`: their sums.
    /// The methods of these names give the means.
    fragmentation_before_sum: f64,
    fragmentation_after_sum: f64,
}

impl DefragTotals {
    /// Mean over the [`runs`](Self::runs) of the
    /// [fragmentation](DefragReport::fragmentation_before) before each, from 0 to 1; 0 if there
    /// were none.
    pub fn fragmentation_before(&self) -> f64 {
        self.fragmentation_before_sum / self.runs.max(1) as f64
    }

    /// Mean over the [`runs`](Self::runs) of the [fragmentation](DefragReport::fragmentation_after)
    /// after each, from 0 to 1; 0 if there were none.
    pub fn fragmentation_after(&self) -> f64 {
        self.fragmentation_after_sum / self.runs.max(1) as f64
    }

    pub(super) fn add(&mut self, report: &DefragReport) {
        self.looks += 1;
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
        }
    }
}

/// What a resize came to.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct ResizeReport {
    /// Blocks before.
    pub from: usize,
    /// Blocks now.
    pub to: usize,
    /// Blocks that were moved out of the way, with their bytes, as for a compaction.
    pub moved: DefragReport,
    /// How long it took, the wait for another run and for batches to end included.
    pub time: Duration,
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn totals_call_sums_sums_and_means_means() {
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
        assert!(shown.contains("fragmentation_before_sum: 1.5, fragmentation_after_sum: 0.5"), "{shown}");
        assert!(!shown.contains(" before:") && !shown.contains(" after:"), "{shown}");
    }
}
