//! Shared code of the reports: the summary of many times, and the shape of free space.

use std::time::Duration;

/// Summary of the times of single calls.
pub struct Times {
    /// Median.
    pub median: Duration,
    /// 99th percentile.
    pub p99: Duration,
    /// 99.9th percentile.
    pub p999: Duration,
    /// Maximum.
    pub max: Duration,
}

impl Times {
    /// Summarises times; of none, all are 0.
    pub fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let last = times.len().saturating_sub(1) as f64;
        let at = |share: f64| times.get((last * share) as usize).copied().unwrap_or_default();
        Self { median: at(0.5), p99: at(0.99), p999: at(0.999), max: at(1.0) }
    }
}

/// Returns the median of some figures; of an even number, the lower one.
///
/// # Panics
///
/// If there are none.
pub fn median(figures: impl IntoIterator<Item = f64>) -> f64 {
    let mut figures: Vec<f64> = figures.into_iter().collect();
    figures.sort_unstable_by(f64::total_cmp);
    figures[(figures.len() - 1) / 2]
}

/// Returns the mean of some figures.
///
/// # Panics
///
/// If there are none.
pub fn mean(figures: impl IntoIterator<Item = f64>) -> f64 {
    let (sum, count) = figures.into_iter().fold((0.0, 0), |(sum, count), figure| (sum + figure, count + 1));
    assert!(count > 0, "a mean of nothing");
    sum / f64::from(count)
}

/// Returns the number of free positions in wholly free aligned units of `unit`.
pub fn free_in_units(owned: &[bool], unit: usize) -> usize {
    owned.chunks_exact(unit).filter(|unit| unit.iter().all(|owned| !owned)).count() * unit
}

/// Returns the mean length of the runs of consecutive numbers in `ids`, in their order.
pub fn mean_run(ids: &[u32]) -> f64 {
    let runs = 1 + ids.windows(2).filter(|pair| pair[1] != pair[0].wrapping_add(1)).count();
    ids.len() as f64 / runs as f64
}
