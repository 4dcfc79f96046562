//! The future of an allocation that waits; [`block`](crate::block) implements the queue itself.

use std::pin::Pin;
use std::time::{Duration, Instant};

#[cfg(debug_assertions)]
use crate::block::Site;
use crate::block::{AllocRequest, Blocks, Class, Waiting};
use crate::compact::COPY_DEADLINE;
use crate::error::AllocError;
use crate::ids::Ticket;
use crate::sync::calls;
use crate::sync::runtime::{now, sleep_until, timeout_at};

use super::leased::{Ids, Leased, Root, Seen};
use super::wait::{CallUntil, Wait};
use super::{Lease, Pool};

impl Pool {
    /// Allocates blocks, and waits for them if necessary.
    ///
    /// Urgent requests are served before high ones, high before normal ones, and requests of equal
    /// priority in order of arrival; a small request does not overtake a large one. Running
    /// sequences that [reserve](Self::reserve_async) blocks come before leases and
    /// [admissions](Self::admit_async) of their priority.
    ///
    /// [`allocate`](Self::allocate) does not wait, and takes any free blocks. An append or
    /// [`Sequence::reserve`](crate::Sequence::reserve) fails with [`AllocError::Behind`] while a
    /// request of higher priority waits, and an [admission](Self::admit) while one of at least its
    /// priority does.
    ///
    /// The future may be dropped at any time; the next request then gets the turn. A future that is
    /// not polled delays those behind it by at most the
    /// [patience](crate::pool::PoolBuilder::turn_patience), which starts after copies for it, and
    /// keeps its place. If a contiguous request finds enough free blocks but no run of that length,
    /// blocks are moved until there is one.
    ///
    /// ```
    /// # use kvpool::{AllocRequest, Pool, Priority, storage::KvLayout};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let pool = Pool::builder(KvLayout::named("tiny")?).blocks(100).build()?;
    /// let all = pool.allocate_owned(AllocRequest::new(100))?;
    /// let waiting = pool.allocate_async(AllocRequest::new(10).priority(Priority::High));
    /// let (lease, ()) = tokio::join!(waiting, async { drop(all) });
    /// let lease = lease?;
    /// assert_eq!(lease.blocks().len(), 10);
    /// let soon = std::time::Instant::now() + std::time::Duration::from_millis(10);
    /// let late = pool.allocate_async(AllocRequest::new(91)).until(soon).await;
    /// assert!(matches!(late, Err(kvpool::AllocError::Deadline { asked: 91, .. })));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`AllocError::Deadline`] at the deadline of [`Wait::until`]. Immediately, for errors that
    /// waiting cannot resolve: [`AllocError::Zero`], [`AllocError::WrongDevice`],
    /// [`AllocError::TooLarge`] (even if the pool could grow to that size; also if the pool shrinks
    /// meanwhile), [`AllocError::Reserved`], [`AllocError::Floors`], and
    /// [`AllocError::FenceRefused`] on a thread that cannot wait.
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn allocate_async(
        &self,
        request: AllocRequest,
    ) -> Wait<impl CallUntil<Output = Result<Lease<'static>, AllocError>, Future: Send>> {
        #[cfg(debug_assertions)]
        let site = Site::here();
        Wait::new(move |deadline| async move {
            let lease = self.allocate_or_wait(request, deadline).await;
            #[cfg(debug_assertions)]
            Lease::note_made(&lease, site);
            lease
        })
    }

    async fn allocate_or_wait(
        &self,
        request: AllocRequest,
        deadline: Option<Instant>,
    ) -> Result<Lease<'static>, AllocError> {
        let blocks = self.blocks();
        blocks.check_request(&request).inspect_err(|error| blocks.count_refusal(error))?;
        if !blocks.is_awaited() {
            // No request waits, so there is no queue to join.
            match self.allocate_owned(request) {
                Err(AllocError::Exhausted { .. } | AllocError::NoRun { .. }) => {}
                outcome => return outcome,
            }
        }
        let waiting = self.in_turns(&request, Class::Admission, deadline, |place| {
            let mut ids = Ids::new();
            place.allocate(&request, None, &mut |id| ids.push(id))?;
            let root = Root::Owned(blocks.keep_alive());
            Ok(Lease::new(Leased::new(root, ids, Seen::new(false))))
        });
        traced!("kvpool.wait", waiting).await
    }

    /// Waits like [`in_line`], and moves blocks for a request that needs a run.
    pub(super) fn in_turns<T>(
        &self,
        request: &AllocRequest,
        class: Class,
        deadline: Option<Instant>,
        attempt: impl FnMut(&mut Waiting<'_>) -> Result<T, AllocError>,
    ) -> impl Future<Output = Result<T, AllocError>> {
        in_line((self.blocks(), Some(self)), request, class, deadline, attempt)
    }

    /// Makes an attempt in each turn, until one succeeds or fails for other reasons than a lack of
    /// blocks.
    async fn take_turns<T>(
        mover: Option<&Self>,
        mut place: Waiting<'_>,
        mut attempt: impl FnMut(&mut Waiting<'_>) -> Result<T, AllocError>,
    ) -> Result<T, AllocError> {
        let (mut runs, mut has_held) = (RunMaker::default(), false);
        loop {
            match mover.filter(|_| has_held) {
                Some(pool) => pool.turn_beside_moves(&mut place).await,
                None => place.turn().await,
            }
            let began = now();
            match attempt(&mut place) {
                // Wait for the next free.
                Err(AllocError::Exhausted { held, .. }) => has_held = held > 0,
                // Enough blocks are free: wait until blocks are moved, or a free extends a run.
                Err(AllocError::NoRun { asked, .. }) => {
                    let pulse = place.pulse();
                    // While blocks are copied for it, the end of the copy wakes this future, not
                    // the queue. While another task moves blocks, the patience bounds its wait.
                    let allowed = || match mover.map(Self::compactor) {
                        Some(compactor) if compactor.copies_for_request() => COPY_DEADLINE,
                        _ => REST.1,
                    };
                    let has_turn = pulse.accompany(runs.make(mover, asked, place.turn()), allowed).await;
                    let rest = rest_after(now().saturating_duration_since(began));
                    pulse.beat(rest);
                    // Models have no time.
                    if !cfg!(any(kvpool_loom, kvpool_loom_coarse)) {
                        sleep_until(now() + rest).await;
                    }
                    if has_turn {
                        // Passes the turn to the current head of the queue.
                        place.hand_back();
                    }
                }
                outcome => return outcome.inspect_err(|error| place.refused(error)),
            }
        }
    }

    /// Waits for a turn, and passes over moves and resizes that hold blocks and are not polled.
    async fn turn_beside_moves(&self, place: &mut Waiting<'_>) {
        let every = self.blocks().turn_patience().max(Duration::from_millis(1));
        while let Some(look) = now().checked_add(every) {
            if timeout_at(look, place.turn()).await.is_some() {
                return;
            }
            self.compactor().look_after_turns();
        }
        place.turn().await;
    }
}

/// Waits in the queue: makes an attempt in each turn until one succeeds, or fails for a reason
/// other than a lack of blocks, or the deadline passes. `mover` moves blocks to make runs.
pub(super) async fn in_line<T>(
    (blocks, mover): (&Blocks, Option<&Pool>),
    request: &AllocRequest,
    class: Class,
    deadline: Option<Instant>,
    attempt: impl FnMut(&mut Waiting<'_>) -> Result<T, AllocError>,
) -> Result<T, AllocError> {
    // On the heap, so that a request that does not wait stays small.
    let mut waiting =
        Box::pin(calls(Pool::take_turns(mover, blocks.enter_wait_queue(request, class), attempt)));
    let Some(deadline) = deadline else { return waiting.await };
    let every = blocks.turn_patience().max(Duration::from_millis(1));
    loop {
        // Poll periodically without a wake-up, to detect a head of the queue that misses its turn.
        let look = now().checked_add(every).map_or(deadline, |look| look.min(deadline));
        match timeout_at(look, waiting.as_mut()).await {
            Some(outcome) => return outcome,
            None if now() < deadline => {}
            None => break,
        }
    }
    let before = blocks.first_waiting();
    drop(waiting);
    // The head of the queue, unless it was this request, which has left the queue.
    let head = before.filter(|&(number, _)| blocks.first_waiting().is_some_and(|(now, _)| now == number));
    let (counts, oldest_batch) = (blocks.counts(), blocks.oldest_batch());
    blocks.count_missed_deadline();
    Err(AllocError::Deadline {
        asked: request.blocks,
        free: counts.free(),
        retired: counts.retired,
        oldest_batch,
        head: head.map(|(_, head)| head),
        turn: mover.and_then(|pool| pool.compactor().turn_holder()),
    })
}

#[derive(Default)]
struct RunMaker {
    /// Newest batch that may still read the frames vacated by the last moves.
    left: Ticket,
}

impl RunMaker {
    /// Returns true if the next turn came while another compactor run or a resize was in progress.
    #[inline(never)]
    fn make(
        &mut self,
        pool: Option<&Pool>,
        blocks: usize,
        turn: impl Future<Output = ()>,
    ) -> Pin<Box<impl Future<Output = bool>>> {
        Box::pin(async move {
            let Some(pool) = pool else { return false };
            let clock = pool.blocks().clock();
            if !clock.ended(self.left) {
                // The vacated frames are not free yet; the end of those batches gives the next
                // turn.
                return false;
            }
            let Some(made) = pool.compactor().make_run(blocks as u32, turn).await else { return true };
            // A failed copy does not end the wait: other threads may still free blocks.
            if made.is_ok_and(|report| report.moved_blocks > 0) {
                self.left = clock.newest();
            }
            false
        })
    }
}

const REST: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(100));

/// Returns how long to rest after an unsuccessful attempt that took this long. A request for a run
/// scans the whole pool on every free: for at most a ninth of the time, but at least ten times a
/// second. A turn that comes during the rest is kept.
fn rest_after(took: Duration) -> Duration {
    // Not zero even if the clock stands still: an attempt announces the frames that it held to the
    // queue, which includes this request.
    took.saturating_mul(8).clamp(REST.0, REST.1)
}

const _: () = {
    const fn sent<T: Send>() {}
    sent::<Lease<'static>>();
};
