//! Events for request routers: a block was stored or removed, or all blocks were cleared.
//!
//! # Guarantees to a subscriber
//!
//! - Events come in the order of their publication: if one publication ends before another begins,
//!   its event comes first. Two subscribers may receive concurrent publications in different
//!   orders.
//! - The queue of each subscriber is bounded, and publishing never waits. An event that finds no
//!   room is dropped and counted, and the subscriber receives one [`KvEvent::Resync`] in its place
//!   or later, never earlier. It must then list the pool's cached blocks again. Other subscribers
//!   are unaffected.
//! - [`Numbered::number`] counts all events published since the subscription, including lost ones.
//! - Every change before the subscription is visible in the pool after it; every other change is an
//!   event. So: subscribe, list the cached blocks, then follow the events. An event may repeat what
//!   the list or an earlier event showed.
//! - After a [`KvEvent::Cleared`] no event concerns a block that was noted before the clear: such a
//!   block is never found, and its removal is not announced.
//! - The stream ends when no block can be stored, found or evicted any more: when the last `Pool`,
//!   `PoolHandle`, `Sequence`, `SequenceView` and `Batch` is dropped, and any migration or manual
//!   compaction in progress has ended. Leases, block handles, a running `Defragmenter`, and threads
//!   that have used the pool do not keep it open; a clone of the pool's `Compactor` does.
//!
//! Any number of subscribers may follow the events at once. Without a subscriber, publishing costs
//! a load, and no event is constructed.
//!
//! # Layout
//!
//! Each subscription has a [slot](slot): a ring of its own, and a waker. Slots are in a list that
//! only grows; a subscription takes a slot that an earlier one has left, or adds one. So there are
//! as many rings as there were subscribers at once, and the protocol of a ring knows one
//! subscriber.
//!
//! | word | meaning |
//! |---|---|
//! | `newest` | number of subscriptions begun; the number of the newest |
//! | `active` | number of slots with a subscription |
//! | a slot's `number` | its subscription, from 1; 0: none, so that no event is pushed |
//! | a slot's `taken` | a subscriber exists, possibly one that is being dropped |
//!
//! Invariant: a thread that reads `newest == n` sees the number of every subscription up to `n` in
//! its slot, unless that subscription has ended. Subscriptions begin under a lock, one at a time.
//!
//! # Protocol
//!
//! ```text
//! publish:      (the pool changed);  light_fence;  active?  each slot with a number:  push, with the era of the event;  wake
//! clear:        era e := e + 1;  publish Cleared of e
//! subscribe:    lock;  taken := 1;  number := newest + 1;  active += 1;  newest += 1;  heavy_fence;  unlock
//!               begin := losses so far, and the tail;  told := era
//! poll:         pop;  else register the waker, pop again;  else closed?  pop again, end;  else sleep
//! pop:          era < told, or Cleared of such an era?  skip it;  Cleared of era e?  told := e + 1
//!               era > told?  a Cleared is still to come: told := era of the event, deliver a Cleared before it
//!               a loss?  told := era: the subscriber lists the blocks again
//! unsubscribe:  number := 0;  active -= 1;  drop the contents;  keep the head;  taken := 0
//! close:        closed := 1;  wake
//! ```
//!
//! A registration announces a block *before* it can be hit, so that its removal is announced later.
//! A subscription that begins in between may have listed the cached blocks too early to see the
//! block. The registration therefore reads `newest` before the announcement, which goes to the
//! subscriptions up to that number, and again once the block is cached: later subscriptions are
//! told then. An announcement that finds a ring full is repeated once the block is cached: the
//! subscriber may have received the loss, and listed the cached blocks, in between. If the second
//! one is lost too, that loss is received after the block was cached.
//!
//! By the asymmetric fence, a publisher sees `active` and the number, or the subscriber sees the
//! publisher's change of the pool. By the waker (an `atomic-waker`), the second `pop` sees a
//! publisher's push, or the publisher sees the waker. A loss wakes the subscriber too, so that it
//! never sleeps beside one. Events pushed before a subscription by a late publisher are skipped by
//! their position: the tail that is read at the subscription orders what those publishers did
//! before it. The [`ring`] documents the rest.
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
use std::ops::RangeBounds;
use std::ptr;
use std::sync::PoisonError;

#[cfg(any(test, feature = "internals"))]
use self::event::ANY_ERA;
use self::event::Told;
use self::slot::{Shared, Slot};
use crate::error::PrefixError;
use crate::sync::{
    Arc, AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, CachePadded, Mutex, Ordering::*, heavy_fence,
    light_fence,
};

mod event;
mod ring;
mod slot;
mod subscriber;
#[cfg(all(test, not(kvpool_loom)))]
mod tests;

pub use self::event::{KvEvent, Numbered};
pub use self::subscriber::KvEvents;

/// Default capacity of a subscriber's queue of events.
pub const EVENTS: usize = if cfg!(kvpool_loom) { 2 } else { 4096 };

/// What became of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Published {
    /// There was no subscriber; the event was not constructed.
    ToNone,
    /// Every subscription that it was for has it in its ring.
    ToAll,
    /// The ring of at least one subscription was full. Its subscriber may receive the `Resync` at
    /// once, and list the cached blocks before the caller's next step.
    Lost,
}

/// The pool's end of its events. Dropping it ends the subscribers' streams, if they have not
/// ended before.
pub struct EventQueue(Arc<Shared>);

impl EventQueue {
    /// Creates a queue for `capacity` events of each subscriber, rounded up to a power of two, at
    /// least two. Allocates at a subscription.
    pub fn new(capacity: usize) -> Self {
        Self(Arc::new(Shared {
            capacity: Slot::capacity(capacity),
            slots: AtomicPtr::new(ptr::null_mut()),
            active: AtomicUsize::new(0),
            newest: AtomicU64::new(0),
            subscribing: Mutex::new(()),
            closed: AtomicBool::new(false),
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

    /// Ends the subscribers' streams after the events published so far.
    pub(crate) fn close(&self) {
        // Release: pairs with the Acquire of `poll_recv`: everything was pushed.
        self.0.closed.store(true, Release);
        self.0.slots().for_each(Slot::wake);
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
        // Pairs with the heavy fence of `subscribe`.
        light_fence();
        self.publish_to(era, .., event) != Published::ToNone
    }

    /// As [`publish_in`](Self::publish_in), to the subscriptions of these numbers, after a call of
    /// [`subscriptions_now`](Self::subscriptions_now).
    #[inline]
    pub(super) fn publish_to(
        &self,
        era: u64,
        numbers: impl RangeBounds<u64>,
        event: impl FnOnce() -> KvEvent,
    ) -> Published {
        if !self.is_subscribed() {
            return Published::ToNone;
        }
        self.push(numbers, Told::new(era, event()))
    }

    /// Returns the number of subscriptions begun so far. One that begins later sees the changes of
    /// words that this thread has made so far.
    #[inline]
    pub(super) fn subscriptions_now(&self) -> u64 {
        // Pairs with the heavy fence of `subscribe`.
        light_fence();
        // Acquire: pairs with the Release of `subscribe`: the slots of these subscriptions have
        // their numbers.
        self.0.newest.load(Acquire)
    }

    #[cold]
    fn push(&self, numbers: impl RangeBounds<u64>, told: Told) -> Published {
        let mut slots = self.0.slots().filter(|slot| slot.follows(&numbers));
        let Some(first) = slots.next() else { return Published::ToAll };
        // All of them, also behind one without room.
        let lost = slots.filter(|slot| !slot.push(told.clone())).count();
        if first.push(told) && lost == 0 { Published::ToAll } else { Published::Lost }
    }

    /// Returns whether there is a subscriber.
    #[inline]
    pub fn is_subscribed(&self) -> bool {
        self.subscribers() > 0
    }

    /// Returns the number of subscribers.
    #[inline]
    pub fn subscribers(&self) -> usize {
        // Relaxed: the list of slots publishes their contents.
        self.0.active.load(Relaxed)
    }

    /// Returns the number of events lost since the queue was created: an event counts once for each
    /// subscriber that lost it.
    pub fn lost(&self) -> u64 {
        self.0.slots().map(|slot| slot.ring.lost()).sum()
    }

    /// Returns the capacity in events, of each subscriber.
    pub fn capacity(&self) -> usize {
        self.0.capacity
    }

    /// Subscribes to everything published from now on.
    ///
    /// Any number of subscribers may follow the events. Each has a queue of its own, of the
    /// [capacity](Self::capacity) of this one, whose memory is kept for later subscribers.
    ///
    /// # Errors
    /// [`PrefixError::NoFence`] if the system refuses a fence that it granted before.
    pub fn subscribe(&self) -> Result<KvEvents, PrefixError> {
        let one_at_a_time = self.0.subscribing.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = self.0.take_slot();
        // Relaxed: changed under the lock only.
        let number = self.0.newest.load(Relaxed) + 1;
        slot.number.store(number, Relaxed);
        self.0.active.fetch_add(1, Relaxed);
        // Release: pairs with the Acquire of `subscriptions_now`.
        self.0.newest.store(number, Release);
        // Pairs with the light fences of publishers.
        if !heavy_fence() {
            self.0.leave(slot);
            return Err(PrefixError::NoFence);
        }
        drop(one_at_a_time);
        Ok(KvEvents::begin(self.0.clone(), slot))
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
            .field("subscribers", &self.subscribers())
            .field("lost", &self.lost())
            .finish()
    }
}
