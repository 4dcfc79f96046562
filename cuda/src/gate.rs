//! The gate of a physical device: keeps driver calls that may wait for all of its work apart from
//! copies to other devices.
//!
//! A copy to a device that hangs never ends, and with it no driver call that waits for all work of
//! the copy's own device: calls that allocate, free, register, map or load. Both go through the
//! gate of the device, which all its handles share, since they share its primary context:
//!
//! ```text
//! flights = 0:  pass ──> calls + 1 ── the driver call ──> calls - 1
//! calls = 0, none waits:  fly ──> flights + 1 ── copies, polled ──> flights - 1
//! stuck:  both are refused, for good
//! ```
//!
//! Invariants:
//! - `flights == 0 || calls == 0`: no such call is in the driver while a copy to another device is in
//!   flight. Both sides hold their place until they have ended, so that there is no gap between a
//!   look and the call;
//! - a thread in flight passes no gate, so that its flight ends by itself: all its buffers are taken
//!   before. Passes are free to nest;
//! - no thread waits for ever: a flight ends or makes the device stuck within seconds if the other
//!   device fails. If the other device hangs without an error, a pass is refused after
//!   [`PATIENCE`], and so is a flight behind a call that does not return. What cannot be freed then
//!   is leaked.
//!
//! A flight does not begin while a call waits, and one of many lots [yields](Flight::is_awaited). A
//! thread that makes many calls [admits](admit_flights) flights between two of them. Host memory is
//! accessible from all devices, so that its calls [pass all gates](pass_all), in ascending order.
//!
//! A stuck device is opened again only if all commands whose end was not known have ended: then
//! with a new gate, while its older handles stay lost. A gate is forgotten with the last handle of
//! its device.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUdevice;

/// Longest wait at a gate.
const PATIENCE: Duration = Duration::from_secs(30);

/// The gate of one device; see the [module](self).
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
    /// Why work of the device will never end, or cannot be known to.
    stuck: OnceLock<Box<str>>,
    /// Marks behind commands whose end was not known; `None` where there is no mark.
    unended: Mutex<Vec<Option<Arc<dyn Unended>>>>,
    /// Devices whose memory this one's context was given access to.
    peers: Mutex<BTreeSet<CUdevice>>,
}

/// Commands whose end was not known, by a mark behind them.
pub(super) trait Unended: std::fmt::Debug + Send + Sync {
    /// Returns true if the commands have ended, also on a device that is lost.
    fn has_ended(&self) -> bool;
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct State {
    flights: usize,
    calls: usize,
    /// Flights that wait for calls to end.
    grounded: usize,
    /// Calls that wait for flights to end.
    waiting: usize,
}

impl State {
    /// Returns true if no flight may begin.
    fn is_busy(&self) -> bool {
        self.calls > 0 || self.waiting > 0
    }
}

/// Why a gate does not open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Shut {
    /// The device is stuck, for this reason.
    Stuck(Box<str>),
    /// The other side has not ended for [`PATIENCE`].
    Late,
}

/// Permission for driver calls that may wait for all work of the device.
#[derive(Debug)]
#[must_use = "the gate is passed until this is dropped"]
pub(super) struct Pass(Arc<Gate>);

/// Permission for copies to other devices. Dropped when their end is known, or the device is stuck.
#[derive(Debug)]
#[must_use = "the flight lasts until this is dropped"]
pub(super) struct Flight(Arc<Gate>);

static GATES: Mutex<BTreeMap<CUdevice, Weak<Gate>>> = Mutex::new(BTreeMap::new());

fn gates() -> MutexGuard<'static, BTreeMap<CUdevice, Weak<Gate>>> {
    // No code panics while this lock is held.
    GATES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Passes the gates of all devices that are open, for calls that concern host memory.
pub(super) fn pass_all() -> Result<Vec<Pass>, Shut> {
    let open: Vec<Arc<Gate>> = gates().values().filter_map(Weak::upgrade).collect();
    open.iter().map(Gate::pass).collect()
}

/// Lets the flights begin that wait at any gate. The thread holds no pass.
pub(super) fn admit_flights() {
    let open: Vec<Arc<Gate>> = gates().values().filter_map(Weak::upgrade).collect();
    open.iter().for_each(|gate| gate.admit());
}

impl Gate {
    /// Returns the gate of a device.
    pub(super) fn of(device: CUdevice) -> Arc<Self> {
        let mut gates = gates();
        if let Some(gate) = gates.get(&device).and_then(Weak::upgrade)
            && !gate.is_over()
        {
            return gate;
        }
        let gate = Arc::new(Self::default());
        gates.insert(device, Arc::downgrade(&gate));
        gate
    }

    /// Waits until no copy to another device is in flight, and keeps others from beginning.
    pub(super) fn pass(self: &Arc<Self>) -> Result<Pass, Shut> {
        self.pass_within(PATIENCE)
    }

    fn pass_within(self: &Arc<Self>, patience: Duration) -> Result<Pass, Shut> {
        let mut state = self.lock();
        state.waiting += 1;
        let (mut state, shut) = self.wait_while(state, patience, |state| state.flights > 0);
        state.waiting -= 1;
        if let Some(shut) = shut {
            // A flight may have waited for this call.
            self.changed.notify_all();
            return Err(shut);
        }
        state.calls += 1;
        Ok(Pass(self.clone()))
    }

    /// Waits until no call is in the driver that may wait for the device, nor waits at the gate,
    /// and keeps others from beginning.
    pub(super) fn fly(self: &Arc<Self>) -> Result<Flight, Shut> {
        self.fly_within(PATIENCE)
    }

    fn fly_within(self: &Arc<Self>, patience: Duration) -> Result<Flight, Shut> {
        let mut state = self.lock();
        state.grounded += 1;
        let (mut state, shut) = self.wait_while(state, patience, State::is_busy);
        state.grounded -= 1;
        // A thread may wait for this one to begin.
        self.changed.notify_all();
        match shut {
            Some(shut) => Err(shut),
            None => {
                state.flights += 1;
                Ok(Flight(self.clone()))
            }
        }
    }

    /// Waits until the flights that wait have begun, unless other calls keep them from it.
    fn admit(&self) {
        drop(self.wait_while(self.lock(), PATIENCE, |state| state.grounded > 0 && !state.is_busy()));
    }

    /// Returns why the gate does not open, if it has not opened within the patience.
    fn wait_while<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        patience: Duration,
        is_closed: impl Fn(&State) -> bool,
    ) -> (MutexGuard<'a, State>, Option<Shut>) {
        let since = Instant::now();
        loop {
            if let Some(reason) = self.stuck.get() {
                return (state, Some(Shut::Stuck(reason.clone())));
            }
            if !is_closed(&state) {
                return (state, None);
            }
            let Some(left) = patience.checked_sub(since.elapsed()) else { return (state, Some(Shut::Late)) };
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while this lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the device as stuck. The first reason is kept.
    pub(super) fn jam(&self, reason: Box<str>) {
        let _ = self.stuck.set(reason);
        // Under the lock: a waiter that did not see the reason sleeps by then.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Notes commands whose end is not known, by the mark behind them.
    pub(super) fn leave(&self, mark: Option<Arc<dyn Unended>>) {
        self.unended.lock().unwrap_or_else(PoisonError::into_inner).push(mark);
    }

    /// Returns true if the device was stuck, and all that was left on it has ended.
    fn is_over(&self) -> bool {
        let unended = self.unended.lock().unwrap_or_else(PoisonError::into_inner);
        let has_ended = |mark: &Option<Arc<dyn Unended>>| mark.as_ref().is_some_and(|mark| mark.has_ended());
        self.stuck().is_some() && !unended.is_empty() && unended.iter().all(has_ended)
    }

    /// Returns why the device is stuck, if it is.
    pub(super) fn stuck(&self) -> Option<&str> {
        self.stuck.get().map(AsRef::as_ref)
    }

    /// Returns whether the context was given access to a device's memory.
    pub(super) fn is_friend(&self, peer: CUdevice) -> bool {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner).contains(&peer)
    }

    /// Notes that the context was given access to a device's memory.
    pub(super) fn befriend(&self, peer: CUdevice) {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner).insert(peer);
    }
}

impl Flight {
    /// Returns true if a call waits for the end of the flight.
    pub(super) fn is_awaited(&self) -> bool {
        self.0.lock().waiting > 0
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.0.lock().calls -= 1;
        self.0.changed.notify_all();
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.lock().flights -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(1);

    #[test]
    fn calls_and_flights_exclude_each_other() {
        let gate = Arc::new(Gate::default());
        let calls = [gate.pass().unwrap(), gate.pass().unwrap()];
        assert_eq!(gate.fly_within(SOON).unwrap_err(), Shut::Late);
        drop(calls);
        let flights = [gate.fly().unwrap(), gate.fly().unwrap()];
        assert_eq!(gate.pass_within(SOON).unwrap_err(), Shut::Late);
        assert!(!flights[0].is_awaited(), "the refused call waits no more");
        drop(flights);
        drop(gate.pass().unwrap());
        assert_eq!(*gate.lock(), State::default());
    }

    #[test]
    fn a_waiting_call_goes_before_later_flights() {
        let gate = Arc::new(Gate::default());
        let flight = gate.fly().unwrap();
        std::thread::scope(|scope| {
            let passing = scope.spawn(|| gate.pass().map(drop));
            while !flight.is_awaited() {
                std::thread::yield_now();
            }
            assert_eq!(gate.fly_within(SOON).unwrap_err(), Shut::Late);
            drop(flight);
            passing.join().unwrap().unwrap();
        });
        drop(gate.fly().unwrap());
    }

    #[test]
    fn flights_begin_between_two_calls_of_a_thread() {
        let gate = Arc::new(Gate::default());
        gate.admit();
        let first = gate.pass().unwrap();
        std::thread::scope(|scope| {
            let flying = scope.spawn(|| gate.fly().map(drop));
            while gate.lock().grounded == 0 {
                std::thread::yield_now();
            }
            // Not while another call keeps it on the ground.
            gate.admit();
            assert_eq!(gate.lock().grounded, 1);
            drop(first);
            gate.admit();
            assert_eq!(gate.lock().grounded, 0);
            drop(gate.pass().unwrap());
            flying.join().unwrap().unwrap();
        });
        assert_eq!(*gate.lock(), State::default());
    }

    #[test]
    fn a_stuck_device_refuses_all_that_wait_and_all_that_come() {
        let gate = Arc::new(Gate::default());
        let flight = gate.fly().unwrap();
        std::thread::scope(|scope| {
            let passing = scope.spawn(|| gate.pass().map(drop));
            while !flight.is_awaited() {
                std::thread::yield_now();
            }
            gate.jam("first".into());
            gate.jam("second".into());
            assert_eq!(passing.join().unwrap(), Err(Shut::Stuck("first".into())));
        });
        drop(flight);
        assert_eq!(gate.fly().unwrap_err(), Shut::Stuck("first".into()));
        assert_eq!(gate.stuck(), Some("first"));
    }

    #[test]
    fn all_handles_of_a_device_have_one_gate() {
        // No device has this number.
        let [one, same, other] = [-7, -7, -8].map(Gate::of);
        assert!(Arc::ptr_eq(&one, &same) && !Arc::ptr_eq(&one, &other));
        one.befriend(3);
        assert!(same.is_friend(3) && !other.is_friend(3));
        let flight = other.fly().unwrap();
        assert_eq!(other.pass_within(SOON).unwrap_err(), Shut::Late);
        drop(flight);
        drop(pass_all().unwrap());
        drop((one, same));
        assert!(!Gate::of(-7).is_friend(3), "forgotten with the last handle");
    }
}
