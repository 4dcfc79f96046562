use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Period in which the same message is logged once.
const TIME: Duration = Duration::from_secs(10);

/// Messages per period: a hostile host can cause any number of them.
const REPORTS_MAX: usize = 8;

/// Messages of the current period, and the number of those suppressed.
#[derive(Default)]
pub(super) struct Reports {
    until: Option<Instant>,
    logged: BTreeSet<String>,
    unsaid: u64,
}

impl Reports {
    /// Returns whether a message is to be logged: it is new in this period, and within the limit.
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

    pub(super) async fn over(&self) {
        match self.until {
            Some(until) => tokio::time::sleep_until(until.into()).await,
            None => std::future::pending().await,
        }
    }

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
