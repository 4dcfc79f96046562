//! Age of the oldest batch in flight.

use std::time::{Duration, Instant};

use crate::ids::Ticket;
use crate::sync::Mutex;

/// Measures the age of the oldest batch in flight: beginning a batch reads no clock.
///
/// An observer (statistics, failed requests, searches of waiting requests, the background task)
/// that finds another oldest batch than the previous one stores it with the time. An age is
/// therefore never too long, and too short by the time until the first observation.
#[derive(Default)]
pub struct Watch {
    /// Only `try_lock` is used: an observer that finds it taken reports no age.
    seen: Mutex<Option<(Ticket, Instant)>>,
}

impl Watch {
    /// Returns a lower bound of the time for which this batch has been the oldest in flight.
    pub fn age(&self, oldest: Ticket) -> Duration {
        if cfg!(kvpool_loom) {
            return Duration::ZERO;
        }
        let Ok(mut seen) = self.seen.try_lock() else { return Duration::ZERO };
        match *seen {
            Some((ticket, since)) if ticket == oldest => since.elapsed(),
            _ => {
                *seen = Some((oldest, Instant::now()));
                Duration::ZERO
            }
        }
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_age_is_that_since_the_first_look() {
        let watch = Watch::default();
        assert_eq!(watch.age(Ticket(3)), Duration::ZERO);
        std::thread::sleep(Duration::from_millis(2));
        assert!(watch.age(Ticket(3)) >= Duration::from_millis(2));
        assert_eq!(watch.age(Ticket(4)), Duration::ZERO, "another one");
    }
}
