use crate::ids::FrameId;
use crate::sequence::SequenceView;

use super::pool::Pool;

/// Runs of adjacent frames in the block tables of the open sequences that have blocks. Each run is
/// as long as possible. A transfer needs one descriptor per run.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct SequenceRuns {
    /// Number of open sequences with blocks; the other figures are 0 without any.
    pub sequences: usize,
    /// Mean number of runs of a sequence.
    pub mean: f64,
    /// Median of the number of runs of a sequence.
    pub p50: usize,
    /// 99th percentile of the number of runs of a sequence.
    pub p99: usize,
    /// Mean length of the runs in blocks: the blocks of all tables, divided by their runs. A shared
    /// block counts for each of its sequences.
    pub mean_run: f64,
}

impl Pool {
    /// Returns the runs of adjacent frames in the block tables of the open sequences. Reads the
    /// word of every block: some milliseconds per million blocks, without delaying other threads.
    /// Exact if no sequence changes and no block moves meanwhile.
    pub fn sequence_runs(&self) -> SequenceRuns {
        let views = self.0.sequences.list_views();
        SequenceRuns::of(views.iter().map(|view| self.runs_of(view)).filter(|&(blocks, _)| blocks > 0))
    }

    /// Returns the numbers of blocks and runs of a sequence.
    fn runs_of(&self, view: &SequenceView) -> (usize, usize) {
        let (mut blocks, mut runs, mut next, mut last) = (0, 0, None, None);
        view.for_each_block(|place, block| {
            if last.is_none_or(|last| place <= last) {
                // The walk began, or began again.
                (blocks, runs, next) = (0, 0, None);
            }
            let frame = self.0.blocks.frame(block);
            runs += usize::from(next != Some(frame));
            (blocks, next, last) = (blocks + 1, Some(FrameId(frame.0 + 1)), Some(place));
        });
        (blocks, runs)
    }
}

impl SequenceRuns {
    fn of(sequences: impl Iterator<Item = (usize, usize)>) -> Self {
        let mut blocks = 0;
        let mut runs: Vec<usize> = sequences.inspect(|(of, _)| blocks += of).map(|(_, runs)| runs).collect();
        runs.sort_unstable();
        let at = |percent: usize| runs.get((runs.len() * percent).div_ceil(100).max(1) - 1).copied();
        let (count, sum) = (runs.len(), runs.iter().sum::<usize>());
        Self {
            sequences: count,
            mean: sum as f64 / count.max(1) as f64,
            p50: at(50).unwrap_or(0),
            p99: at(99).unwrap_or(0),
            mean_run: blocks as f64 / sum.max(1) as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_sequences_and_lengths_those_of_runs() {
        assert_eq!(SequenceRuns::of([].into_iter()), SequenceRuns::default());
        let hundred = SequenceRuns::of((1..=100).map(|runs| (3 * runs, runs)));
        let expected = SequenceRuns { sequences: 100, mean: 50.5, p50: 50, p99: 99, mean_run: 3.0 };
        assert_eq!(hundred, expected);
        let mixed = SequenceRuns::of([(10, 1), (4, 4), (4, 4)].into_iter());
        assert_eq!((mixed.mean, mixed.p50, mixed.p99, mixed.mean_run), (3.0, 4, 4, 2.0));
    }
}
