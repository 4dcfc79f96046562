//! Latencies of operations: one in so many per thread and kind is timed, and all waits and resizes.
//! An append counts as an allocation if it needs blocks. A timed lease's release is timed, too.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use histogram::AtomicHistogram;

use crate::sync::{Ordering::*, StatisticU64, thread_local_const};

/// Times are exact to within 1/16, up to one second; longer ones count as the maximum.
const GROUPING_POWER: u8 = 4;
const MAX_VALUE_POWER: u8 = 30;

const OPERATIONS: usize = 6;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Operation {
    Allocate,
    Append,
    Admit,
    Wait,
    Free,
    /// A resize, including a refused one.
    Resize,
}

thread_local_const! {
    static TICKS: [Cell<u32>; OPERATIONS] = [const { Cell::new(0) }; OPERATIONS];
}

pub(crate) struct Latencies([Times; OPERATIONS]);

struct Times {
    nanoseconds: AtomicHistogram,
    sum: StatisticU64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Times {
            nanoseconds: AtomicHistogram::new(GROUPING_POWER, MAX_VALUE_POWER).expect("constants that fit"),
            sum: StatisticU64::new(0),
        }))
    }
}

impl Latencies {
    #[cold]
    #[inline(never)]
    pub(crate) fn record(&self, operation: Operation, start: Instant) {
        let nanoseconds = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let times = &self.0[operation as usize];
        times.sum.fetch_add(nanoseconds, Relaxed);
        // Cannot fail: the value is within the histogram's range.
        let _ = times.nanoseconds.increment(nanoseconds.min((1 << MAX_VALUE_POWER) - 1));
    }

    pub(crate) fn time(&self, operation: Operation) -> Timing<'_> {
        Timing { latencies: self, operation, start: Some(Instant::now()) }
    }

    pub(crate) fn histogram(&self, operation: Operation) -> LatencyHistogram {
        let times = &self.0[operation as usize];
        // The sum first: it includes each time in the buckets, or lags behind them.
        let sum_ns = times.sum.load(Relaxed);
        let bucket =
            |bucket: histogram::Bucket| LatencyBucket { up_to_ns: bucket.end(), count: bucket.count() };
        let buckets = times.nanoseconds.load();
        let buckets = buckets.iter().filter(|bucket| bucket.count() > 0).map(bucket).collect();
        LatencyHistogram { buckets, sum_ns }
    }
}

#[derive(Clone)]
pub(crate) struct Sampler {
    /// Samples when `tick & mask == 0`; `None` never samples.
    mask: Option<u32>,
    latencies: Arc<Latencies>,
}

pub(crate) struct Timing<'a> {
    latencies: &'a Latencies,
    operation: Operation,
    start: Option<Instant>,
}

impl Timing<'_> {
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.start.is_some()
    }
}

impl Drop for Timing<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(start) = self.start {
            self.latencies.record(self.operation, start);
        }
    }
}

/// Times of one kind of operation that lie in one interval.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LatencyBucket {
    /// Inclusive upper end in ns, at most 1/16 above the lower end; the last is 2^30 - 1.
    pub up_to_ns: u64,
    /// Number of times in the interval.
    pub count: u64,
}

/// Histogram of the times of one kind of operation.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LatencyHistogram {
    /// Intervals that contain a time, ascending.
    pub buckets: Vec<LatencyBucket>,
    /// Sum of the times, in nanoseconds.
    pub sum_ns: u64,
}

impl LatencyHistogram {
    /// Returns the number of times.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.count).sum()
    }

    /// Returns quantiles of the times.
    pub fn quantiles(&self) -> Latency {
        let samples = self.count();
        // Each is the upper end of the first bucket at which this share of samples is reached.
        let shares = [0.5, 0.99, 0.999, 1.0];
        let ranks = shares.map(|share| ((samples as f64 * share).ceil() as u64).max(1));
        let (mut ends, mut seen) = ([0; 4], 0);
        for bucket in &self.buckets {
            let before = seen;
            seen += bucket.count;
            for (end, rank) in ends.iter_mut().zip(ranks) {
                if (before + 1..=seen).contains(&rank) {
                    *end = bucket.up_to_ns;
                }
            }
        }
        let [p50_ns, p99_ns, p999_ns, max_ns] = ends;
        Latency { samples, p50_ns, p99_ns, p999_ns, max_ns }
    }

    fn with(mut self, other: &Self) -> Self {
        self.sum_ns += other.sum_ns;
        for bucket in &other.buckets {
            match self.buckets.binary_search_by_key(&bucket.up_to_ns, |own| own.up_to_ns) {
                Ok(place) => self.buckets[place].count += bucket.count,
                Err(place) => self.buckets.insert(place, *bucket),
            }
        }
        self
    }
}

/// Quantiles of sampled times. Each is the upper end of its bucket: at most 1/16 too high.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Latency {
    /// Number of timed operations.
    pub samples: u64,
    /// Median, in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile, in nanoseconds.
    pub p99_ns: u64,
    /// 99.9th percentile, in nanoseconds.
    #[cfg_attr(feature = "serde", serde(default))]
    pub p999_ns: u64,
    /// Maximum of the samples, not of all operations, in nanoseconds.
    pub max_ns: u64,
}

impl Sampler {
    /// Creates a sampler of one in `every` operations, rounded up to a power of two; 0: none.
    pub(crate) fn new(every: u32, latencies: Arc<Latencies>) -> Self {
        Self {
            // Above 2^31 the next power is 2^32, whose mask is all ones.
            mask: (every != 0).then(|| every.checked_next_power_of_two().map_or(u32::MAX, |every| every - 1)),
            latencies,
        }
    }

    pub(crate) fn every(&self) -> u64 {
        self.mask.map_or(0, |mask| u64::from(mask) + 1)
    }

    /// Begins to time an operation if the last [`is_due`](Self::is_due) for it returned true.
    #[inline]
    #[must_use = "the operation ends when it is dropped"]
    pub(crate) fn time(&self, operation: Operation) -> Timing<'_> {
        let start = self.is_timed(operation).then(Instant::now);
        Timing { latencies: &self.latencies, operation, start }
    }

    #[must_use = "the operation ends when it is dropped"]
    pub(crate) fn start(&self, operation: Operation) -> Timing<'_> {
        let start = self.is_due(operation).then(Instant::now);
        Timing { latencies: &self.latencies, operation, start }
    }

    /// Returns whether the operation that was counted last is timed.
    #[inline]
    pub(crate) fn is_timed(&self, operation: Operation) -> bool {
        self.mask.is_some_and(|mask| {
            TICKS.try_with(|ticks| ticks[operation as usize].get()).is_ok_and(|tick| tick & mask == 0)
        })
    }

    #[inline]
    pub(crate) fn is_due(&self, operation: Operation) -> bool {
        let Some(mask) = self.mask else { return false };
        let tick = TICKS.try_with(|ticks| {
            let tick = &ticks[operation as usize];
            tick.set(tick.get().wrapping_add(1));
            tick.get()
        });
        tick.is_ok_and(|tick| tick & mask == 0)
    }

    pub(crate) fn histogram(&self, operation: Operation) -> LatencyHistogram {
        self.latencies.histogram(operation)
    }

    /// Returns quantiles of the times of allocations, including those of appends.
    pub(crate) fn read(&self) -> Latency {
        let appends = self.latencies.histogram(Operation::Append);
        self.latencies.histogram(Operation::Allocate).with(&appends).quantiles()
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_in_so_many_is_timed() {
        let sampler = Sampler::new(4, Arc::default());
        for _ in 0..400 {
            sampler.is_due(Operation::Allocate);
            drop(sampler.time(Operation::Allocate));
        }
        let latency = sampler.read();
        assert_eq!(latency.samples, 100);
        assert!(latency.p50_ns <= latency.p99_ns && latency.p99_ns <= latency.max_ns);
        let none = Sampler::new(0, Arc::default());
        none.is_due(Operation::Allocate);
        drop(none.time(Operation::Allocate));
        drop(none.start(Operation::Free));
        assert_eq!(none.read(), Latency::default());
    }
}
