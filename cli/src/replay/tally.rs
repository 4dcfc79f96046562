use std::collections::HashSet;
use std::time::Duration;

use hdrhistogram::Histogram;
use kvpool_load::Corrupt;

/// Findings that are kept; later ones are dropped.
const FINDINGS_MAX: usize = 16;

/// The mean and the maximum of samples.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Samples {
    sum: f64,
    count: u64,
    /// The largest sample.
    pub max: f64,
}

impl Samples {
    /// Adds a sample.
    pub fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
        self.max = self.max.max(value);
    }

    /// Returns the mean; 0 without samples.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }
    }

    fn merge(&mut self, other: &Self) {
        self.sum += other.sum;
        self.count += other.count;
        self.max = self.max.max(other.max);
    }
}

/// A histogram, exact to three digits: of durations in nanoseconds, or of the runs per block table,
/// which are the descriptors that a transfer of the whole sequence needs.
#[derive(Clone, Debug)]
pub struct Distribution(Histogram<u64>);

impl Default for Distribution {
    fn default() -> Self {
        // Only more than five digits are refused.
        Self(Histogram::new(3).expect("three digits are few enough"))
    }
}

impl Distribution {
    /// Adds a value.
    pub fn record(&mut self, value: u64) {
        self.0.record(value).expect("a histogram that grows takes every value");
    }

    /// Adds the duration of a call.
    pub fn record_time(&mut self, duration: Duration) {
        self.record(duration.as_nanos() as u64);
    }

    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Returns the mean; 0 without values.
    pub fn mean(&self) -> f64 {
        self.0.mean()
    }

    /// Returns the quantile of a share from 0 to 1; the maximum at 1.
    pub fn at(&self, share: f64) -> u64 {
        if share == 1.0 { self.0.max() } else { self.0.value_at_quantile(share) }
    }

    fn merge(&mut self, other: &Self) {
        self.0.add(&other.0).expect("a histogram that grows takes every value");
    }
}

/// The runs of consecutive frames in block tables.
#[derive(Clone, Debug, Default)]
pub struct TableRuns {
    /// Blocks of the tables.
    pub blocks: u64,
    /// Runs in them.
    pub runs: u64,
    /// The runs of each request's table at its completion.
    pub per_sequence: Distribution,
}

impl TableRuns {
    /// Counts the runs in the table of a completed or preempted request.
    pub fn count(&mut self, table: &[i32], is_completed: bool) {
        let ends = table.windows(2).filter(|pair| pair[1] != pair[0] + 1).count();
        let runs = (table.len().min(1) + ends) as u64;
        self.blocks += table.len() as u64;
        self.runs += runs;
        if is_completed {
            self.per_sequence.record(runs);
        }
    }

    /// Returns the mean length of the runs; 0 without tables.
    pub fn mean_len(&self) -> f64 {
        if self.runs == 0 { 0.0 } else { self.blocks as f64 / self.runs as f64 }
    }

    /// Adds the counts of other tables.
    pub fn merge(&mut self, other: &Self) {
        self.blocks += other.blocks;
        self.runs += other.runs;
        self.per_sequence.merge(&other.per_sequence);
    }
}

/// The counters of one thread.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Requests completed.
    pub completed: u64,
    /// Requests rejected because they are larger than the pool.
    pub rejected: u64,
    /// Number of preemptions.
    pub preempted: u64,
    /// Number of refusals, also after this thread's last step had ended.
    pub refused: u64,
    /// Full blocks of prompts at their first admission.
    pub lookup_blocks: u64,
    /// Leading blocks of these prompts that were cached.
    pub hit_blocks: u64,
    /// Full blocks of prompts readmitted after a preemption.
    pub resumed_lookup_blocks: u64,
    /// Leading blocks of these prompts that were cached: mostly the request's own.
    pub resumed_hit_blocks: u64,
    /// Tokens of prompts at their first admission.
    pub prompt_tokens: u64,
    /// Tokens admitted that had been computed before, and were not cached any more.
    pub recomputed_tokens: u64,
    /// Virtual time from the arrival of a request to the first token of its answer.
    pub first_token: Distribution,
    /// Tokens appended and written.
    pub tokens: u64,
    /// Tokens read back and compared.
    pub tokens_verified: u64,
    /// Blocks allocated by appends and for states, without those found in the cache.
    pub blocks_allocated: u64,
    /// Blocks of these that were freed.
    pub blocks_freed: u64,
    /// Blocks with a wrong byte.
    pub corrupt: HashSet<Corrupt>,
    /// Other faults, the first few.
    pub findings: Vec<String>,
    /// The runs of the block tables of ended or preempted requests.
    pub tables: TableRuns,
    /// The same of each list alone, if there are several.
    pub lists: Vec<TableRuns>,
    /// The same in the free list, if there is one.
    pub listed: TableRuns,
    /// Leading blocks of prompts that the free list had cached, at their first admission.
    pub listed_hits: u64,
    /// Latency of appends that allocated blocks.
    pub allocate: Distribution,
    /// Latency of closing sequences.
    pub free: Distribution,
    /// The share of blocks in use.
    pub utilization: Samples,
    /// The share of the free frames outside long runs.
    pub fragmentation: Samples,
    /// Shares of the blocks that were free, and reserved for growth of sequences.
    pub reserved_for_growth: Samples,
    /// Cuts at which the states of a sequence were kept.
    pub checkpoints: u64,
    /// Cuts at which they were not, because there was no memory for them.
    pub checkpoints_refused: u64,
    /// What sequences hold and give up in each group of layers, if there are groups.
    pub groups: Vec<GroupUse>,
}

/// The use of a pool by a group of layers.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct GroupUse {
    /// Frames of open sequences, also those reserved. Shared ones count for each.
    pub frames: Samples,
    /// Frames that sequences gave up before their end, behind a window.
    pub given_up: u64,
}

impl Tally {
    /// Adds a finding, up to the limit.
    pub fn find(&mut self, finding: String) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        }
    }

    /// Counts the blocks that an attempt at a request looked up in the cache, and the hits.
    pub fn count_lookup(&mut self, attempt: u32, blocks: usize, hits: usize) {
        let (all, found) = match attempt {
            0 => (&mut self.lookup_blocks, &mut self.hit_blocks),
            _ => (&mut self.resumed_lookup_blocks, &mut self.resumed_hit_blocks),
        };
        *all += blocks as u64;
        *found += hits as u64;
    }

    /// Adds the counts of another thread.
    pub fn merge(&mut self, other: Self) {
        self.completed += other.completed;
        self.rejected += other.rejected;
        self.preempted += other.preempted;
        self.refused += other.refused;
        self.checkpoints += other.checkpoints;
        self.checkpoints_refused += other.checkpoints_refused;
        self.lookup_blocks += other.lookup_blocks;
        self.hit_blocks += other.hit_blocks;
        self.resumed_lookup_blocks += other.resumed_lookup_blocks;
        self.resumed_hit_blocks += other.resumed_hit_blocks;
        self.prompt_tokens += other.prompt_tokens;
        self.recomputed_tokens += other.recomputed_tokens;
        self.first_token.merge(&other.first_token);
        self.tokens += other.tokens;
        self.tokens_verified += other.tokens_verified;
        self.blocks_allocated += other.blocks_allocated;
        self.blocks_freed += other.blocks_freed;
        self.corrupt.extend(other.corrupt);
        other.findings.into_iter().for_each(|finding| self.find(finding));
        self.tables.merge(&other.tables);
        self.lists.resize_with(self.lists.len().max(other.lists.len()), TableRuns::default);
        self.lists.iter_mut().zip(&other.lists).for_each(|(own, other)| own.merge(other));
        self.listed.merge(&other.listed);
        self.listed_hits += other.listed_hits;
        self.allocate.merge(&other.allocate);
        self.free.merge(&other.free);
        self.utilization.merge(&other.utilization);
        self.fragmentation.merge(&other.fragmentation);
        self.reserved_for_growth.merge(&other.reserved_for_growth);
        self.groups.resize(self.groups.len().max(other.groups.len()), GroupUse::default());
        for (sum, group) in self.groups.iter_mut().zip(&other.groups) {
            sum.frames.merge(&group.frames);
            sum.given_up += group.given_up;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_frames_do_not_follow() {
        let mut tables = TableRuns::default();
        tables.count(&[], false);
        assert_eq!((tables.mean_len(), tables.per_sequence.count()), (0.0, 0));
        tables.count(&[4, 5, 6, 9, 8], true);
        tables.count(&[8, 9, 10], false);
        assert_eq!((tables.blocks, tables.runs, tables.mean_len()), (8, 4, 2.0));
        assert_eq!((tables.per_sequence.count(), tables.per_sequence.mean()), (1, 3.0));
    }

    #[test]
    fn runs_of_sequences_are_summed_over_threads() {
        assert_eq!(Distribution::default().mean(), 0.0);
        let mut sum = Tally::default();
        for runs in [1..=60, 61..=100] {
            let mut tally = Tally::default();
            runs.for_each(|runs| tally.tables.per_sequence.record(runs));
            sum.merge(tally);
        }
        let runs = sum.tables.per_sequence;
        assert_eq!((runs.mean(), [0.5, 0.99].map(|share| runs.at(share))), (50.5, [50, 99]));
    }

    #[test]
    fn long_times_are_recorded_too() {
        let mut tally = Tally::default();
        tally.allocate.record_time(Duration::from_secs(100));
        let mut sum = Tally::default();
        sum.allocate.record_time(Duration::from_nanos(5));
        sum.merge(tally);
        let [p50, max] = [0.5, 1.0].map(|share| sum.allocate.at(share));
        assert!(p50 == 5 && max >= 100_000_000_000 * 999 / 1000);
    }
}
