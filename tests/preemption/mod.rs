//! Preemption: waiting for batches to end, swaps beside the batches of other workers, victims.
//!
//! | file | contents |
//! |---|---|
//! | `settled` | waits for the batches that write a sequence, and for all up to a ticket |
//! | `preempt` | closed and swapped sequences, and what is reported of them |
//! | `resume` | swapped sequences that come back, and blocks that admissions leave to running ones |
//! | `victims` | candidates and their order |
//! | `storm` | workers with overlapping batches that swap each other's neighbours out |
#![cfg(not(kvpool_loom))]

mod preempt;
mod resume;
mod settled;
#[cfg(not(miri))]
mod storm;
mod victims;

use std::time::{Duration, Instant};

use super::migration::kv;

/// A deadline that no test reaches.
fn far() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// A deadline that passes.
fn near() -> Instant {
    Instant::now() + Duration::from_millis(20)
}

/// A deadline that has passed.
fn past() -> Instant {
    Instant::now()
}
