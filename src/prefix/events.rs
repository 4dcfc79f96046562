//! What becomes known and what is forgotten, told to whoever routes requests: a block was stored, removed, all were cleared.
//!
//! # What a subscriber can rely on
//!
//! - Events come in the order in which they were published: if one publication ends before another begins, its event comes first.
//! - The queue is bounded, and publishing never waits. What finds no room is given up and counted, and the subscriber gets one
//!   [`KvEvent::Resync`] in its place or later, never earlier. It then looks at the pool's cached blocks anew.
//! - [`Numbered::number`] counts everything that was published since the subscription, with what was lost.
//! - Everything that happened before the subscription can be seen in the pool after it; everything that cannot is an event.
//!   So: subscribe, then look, then follow. An event may tell what was seen already.
//!
//! There is one subscriber at a time: who wants more puts a `tokio::sync::broadcast` behind it. Without one, publishing is
//! a load, and no event is made.
//!
//! # Protocol
//!
//! ```text
//! publish:      (the pool changed);  light_fence;  active?  push to the ring;  wake
//! subscribe:    taken := 1 (or refused);  active := 1;  heavy_fence;  begin := what is lost, and the tail
//! poll:         pop;  else register the waker, pop again;  else closed?  pop again, end;  else sleep
//! unsubscribe:  active := 0;  drop what is there;  leave the head;  taken := 0
//! close:        closed := 1;  wake
//! ```
//!
//! By the asymmetric fence a publisher sees `active`, or what it changed in the pool is seen by who subscribed. By the
//! waker (which is made for this: `atomic-waker`) a publisher's push is seen by the second `pop`, or the publisher sees the
//! waker. A loss wakes too: nobody sleeps beside one. What was pushed before a subscription, by a publisher that came late,
//! is skipped by its position: the tail that is read at the subscription carries with it what those publishers did. The
//! [`ring`] has the rest.
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
use crate::sync::{Arc, AtomicBool, AtomicU64, AtomicWaker, Ordering::*, heavy_fence, light_fence};

mod ring;
#[cfg(all(test, not(kvpool_loom)))]
mod tests;

/// Events that a queue holds unless configured otherwise.
pub const EVENTS: usize = if cfg!(kvpool_loom) { 2 } else { 4096 };

/// Something that a router wants to know.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum KvEvent {
    /// A full block can be found by its hash from now on.
    Stored {
        /// The block.
        block: BlockId,
        /// What it is found by.
        hash: BlockHash,
        /// The hash of the block before it; none if it is the first of its prefix, or if it is not known: then there are no
        /// tokens either.
        parent: Option<BlockHash>,
        /// Its tokens; none if they are not known: its sequence was opened before the subscription.
        tokens: SmallVec<[u32; 16]>,
        /// Tokens that a block holds.
        block_tokens: u32,
    },
    /// The block cannot be found by this hash any more. Others of the same hash may still be.
    Removed {
        /// The block.
        block: BlockId,
        /// What it was found by.
        hash: BlockHash,
    },
    /// No block that was stored before can be found any more.
    Cleared,
    /// Events were lost, because they were not received as fast as they came: look at the pool's cached blocks anew.
    Resync {
        /// How many.
        lost: u64,
    },
}

/// An event and its place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Numbered {
    /// Events since the subscription before this one, the lost ones too. For a [`KvEvent::Resync`], that of the first lost one.
    pub number: u64,
    /// The event.
    pub event: KvEvent,
}

struct Shared {
    capacity: usize,
    /// Made for the first subscriber: who wants no events pays for none.
    ring: OnceLock<Ring<KvEvent>>,
    /// Somebody listens: publish. Then there is a ring.
    active: AtomicBool,
    /// There is a subscriber, perhaps a leaving one.
    taken: AtomicBool,
    closed: AtomicBool,
    /// Where the last subscriber was.
    head: AtomicU64,
    waker: AtomicWaker,
}

impl Shared {
    fn ring(&self) -> &Ring<KvEvent> {
        self.ring.get_or_init(|| Ring::new(self.capacity))
    }
}

/// The pool's end of its events. Dropping it ends the subscriber's stream.
pub struct EventQueue(Arc<Shared>);

impl EventQueue {
    /// Room for `capacity` events, rounded up to a power of two, at least two; allocated at the first subscription.
    pub fn new(capacity: usize) -> Self {
        Self(Arc::new(Shared {
            capacity: Ring::<KvEvent>::capacity(capacity),
            ring: OnceLock::new(),
            active: AtomicBool::new(false),
            taken: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            head: AtomicU64::new(0),
            waker: AtomicWaker::new(),
        }))
    }

    internal! {
        /// Tells the subscriber what `event` returns, and returns true. Without a subscriber that is not even called.
        #[inline]
        fn publish(&self, event: impl FnOnce() -> KvEvent) -> bool {
            // Pairs with the heavy fence of `subscribe`.
            if !cfg!(kvpool_mutant = "events_no_fence") {
                light_fence();
            }
            let is_active = self.is_subscribed();
            if is_active {
                self.push(event());
            }
            is_active
        }
    }

    #[cold]
    fn push(&self, event: KvEvent) {
        let pushed = self.0.ring().push(event);
        if pushed || !cfg!(kvpool_mutant = "events_silent_loss") {
            self.0.waker.wake();
        }
    }

    /// Whether somebody listens.
    #[inline]
    pub fn is_subscribed(&self) -> bool {
        // Acquire: pairs with the Release of `subscribe`, which made the ring.
        self.0.active.load(Acquire)
    }

    /// Events that found no room, ever.
    pub fn lost(&self) -> u64 {
        self.0.ring.get().map_or(0, Ring::lost)
    }

    /// Events that there is room for.
    pub fn capacity(&self) -> usize {
        self.0.capacity
    }

    /// Everything that is published from now on.
    ///
    /// # Errors
    /// [`PrefixError::Subscribed`] if there is a subscriber; [`PrefixError::NoFence`] where the system refuses a fence that
    /// it granted before.
    pub fn subscribe(&self) -> Result<KvEvents, PrefixError> {
        // Acquire: pairs with the Release of the subscriber that left.
        if self.0.taken.swap(true, Acquire) {
            return Err(PrefixError::Subscribed);
        }
        let ring = self.0.ring();
        // Release: pairs with the Acquire of `is_subscribed`.
        self.0.active.store(true, Release);
        // Pairs with the light fence of `publish`.
        if !cfg!(kvpool_mutant = "events_no_fence") && !heavy_fence() {
            self.0.active.store(false, Relaxed);
            self.0.taken.store(false, Release);
            return Err(PrefixError::NoFence);
        }
        // First the losses: one after this is reported. What was lost before, or pushed before the tail, is seen by who looks
        // afterwards: both are Acquire.
        let lost = ring.lost();
        let begin = Reader { head: ring.tail(), reported: lost };
        let head = self.0.head.load(Relaxed);
        Ok(KvEvents { shared: self.0.clone(), begin, reader: Reader { head, reported: lost } })
    }
}

impl Drop for EventQueue {
    fn drop(&mut self) {
        // Release: pairs with the Acquire of `poll_next`: everything was pushed.
        self.0.closed.store(true, Release);
        self.0.waker.wake();
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

/// The subscriber's end: a stream of events, which ends with the pool. Dropping it ends the subscription.
pub struct KvEvents {
    shared: Arc<Shared>,
    /// Where the subscription began.
    begin: Reader,
    reader: Reader,
}

impl KvEvents {
    /// The next event; none when the pool is gone and everything was received. May be dropped at any await.
    pub async fn recv(&mut self) -> Option<Numbered> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    /// The next event, if it is there.
    pub fn try_recv(&mut self) -> Option<Numbered> {
        loop {
            let before = self.reader;
            // SAFETY: there is one `KvEvents` at a time, by `taken`, and it began where the last one left `head`.
            let event = match unsafe { self.shared.ring().pop(&mut self.reader) }? {
                Popped::Value(event) => event,
                Popped::Lost(lost) => KvEvent::Resync { lost },
            };
            if before.head >= self.begin.head {
                let number = before.head - self.begin.head + before.reported - self.begin.reported;
                return Some(Numbered { number, event });
            }
            // Test: `what_is_left_of_the_last_subscription_is_skipped`. Nor is it counted.
            self.begin.reported = self.reader.reported;
        }
    }

    /// [`recv`](Self::recv), for who polls.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<Numbered>> {
        if let Some(event) = self.try_recv() {
            return Poll::Ready(Some(event));
        }
        self.shared.waker.register(context.waker());
        if cfg!(kvpool_mutant = "events_no_second_look") {
            return Poll::Pending;
        }
        // In this order: whoever closed had published everything.
        let is_closed = self.shared.closed.load(Acquire);
        match self.try_recv() {
            None if !is_closed => Poll::Pending,
            event => Poll::Ready(event),
        }
    }
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
        // What is pushed after this, by publishers who are on their way, the next subscriber skips.
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
