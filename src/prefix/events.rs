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
//! - After a [`KvEvent::Cleared`] no event is about a block that was noted before the clear: such a
//!   block is not found, and that it goes is not told.
//! - The stream ends when nothing can be stored, found or evicted any more: with the last `Pool`,
//!   `PoolHandle`, `Sequence`, `SequenceView` or `Batch`, and with a migration or compaction that
//!   is under way by hand. Leases, handles of blocks, a running `Defragmenter`, and threads that
//!   have used the pool do not keep it open; a clone of the pool's `Compactor` does.
//!
//! There is one subscriber at a time: who wants more puts a `tokio::sync::broadcast` behind it. Without one, publishing is
//! a load, and no event is made.
//!
//! # Protocol
//!
//! ```text
//! publish:      (the pool changed);  light_fence;  active?  push to the ring, with the era of what it is about;  wake
//! clear:        era e := e + 1;  publish Cleared of e
//! subscribe:    taken := 1 (or refused);  active := 1;  heavy_fence;  begin := what is lost, and the tail;  told := era
//! poll:         pop;  else register the waker, pop again;  else closed?  pop again, end;  else sleep
//! pop:          of an era before `told`, or Cleared of one?  skip it;  Cleared of e?  told := e + 1
//!               of an era after `told`?  a Cleared is on its way: told := that era, pass a Cleared on before it
//!               a loss?  told := era: the subscriber looks anew
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
//! # Eras
//!
//! The cache notes the *era* in which a block's chain began, and finds the block in that era only. A
//! publisher that runs beside a clear may push an event about the old era behind its `Cleared`, or
//! one about the new era before it. The publisher cannot know, and does not wait; the reader can
//! tell by the eras that events carry. An event about an era that the publisher knows to be over is
//! not pushed at all. `told` begins with the era that the subscriber sees: by the asymmetric fence,
//! a clear whose new era it does not see yet sees `active`, and publishes its `Cleared`.
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

/// An event on its way to the reader.
struct Told {
    /// Of the block that it is about, or that it ends; [`ANY_ERA`]: told whatever was cleared.
    era: u64,
    event: KvEvent,
}

/// Of no era in particular.
const ANY_ERA: u64 = u64::MAX;

struct Shared {
    capacity: usize,
    /// Made for the first subscriber: who wants no events pays for none.
    ring: OnceLock<Ring<Told>>,
    /// Somebody listens: publish. Then there is a ring.
    active: AtomicBool,
    /// There is a subscriber, perhaps a leaving one.
    taken: AtomicBool,
    closed: AtomicBool,
    /// Where the last subscriber was.
    head: AtomicU64,
    waker: AtomicWaker,
    /// The cache's: how often it was cleared.
    era: CachePadded<AtomicU64>,
}

impl Shared {
    fn ring(&self) -> &Ring<Told> {
        self.ring.get_or_init(|| Ring::new(self.capacity))
    }
}

/// The pool's end of its events. Dropping it ends the subscriber's stream, if nothing has before.
pub struct EventQueue(Arc<Shared>);

impl EventQueue {
    /// Room for `capacity` events, rounded up to a power of two, at least two; allocated at the first subscription.
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

    /// The era of what begins now.
    #[inline]
    pub(super) fn era(&self) -> u64 {
        // Acquire: pairs with the Release of `clear`, so that who is in an era sees all that was
        // before it.
        self.0.era.load(Acquire)
    }

    /// Begins another era, and says so.
    pub(super) fn clear(&self) {
        let ended = self.0.era.fetch_add(1, AcqRel);
        self.publish_in(ended, || KvEvent::Cleared);
    }

    /// Nothing will be published any more: the subscriber's stream ends behind what was.
    pub(crate) fn close(&self) {
        // Release: pairs with the Acquire of `poll_next`: everything was pushed.
        self.0.closed.store(true, Release);
        let _ = self.0.waker.take().map(crate::sync::wake);
    }

    /// Tells the subscriber what `event` returns, and returns true. Without a subscriber that is not even called.
    #[cfg(any(test, feature = "internals"))]
    pub fn publish(&self, event: impl FnOnce() -> KvEvent) -> bool {
        self.publish_in(ANY_ERA, event)
    }

    /// As [`publish`](Self::publish), about a block that was noted in this era, or its end: nothing
    /// is told of it after the era's clear.
    #[inline]
    pub(super) fn publish_in(&self, era: u64, event: impl FnOnce() -> KvEvent) -> bool {
        // Pairs with the heavy fence of `subscribe`.
        if !cfg!(kvpool_mutant = "events_no_fence") {
            light_fence();
        }
        let is_active = self.is_subscribed();
        if is_active {
            self.push(Told { era, event: event() });
        }
        is_active
    }

    #[cold]
    fn push(&self, told: Told) {
        let pushed = self.0.ring().push(told);
        if pushed || !cfg!(kvpool_mutant = "events_silent_loss") {
            let _ = self.0.waker.take().map(crate::sync::wake);
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

/// The subscriber's end: a stream of events, which ends with the pool: when the last `Pool`,
/// `PoolHandle`, `Sequence`, `SequenceView` and `Batch` is gone. Leases, a running
/// `Defragmenter`, and threads that have used the pool do not keep it open; a clone of the pool's
/// `Compactor` does, and so does a `Defragmenter` whose runtime is not driven. Dropping it ends the subscription.
pub struct KvEvents {
    shared: Arc<Shared>,
    /// Where the subscription began.
    begin: Reader,
    reader: Reader,
    /// All eras before this one have been told to be over, or were when the subscriber last looked.
    told: u64,
    /// Events that were passed on and are not in the ring yet, less those that were skipped; wraps.
    skew: u64,
    /// What comes after a `Cleared` that was passed on before its time.
    next: Option<Numbered>,
}

impl KvEvents {
    /// The next event; none when the pool is gone and everything was received. May be dropped at any await.
    pub async fn recv(&mut self) -> Option<Numbered> {
        std::future::poll_fn(|context| self.poll_recv(context)).await
    }

    /// The next event, if it is there.
    pub fn try_recv(&mut self) -> Option<Numbered> {
        if let Some(next) = self.next.take() {
            return Some(next);
        }
        loop {
            let before = self.reader;
            // SAFETY: there is one `KvEvents` at a time, by `taken`, and it began where the last one left `head`.
            let told = match unsafe { self.shared.ring().pop(&mut self.reader) }? {
                Popped::Value(told) => told,
                Popped::Lost(lost) => Told { era: ANY_ERA, event: KvEvent::Resync { lost } },
            };
            if before.head < self.begin.head {
                // Test: `what_is_left_of_the_last_subscription_is_skipped`. Nor is it counted.
                self.begin.reported = self.reader.reported;
                continue;
            }
            let place = before.head - self.begin.head + before.reported - self.begin.reported;
            let number = place.wrapping_add(self.skew);
            if let Some(first) = self.heed(told.era, &told.event) {
                let own = Numbered { number, event: told.event };
                return Some(match first {
                    First::Itself => own,
                    First::Cleared => {
                        self.skew = self.skew.wrapping_add(1);
                        self.next = Some(Numbered { number: number + 1, ..own });
                        Numbered { number, event: KvEvent::Cleared }
                    }
                });
            }
            self.skew = self.skew.wrapping_sub(1);
        }
    }

    /// What is to be passed on for an event of this era; `None`: nothing, a clear has told of it.
    fn heed(&mut self, era: u64, event: &KvEvent) -> Option<First> {
        if let KvEvent::Resync { .. } = event {
            // A `Cleared` may be lost. Who looks anew sees this era, or a later one. Acquire: pairs
            // with the Release of `clear`.
            self.told = self.told.max(self.shared.era.load(Acquire));
        }
        if era == ANY_ERA {
            return Some(First::Itself);
        }
        if era < self.told && !cfg!(kvpool_mutant = "events_after_clear") {
            return None;
        }
        if let KvEvent::Cleared = event {
            self.told = era + 1;
            return Some(First::Itself);
        }
        // Reached by the models that clear beside a registration.
        let is_early = era > self.told && !cfg!(kvpool_mutant = "events_early_era");
        self.told = self.told.max(era);
        Some(if is_early { First::Cleared } else { First::Itself })
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

/// What is passed on next.
enum First {
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
