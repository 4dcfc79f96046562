//! Resizes the pool during a replay, by a schedule, on a thread of its own.
//!
//! A step is due when its share of the requests is settled. Blocks in the way are soon closed, so a
//! blocked step is retried until it succeeds, the next step is due, or the replay ends. A step that
//! stays blocked is reported and is not a failure, since the pool has lost nothing. Any other error
//! is a failure, and so is a resize that leaves the pool with another size.

use std::thread;
use std::time::{Duration, Instant};

use kvpool::compact::ResizeError;
use thiserror::Error;

use super::pool::ReplayPool;
use super::shared_clock::SharedClock;
use crate::schedule::{Schedule, Share};

/// Interval of checks whether a step is due.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Why the pool does not have the requested size.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ResizeRefusal {
    /// Blocks in use are in the way. A retry may succeed.
    #[error("blocked: {0}")]
    Blocked(String),
    /// An error that a replay never expects.
    #[error("failed: {0}")]
    Failed(String),
}

/// A step of the schedule, and its outcome.
#[derive(Clone, PartialEq, Debug)]
pub struct Resize {
    /// Requests settled at its start.
    pub at_request: u64,
    /// Blocks before.
    pub from: usize,
    /// Requested blocks.
    pub to: usize,
    /// Milliseconds from the first attempt to the end of the last.
    pub time_ms: f64,
    /// Attempts.
    pub attempts: u32,
    /// Why the last attempt was refused, if it was.
    pub outcome: Result<(), ResizeRefusal>,
}

/// Executes the schedule of a replay of `requests` requests, until its end or that of the replay.
pub fn run(pool: &ReplayPool, clock: &SharedClock<'_>, schedule: &Schedule, requests: usize) -> Vec<Resize> {
    let is_due = |at: Share| clock.settled() >= at.of(requests);
    let mut resizes = Vec::new();
    for (index, &(at, to)) in schedule.0.iter().enumerate() {
        while !is_due(at) {
            if clock.is_stopped() {
                return resizes;
            }
            thread::sleep(CHECK_INTERVAL);
        }
        let next = schedule.0.get(index + 1);
        let is_over = || clock.is_stopped() || next.is_some_and(|&(next, _)| is_due(next));
        resizes.push(resize(pool, clock.settled(), to, is_over));
    }
    resizes
}

fn resize(pool: &ReplayPool, at_request: u64, to: usize, is_over: impl Fn() -> bool) -> Resize {
    let (from, start) = (pool.total_blocks(), Instant::now());
    let mut attempts = 0;
    let outcome = loop {
        attempts += 1;
        // Checked before the last attempt: once the pool is unused, nothing is in the way.
        let is_last = is_over();
        match pool.wait(pool.resize(to)) {
            Ok(_) => break confirm(to, pool.total_blocks()),
            Err(
                error @ (ResizeError::Blocked { .. }
                | ResizeError::NoRoom { .. }
                | ResizeError::NoTurn { .. }),
            ) => {
                if is_last {
                    break Err(ResizeRefusal::Blocked(error.to_string()));
                }
                thread::sleep(RETRY_INTERVAL);
            }
            Err(error) => break Err(ResizeRefusal::Failed(error.to_string())),
        }
    };
    Resize { at_request, from, to, time_ms: start.elapsed().as_secs_f64() * 1e3, attempts, outcome }
}

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
