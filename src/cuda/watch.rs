//! The thread that sees marks reached, one a device, and tells who waits for them.
//!
//! ```text
//! watch(event, done) ──channel──> pending: [(event, done)]
//!                                  │  on every message, every nudge, and every 2 ms while anything is pending:
//!                                  ├─ complete        done(Ok)
//!                                  ├─ not yet         stays
//!                                  └─ query failed    the device is lost: done(Err) for this one and all others
//! ```
//!
//! A nudge is a host function behind the event, on a stream of its own, so that it blocks nothing but other nudges. It is a
//! hint: one that comes late, or never, since the context has failed, costs a tick.
//!
//! A callback runs here, and may do what it likes, for instance drop the last reference to the device. So nobody ever
//! joins this thread: it ends by itself once nobody can watch anything any more and nothing is pending.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SendError, Sender};
use std::sync::{Arc, Weak};
use std::time::Duration;

use cudarc::driver::sys::{self, CUstream};

use crate::error::StorageError;
use crate::storage::{CopyDone, DeviceStream};
use crate::sync::{sleep, spawn_detached};

use super::context::Context;
use super::error::CudaError;
use super::event::Event;
use super::stream::{Stream, StreamPriority, is_capturing};

/// How late it is noticed at most that a mark was reached whose nudge was lost.
const TICK: Duration = Duration::from_millis(2);

/// Watches marks; see the [module](self).
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

/// What is waited for.
struct Mark {
    /// `None` while the stream is being captured, or the driver refuses: it is marked as soon as it can be.
    event: Option<Event>,
    /// The engine's, unless it is one of ours, which nobody captures.
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

    /// Calls `done` on the watcher's thread once the mark is reached, or can never be.
    pub(super) fn watch(&self, event: Event, stream: Option<DeviceStream>, done: CopyDone) {
        // Before the event is given away. If that fails there is the tick; if the context failed, the thread will see.
        let _ = self.nudge_behind(&event);
        self.send(Message::Watch(Mark { event: Some(event), stream }, done));
    }

    /// The same for a stream that cannot be marked now: that is being captured, or that the driver refuses to mark.
    pub(super) fn watch_captured(&self, stream: DeviceStream, done: CopyDone) {
        self.send(Message::Watch(Mark { event: None, stream: Some(stream) }, done));
    }

    fn send(&self, message: Message) {
        // The thread goes on for as long as there is a sender. Were it gone, nobody would ever know again what is over: then
        // nothing of this device is used any more, and what is under way there is in nobody's way.
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
        // Weak: one that is never called, in a context that has failed, must not keep the thread waiting for more.
        let told = Box::into_raw(Box::new(Arc::downgrade(&self.sender)));
        // SAFETY: the stream lives; the function takes the box back, and calls nothing of the driver.
        let launched = unsafe { sys::cuLaunchHostFunc(self.nudges.raw(), Some(nudge), told.cast()) };
        let launched = self.context.check(launched, "calling back");
        if launched.is_err() {
            // SAFETY: the driver did not take it.
            drop(unsafe { Box::from_raw(told) });
        }
        launched
    }
}

/// Called by the driver.
///
/// # Safety
/// `told` is what [`Watch::nudge_behind`] gave away, and is given back once.
unsafe extern "C" fn nudge(told: *mut c_void) {
    // SAFETY: as the caller says.
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
        // A burst is one sweep.
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

/// Tells everybody whose mark was reached, in the order in which they came.
fn sweep(context: &Arc<Context>, pending: &mut Vec<(Mark, CopyDone)>) {
    let mut over = Vec::new();
    for (mut mark, done) in std::mem::take(pending) {
        match mark.is_reached(context) {
            Ok(false) => pending.push((mark, done)),
            Ok(true) => over.push((mark, done, Ok(()))),
            Err(error) => over.push((mark, done, Err(error))),
        }
    }
    // What one query has found out holds for those that were asked before it.
    if let Err(lost) = context.good() {
        over.extend(pending.drain(..).map(|(mark, done)| (mark, done, Err(lost.clone()))));
    }
    for (mark, done, outcome) in over {
        // A callback that panics has said so; the others have nothing to do with it. Nor with the owner of a stream.
        guarded(|| drop(mark));
        guarded(|| done(outcome));
    }
}

/// Runs what is others' code: it may panic, and this thread goes on.
fn guarded(call: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(call)) {
        // What it panicked with may do so again when it is dropped.
        std::mem::forget(panic);
    }
}

impl Mark {
    fn is_reached(&mut self, context: &Arc<Context>) -> Result<bool, StorageError> {
        if self.event.is_none() {
            let Some(stream) = &self.stream else { return Ok(false) };
            let raw: CUstream = stream.as_raw().cast();
            // SAFETY: whoever made the `DeviceStream` says that it is one of this device while it lives.
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
                // There is no event to be had: the next tick tries again.
                Err(_) => return Ok(false),
            }
        }
        let Some(event) = &self.event else { return Ok(false) };
        match event.is_complete() {
            // A capture was begun between the question whether there is one and the mark, which is in the graph now.
            Err(error) if !error.is_lost() && self.stream.is_some() => {
                self.event = None;
                Ok(false)
            }
            answer => answer,
        }
    }
}
