//! How long allocations take: every so many of a thread's is timed, so that the others pay one decrement.

use std::cell::Cell;
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

/// Times one in so many allocations.
pub(super) struct Sampler {
    /// Sampled when `tick & mask == 0`; `None` samples nothing.
    mask: Option<u32>,
    nanoseconds: AtomicHistogram,
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
    pub(super) fn new(every: u32) -> Self {
        Self {
            // Above 2^31 the next power is 2^32, of which the mask is all ones.
            mask: (every != 0).then(|| every.checked_next_power_of_two().map_or(u32::MAX, |every| every - 1)),
            nanoseconds: AtomicHistogram::new(GROUPING_POWER, MAX_VALUE_POWER).expect("constants that fit"),
        }
    }

    /// Runs `f`, and records how long it took if the last call of [`is_due`](Self::is_due) said so.
    pub(super) fn time<R>(&self, f: impl FnOnce() -> R) -> R {
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
    pub(super) fn is_due(&self) -> bool {
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

    pub(super) fn read(&self) -> Latency {
        let histogram = self.nanoseconds.load();
        let samples: u64 = histogram.iter().map(|bucket| bucket.count()).sum();
        // The upper end of the first bucket at which so large a share has been seen.
        let at = |share: f64| {
            let rank = (samples as f64 * share).ceil() as u64;
            let mut seen = 0;
            let bucket = histogram.iter().find(|bucket| {
                seen += bucket.count();
                seen >= rank.max(1)
            });
            bucket.map_or(0, |bucket| bucket.end())
        };
        Latency { samples, p50_ns: at(0.5), p99_ns: at(0.99), p999_ns: at(0.999), max_ns: at(1.0) }
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
