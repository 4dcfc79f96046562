//! Reports that others can cause, of which few are logged.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Time in which a report is logged once.
const TIME: Duration = Duration::from_secs(10);

/// Reports that are logged in this time: a hostile host can cause any number of them.
const REPORTS_MAX: usize = 8;

/// The reports that were logged lately, and the number of others.
#[derive(Default)]
pub(super) struct Reports {
    /// End of the time in which each is logged once.
    until: Option<Instant>,
    logged: BTreeSet<String>,
    unsaid: u64,
}

impl Reports {
    /// Returns whether a report is to be logged: neither it nor too many others were lately.
    pub(super) fn is_new(&mut self, report: String) -> bool {
        let now = Instant::now();
        if self.until.is_some_and(|until| until <= now) {
            self.sum_up();
        }
        self.until.get_or_insert(now + TIME);
        let is_new = self.logged.len() < REPORTS_MAX && self.logged.insert(report);
        self.unsaid += u64::from(!is_new);
        is_new
    }

    /// Waits until reports may be logged again.
    pub(super) async fn over(&self) {
        match self.until {
            Some(until) => tokio::time::sleep_until(until.into()).await,
            None => std::future::pending().await,
        }
    }

    /// Logs the number of reports that were not logged.
    pub(super) fn sum_up(&mut self) {
        if self.unsaid > 0 {
            tracing::warn!(
                connections = self.unsaid,
                "more connections were refused, or links cut, in the last 10 s"
            );
        }
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_report_is_logged_once_and_few_in_all() {
        let mut reports = Reports::default();
        let new = |report: usize, reports: &mut Reports| reports.is_new(report.to_string());
        assert!((0..REPORTS_MAX).all(|report| new(report, &mut reports)));
        assert!((0..2 * REPORTS_MAX).all(|report| !new(report, &mut reports)));
        assert_eq!(reports.unsaid, 2 * REPORTS_MAX as u64);
        reports.until = Some(Instant::now());
        assert!(new(0, &mut reports));
    }
}
