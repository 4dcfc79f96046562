//! Calls of several threads at once, without those during which one of the threads did not run.
//!
//! On a machine with other work, a thread is stopped now and then in favour of another process. Its
//! own call is then too long, and the calls of the other threads meet no contention. Both kinds are
//! dropped here; waiting for a lock is not, since it is a cost of the call. The rest has no
//! outliers of that kind, so that its mean counts all work, also work that an engine does only now
//! and then.
//!
//! ```text
//! thread 0   [drop][call][drop: stopped            ][call][call]
//! thread 1      [call][drop][drop][drop][drop][drop][drop][call][drop]
//! ```

use std::time::Instant;

use crate::quiet::preemptions;
use crate::report::mean;

/// One call.
struct Call<T> {
    begin: Instant,
    end: Instant,
    /// Whether the thread was stopped in it or since the call before.
    stopped: bool,
    result: T,
}

/// The calls of one thread.
pub struct Calls<T> {
    calls: Vec<Call<T>>,
    preemptions: i64,
}

impl<T> Default for Calls<T> {
    fn default() -> Self {
        Self { calls: Vec::new(), preemptions: preemptions() }
    }
}

impl<T> Calls<T> {
    /// Creates a list for the calling thread, with room for `calls` calls.
    pub fn with_capacity(calls: usize) -> Self {
        Self { calls: Vec::with_capacity(calls), ..Self::default() }
    }

    /// Runs a call.
    pub fn run(&mut self, call: impl FnOnce() -> T) {
        let begin = Instant::now();
        let result = call();
        let end = Instant::now();
        let preemptions = preemptions();
        self.calls.push(Call { begin, end, stopped: preemptions != self.preemptions, result });
        self.preemptions = preemptions;
    }

    /// Returns the mean time of the undisturbed calls of the only thread, in nanoseconds; `None`
    /// without any.
    pub fn mean_ns(self) -> Option<f64> {
        let times = undisturbed(vec![self]);
        (!times.is_empty()).then(|| mean(times.into_iter().map(|(ns, _)| ns)))
    }

    /// Returns the times in which this thread makes calls without being stopped, as pairs of begin
    /// and end.
    fn active(&self) -> Vec<(Instant, Instant)> {
        let mut active = Vec::new();
        for calls in self.calls.split(|call| call.stopped) {
            active.extend(calls.first().zip(calls.last()).map(|(first, last)| (first.begin, last.end)));
        }
        active
    }
}

/// Returns the nanoseconds and the results of the undisturbed calls of all threads: those during
/// which every thread made calls and none was stopped.
pub fn undisturbed<T>(threads: Vec<Calls<T>>) -> Vec<(f64, T)> {
    let active: Vec<_> = threads.iter().map(Calls::active).collect();
    let calls = threads.into_iter().flat_map(|calls| calls.calls);
    let within = |call: &Call<T>| {
        let holds = |&(begin, end): &(Instant, Instant)| begin <= call.begin && call.end <= end;
        active.iter().all(|active| active.iter().any(holds))
    };
    calls.filter(within).map(|call| ((call.end - call.begin).as_nanos() as f64, call.result)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn calls(zero: Instant, times: &[(u64, u64, bool)]) -> Calls<u64> {
        let at = |us| zero + Duration::from_micros(us);
        let call = |&(begin, end, stopped)| Call { begin: at(begin), end: at(end), stopped, result: begin };
        Calls { calls: times.iter().map(call).collect(), preemptions: 0 }
    }

    #[test]
    fn calls_beside_a_stopped_thread_are_dropped() {
        let zero = Instant::now();
        let first = [(0, 10, false), (10, 20, false), (20, 90, true), (90, 100, false), (100, 110, false)];
        let second = [(5, 15, false), (15, 25, false), (50, 60, false), (95, 105, false), (105, 115, false)];
        let kept = undisturbed(vec![calls(zero, &first), calls(zero, &second)]);
        // Dropped: 0 begins before the other's first call, 15 and 50 meet the stop, 105 ends last.
        assert_eq!(kept, [(10_000.0, 10), (10_000.0, 90), (10_000.0, 100), (10_000.0, 5), (10_000.0, 95)]);
    }

    #[test]
    fn one_thread_drops_only_its_stopped_calls() {
        let times = [(0, 10, true), (10, 30, false), (30, 40, true)];
        assert_eq!(undisturbed(vec![calls(Instant::now(), &times)]), [(20_000.0, 10)]);
        assert_eq!(calls(Instant::now(), &times).mean_ns(), Some(20_000.0));
        assert_eq!(calls(Instant::now(), &times[..1]).mean_ns(), None);
    }
}
