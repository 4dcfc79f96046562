//! Conversion of a pool's histograms to Prometheus.
//!
//! A pool counts times in intervals of a sixteenth of a power of two, in nanoseconds, including
//! their upper ends. Two bounds per power of two are exported, `2^n - 1` and `1.5 * 2^n - 1`. Both
//! end an interval of the pool, so every time is on the right side of every bound. Times beyond the
//! pool's last interval are counted in it, and appear only below `+Inf`.

use kvpool::LatencyHistogram;

/// Powers of two whose multiples are bounds: from 63 ns to 0.8 s.
const POWERS: std::ops::Range<u32> = 6..30;

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Seconds {
    pub(super) sum: f64,
    pub(super) count: u64,
    /// Inclusive upper bounds, ascending to infinity, with each interval's own count.
    pub(super) intervals: Vec<(f64, u64)>,
}

pub(super) fn seconds(histogram: &LatencyHistogram) -> Seconds {
    let mut rest = histogram.buckets.iter().peekable();
    let mut intervals: Vec<(f64, u64)> = bounds()
        .map(|bound| {
            let mut count = 0;
            while let Some(bucket) = rest.next_if(|bucket| bucket.up_to_ns <= bound) {
                count += bucket.count;
            }
            (bound as f64 / 1e9, count)
        })
        .collect();
    intervals.push((f64::INFINITY, rest.map(|bucket| bucket.count).sum()));
    Seconds { sum: histogram.sum_ns as f64 / 1e9, count: histogram.count(), intervals }
}

pub(super) fn bounds() -> impl Iterator<Item = u64> {
    POWERS.flat_map(|power| [(1 << power) - 1, (3 << (power - 1)) - 1])
}
