use std::time::Duration;

/// Returns the user and system time of all threads of this process; `None` without a clock for it.
#[cfg(any(target_os = "linux", target_vendor = "apple"))]
pub fn used() -> Option<Duration> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).ok()
}

#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
pub fn used() -> Option<Duration> {
    None
}

#[cfg(all(test, any(target_os = "linux", target_vendor = "apple")))]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Other tests of this process add to it, so there is no upper bound.
    #[test]
    fn a_busy_thread_uses_processor_time() {
        let (begin, before) = (Instant::now(), used().unwrap());
        let after = || used().unwrap();
        while after() - before < Duration::from_millis(20) {
            assert!(begin.elapsed() < Duration::from_secs(60), "the clock stands still");
        }
    }
}
