//! A subscriber of events: its stream.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;

use super::event::{ANY_ERA, KvEvent, Numbered, Told};
use super::ring::{Popped, Reader};
use super::slot::{Shared, Slot};
use crate::sync::{Arc, Ordering::*};

/// A subscriber's end: a stream of events.
///
/// Each subscriber receives all events since its subscription, and lags and loses independently of
/// the others. The stream ends with the pool: when the last `Pool`, `PoolHandle`, `Sequence`,
/// `SequenceView` and `Batch` is dropped. Leases, a running `Defragmenter`, and threads that have
/// used the pool do not keep it open; a clone of the pool's `Compactor` does, and so does a
/// `Defragmenter` whose runtime is not driven. Dropping this value ends the subscription.
pub struct KvEvents {
    shared: Arc<Shared>,
    /// The subscription's slot, in a list that `shared` owns.
    slot: *const Slot,
    /// Position at which the subscription began.
    begin: Reader,
    reader: Reader,
    /// All eras before this one have been announced as over, or were over when the subscriber last
    /// listed the blocks.
    told: u64,
    /// Delivered events that are not in the ring yet, minus skipped ones; wraps.
    skew: u64,
    /// Event to deliver after an early `Cleared`.
    next: Option<Numbered>,
}

// SAFETY: the pointer is a reference into `shared`, whose slots are `Sync`.
unsafe impl Send for KvEvents {}
// SAFETY: as above.
unsafe impl Sync for KvEvents {}

impl KvEvents {
    /// Begins to follow a slot, after its subscription became visible to publishers.
    pub(super) fn begin(shared: Arc<Shared>, slot: *const Slot) -> Self {
        // SAFETY: slots live as long as `shared`.
        let (ring, head) = unsafe { (&(*slot).ring, (*slot).head.load(Relaxed)) };
        // The losses first: a loss after this is reported. A subscriber that lists the blocks
        // afterwards sees changes whose events were lost before, or pushed before the tail: both
        // loads are Acquire.
        let lost = ring.lost();
        let begin = Reader { head: ring.tail(), reported: lost };
        // Acquire: pairs with the Release of `clear`.
        let told = shared.era.load(Acquire);
        Self { shared, slot, begin, reader: Reader { head, reported: lost }, told, skew: 0, next: None }
    }

    fn slot(&self) -> &Slot {
        // SAFETY: slots live as long as `shared`.
        unsafe { &*self.slot }
    }

    /// Returns the number of published events that were not received yet, lost ones not counted.
    ///
    /// Events are lost when it exceeds the [capacity](super::EventQueue::capacity).
    pub fn lag(&self) -> u64 {
        let waiting = self.slot().ring.tail().saturating_sub(self.reader.head.max(self.begin.head));
        waiting + u64::from(self.next.is_some())
    }

    /// Returns the next event, or `None` when the pool is gone and every event was received. Cancel
    /// safe.
    pub async fn recv(&mut self) -> Option<Numbered> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    /// Returns the next event, if there is one.
    pub fn try_recv(&mut self) -> Option<Numbered> {
        if let Some(next) = self.next.take() {
            return Some(next);
        }
        loop {
            let before = self.reader;
            // SAFETY: there is one `KvEvents` of a slot at a time, by `taken`, and it began where
            // the previous one left `head`. Slots live as long as `shared`.
            let told = match unsafe { (*self.slot).ring.pop(&mut self.reader) }? {
                Popped::Value(told) => told,
                Popped::Lost(lost) => Told::new(ANY_ERA, KvEvent::Resync { lost }),
            };
            if before.head < self.begin.head {
                // Test: `what_is_left_of_the_last_subscription_is_skipped`. Not counted either.
                self.begin.reported = self.reader.reported;
                continue;
            }
            let place = before.head - self.begin.head + before.reported - self.begin.reported;
            let number = place.wrapping_add(self.skew);
            if let Some(delivery) = self.heed(told.era, told.event()) {
                let own = Numbered { number, event: told.into_event() };
                return Some(match delivery {
                    Delivery::Itself => own,
                    Delivery::Cleared => {
                        self.skew = self.skew.wrapping_add(1);
                        self.next = Some(Numbered { number: number + 1, ..own });
                        Numbered { number, event: KvEvent::Cleared }
                    }
                });
            }
            self.skew = self.skew.wrapping_sub(1);
        }
    }

    /// Decides what to deliver for an event of this era; `None`: nothing, since a clear covers it.
    fn heed(&mut self, era: u64, event: &KvEvent) -> Option<Delivery> {
        if let KvEvent::Resync { .. } = event {
            // A `Cleared` may be among the lost. A subscriber that lists the blocks now sees this
            // era, or a later one. Acquire: pairs with the Release of `clear`.
            self.told = self.told.max(self.shared.era.load(Acquire));
        }
        if era == ANY_ERA {
            return Some(Delivery::Itself);
        }
        if era < self.told {
            return None;
        }
        if let KvEvent::Cleared = event {
            self.told = era + 1;
            return Some(Delivery::Itself);
        }
        // Reached by the models that clear concurrently with a registration.
        let is_early = era > self.told;
        self.told = self.told.max(era);
        Some(if is_early { Delivery::Cleared } else { Delivery::Itself })
    }

    /// Polling form of [`recv`](Self::recv).
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<Numbered>> {
        if let Some(event) = self.try_recv() {
            return Poll::Ready(Some(event));
        }
        self.slot().waker.register(context.waker());
        // In this order: everything was published before the close.
        let is_closed = self.shared.closed.load(Acquire);
        match self.try_recv() {
            None if !is_closed => Poll::Pending,
            event => Poll::Ready(event),
        }
    }
}

/// The event to deliver next.
enum Delivery {
    Itself,
    Cleared,
}

impl Stream for KvEvents {
    type Item = Numbered;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Numbered>> {
        self.get_mut().poll_recv(context)
    }
}

impl Drop for KvEvents {
    fn drop(&mut self) {
        self.shared.unfollow(self.slot());
        // The next subscriber skips what concurrent publishers push after this.
        while self.try_recv().is_some() {}
        drop(self.slot().waker.take());
        self.slot().head.store(self.reader.head, Relaxed);
        // Release: pairs with the Acquire of `take_slot`.
        self.slot().taken.store(false, Release);
    }
}

impl fmt::Debug for KvEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvEvents")
            .field("received", &self.reader.head.saturating_sub(self.begin.head))
            .field("lost", &(self.reader.reported - self.begin.reported))
            .finish()
    }
}
