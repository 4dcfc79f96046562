//! Latency of allocations: one in so many per thread is timed, the others pay one
//! increment.
//!
//! An allocation is one request for blocks: a lease, handles, or an append that needs blocks.
//! Requests that wait in line are not timed: their duration depends on other requests.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use histogram::AtomicHistogram;

use crate::sync::thread_local_const;

/// Values are exact to within 1/16, up to one second; longer ones count as the maximum.
const GROUPING_POWER: u8 = 4;
const MAX_VALUE_POWER: u8 = 30;

thread_local_const! {
    /// Number of allocations of this thread so far, in any pool.
    static TICK: Cell<u32> = Cell::new(0);
}

/// Times one in so many allocations. Clones share one histogram.
#[derive(Clone)]
pub(crate) struct Sampler {
    /// Samples when `tick & mask == 0`; `None` never samples.
    mask: Option<u32>,
    nanoseconds: Arc<AtomicHistogram>,
}

/// An allocation that may be timed.
pub(crate) struct Timing<'a> {
    sampler: &'a Sampler,
    start: Option<Instant>,
}

impl Drop for Timing<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(start) = self.start {
            self.sampler.record(start);
        }
    }
}

/// Quantiles of sampled allocation times. Each is the upper end of its bucket: at most 1/16 too
/// high.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Latency {
    /// Number of timed allocations.
    pub samples: u64,
    /// Median, in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile, in nanoseconds.
    pub p99_ns: u64,
    /// 99.9th percentile, in nanoseconds.
    pub p999_ns: u64,
    /// Maximum of the samples, not of all allocations, in nanoseconds.
    pub max_ns: u64,
}

impl Sampler {
    /// Creates a sampler of one in `every` allocations, rounded up to a power of two; 0: none.
    pub(crate) fn new(every: u32) -> Self {
        Self {
            // Above 2^31 the next power is 2^32, whose mask is all ones.
            mask: (every != 0).then(|| every.checked_next_power_of_two().map_or(u32::MAX, |every| every - 1)),
            nanoseconds: Arc::new(
                AtomicHistogram::new(GROUPING_POWER, MAX_VALUE_POWER).expect("constants that fit"),
            ),
        }
    }

    /// Begins to time an allocation, if the last call of [`is_due`](Self::is_due) returned true;
    /// its end is the drop of the result. Each call must follow a call of `is_due`.
    #[inline]
    #[must_use = "the allocation ends when it is dropped"]
    pub(crate) fn time(&self) -> Timing<'_> {
        let is_due =
            self.mask.is_some_and(|mask| TICK.try_with(Cell::get).is_ok_and(|tick| tick & mask == 0));
        Timing { sampler: self, start: is_due.then(Instant::now) }
    }

    /// Counts an allocation, and returns whether it is to be timed.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        let Some(mask) = self.mask else { return false };
        let tick = TICK.try_with(|tick| {
            tick.set(tick.get().wrapping_add(1));
            tick.get()
        });
        tick.is_ok_and(|tick| tick & mask == 0)
    }

    #[cold]
    #[inline(never)]
    fn record(&self, start: Instant) {
        let nanoseconds = start.elapsed().as_nanos().min((1 << MAX_VALUE_POWER) - 1) as u64;
        // Cannot fail: the value is within the histogram's range.
        let _ = self.nanoseconds.increment(nanoseconds);
    }

    pub(crate) fn read(&self) -> Latency {
        let histogram = self.nanoseconds.load();
        let buckets = || histogram.iter().filter(|bucket| bucket.count() > 0);
        let samples: u64 = buckets().map(|bucket| bucket.count()).sum();
        // Each is the upper end of the first bucket at which this share of samples is reached.
        let shares = [0.5, 0.99, 0.999, 1.0];
        let ranks = shares.map(|share| ((samples as f64 * share).ceil() as u64).max(1));
        let (mut ends, mut seen) = ([0; 4], 0);
        for bucket in buckets() {
            let before = seen;
            seen += bucket.count();
            for (end, rank) in ends.iter_mut().zip(ranks) {
                if (before + 1..=seen).contains(&rank) {
                    *end = bucket.end();
                }
            }
        }
        let [p50_ns, p99_ns, p999_ns, max_ns] = ends;
        Latency { samples, p50_ns, p99_ns, p999_ns, max_ns }
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_in_so_many_is_timed() {
        let sampler = Sampler::new(4);
        for _ in 0..400 {
            sampler.is_due();
            drop(sampler.time());
        }
        let latency = sampler.read();
        assert_eq!(latency.samples, 100);
        assert!(latency.p50_ns <= latency.p99_ns && latency.p99_ns <= latency.max_ns);
        let none = Sampler::new(0);
        none.is_due();
        drop(none.time());
        assert_eq!(none.read(), Latency::default());
    }
}
