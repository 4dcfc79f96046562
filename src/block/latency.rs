//! How long allocations take: one in so many of a thread's is timed, so that the others pay one
//! decrement.
//!
//! An allocation is what asks for blocks once: a lease, handles, or an append that needs blocks.
//! One that waits in line is not timed: how long it takes is others' doing.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use histogram::AtomicHistogram;

use crate::sync::thread_local_const;

/// Values are kept to within 1/16 of themselves, up to a second; longer ones count as the longest.
const GROUPING_POWER: u8 = 4;
const MAX_VALUE_POWER: u8 = 30;

thread_local_const! {
    /// Allocations of this thread, in any pool, since its start.
    static TICK: Cell<u32> = Cell::new(0);
}

/// Times one in so many allocations. Clones add to the same histogram.
#[derive(Clone)]
pub(crate) struct Sampler {
    /// Sampled when `tick & mask == 0`; `None` samples nothing.
    mask: Option<u32>,
    nanoseconds: Arc<AtomicHistogram>,
}

/// Times of sampled allocations, in nanoseconds. A quantile is the upper end of its bucket: at most 1/16 above.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Latency {
    /// Allocations that were timed.
    pub samples: u64,
    /// Half of them took at most this.
    pub p50_ns: u64,
    /// 99 % of them took at most this.
    pub p99_ns: u64,
    /// 99.9 % of them took at most this.
    pub p999_ns: u64,
    /// The longest: a maximum of samples, not of all allocations.
    pub max_ns: u64,
}

impl Sampler {
    /// Samples one in `every` (rounded up to a power of two); 0: none.
    pub(crate) fn new(every: u32) -> Self {
        Self {
            // Above 2^31 the next power is 2^32, of which the mask is all ones.
            mask: (every != 0).then(|| every.checked_next_power_of_two().map_or(u32::MAX, |every| every - 1)),
            nanoseconds: Arc::new(
                AtomicHistogram::new(GROUPING_POWER, MAX_VALUE_POWER).expect("constants that fit"),
            ),
        }
    }

    /// Runs `f`, and records how long it took if the last call of [`is_due`](Self::is_due) said so.
    /// Each call comes after one of that.
    #[inline]
    pub(crate) fn time<R>(&self, f: impl FnOnce() -> R) -> R {
        match self.mask {
            Some(mask) if TICK.try_with(Cell::get).is_ok_and(|tick| tick & mask == 0) => {
                let start = Instant::now();
                let result = f();
                self.record(start);
                result
            }
            _ => f(),
        }
    }

    /// Counts an allocation. True if it is one to be timed.
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
        // Each is the upper end of the first bucket at which so large a share has been seen.
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
            sampler.time(|| ());
        }
        let latency = sampler.read();
        assert_eq!(latency.samples, 100);
        assert!(latency.p50_ns <= latency.p99_ns && latency.p99_ns <= latency.max_ns);
        let none = Sampler::new(0);
        none.is_due();
        none.time(|| ());
        assert_eq!(none.read(), Latency::default());
    }
}
