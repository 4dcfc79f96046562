//! A request's place in line.

use std::cmp::Reverse;
use std::future::poll_fn;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::error::AllocError;
use crate::ids::BlockId;
use crate::sync::heavy_fence;

use crate::block::allocate::Grab;
use crate::block::state::{Absence, Key, Line, Place};
use crate::block::{AllocRequest, Blocks, Ownership};

/// A place in line. Dropping it leaves the line and hands the turn on.
#[must_use = "a place that is dropped is given up"]
pub(crate) struct Waiting<'a> {
    blocks: &'a Blocks,
    key: Key,
    is_fenced: bool,
    is_sure: bool,
    /// It has had a turn: who came before it in line meanwhile may have looked for what we had in our hands.
    has_tried: bool,
}

impl Blocks {
    /// Takes a place in line, behind all of the request's priority.
    pub(crate) fn wait_in_line(&self, request: &AllocRequest) -> Waiting<'_> {
        let came = Instant::now();
        let key = self.with_line(|line| {
            let key = (Reverse(request.priority), line.came);
            line.came += 1;
            line.places.insert(key, Place { asked: request.blocks, came, waker: None, absent: None });
            if line.is_head(key) {
                // What was freed before the bit was set was announced to nobody: look once more.
                line.signal = !cfg!(kvpool_mutant = "no_look_after_bit");
            }
            // Under the lock, under which it is cleared.
            self.space.clock.set_awaited();
            key
        });
        Waiting { blocks: self, key, is_fenced: false, is_sure: false, has_tried: false }
    }
}

impl<'a> Waiting<'a> {
    /// By which its future says that it is at work.
    pub(crate) fn pulse(&self) -> Pulse<'a> {
        Pulse { blocks: self.blocks, key: self.key }
    }
}

impl Waiting<'_> {
    /// Waits until it is this place's turn to try.
    pub(crate) async fn turn(&mut self) {
        if self.has_tried && !self.is_sure {
            // Somebody was inside its thread cache, where there may be something. Let it run, and look again.
            yield_once().await;
        }
        poll_fn(|context| self.poll_turn(context)).await;
    }

    fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let mut waker = Some(context.waker().clone());
        let (has_turn, woken) = self.blocks.with_line(|line| {
            line.is_polled(self.key);
            let is_other = line.pass_over() && !line.is_head(self.key);
            let woken = if is_other { line.wake_head(self.blocks.turn_patience()) } else { None };
            let has_turn = line.is_head(self.key) && std::mem::take(&mut line.signal);
            if !has_turn && let Some(place) = line.places.get_mut(&self.key) {
                // The one before it is dropped without the lock.
                std::mem::swap(&mut place.waker, &mut waker);
            }
            (has_turn, woken)
        });
        woken.into_iter().for_each(crate::sync::wake);
        if has_turn { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Tries, in its turn, for a lease. On success every block is passed to `take`; else there is nothing to be had now, and another
    /// turn will come.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; nothing was taken.
    pub(crate) fn allocate(
        &mut self,
        request: &AllocRequest,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError> {
        self.has_tried = true;
        if !self.is_fenced {
            // Pairs with the light fences of those who free: they see the bit, or we find what they freed.
            self.is_fenced = cfg!(kvpool_mutant = "waiter_no_fence") || heavy_fence();
        }
        // The pool may have shrunk since, or its device been lost.
        self.blocks.check_request(request)?;
        if self.is_sure {
            // A look from afar first: who waits for many blocks is told of each one.
            let counts = self.blocks.recount();
            let reserved = self.blocks.reserved_for(request);
            if counts.free() + counts.retired + counts.evictable + reserved < request.blocks {
                self.tried();
                return Err(self.blocks.exhausted(request.blocks));
            }
        }
        let mut grab = Grab::new();
        let custody = self.blocks.custody();
        let gathered = self
            .blocks
            .with_thread_cache(|cache| self.blocks.gather(cache, request, None, &mut grab, &custody));
        // An announcement would signal the first in line, which is this place: it would search again for ever. `tried`
        // and the end of the place tell the line what it needs to know.
        custody.leave_to_line();
        self.is_sure = self.is_fenced && grab.is_sure;
        let is_refused = !self.is_fenced || grab.is_refused;
        match gathered {
            Ok(()) => self.blocks.hand_out(&grab, request, Ownership::Guarded, take),
            // Without its fences it may sleep beside a free block, and would look for ever. Reached by `fence_refused`.
            Err(AllocError::Exhausted { asked, .. } | AllocError::NoRun { asked, .. }) if is_refused => {
                return Err(AllocError::FenceRefused { asked, free: self.blocks.counts().free() });
            }
            Err(_) => self.tried(),
        }
        gathered
    }

    /// Gives back a turn that was not used: the first in line, perhaps another by now, has reason to try.
    pub(crate) fn hand_back(&self) {
        let woken = self.blocks.with_line(|line| line.signal(self.blocks.turn_patience()));
        woken.into_iter().for_each(crate::sync::wake);
    }

    /// After a search in vain: announces what this place had in its hands to the head, unless it is the head itself.
    fn tried(&self) {
        let woken = self.blocks.with_line(|line| {
            if !self.is_sure {
                // It yields, and is to be polled again soon; by then it may be the head again.
                self.pulse().is_absent(line, Duration::ZERO);
            }
            if line.is_head(self.key) {
                line.signal |= !self.is_sure;
                return None;
            }
            line.signal(self.blocks.turn_patience())
        });
        woken.into_iter().for_each(crate::sync::wake);
    }
}

/// A sign of life of a future that does something else than wait for its turn.
#[derive(Clone, Copy)]
pub(crate) struct Pulse<'a> {
    blocks: &'a Blocks,
    key: Key,
}

impl Pulse<'_> {
    /// The future is being polled, and will be again within so long, or it is not going to be.
    pub(crate) fn beat(&self, within: Duration) {
        self.blocks.with_line(|line| {
            line.is_polled(self.key);
            self.is_absent(line, within);
        });
    }

    fn is_absent(&self, line: &mut Line, within: Duration) {
        if let Some(place) = line.places.get_mut(&self.key) {
            let allowed = self.blocks.turn_patience().saturating_add(within);
            place.absent = Some(Absence { since: Instant::now(), allowed });
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let (own, woken) = self.blocks.with_line(|line| {
            let was_head = line.is_head(self.key);
            let own = line.remove(self.key);
            let hands_on = (was_head || self.has_tried) && !cfg!(kvpool_mutant = "turn_kept");
            let woken = if hands_on { line.signal(self.blocks.turn_patience()) } else { None };
            self.blocks.settle(line);
            (own, woken)
        });
        drop(own);
        woken.into_iter().for_each(crate::sync::wake);
    }
}

/// Lets other tasks run.
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
