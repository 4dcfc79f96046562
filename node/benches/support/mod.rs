//! Shared code of the benches: cores, processor time, medians.

#![allow(dead_code, reason = "each bench uses a part of it")]

#[path = "../../../benches/src/quiet.rs"]
mod quiet;

use std::sync::OnceLock;
use std::time::Duration;

/// Returns the cores on which the process may run, as of the first call.
fn cores() -> &'static [usize] {
    static CORES: OnceLock<Vec<usize>> = OnceLock::new();
    CORES.get_or_init(|| quiet::cores().unwrap_or_default())
}

/// Returns the number of cores on which the process may run; 0 if the system does not report them.
pub fn core_count() -> usize {
    cores().len()
}

/// Pins the calling thread, and those that it creates later, to the `index`th core on which the
/// process may run, wrapping around. Returns whether the system did so.
pub fn pin(index: usize) -> bool {
    let cores = cores();
    !cores.is_empty() && quiet::pin_to(cores[index % cores.len()]).is_ok()
}

/// Lets the calling thread, whose creator may be pinned, run on all cores of the process.
pub fn unpin() {
    // A thread that stays pinned measures less, and nothing wrong.
    let _ = quiet::pin_to_any(cores());
}

/// Returns the processor time of this process.
pub fn processor_time() -> Duration {
    time_of(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Returns the processor time of this thread.
pub fn thread_time() -> Duration {
    time_of(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn time_of(clock: libc::clockid_t) -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes only the struct passed to it.
    let status = unsafe { libc::clock_gettime(clock, &raw mut now) };
    assert_eq!(status, 0, "the clock of processor time");
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Sorts figures, and returns their median; of an even number, the upper one.
pub fn median(figures: &mut [f64]) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    figures[figures.len() / 2]
}
