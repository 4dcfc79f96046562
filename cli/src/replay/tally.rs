//! What a scheduler thread counts, and the sum over threads.

use std::collections::HashSet;
use std::time::Duration;

use hdrhistogram::Histogram;

use super::transfer::Corrupt;

/// Findings that are kept word for word; beyond that they are only counted.
const FINDINGS_MAX: usize = 16;

/// A mean and the extremes of what was sampled.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Samples {
    sum: f64,
    count: u64,
    /// The largest.
    pub max: f64,
}

impl Samples {
    /// Adds one.
    pub fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
        self.max = self.max.max(value);
    }

    /// The mean; 0 of nothing.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }
    }

    fn merge(&mut self, other: &Self) {
        self.sum += other.sum;
        self.count += other.count;
        self.max = self.max.max(other.max);
    }
}

/// What one thread counted.
#[derive(Debug)]
pub struct Tally {
    /// Requests done.
    pub completed: u64,
    /// Requests that no empty pool could hold.
    pub rejected: u64,
    /// How often a request gave way.
    pub preempted: u64,
    /// How often the pool refused blocks, and kept to it once this thread's finished step had ended.
    pub refused: u64,
    /// Full blocks of prompts when they were admitted for the first time.
    pub lookup_blocks: u64,
    /// Leading ones of each that were cached.
    pub hit_blocks: u64,
    /// The same two of prompts that came back after they had given way: what they find is mostly their own.
    pub resumed_lookup_blocks: u64,
    /// See [`resumed_lookup_blocks`](Self::resumed_lookup_blocks).
    pub resumed_hit_blocks: u64,
    /// Tokens appended and written.
    pub tokens: u64,
    /// Tokens read back and compared.
    pub tokens_verified: u64,
    /// Blocks taken by appends. What was found in the cache is not among them.
    pub blocks_allocated: u64,
    /// Those of them that were given back.
    pub blocks_freed: u64,
    /// Blocks in which a byte was not as it was written.
    pub corrupt: HashSet<Corrupt>,
    /// What else went wrong, the first few.
    pub findings: Vec<String>,
    /// Blocks of the tables walked, and the runs of consecutive frames that they were.
    pub run_blocks: u64,
    /// See [`run_blocks`](Self::run_blocks).
    pub runs: u64,
    /// Nanoseconds of appends that took blocks.
    pub allocate_ns: Histogram<u64>,
    /// Nanoseconds of giving a sequence's blocks back.
    pub free_ns: Histogram<u64>,
    /// The share of blocks in use.
    pub utilization: Samples,
    /// The share of free frames that are in no long run.
    pub fragmentation: Samples,
}

impl Default for Tally {
    fn default() -> Self {
        // Three digits, growing as needed: the only arguments that it refuses are more than five digits.
        let histogram = || Histogram::new(3).expect("three digits are few enough");
        Self {
            completed: 0,
            rejected: 0,
            preempted: 0,
            refused: 0,
            lookup_blocks: 0,
            hit_blocks: 0,
            resumed_lookup_blocks: 0,
            resumed_hit_blocks: 0,
            tokens: 0,
            tokens_verified: 0,
            blocks_allocated: 0,
            blocks_freed: 0,
            corrupt: HashSet::new(),
            findings: Vec::new(),
            run_blocks: 0,
            runs: 0,
            allocate_ns: histogram(),
            free_ns: histogram(),
            utilization: Samples::default(),
            fragmentation: Samples::default(),
        }
    }
}

impl Tally {
    /// Keeps a finding, if there are not too many already.
    pub fn find(&mut self, finding: String) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        }
    }

    /// Counts what was looked up in the cache for an attempt at a request, and what of it was there.
    pub fn count_lookup(&mut self, attempt: u32, blocks: usize, hits: usize) {
        let (all, found) = match attempt {
            0 => (&mut self.lookup_blocks, &mut self.hit_blocks),
            _ => (&mut self.resumed_lookup_blocks, &mut self.resumed_hit_blocks),
        };
        *all += blocks as u64;
        *found += hits as u64;
    }

    /// Counts a table's runs of consecutive frames.
    pub fn count_runs(&mut self, table: &[i32]) {
        self.run_blocks += table.len() as u64;
        self.runs += table.len().min(1) as u64;
        self.runs += table.windows(2).filter(|pair| pair[1] != pair[0] + 1).count() as u64;
    }

    /// The mean run of a table's blocks; 0 if none was walked.
    pub fn run_len_mean(&self) -> f64 {
        if self.runs == 0 { 0.0 } else { self.run_blocks as f64 / self.runs as f64 }
    }

    /// Adds what another thread counted.
    pub fn merge(&mut self, other: Self) {
        self.completed += other.completed;
        self.rejected += other.rejected;
        self.preempted += other.preempted;
        self.refused += other.refused;
        self.lookup_blocks += other.lookup_blocks;
        self.hit_blocks += other.hit_blocks;
        self.resumed_lookup_blocks += other.resumed_lookup_blocks;
        self.resumed_hit_blocks += other.resumed_hit_blocks;
        self.tokens += other.tokens;
        self.tokens_verified += other.tokens_verified;
        self.blocks_allocated += other.blocks_allocated;
        self.blocks_freed += other.blocks_freed;
        self.corrupt.extend(other.corrupt);
        other.findings.into_iter().for_each(|finding| self.find(finding));
        self.run_blocks += other.run_blocks;
        self.runs += other.runs;
        self.allocate_ns.add(&other.allocate_ns).expect("a histogram that grows takes every value");
        self.free_ns.add(&other.free_ns).expect("a histogram that grows takes every value");
        self.utilization.merge(&other.utilization);
        self.fragmentation.merge(&other.fragmentation);
    }
}

/// Adds a duration to a histogram that grows as needed.
pub fn record(histogram: &mut Histogram<u64>, duration: Duration) {
    // It refuses only what is beyond 64 bits of precision, and those are centuries.
    let _ = histogram.record(duration.as_nanos() as u64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_frames_do_not_follow() {
        let mut tally = Tally::default();
        tally.count_runs(&[]);
        assert_eq!(tally.run_len_mean(), 0.0);
        tally.count_runs(&[4, 5, 6, 9, 8]);
        assert_eq!((tally.run_blocks, tally.runs), (5, 3));
    }

    #[test]
    fn long_times_are_recorded_too() {
        let mut tally = Tally::default();
        record(&mut tally.allocate_ns, Duration::from_secs(100));
        assert!(tally.allocate_ns.max() >= 100_000_000_000 * 999 / 1000);
        let mut sum = Tally::default();
        record(&mut sum.allocate_ns, Duration::from_nanos(5));
        sum.merge(tally);
        assert_eq!(sum.allocate_ns.len(), 2);
    }
}
