//! One thread per device that detects completed events and notifies their waiters.
//!
//! ```text
//! watch(event, done) ──channel──> pending: [(event, done)]
//!                                  │  on each message, and every 2 ms while any is pending:
//!                                  ├─ complete        done(Ok)
//!                                  ├─ not yet         stays
//!                                  └─ query failed    the device is lost: done(Err) for all events
//! ```
//!
//! A nudge is a host function behind the event, on a separate stream, so that it delays only other
//! nudges. It is a hint: a nudge that comes late, or never because the context has failed, costs
//! one tick.
//!
//! Callbacks run on this thread, and may do anything, such as dropping the last reference to the
//! device. No thread therefore joins this one: it ends by itself once no sender is left and no
//! event is pending.

use std::ffi::c_void;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SendError, Sender};
use std::sync::{Arc, Weak};
use std::time::Duration;

use cudarc::driver::sys::{self, CUstream};

use crate::error::StorageError;
use crate::storage::{CopyDone, DeviceStream};
use crate::sync::{caught, sleep, spawn_detached};

use super::context::Context;
use super::error::CudaError;
use super::event::Event;
use super::stream::{Stream, StreamPriority, is_capturing};

/// Maximum delay of a notification whose nudge was lost.
const TICK: Duration = Duration::from_millis(2);

/// Watches events; see the [module](self).
#[derive(Debug)]
pub(super) struct Watch {
    context: Arc<Context>,
    sender: Arc<Sender<Message>>,
    nudges: Stream,
}

enum Message {
    Watch(Mark, CopyDone),
    Nudge,
}

/// An event to wait for.
struct Mark {
    /// `None` while the stream is being captured, or the driver refuses; the event is recorded as
    /// soon as possible.
    event: Option<Event>,
    /// The engine's stream; `None` for the backend's own streams, which no one captures.
    stream: Option<DeviceStream>,
}

impl Watch {
    /// Starts the thread.
    pub(super) fn start(context: Arc<Context>) -> Result<Self, CudaError> {
        let nudges = Stream::new(context.clone(), StreamPriority::Highest).map_err(CudaError::of)?;
        let (sender, receiver) = mpsc::channel();
        let watched = context.clone();
        spawn_detached(format!("kvpool-{}", context.id()), move || run(&watched, &receiver))
            .map_err(|error| CudaError::NoThread { reason: error.kind() })?;
        Ok(Self { context, sender: Arc::new(sender), nudges })
    }

    /// Calls `done` on the watcher's thread once the event is complete, or can never be.
    pub(super) fn watch(&self, event: Event, stream: Option<DeviceStream>, done: CopyDone) {
        // Before the event is given away. If this fails, the tick remains; if the context has
        // failed, the thread will notice.
        let _ = self.nudge_behind(&event);
        self.send(Message::Watch(Mark { event: Some(event), stream }, done));
    }

    /// Does the same for a stream on which no event can be recorded now.
    ///
    /// The stream is being captured, or the driver refuses.
    pub(super) fn watch_captured(&self, stream: DeviceStream, done: CopyDone) {
        self.send(Message::Watch(Mark { event: None, stream: Some(stream) }, done));
    }

    fn send(&self, message: Message) {
        // The thread runs while there is a sender. If it has ended, completion cannot be detected
        // any more: the device is then marked as lost, and its memory is not used any more, so that
        // work in progress does no harm.
        if let Err(SendError(Message::Watch(mark, done))) = self.sender.send(message) {
            let lost = self.context.lose("the thread that watches it has ended".into());
            drop(mark);
            done(Err(lost));
        }
    }

    fn nudge_behind(&self, event: &Event) -> Result<(), StorageError> {
        // SAFETY: the stream lives, and is of this context.
        unsafe { event.hold_back(&self.context, self.nudges.raw())? };
        let _entered = self.context.enter()?;
        // Weak: a nudge that is never called, in a failed context, must not keep the thread
        // running.
        let told = Box::into_raw(Box::new(Arc::downgrade(&self.sender)));
        // SAFETY: the stream lives; the function takes the box back, and calls no function of the
        // driver.
        let launched = unsafe { sys::cuLaunchHostFunc(self.nudges.raw(), Some(nudge), told.cast()) };
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
        let _ = sender.send(Message::Nudge);
    }
}

fn run(context: &Arc<Context>, receiver: &Receiver<Message>) {
    let mut pending = Vec::new();
    loop {
        let message = if pending.is_empty() {
            receiver.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            receiver.recv_timeout(TICK)
        };
        match message {
            Ok(message) => take(message, &mut pending),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) if pending.is_empty() => return,
            Err(RecvTimeoutError::Disconnected) => sleep(TICK),
        }
        // Handle a burst of messages in one sweep.
        while let Ok(message) = receiver.try_recv() {
            take(message, &mut pending);
        }
        sweep(context, &mut pending);
    }
}

fn take(message: Message, pending: &mut Vec<(Mark, CopyDone)>) {
    if let Message::Watch(mark, done) = message {
        pending.push((mark, done));
    }
}

/// Notifies the waiters of all completed events, in order of arrival.
fn sweep(context: &Arc<Context>, pending: &mut Vec<(Mark, CopyDone)>) {
    let mut over = Vec::new();
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
    for (mark, done, outcome) in over {
        // A panic in a callback, or in the owner of a stream, must not affect the other callbacks.
        caught(|| drop(mark));
        caught(|| done(outcome));
    }
}

impl Mark {
    fn is_reached(&mut self, context: &Arc<Context>) -> Result<bool, StorageError> {
        if self.event.is_none() {
            let Some(stream) = &self.stream else { return Ok(false) };
            let raw: CUstream = stream.as_raw().cast();
            // SAFETY: by the contract of `DeviceStream`, a stream of this device while it lives.
            let marked = unsafe {
                match is_capturing(context, raw) {
                    Ok(true) => return Ok(false),
                    Ok(false) => Event::record(context, raw),
                    Err(error) => Err(error),
                }
            };
            match marked {
                Ok(event) => self.event = Some(event),
                Err(error) if error.is_lost() => return Err(error),
                // No event can be recorded now: the next tick tries again.
                Err(_) => return Ok(false),
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
