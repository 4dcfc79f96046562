//! The thread that resizes the pool during a replay, by a schedule.
//!
//! A step is due when its share of the requests is settled. A block that is in the way (open at this
//! moment) is gone a moment later, so a blocked step is tried again until it succeeds, the next step
//! is due, or the replay ends. A step that stays blocked is reported and is not a failure: a pool
//! that cannot shrink has lost nothing. Any other error is a failure, and so is a resize that leaves
//! the pool with another size.

use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};

use super::pool::{ReplayPool, ResizeRefusal};
use super::shared_clock::SharedClock;
use crate::schedule::{Schedule, Share};

/// Time between two checks whether a step is due.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Time after which a blocked step is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// A step of the schedule, and its outcome. The names are those of the JSON.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Resize {
    /// Requests settled when it was begun.
    pub at_request: u64,
    /// Blocks before.
    pub from: usize,
    /// Blocks asked for.
    pub to: usize,
    /// Milliseconds from the first attempt to the end of the last.
    pub time_ms: f64,
    /// Attempts.
    pub attempts: u32,
    /// `done`, or why the last attempt was refused.
    #[serde(serialize_with = "as_text")]
    pub outcome: Result<(), ResizeRefusal>,
}

fn as_text<S: Serializer>(outcome: &Result<(), ResizeRefusal>, serializer: S) -> Result<S::Ok, S::Error> {
    match outcome {
        Ok(()) => serializer.serialize_str("done"),
        Err(refusal) => serializer.collect_str(refusal),
    }
}

/// See the [module](self).
pub struct Resizer<'a> {
    pool: &'a ReplayPool,
    clock: &'a SharedClock<'a>,
    schedule: &'a Schedule,
    requests: usize,
}

impl<'a> Resizer<'a> {
    /// Creates the resizer of a replay of `requests` requests.
    pub fn new(
        pool: &'a ReplayPool,
        clock: &'a SharedClock<'a>,
        schedule: &'a Schedule,
        requests: usize,
    ) -> Self {
        Self { pool, clock, schedule, requests }
    }

    /// Starts the thread, unless the schedule is empty.
    pub fn spawn<'scope>(
        self,
        scope: &'scope Scope<'scope, '_>,
    ) -> Option<ScopedJoinHandle<'scope, Vec<Resize>>>
    where
        'a: 'scope,
    {
        (!self.schedule.0.is_empty()).then(|| scope.spawn(move || self.run()))
    }

    fn run(&self) -> Vec<Resize> {
        let mut resizes = Vec::new();
        let mut steps = self.schedule.0.iter().peekable();
        while let Some(&(at, blocks)) = steps.next() {
            while !self.is_due(at) {
                if self.clock.is_stopped() {
                    return resizes;
                }
                thread::sleep(CHECK_INTERVAL);
            }
            let next = steps.peek().map(|(at, _)| *at);
            resizes.push(self.resize(blocks, next));
        }
        resizes
    }

    fn is_due(&self, at: Share) -> bool {
        self.clock.settled() >= at.of(self.requests)
    }

    fn resize(&self, to: usize, next: Option<Share>) -> Resize {
        let (at_request, from, start) = (self.clock.settled(), self.pool.blocks(), Instant::now());
        let mut attempts = 0;
        let outcome = loop {
            attempts += 1;
            // Checked before the last attempt: once the pool is not in use, nothing is in the way.
            let is_last = self.clock.is_stopped() || next.is_some_and(|next| self.is_due(next));
            match self.pool.resize(to) {
                Ok(()) => break confirm(to, self.pool.blocks()),
                Err(ResizeRefusal::Blocked(_)) if !is_last => thread::sleep(RETRY_INTERVAL),
                Err(refusal) => break Err(refusal),
            }
        };
        let time_ms = start.elapsed().as_secs_f64() * 1e3;
        Resize { at_request, from, to, time_ms, attempts, outcome }
    }
}

/// Compares the size after a resize with the size asked for.
fn confirm(asked: usize, found: usize) -> Result<(), ResizeRefusal> {
    let wrong = || ResizeRefusal::Failed(format!("{asked} blocks were asked for, and {found} are there"));
    (asked == found).then_some(()).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resize_to_another_size_is_a_failure() {
        assert_eq!(confirm(90, 90), Ok(()));
        let failed = confirm(90, 60).unwrap_err().to_string();
        assert_eq!(failed, "failed: 90 blocks were asked for, and 60 are there");
    }
}
