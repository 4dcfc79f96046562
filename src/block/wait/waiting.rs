//! A request's place in the queue. Dropping it leaves the queue and passes on the turn.

use std::cmp::Reverse;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::error::AllocError;
use crate::ids::BlockId;
use crate::sync::{call, heavy_fence};

use crate::block::allocate::{Aim, Grab, ListEnd, ListShare, lists_of};
use crate::block::core::Blocks;
use crate::block::latency::Operation;
use crate::block::request::{AllocRequest, Priority};
use crate::block::state::{Absence, Class, Key, QueuePlace, WaitQueue};
use crate::block::tenants::Tenant;

#[must_use = "dropping the place leaves the queue"]
pub(crate) struct Waiting<'a> {
    blocks: &'a Blocks,
    key: Key,
    entered: Instant,
    is_fenced: bool,
    is_sure: bool,
    /// Whether it has searched, so that others may have missed frames in transit.
    has_tried: bool,
}

impl Blocks {
    pub(crate) fn enter_wait_queue(&self, request: &AllocRequest, class: Class) -> Waiting<'_> {
        let entered = Instant::now();
        self.counters.waits();
        let key = self.with_wait_queue(|queue| {
            let key = (Reverse(request.priority), class, queue.entries);
            queue.entries += 1;
            queue
                .places
                .insert(key, QueuePlace { asked: request.blocks, entered, waker: None, absent: None });
            if queue.is_head(key) {
                // Frees before the bit was set were not announced: search again.
                queue.signal = true;
            }
            // Under the lock, like the clearing.
            self.space.clock.set_awaited();
            key
        });
        Waiting { blocks: self, key, entered, is_fenced: false, is_sure: false, has_tried: false }
    }

    /// Refuses a waiting request that floors of other tenants keep from its blocks, so that it does
    /// not wait until one is lowered. `kept` are blocks that it has and keeps. The refusal is
    /// counted where it [ends the wait](Waiting::refused).
    pub(crate) fn check_floors(
        &self,
        request: &AllocRequest,
        tenant: Tenant,
        kept: impl IntoIterator<Item = BlockId>,
    ) -> Result<(), AllocError> {
        let Some(tenants) = self.tenants() else { return Ok(()) };
        let asked = request.blocks;
        let is_reserved = request.priority != Priority::Urgent || (request.contiguous && asked > 1);
        let unavailable = tenants.kept_from(tenant, kept) + if is_reserved { self.reserve() } else { 0 };
        let most = self.total().saturating_sub(unavailable);
        if asked > most {
            return Err(AllocError::Floors { asked, most });
        }
        Ok(())
    }
}

impl<'a> Waiting<'a> {
    /// Refuses a request of a tenant that, by the counts, cannot be met while it keeps `kept` evictable
    /// blocks.
    pub(crate) fn check_counts(
        &self,
        request: &AllocRequest,
        tenant: Tenant,
        kept: usize,
    ) -> Result<(), AllocError> {
        self.blocks.check_floors(request, tenant, [])?;
        // Otherwise a search may find frames that are not counted.
        if self.is_sure {
            let counts = self.blocks.recount();
            let most = counts.free() + counts.retired + counts.evictable + self.blocks.reserved_for(request);
            if most < request.blocks + kept {
                self.tried();
                return Err(self.blocks.exhausted(request.blocks));
            }
        }
        Ok(())
    }

    pub(crate) fn pulse(&self) -> Pulse<'a> {
        Pulse { blocks: self.blocks, key: self.key }
    }
}

impl Waiting<'_> {
    pub(crate) async fn turn(&mut self) {
        if self.has_tried && !self.is_sure {
            // An owner was inside its thread cache. Let it run, and search again.
            yield_once().await;
        }
        poll_fn(|context| self.poll_turn(context)).await;
    }

    fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let mut waker = Some(context.waker().clone());
        let (has_turn, woken) = self.blocks.with_wait_queue(|queue| {
            queue.is_polled(self.key);
            let is_other = queue.pass_over() && !queue.is_head(self.key);
            let woken = if is_other { queue.wake_head(self.blocks.turn_patience()) } else { None };
            let has_turn = queue.is_head(self.key) && std::mem::take(&mut queue.signal);
            if !has_turn && let Some(place) = queue.places.get_mut(&self.key) {
                std::mem::swap(&mut place.waker, &mut waker);
            }
            (has_turn, woken)
        });
        woken.into_iter().for_each(crate::sync::wake);
        if has_turn { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Searches once for a lease or a list. After an error, the place waits for another turn.
    pub(crate) fn allocate(
        &mut self,
        request: &AllocRequest,
        list: Option<ListEnd>,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError> {
        self.allocate_for(request, list.map_or(Aim::Any, Aim::List), take)
    }

    /// As [`allocate`](Self::allocate), for several lists, all or nothing: see
    /// [`Blocks::allocate_for_lists`].
    pub(crate) fn allocate_for_lists(
        &mut self,
        request: &AllocRequest,
        shares: &[ListShare],
        take: &mut dyn FnMut(usize, BlockId),
    ) -> Result<(), AllocError> {
        let mut blocks = SmallVec::<[BlockId; 16]>::new();
        self.allocate_for(request, Aim::Lists(shares), &mut |id| blocks.push(id))?;
        lists_of(shares).zip(blocks).for_each(|(list, id)| take(list, id));
        Ok(())
    }

    fn allocate_for(
        &mut self,
        request: &AllocRequest,
        aim: Aim<'_>,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError> {
        // Before the counts are read: for a tenant, they may refuse it.
        self.has_tried = true;
        if !self.is_fenced {
            // Pairs with the light fences of frees: they see the bit, or we find what they freed.
            self.is_fenced = heavy_fence();
        }
        let blocks = self.blocks;
        let mut has_searched = false;
        let allocated = blocks.charged(aim.tenant(), (request, true), take, |take| {
            has_searched = true;
            self.search(request, aim, take)
        });
        match allocated {
            // By the counts, after all thread caches were visited: as a search that found nothing.
            Err(AllocError::Exhausted { .. }) if !has_searched => self.end_search(allocated, true, false),
            _ => allocated,
        }
    }

    fn search(
        &mut self,
        request: &AllocRequest,
        aim: Aim<'_>,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError> {
        // The pool may have shrunk or its device failed since the request entered the queue.
        self.blocks.check_request(request).inspect_err(|error| self.blocks.counters.refused(error))?;
        self.check_counts(request, aim.tenant(), 0)?;
        let mut grab = Grab::new();
        let wake_guard = self.blocks.wake_guard();
        let gathered = self
            .blocks
            .with_thread_cache(|cache| self.blocks.gather(cache, request, aim, &mut grab, &wake_guard));
        // An announcement would signal this place itself, which would search again forever.
        wake_guard.leave_to_queue();
        if gathered.is_ok() {
            self.blocks.counters.granted(grab.frames);
            if !matches!(aim, Aim::Any) {
                self.blocks.count_further(-(grab.frames as isize));
            }
            self.blocks.latencies().record(Operation::Wait, self.entered);
            self.blocks.hand_out(&grab, request, take);
        }
        self.end_search(gathered, grab.is_sure, grab.is_refused)
    }

    fn end_search(
        &mut self,
        gathered: Result<(), AllocError>,
        is_sure: bool,
        is_refused: bool,
    ) -> Result<(), AllocError> {
        self.is_sure = self.is_fenced && is_sure;
        let is_refused = !self.is_fenced || is_refused;
        match gathered {
            Ok(()) => {}
            // Without its fences it may sleep while a block is free. Reached by `fence_refused`.
            Err(AllocError::Exhausted { asked, .. } | AllocError::NoRun { asked, .. }) if is_refused => {
                let error = AllocError::FenceRefused { asked, free: self.blocks.counts().free() };
                self.blocks.counters.refused(&error);
                return Err(error);
            }
            Err(_) => self.tried(),
        }
        gathered
    }

    /// Counts the refusal that ends the wait.
    pub(crate) fn refused(&self, error: &AllocError) {
        if matches!(error, AllocError::Floors { .. }) {
            self.blocks.count_refusal(error);
        }
    }

    /// Returns an unused turn: the head, which may have changed, has a reason to search.
    pub(crate) fn hand_back(&self) {
        let woken = self.blocks.with_wait_queue(|queue| queue.signal(self.blocks.turn_patience()));
        woken.into_iter().for_each(crate::sync::wake);
    }

    /// Signals the head, unless it is this place, that the blocks kept by its search are evictable.
    pub(crate) fn kept_no_longer(&self) {
        let woken = self.blocks.with_wait_queue(|queue| {
            if queue.is_head(self.key) { None } else { queue.signal(self.blocks.turn_patience()) }
        });
        woken.into_iter().for_each(crate::sync::wake);
    }

    /// Signals the head, unless it is this place, that frames were in transit in a failed search.
    fn tried(&self) {
        let woken = self.blocks.with_wait_queue(|queue| {
            if !self.is_sure {
                // It yields and should be polled again soon; it may be the head again then.
                self.pulse().is_absent(queue, Duration::ZERO);
            }
            if queue.is_head(self.key) {
                queue.signal |= !self.is_sure;
                return None;
            }
            queue.signal(self.blocks.turn_patience())
        });
        woken.into_iter().for_each(crate::sync::wake);
    }
}

/// Reports that a future is alive while it does other work than wait for its turn.
#[derive(Clone, Copy)]
pub(crate) struct Pulse<'a> {
    blocks: &'a Blocks,
    key: Key,
}

impl Pulse<'_> {
    /// Completes work that something other than the queue wakes. While it sleeps, the future may be
    /// absent for `allowed` plus the patience.
    pub(crate) async fn accompany<F: Future>(&self, work: F, allowed: impl Fn() -> Duration) -> F::Output {
        let mut work = pin!(work);
        poll_fn(|context| {
            self.blocks.with_wait_queue(|queue| queue.is_polled(self.key));
            let (blocks, waker) = (self.blocks.clone(), context.waker().clone());
            let roused = Arc::new(Roused { blocks, key: self.key, waker }).into();
            let outcome = work.as_mut().poll(&mut Context::from_waker(&roused));
            let allowed = allowed();
            self.blocks.with_wait_queue(|queue| {
                if queue.places.get(&self.key).is_some_and(|place| place.absent.is_none()) {
                    self.is_absent(queue, allowed);
                }
            });
            outcome
        })
        .await
    }

    /// Records that the future is being polled, and expects its next poll within `within`.
    pub(crate) fn beat(&self, within: Duration) {
        self.blocks.with_wait_queue(|queue| {
            queue.is_polled(self.key);
            self.is_absent(queue, within);
        });
    }

    fn is_absent(&self, queue: &mut WaitQueue, within: Duration) {
        if let Some(place) = queue.places.get_mut(&self.key) {
            let allowed = self.blocks.turn_patience().saturating_add(within);
            place.absent = Some(Absence { since: Instant::now(), allowed });
        }
    }
}

struct Roused {
    blocks: Blocks,
    key: Key,
    waker: Waker,
}

impl Wake for Roused {
    fn wake(self: Arc<Self>) {
        let pulse = Pulse { blocks: &self.blocks, key: self.key };
        self.blocks.with_wait_queue(|queue| pulse.is_absent(queue, Duration::ZERO));
        self.waker.wake_by_ref();
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let _call = call();
        let (own, woken) = self.blocks.with_wait_queue(|queue| {
            let was_head = queue.is_head(self.key);
            let own = queue.remove(self.key);
            let hands_on = was_head || self.has_tried;
            let woken = if hands_on { queue.signal(self.blocks.turn_patience()) } else { None };
            self.blocks.settle(queue);
            (own, woken)
        });
        drop(own);
        woken.into_iter().for_each(crate::sync::wake);
    }
}

async fn yield_once() {
    let mut yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
