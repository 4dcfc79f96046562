//! Waits without progress of any thread.

use std::mem;
use std::time::{Duration, Instant};

/// Maximum that counts as waited between two checks for progress.
const CHECK_MAX: Duration = Duration::from_millis(100);

/// The time that a thread has waited without progress of any thread.
pub(super) struct Stall {
    pub(super) transfers: u64,
    checked: Instant,
    waited: Duration,
}

impl Stall {
    pub(super) fn new(transfers: u64) -> Self {
        Self { transfers, checked: Instant::now(), waited: Duration::ZERO }
    }

    /// Adds the time since the last check, up to a limit, since the whole process may have been
    /// stopped.
    pub(super) fn check(&mut self) -> Duration {
        let before = mem::replace(&mut self.checked, Instant::now());
        self.waited += self.checked.duration_since(before).min(CHECK_MAX);
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that was stopped for a minute (by a terminal, a debugger, a snapshot) is not
    /// stuck.
    #[test]
    fn a_stopped_process_is_not_stuck() {
        let Some(then) = Instant::now().checked_sub(Duration::from_secs(60)) else { return };
        let mut stall = Stall { checked: then, ..Stall::new(7) };
        assert_eq!(stall.check(), CHECK_MAX);
        assert!(stall.check() < 2 * CHECK_MAX);
    }
}
