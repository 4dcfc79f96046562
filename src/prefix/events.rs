//! Events for request routers: a block was stored or removed, or all blocks were cleared.
//!
//! - Events come in the order of their publication, the same for all subscribers: if one
//!   publication ends before another begins, its event comes first.
//! - The newest events are kept, by default [`EVENTS`], and publishing never waits. A subscriber
//!   that lags further loses events, which affects no other: in their place or later, never
//!   earlier, it receives one [`KvEvent::Resync`], and must list the pool's cached blocks again. It
//!   continues with the newer half of the events, so that it does not lose the next ones at once.
//! - [`Numbered::number`] counts all events published since the subscription, including lost ones.
//! - A change before the subscription is visible in the pool after it; every other change is an
//!   event. So: subscribe, list the cached blocks, then follow the events. An event may repeat what
//!   the list or an earlier event showed.
//! - After a [`KvEvent::Cleared`], no event concerns a block that was noted before the clear.
//! - The stream ends when no block can be stored, found or evicted any more: see [`KvEvents`].
//!
//! The cost of an event does not depend on the number of subscribers: a position, an exchange in
//! the ring, and one of `sleeps`. Publishing wakes all subscribers if one has gone to sleep since
//! the last event. Without a subscriber, it costs a load, and no event is constructed.
//!
//! All subscribers read one [`ring`], created at the first subscription, each at its own position.
//! Each has a [slot] with its waker, in a list that only grows; vacated slots are reused. Events
//! are freed when they are overwritten, and the rest with the ring.
//!
//! | word | meaning |
//! |---|---|
//! | `newest` | number of subscriptions begun; the number of the newest |
//! | `active` | number of subscriptions that have not ended |
//! | `sleeps` | number of times that a subscriber was about to sleep; read by exchanges only |
//! | `woken` | those of them after which all subscribers were woken |
//! | `closed` | nothing is published any more |
//! | `era` | number of clears |
//! | a slot's `taken` | a subscriber exists, possibly one that is being dropped |
//!
//! Each event carries its *audience*: the numbers of the subscriptions that it is for. Others skip
//! it without counting it. Invariant: an event for `n` has the position at which subscription `n`
//! began, or a later one, as its publisher has read `newest >= n`, which is written after that
//! position was chosen. A lock serializes subscribing.
//!
//! ```text
//! publish:      (the pool changed);  light_fence;  active?  newest => n;  push for 1..=n, with the era of the event;  wake
//! wake:         sleeps => s;  sleeps := s;  woken < s?  wake all wakers;  woken := max(woken, s)
//! clear:        era e := e + 1;  publish Cleared of e
//! subscribe:    lock;  taken := 1;  active += 1;  head := tail;  newest += 1;  heavy_fence;  unlock;  told := era
//! poll:         read;  else register the waker, sleeps += 1, read again;  else closed?  read again, end;  else sleep
//! read:         not for this subscription, era < told, or Cleared of such an era?  skip it;  Cleared of era e?  told := e + 1
//!               era > told?  a Cleared is still to come: told := era of the event, deliver a Cleared before it
//!               a loss?  told := era: the subscriber lists the blocks again
//! unsubscribe:  active -= 1;  taken := 0
//! close:        closed := 1;  wake
//! ```
//!
//! A registration announces a block *before* it can be hit, so that its removal is announced later.
//! A subscription that begins in between may have listed the cached blocks too early to see it. So
//! the registration reads `newest` before the announcement, which is for the subscriptions up to
//! that number, and again once the block is cached, to announce it to later ones. If the
//! announcement may be overwritten before the block is cached (by the ring's tail), it is repeated
//! afterwards, because a subscriber may have received the loss, and listed the blocks, in between.
//!
//! By the asymmetric fence, a publisher sees `active` and the number, or the subscriber sees the
//! publisher's change of the pool, so the number that the publisher has read bounds the audience.
//!
//! Publishers and subscribers about to sleep exchange `sleeps`. If the publisher is first, the
//! second `read` sees its event; otherwise it sees the waker, and wakes it unless another publisher
//! has. A publisher that stops before it has woken all leaves the rest to the next one.
//!
//! # Eras
//!
//! A publisher concurrent with a clear may push an event of the old era behind its `Cleared`, or
//! one of the new era before it. It cannot know, and does not wait; the reader can tell by the era
//! of each event. An event of an era that its publisher knows to be over is not pushed. `told`
//! begins with the era that the subscriber sees: by the asymmetric fence, a clear whose era it does
//! not see does see `active`, and publishes its `Cleared`. Model: `loom-tests/tests/kv_events.rs`.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::PoisonError;

#[cfg(any(test, feature = "internals"))]
use self::event::ANY_ERA;
use self::event::Told;
use self::slot::Shared;
use crate::error::PrefixError;
use crate::sync::{Arc, Ordering::*, heavy_fence, light_fence};

mod event;
mod ring;
mod slot;
mod subscriber;
#[cfg(all(test, not(kvpool_loom)))]
mod tests;

pub use self::event::{KvEvent, Numbered};
pub use self::subscriber::KvEvents;

/// Default number of events that subscribers can receive late.
pub const EVENTS: usize = if cfg!(kvpool_loom) { 2 } else { 4096 };

/// The pool's end of its events. Dropping it ends the subscribers' streams.
pub struct EventQueue(Arc<Shared>);

impl EventQueue {
    /// Creates a queue of the newest `capacity` events, rounded up to a power of two, at least two.
    pub fn new(capacity: usize) -> Self {
        Self(Arc::new(Shared::new(capacity)))
    }

    #[inline]
    pub(super) fn era(&self) -> u64 {
        // Acquire: pairs with the Release of `clear`; a thread in an era sees everything before it.
        self.0.era.load(Acquire)
    }

    pub(super) fn clear(&self) {
        let ended = self.0.era.fetch_add(1, AcqRel);
        self.publish_in(ended, || KvEvent::Cleared);
    }

    pub(crate) fn close(&self) {
        // Release: pairs with the Acquire of `poll_recv`: everything was pushed.
        self.0.closed.store(true, Release);
        self.0.wake();
    }

    /// Publishes the result of `event`; without a subscriber, returns false without a call.
    #[cfg(any(test, feature = "internals"))]
    pub fn publish(&self, event: impl FnOnce() -> KvEvent) -> bool {
        self.publish_in(ANY_ERA, event)
    }

    /// Publishes an event of this era, or its end; it is not delivered after the era's clear.
    #[inline]
    pub(super) fn publish_in(&self, era: u64, event: impl FnOnce() -> KvEvent) -> bool {
        // Pairs with the heavy fence of `subscribe`.
        light_fence();
        // Acquire: as in `subscriptions_now`. Later subscriptions see this change, or a later one.
        self.is_subscribed() && self.publish_to(era, 0..=self.0.newest.load(Acquire), event).is_some()
    }

    /// Publishes to these [subscriptions](Self::subscriptions_now); returns the event's position.
    #[inline]
    pub(super) fn publish_to(
        &self,
        era: u64,
        audience: RangeInclusive<u64>,
        event: impl FnOnce() -> KvEvent,
    ) -> Option<u64> {
        self.is_subscribed().then(|| self.push(Told { audience, era, event: event() }))?
    }

    /// Returns whether a subscriber that does not see this thread's changes may lose this event.
    pub(super) fn may_be_lost(&self, position: u64) -> bool {
        self.0.ring().is_some_and(|ring| ring.may_be_lost(position))
    }

    /// Returns the number of subscriptions so far; later ones see this thread's changes of words.
    #[inline]
    pub(super) fn subscriptions_now(&self) -> u64 {
        // Pairs with the heavy fence of `subscribe`.
        light_fence();
        // Acquire: pairs with the Release of `subscribe`, after these subscriptions' positions.
        self.0.newest.load(Acquire)
    }

    #[cold]
    fn push(&self, told: Told) -> Option<u64> {
        let position = self.0.ring()?.push(told);
        self.0.wake();
        Some(position)
    }

    /// Returns whether there is a subscriber.
    #[inline]
    pub fn is_subscribed(&self) -> bool {
        self.subscribers() > 0
    }

    /// Returns the number of subscribers.
    #[inline]
    pub fn subscribers(&self) -> usize {
        // Relaxed: the ring's pointer publishes the ring.
        self.0.active.load(Relaxed)
    }

    /// Returns the number of events that subscribers lost since the queue was created; an event
    /// counts once for each subscriber that would have received it.
    pub fn lost(&self) -> u64 {
        self.0.lost.load(Relaxed)
    }

    /// Returns the capacity in events.
    pub fn capacity(&self) -> usize {
        self.0.capacity
    }

    /// Subscribes to everything published from now on. The memory of the ring, which all
    /// subscribers share, is kept until the queue and its subscribers are dropped.
    ///
    /// # Errors
    /// [`PrefixError::NoFence`] if the system denies a fence that it granted before.
    pub fn subscribe(&self) -> Result<KvEvents, PrefixError> {
        let one_at_a_time = self.0.subscribing.lock().unwrap_or_else(PoisonError::into_inner);
        let (ring, slot) = (self.0.make_ring(), self.0.take_slot());
        // Relaxed: changed under the lock only.
        let number = self.0.newest.load(Relaxed) + 1;
        self.0.active.fetch_add(1, Relaxed);
        let head = ring.tail();
        // Release: pairs with the Acquire of `subscriptions_now`. After the tail: an event for this
        // number has that position or a later one.
        self.0.newest.store(number, Release);
        // Pairs with the light fences of publishers.
        if !heavy_fence() {
            self.0.leave(slot);
            return Err(PrefixError::NoFence);
        }
        drop(one_at_a_time);
        Ok(KvEvents::begin(self.0.clone(), slot, number, head))
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
