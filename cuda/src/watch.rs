//! One thread per device that detects completed events and notifies their waiters.
//!
//! ```text
//! watch(event, done) ──channel──> pending: [(event, done)]
//!                                  │  on each message, and from time to time while any is pending:
//!                                  ├─ complete        done(Ok)
//!                                  ├─ not yet         stays
//!                                  └─ query failed    the device is lost: done(Err) for all events
//! ```
//!
//! On some streams no event can be recorded for now: the stream is being captured, or the driver
//! refuses. The recording is tried again with every sweep. A capture may take any time. Refusals
//! may be permanent (the stream was destroyed), so that after [`PATIENCE`] the stream itself is
//! asked:
//!
//! ```text
//! refused < 200 ms ──> try again
//! refused longer ──cuStreamQuery──> idle       its work is complete: done(Ok)
//!                                   no answer, or busy
//!                                              try again, for at most 5 s; then the device is lost
//! ```
//!
//! A nudge is a host function behind the event. It is a hint: it may come late, or never because
//! the context has failed. The thread therefore also looks by itself, after half of the time for
//! which the youngest event has been pending, at least [`LOOK_MIN`] and at most [`LOOK_MAX`]: a
//! lost nudge makes a notification late by half at most. A stream executes its work in order, so
//! that events of different streams must not share one stream of nudges: the nudge of a wave would
//! wait for those of the batches before it. Streams may share a hardware queue, which has the same
//! effect.
//!
//! | event on | nudge on |
//! |---|---|
//! | an engine's stream | one of [`NUDGES`] streams: while few engine streams have pending events, one each |
//! | the stream of moves | one stream for all storages of the device |
//! | others | none: only buffers wait for these events |
//!
//! A host function on the stream of moves itself would save a call per wave (seven instead of
//! eight). But the next wave then begins after that function has returned, and CUDA may run the
//! host functions of all streams on one thread: one of the engine that takes long would hold up
//! compaction.
//!
//! Callbacks run on this thread, and delay each other: a pool that wipes freed frames only begins
//! the wipes here. A callback may drop the last reference to a storage, which waits for the device,
//! or to the device. No thread therefore joins this one: it ends by itself once no sender is left
//! and no event is pending.

use std::cell::Cell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SendError, Sender};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUstream};

use kvpool::StorageError;
use kvpool::storage::{CopyDone, DeviceStream};

use super::context::Context;
use super::engines::{Engines, NUDGES};
use super::error::CudaError;
use super::event::Event;
use super::stream::{Stream, StreamPriority, is_capturing, is_idle};

/// Minimum time between two looks without a nudge.
const LOOK_MIN: Duration = Duration::from_micros(50);

/// Maximum delay of a notification whose nudge was lost.
const LOOK_MAX: Duration = Duration::from_millis(2);

/// Time for which the driver may refuse an event before the stream is asked instead.
const PATIENCE: Duration = Duration::from_millis(200);

/// Time for which the driver may refuse an event on a stream that stays busy.
const PATIENCE_BUSY: Duration = Duration::from_secs(5);

/// Watches events; see the [module](self).
#[derive(Debug)]
pub(super) struct Watch {
    context: Arc<Context>,
    sender: Arc<Sender<Message>>,
    nudges: [Stream; NUDGES],
    /// Nudges of waves.
    waves: Stream,
    /// The engine streams with pending events.
    engines: Arc<Engines>,
}

/// An event and the callback for its end, or `None`: a nudge.
type Message = Option<(Mark, CopyDone)>;

/// An event to wait for.
struct Mark {
    /// `None` while the stream is being captured, or the driver refuses; the event is recorded as
    /// soon as possible.
    event: Option<Arc<Event>>,
    /// The engine's stream; `None` for the backend's own streams, which no one captures.
    stream: Option<DeviceStream>,
    /// Time since which the driver has refused to record the event, other than for a capture.
    refused_since: Option<Instant>,
    begun: Instant,
}

impl Watch {
    /// Starts the thread.
    pub(super) fn start(context: Arc<Context>) -> Result<Self, CudaError> {
        let nudge = || Stream::new(context.clone(), StreamPriority::Highest).map_err(CudaError::of);
        let (nudges, waves) = ([nudge()?, nudge()?, nudge()?, nudge()?], nudge()?);
        let (sender, receiver) = mpsc::channel();
        let watched = context.clone();
        let thread = thread::Builder::new().name(format!("kvpool-{}", context.id));
        (thread.spawn(move || run(&watched, &receiver)))
            .map_err(|error| CudaError::NoThread { reason: error.kind() })?;
        Ok(Self { context, sender: Arc::new(sender), nudges, waves, engines: Arc::default() })
    }

    /// Calls `done` on the watcher's thread once the event, recorded on an engine's stream, is
    /// complete, or can never be.
    pub(super) fn watch(&self, event: Arc<Event>, stream: DeviceStream, done: CopyDone) {
        let (place, done) = self.engines.counted(&stream, done);
        // Before the event is given away. If this fails, the thread looks by itself.
        let _ = self.nudge_behind(&event, self.nudges[place].raw());
        self.send(Mark::new(Some(event), Some(stream)), done);
    }

    /// Does the same for an event on a stream of this backend. Without a
    /// [nudge](Self::nudge_of_wave), somewhat later.
    pub(super) fn watch_own(&self, event: Arc<Event>, done: CopyDone) {
        self.send(Mark::new(Some(event), None), done);
    }

    /// Does the same for a stream on which no event can be recorded now.
    ///
    /// The stream is being captured, or the driver refuses.
    pub(super) fn watch_captured(&self, stream: DeviceStream, done: CopyDone) {
        let (_, done) = self.engines.counted(&stream, done);
        self.send(Mark::new(None, Some(stream)), done);
    }

    /// Returns true if batches on engine streams have been finished by the host, and not by the
    /// device.
    pub(super) fn is_engine_busy(&self) -> bool {
        self.engines.is_busy()
    }

    fn send(&self, mark: Mark, done: CopyDone) {
        // The thread runs while there is a sender. If it has ended, completion cannot be detected
        // any more: the device is then marked as stuck, and its memory is neither used nor given
        // back any more, so that work in progress does no harm.
        if let Err(SendError(Some((mark, done)))) = self.sender.send(Some((mark, done))) {
            let lost = self.context.lose_stuck("the thread that watches it has ended".into());
            drop(mark);
            done(Err(lost));
        }
    }

    /// Enqueues a nudge behind the event of a wave.
    pub(super) fn nudge_of_wave(&self, event: &Event) {
        // A nudge is a hint.
        let _ = self.nudge_behind(event, self.waves.raw());
    }

    fn nudge_behind(&self, event: &Event, nudges: CUstream) -> Result<(), StorageError> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream lives, and is of this context.
        unsafe { event.hold_back(&self.context, nudges)? };
        // Weak: a nudge that is never called, in a failed context, must not keep the thread
        // running.
        let told = Box::into_raw(Box::new(Arc::downgrade(&self.sender)));
        // SAFETY: the stream lives; the function takes the box back, and calls no function of the
        // driver.
        let launched = unsafe { sys::cuLaunchHostFunc(nudges, Some(nudge), told.cast()) };
        let launched = self.context.check(launched, "calling back");
        if launched.is_err() {
            // SAFETY: the driver did not take it.
            drop(unsafe { Box::from_raw(told) });
        }
        launched
    }
}

/// Host function, called by the driver.
///
/// # Safety
/// `told` comes from [`Watch::nudge_behind`], and is passed once.
unsafe extern "C" fn nudge(told: *mut c_void) {
    // SAFETY: the caller's promise.
    let sender = unsafe { Box::from_raw(told.cast::<Weak<Sender<Message>>>()) };
    if let Some(sender) = sender.upgrade() {
        let _ = sender.send(None);
    }
}

thread_local! {
    static IS_WATCHER: Cell<bool> = const { Cell::new(false) };
}

/// Returns true on the threads of watchers, which must not wait for a device: the reports of all
/// events would wait with them.
pub(super) fn is_watcher() -> bool {
    IS_WATCHER.get()
}

fn run(context: &Arc<Context>, receiver: &Receiver<Message>) {
    IS_WATCHER.set(true);
    let mut pending = Vec::new();
    loop {
        let message = if pending.is_empty() {
            receiver.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            let youngest = pending.iter().map(|(mark, _): &(Mark, CopyDone)| mark.begun.elapsed()).min();
            receiver.recv_timeout(next_look(youngest.unwrap_or_default()))
        };
        match message {
            Ok(message) => pending.extend(message),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if pending.is_empty() => return,
            Err(RecvTimeoutError::Disconnected) => thread::sleep(LOOK_MAX),
        }
        // Handle a burst of messages in one sweep.
        pending.extend(receiver.try_iter().flatten());
        sweep(context, &mut pending);
    }
}

/// Returns the time until the pending events are looked at without a nudge, by the time for which
/// the youngest has been pending.
fn next_look(youngest: Duration) -> Duration {
    (youngest / 2).clamp(LOOK_MIN, LOOK_MAX)
}

/// Calls user code. Neither a panic of it nor one of the payload's destructor goes any further.
fn caught(call: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(call)) {
        std::mem::forget(catch_unwind(AssertUnwindSafe(|| drop(payload))));
    }
}

/// Notifies the waiters of all completed events, in order of arrival.
fn sweep(context: &Arc<Context>, pending: &mut Vec<(Mark, CopyDone)>) {
    let mut over = Vec::new();
    // Around the queries, not around the callbacks.
    let entered = context.enter_even_if_lost();
    for (mut mark, done) in std::mem::take(pending) {
        match mark.is_reached(context) {
            Ok(false) => pending.push((mark, done)),
            Ok(true) => over.push((mark, done, Ok(()))),
            Err(error) => over.push((mark, done, Err(error))),
        }
    }
    // A failure found by one query also applies to events queried before it.
    if let Err(lost) = context.good() {
        over.extend(pending.drain(..).map(|(mark, done)| (mark, done, Err(lost.clone()))));
    }
    drop(entered);
    for (mark, done, outcome) in over {
        // A panic in a callback, or in the owner of a stream, must not affect the other callbacks.
        caught(|| done(outcome));
        caught(|| drop(mark));
    }
}

impl Mark {
    fn new(event: Option<Arc<Event>>, stream: Option<DeviceStream>) -> Self {
        Self { event, stream, refused_since: None, begun: Instant::now() }
    }

    fn is_reached(&mut self, context: &Arc<Context>) -> Result<bool, StorageError> {
        if self.event.is_none() {
            let Some(stream) = &self.stream else { return Ok(false) };
            let raw: CUstream = stream.as_raw().cast();
            // SAFETY: by the contract of `DeviceStream`, a stream of this device while it lives.
            let marked = unsafe {
                match is_capturing(context, raw) {
                    Ok(true) => {
                        self.refused_since = None;
                        return Ok(false);
                    }
                    Ok(false) => Event::record(context, raw),
                    Err(error) => Err(error),
                }
            };
            match marked {
                Ok(event) => (self.event, self.refused_since) = (Some(Arc::new(event)), None),
                Err(error) if error.is_lost() => return Err(error),
                Err(error) => {
                    let refused = self.refused_since.get_or_insert_with(Instant::now).elapsed();
                    // SAFETY: as above.
                    return unsafe { ask_stream(context, raw, refused, &error) };
                }
            }
        }
        let Some(event) = &self.event else { return Ok(false) };
        match event.is_complete() {
            // A capture began between the check and the recording; the event is part of the graph.
            Err(error) if !error.is_lost() && self.stream.is_some() => {
                self.event = None;
                Ok(false)
            }
            answer => answer,
        }
    }
}

/// Asks a stream on which the driver refuses to record an event, because of `error`, for its state.
///
/// # Safety
/// The stream lives, and is one of this context.
unsafe fn ask_stream(
    context: &Context,
    stream: CUstream,
    refused: Duration,
    error: &StorageError,
) -> Result<bool, StorageError> {
    if refused < PATIENCE {
        return Ok(false);
    }
    // SAFETY: the caller's promise.
    match unsafe { is_idle(context, stream) } {
        Err(error) if error.is_lost() => Err(error),
        Ok(false) | Err(_) if refused >= PATIENCE_BUSY => {
            Err(context.lose_stuck(format!("the end of a stream's work cannot be detected: {error}").into()))
        }
        answer => Ok(answer.unwrap_or(false)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_nudge_makes_a_notification_late_by_half() {
        let micros = Duration::from_micros;
        let looks = [0, 100, 400, 3_000, 1_000_000].map(|youngest| next_look(micros(youngest)));
        assert_eq!(looks, [50, 50, 200, 1_500, 2_000].map(micros));
    }
}
