//! Futures that are polled by hand after they are woken, in an order that the schedule decides.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::task::{Context, Poll, Wake, Waker};

use kvpool::compact::{DefragError, DefragOptions, DefragReport, DefragTotals, ResizeError, ResizeReport};
use kvpool::{AllocError, AllocRequest, Lease};

/// Purpose of a task.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Allocate { request: AllocRequest, has_deadline: bool },
    Defragment(DefragOptions),
    Resize(usize),
    Stop,
}

/// Result of a task.
pub enum Outcome {
    Allocated(Result<Lease<'static>, AllocError>),
    Defragmented(Result<DefragReport, DefragError>),
    Resized(Result<ResizeReport, ResizeError>),
    Stopped(DefragTotals),
}

#[derive(Default)]
struct Bell(AtomicBool);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

/// A future, and whether it was woken.
pub struct Task {
    pub number: u64,
    pub kind: Kind,
    /// Number of its first poll among those of all tasks, once it was polled.
    pub came: Option<u64>,
    bell: Arc<Bell>,
    future: Pin<Box<dyn Future<Output = Outcome>>>,
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "task {}: {:?}, woken: {}", self.number, self.kind, self.is_woken())
    }
}

impl Task {
    pub fn new(number: u64, kind: Kind, future: impl Future<Output = Outcome> + 'static) -> Self {
        let bell = Arc::new(Bell(AtomicBool::new(true)));
        Self { number, kind, came: None, bell, future: Box::pin(future) }
    }

    pub fn is_woken(&self) -> bool {
        self.bell.0.load(Relaxed)
    }

    pub fn poll(&mut self) -> Poll<Outcome> {
        self.bell.0.store(false, Relaxed);
        self.future.as_mut().poll(&mut Context::from_waker(&Waker::from(self.bell.clone())))
    }
}
