//! A subscriber of events: its stream.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;

use super::event::{ANY_ERA, KvEvent, Numbered, Told};
use super::ring::Ring;
use super::slot::{Shared, Slot};
use crate::sync::{Arc, Ordering::*};

/// A subscriber's stream of events. Dropping it ends the subscription.
///
/// Each subscriber receives all events since its subscription, and lags and loses independently.
/// The stream ends with the last `Pool`, `Sequence`, `SequenceView` and `Batch`, and the end of any
/// migration or manual compaction. Leases, block handles, a running `Defragmenter`, and threads
/// that have used the pool do not keep it open; a `Defragmenter` whose runtime is not driven does.
pub struct KvEvents {
    shared: Arc<Shared>,
    /// The subscription's slot, in a list that `shared` owns.
    slot: *const Slot,
    subscription: u64,
    head: u64,
    number: u64,
    /// All earlier eras were announced as over, or were over when the blocks were last listed.
    told: u64,
    /// Event to deliver after an early `Cleared`.
    next: Option<Numbered>,
}

// SAFETY: the pointer is a reference into `shared`, whose slots are `Sync`.
unsafe impl Send for KvEvents {}
// SAFETY: as above.
unsafe impl Sync for KvEvents {}

impl KvEvents {
    pub(super) fn begin(shared: Arc<Shared>, slot: *const Slot, subscription: u64, head: u64) -> Self {
        // Acquire: pairs with the Release of `clear`.
        let told = shared.era.load(Acquire);
        Self { shared, slot, subscription, head, number: 0, told, next: None }
    }

    fn slot(&self) -> &Slot {
        // SAFETY: slots live as long as `shared`.
        unsafe { &*self.slot }
    }

    /// Returns the number of published events that were not received, at most the
    /// [capacity](super::EventQueue::capacity), including events for other subscribers.
    pub fn lag(&self) -> u64 {
        let tail = self.shared.ring().map_or(self.head, Ring::tail);
        (tail - self.head).min(self.shared.capacity as u64) + u64::from(self.next.is_some())
    }

    /// Returns the next event, or `None` once the pool is gone and all were received. Cancel safe.
    pub async fn recv(&mut self) -> Option<Numbered> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    /// Returns the next event, if there is one.
    pub fn try_recv(&mut self) -> Option<Numbered> {
        if let Some(next) = self.next.take() {
            return Some(next);
        }
        loop {
            let Self { shared, head, told, .. } = self;
            match shared.ring()?.read(*head, |entry| heed(told, self.subscription, entry))? {
                Ok(heard) => {
                    self.head += 1;
                    let Some((is_early, event)) = heard else { continue };
                    let cleared = is_early.then(|| self.deliver(KvEvent::Cleared, 1));
                    let own = Some(self.deliver(event, 1));
                    if is_early {
                        self.next = own;
                        return cleared;
                    }
                    return own;
                }
                Err(oldest) => {
                    let lost = oldest - std::mem::replace(head, oldest);
                    shared.lost.fetch_add(lost, Relaxed);
                    // Acquire: pairs with the Release of `clear`. A list shows this era or later.
                    *told = shared.era.load(Acquire).max(*told);
                    return Some(self.deliver(KvEvent::Resync { lost }, lost));
                }
            }
        }
    }

    /// Numbers an event that stands for `count` published ones.
    fn deliver(&mut self, event: KvEvent, count: u64) -> Numbered {
        let number = self.number;
        self.number += count;
        Numbered { number, event }
    }

    /// Polling form of [`recv`](Self::recv).
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<Numbered>> {
        if let Some(event) = self.try_recv() {
            return Poll::Ready(Some(event));
        }
        self.slot().waker.register(context.waker());
        // AcqRel: pairs with `Shared::wake`. A publisher that counts this sleep sees the waker;
        // events of earlier publishers are seen below.
        self.shared.sleeps.fetch_add(1, AcqRel);
        // Before the read: everything was published before the close.
        let is_closed = self.shared.closed.load(Acquire);
        match self.try_recv() {
            None if !is_closed => Poll::Pending,
            event => Poll::Ready(event),
        }
    }
}

/// Copies an event, with whether a `Cleared` precedes it; `None` if for others, or cleared.
fn heed(told: &mut u64, subscription: u64, entry: &Told) -> Option<(bool, KvEvent)> {
    let Told { audience, era, event } = entry;
    if !audience.contains(&subscription) || *era < *told {
        return None;
    }
    let is_clear = *event == KvEvent::Cleared;
    // Reached by the models that clear concurrently with a registration.
    let is_early = *era != ANY_ERA && *era > *told && !is_clear;
    if *era != ANY_ERA {
        *told = *era + u64::from(is_clear);
    }
    Some((is_early, event.clone()))
}

impl Stream for KvEvents {
    type Item = Numbered;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Numbered>> {
        self.get_mut().poll_recv(context)
    }
}

impl Drop for KvEvents {
    fn drop(&mut self) {
        drop(self.slot().waker.take());
        self.shared.leave(self.slot());
    }
}

impl fmt::Debug for KvEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvEvents").field("number", &self.number).field("lag", &self.lag()).finish()
    }
}
