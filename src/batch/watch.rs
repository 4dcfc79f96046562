//! For how long the oldest batch has been in flight, by the looks of those who ask: beginning a batch reads no clock.
//!
//! A look that finds another oldest batch than the one before notes it with the time; one that finds the same gives the time
//! since. So an age is never too long, and too short by the time until the first look: a batch that is never ended is
//! found by any two looks. Statistics look, so does each refusal of an allocation, each search of a request that waits, and the
//! background task of the compactor.

use std::time::{Duration, Instant};

use crate::ids::Ticket;
use crate::sync::Mutex;

/// See the [module](self).
#[derive(Default)]
pub struct Watch {
    /// Only ever tried: a look that meets another one learns nothing of the age.
    seen: Mutex<Option<(Ticket, Instant)>>,
}

impl Watch {
    /// For how long this batch, which is the oldest in flight, has been that, at least.
    pub fn age(&self, oldest: Ticket) -> Duration {
        if cfg!(kvpool_loom) {
            // A model has no time.
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
