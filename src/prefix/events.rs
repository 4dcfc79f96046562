//! Events for request routers: a block was stored or removed, or all blocks were cleared.
//!
//! # Guarantees to a subscriber
//!
//! - Events come in the order of their publication: if one publication ends before another begins,
//!   its event comes first.
//! - The queue is bounded, and publishing never waits. An event that finds no room is dropped and
//!   counted, and the subscriber receives one [`KvEvent::Resync`] in its place or later, never
//!   earlier. It must then list the pool's cached blocks again.
//! - [`Numbered::number`] counts all events published since the subscription, including lost ones.
//! - Every change before the subscription is visible in the pool after it; every other change is an
//!   event. So: subscribe, list the cached blocks, then follow the events. An event may repeat what
//!   the list showed.
//! - After a [`KvEvent::Cleared`] no event concerns a block that was noted before the clear: such a
//!   block is never found, and its removal is not announced.
//! - The stream ends when no block can be stored, found or evicted any more: when the last `Pool`,
//!   `PoolHandle`, `Sequence`, `SequenceView` and `Batch` is dropped, and any migration or manual
//!   compaction in progress has ended. Leases, block handles, a running `Defragmenter`, and threads
//!   that have used the pool do not keep it open; a clone of the pool's `Compactor` does.
//!
//! There is one subscriber at a time; for more, forward its events through a
//! `tokio::sync::broadcast`. Without a subscriber, publishing costs a load, and no event is
//! constructed.
//!
//! # Protocol
//!
//! ```text
//! publish:      (the pool changed);  light_fence;  active?  push to the ring, with the era of the event;  wake
//! clear:        era e := e + 1;  publish Cleared of e
//! subscribe:    taken := 1 (or refuse);  active := 1;  heavy_fence;  begin := losses so far, and the tail;  told := era
//! poll:         pop;  else register the waker, pop again;  else closed?  pop again, end;  else sleep
//! pop:          era < told, or Cleared of such an era?  skip it;  Cleared of era e?  told := e + 1
//!               era > told?  a Cleared is still to come: told := era of the event, deliver a Cleared before it
//!               a loss?  told := era: the subscriber lists the blocks again
//! unsubscribe:  active := 0;  drop the contents;  keep the head;  taken := 0
//! close:        closed := 1;  wake
//! ```
//!
//! By the asymmetric fence, a publisher sees `active`, or the subscriber sees the publisher's
//! change of the pool. By the waker (an `atomic-waker`), the second `pop` sees a publisher's push,
//! or the publisher sees the waker. A loss wakes the subscriber too, so that it never sleeps beside
//! one. Events pushed before a subscription by a late publisher are skipped by their position: the
//! tail that is read at the subscription orders what those publishers did before it. The [`ring`]
//! documents the rest.
//!
//! # Eras
//!
//! The cache notes the *era* in which a block's chain began, and finds the block only in that era.
//! A publisher that runs concurrently with a clear may push an event about the old era behind its
//! `Cleared`, or one about the new era before it. The publisher cannot know, and does not wait; the
//! reader can tell by the era that each event carries. An event about an era that the publisher
//! knows to be over is not pushed. `told` begins with the era that the subscriber sees: by the
//! asymmetric fence, a clear whose new era the subscriber does not yet see does see `active`, and
//! publishes its `Cleared`.
//!
//! Model: `loom-tests/tests/kv_events.rs`.

use std::fmt;
use std::pin::Pin;
use std::sync::OnceLock;
use std::task::{Context, Poll};

use futures_core::Stream;
use smallvec::SmallVec;

use self::ring::{Popped, Reader, Ring};
use super::BlockHash;
use crate::error::PrefixError;
use crate::ids::BlockId;
use crate::sync::{
    Arc, AtomicBool, AtomicU64, AtomicWaker, CachePadded, Ordering::*, heavy_fence, light_fence,
};

mod ring;
#[cfg(all(test, not(kvpool_loom)))]
mod tests;

/// Default capacity of an event queue.
pub const EVENTS: usize = if cfg!(kvpool_loom) { 2 } else { 4096 };

/// A change of the cache, for routers.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum KvEvent {
    /// A full block can now be found by its hash.
    Stored {
        /// The block.
        block: BlockId,
        /// The hash by which it is found.
        hash: BlockHash,
        /// Hash of the block before it. `None` for the first block of a prefix, or if unknown: then
        /// `tokens` is empty too.
        parent: Option<BlockHash>,
        /// Its tokens; empty if unknown, because its sequence was opened before the subscription.
        tokens: SmallVec<[u32; 16]>,
        /// Number of tokens per block.
        block_tokens: u32,
    },
    /// The block can no longer be found by this hash. Other blocks with the same hash may still be.
    Removed {
        /// The block.
        block: BlockId,
        /// The hash by which it was found.
        hash: BlockHash,
    },
    /// No block stored before can be found any more.
    Cleared,
    /// Events were lost because they were received too slowly: list the pool's cached blocks again.
    Resync {
        /// Number of lost events.
        lost: u64,
    },
}

/// An event and its position in the stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Numbered {
    /// Number of events published since the subscription before this one, including lost ones. For
    /// a [`KvEvent::Resync`], the number of the first lost event.
    pub number: u64,
    /// The event.
    pub event: KvEvent,
}

/// An event in the ring.
struct Told {
    /// Era of the block, or the era that a `Cleared` ends; [`ANY_ERA`]: delivered regardless of
    /// clears.
    era: u64,
    event: KvEvent,
}

/// Matches any era.
const ANY_ERA: u64 = u64::MAX;

struct Shared {
    capacity: usize,
    /// Created by the first subscription: pools without subscribers allocate nothing.
    ring: OnceLock<Ring<Told>>,
    /// There is an active subscriber, so events are published. Implies that the ring exists.
    active: AtomicBool,
    /// A subscriber exists, possibly one that is being dropped.
    taken: AtomicBool,
    closed: AtomicBool,
    /// Position of the last subscriber.
    head: AtomicU64,
    waker: AtomicWaker,
    /// The cache's era: the number of clears.
    era: CachePadded<AtomicU64>,
}

impl Shared {
    fn ring(&self) -> &Ring<Told> {
        self.ring.get_or_init(|| Ring::new(self.capacity))
    }
}

/// The pool's end of its events. Dropping it ends the subscriber's stream, if it has not ended
/// before.
pub struct EventQueue(Arc<Shared>);

impl EventQueue {
    /// Creates a queue for `capacity` events, rounded up to a power of two, at least two. Allocates
    /// at the first subscription.
    pub fn new(capacity: usize) -> Self {
        Self(Arc::new(Shared {
            capacity: Ring::<Told>::capacity(capacity),
            ring: OnceLock::new(),
            active: AtomicBool::new(false),
            taken: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            head: AtomicU64::new(0),
            waker: AtomicWaker::new(),
            era: CachePadded::new(AtomicU64::new(0)),
        }))
    }

    /// Returns the current era.
    #[inline]
    pub(super) fn era(&self) -> u64 {
        // Acquire: pairs with the Release of `clear`; a thread in an era sees everything before it.
        self.0.era.load(Acquire)
    }

    /// Begins a new era and publishes `Cleared`.
    pub(super) fn clear(&self) {
        let ended = self.0.era.fetch_add(1, AcqRel);
        self.publish_in(ended, || KvEvent::Cleared);
    }

    /// Ends the subscriber's stream after the events published so far.
    pub(crate) fn close(&self) {
        // Release: pairs with the Acquire of `poll_recv`: everything was pushed.
        self.0.closed.store(true, Release);
        let _ = self.0.waker.take().map(crate::sync::wake);
    }

    /// Publishes the result of `event` and returns true. Without a subscriber, returns false and
    /// does not call it.
    #[cfg(any(test, feature = "internals"))]
    pub fn publish(&self, event: impl FnOnce() -> KvEvent) -> bool {
        self.publish_in(ANY_ERA, event)
    }

    /// Like `publish`, for a block noted in this era, or the end of the era. Not
    /// delivered after the era's clear.
    #[inline]
    pub(super) fn publish_in(&self, era: u64, event: impl FnOnce() -> KvEvent) -> bool {
        let is_active = self.is_subscribed_now();
        if is_active {
            self.push(Told { era, event: event() });
        }
        is_active
    }

    /// Returns whether there is a subscriber. If not, one that comes later sees the changes of words
    /// that this thread has made so far.
    #[inline]
    pub(super) fn is_subscribed_now(&self) -> bool {
        // Pairs with the heavy fence of `subscribe`.
        light_fence();
        self.is_subscribed()
    }

    #[cold]
    fn push(&self, told: Told) {
        self.0.ring().push(told);
        let _ = self.0.waker.take().map(crate::sync::wake);
    }

    /// Returns whether there is a subscriber.
    #[inline]
    pub fn is_subscribed(&self) -> bool {
        // Acquire: pairs with the Release of `subscribe`, which created the ring.
        self.0.active.load(Acquire)
    }

    /// Returns the number of events lost since the queue was created.
    pub fn lost(&self) -> u64 {
        self.0.ring.get().map_or(0, Ring::lost)
    }

    /// Returns the capacity in events.
    pub fn capacity(&self) -> usize {
        self.0.capacity
    }

    /// Subscribes to everything published from now on.
    ///
    /// # Errors
    /// [`PrefixError::Subscribed`] if there is a subscriber; [`PrefixError::NoFence`] if the system
    /// refuses a fence that it granted before.
    pub fn subscribe(&self) -> Result<KvEvents, PrefixError> {
        // Acquire: pairs with the Release of the previous subscriber's drop.
        if self.0.taken.swap(true, Acquire) {
            return Err(PrefixError::Subscribed);
        }
        let ring = self.0.ring();
        // Release: pairs with the Acquire of `is_subscribed`.
        self.0.active.store(true, Release);
        // Pairs with the light fence of `publish`.
        if !heavy_fence() {
            self.0.active.store(false, Relaxed);
            self.0.taken.store(false, Release);
            return Err(PrefixError::NoFence);
        }
        // The losses first: a loss after this is reported. A subscriber that lists the blocks
        // afterwards sees changes whose events were lost before, or pushed before the tail: both
        // loads are Acquire.
        let lost = ring.lost();
        let begin = Reader { head: ring.tail(), reported: lost };
        let head = self.0.head.load(Relaxed);
        Ok(KvEvents {
            shared: self.0.clone(),
            begin,
            reader: Reader { head, reported: lost },
            told: self.era(),
            skew: 0,
            next: None,
        })
    }
}

impl Drop for EventQueue {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for EventQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventQueue")
            .field("capacity", &self.capacity())
            .field("subscribed", &self.is_subscribed())
            .field("lost", &self.lost())
            .finish()
    }
}

/// The subscriber's end: a stream of events.
///
/// It ends with the pool: when the last `Pool`, `PoolHandle`, `Sequence`, `SequenceView` and
/// `Batch` is dropped. Leases, a running `Defragmenter`, and threads that have used the pool do not
/// keep it open; a clone of the pool's `Compactor` does, and so does a `Defragmenter` whose runtime
/// is not driven. Dropping this value ends the subscription.
pub struct KvEvents {
    shared: Arc<Shared>,
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

impl KvEvents {
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
            // SAFETY: there is one `KvEvents` at a time, by `taken`, and it began where the
            // previous one left `head`.
            let told = match unsafe { self.shared.ring().pop(&mut self.reader) }? {
                Popped::Value(told) => told,
                Popped::Lost(lost) => Told { era: ANY_ERA, event: KvEvent::Resync { lost } },
            };
            if before.head < self.begin.head {
                // Test: `what_is_left_of_the_last_subscription_is_skipped`. Not counted either.
                self.begin.reported = self.reader.reported;
                continue;
            }
            let place = before.head - self.begin.head + before.reported - self.begin.reported;
            let number = place.wrapping_add(self.skew);
            if let Some(delivery) = self.heed(told.era, &told.event) {
                let own = Numbered { number, event: told.event };
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
        self.shared.waker.register(context.waker());
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
        self.shared.active.store(false, Relaxed);
        // The next subscriber skips what concurrent publishers push after this.
        while self.try_recv().is_some() {}
        drop(self.shared.waker.take());
        self.shared.head.store(self.reader.head, Relaxed);
        // Release: pairs with the Acquire of `subscribe`.
        self.shared.taken.store(false, Release);
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
