//! Allocation that waits its turn.
//!
//! The line, and the protocol by which no free goes unnoticed, are the floor's below ([`block`](crate::block)); here is
//! the future that a task awaits. It is runtime-agnostic; deadlines need tokio's timer, and so do requests for runs when
//! they wait on a tokio runtime (elsewhere they poll).

use std::future::poll_fn;
use std::pin::pin;
use std::time::Duration;

use smallvec::SmallVec;
// Of the clock that it rests by, so that who holds that one holds both.
use tokio::time::{Instant, timeout_at};

use crate::block::AllocRequest;
use crate::compact::COPY_DEADLINE;
use crate::error::AllocError;
use crate::ids::Ticket;

use super::ids::LeasedIds;
use super::lease::Root;
use super::{Lease, Pool};

impl Pool {
    /// Hands out blocks, and waits for them if need be: urgent requests before high before normal ones, and among
    /// those of a priority in the order in which they came; a small request does not overtake a large one. A request that does not wait ([`allocate`](Self::allocate), an append to a
    /// sequence) stands in no line: it takes what is free at that moment.
    ///
    /// The future may be dropped at any time: its turn goes to the next. One that is kept without being polled holds
    /// up those behind it for no longer than the [patience](crate::pool::PoolBuilder::turn_patience): then they are served,
    /// and it keeps its place for when it is polled. A contiguous request for which
    /// enough is free, and no run is long enough, has blocks moved until one is.
    ///
    /// ```
    /// # use kvpool::{pool::{AllocRequest, Pool, Priority}, storage::KvLayout};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let pool = Pool::builder(KvLayout::named("tiny")?).blocks(100).build()?;
    /// let all = pool.allocate_owned(AllocRequest::new(100))?;
    /// let waiting = pool.allocate_async(AllocRequest::new(10).priority(Priority::High));
    /// let (lease, ()) = tokio::join!(waiting, async { drop(all) });
    /// assert_eq!(lease?.blocks().len(), 10);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// What waiting cannot cure, at once: [`AllocError::Zero`], [`AllocError::WrongDevice`], [`AllocError::TooLarge`]
    /// (also of a pool that could grow to that size, or that shrinks while the request waits),
    /// [`AllocError::Reserved`]; and on a thread that cannot wait, [`AllocError::FenceRefused`].
    ///
    /// # Panics
    ///
    /// A contiguous request that has to wait, on a tokio runtime without a timer.
    pub async fn allocate_async(&self, request: AllocRequest) -> Result<Lease<'static>, AllocError> {
        let blocks = self.blocks();
        blocks.check_request(&request)?;
        if !blocks.is_awaited() {
            // Nobody waits: there is no line to stand in.
            match self.allocate_owned(request) {
                Err(AllocError::Exhausted { .. } | AllocError::NoRun { .. }) => {}
                outcome => return outcome,
            }
        }
        let mut place = blocks.wait_in_line(&request);
        let mut runs = RunMaker::default();
        loop {
            place.turn().await;
            let mut ids = SmallVec::new();
            let began = Instant::now();
            match place.allocate(&request, &mut |id| ids.push(id)) {
                Ok(()) => return Ok(Lease::new(Root::Owned(blocks.keep_alive()), LeasedIds::more(ids))),
                // Until somebody frees.
                Err(AllocError::Exhausted { .. }) => {}
                // Enough is free: until it is moved together, or somebody frees what joins the pieces.
                Err(AllocError::NoRun { .. }) => {
                    let pulse = place.pulse();
                    let has_turn = {
                        let mut making = pin!(runs.make(self, request.blocks, place.turn()));
                        let beating = poll_fn(|context| {
                            // While blocks move it is woken by their copies, not by the line.
                            pulse.beat(COPY_DEADLINE);
                            making.as_mut().poll(context)
                        });
                        beating.await
                    };
                    pulse.beat(REST.1);
                    rest(began.elapsed()).await;
                    if has_turn {
                        // Of whoever is the first in line by now.
                        place.hand_back();
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// As [`allocate_async`](Self::allocate_async), until a deadline. If nobody waits before it, the request is tried at
    /// least once, also if the deadline has passed already.
    ///
    /// # Errors
    ///
    /// As for [`allocate_async`](Self::allocate_async), and [`AllocError::Deadline`].
    ///
    /// # Panics
    ///
    /// When it is polled outside of a tokio runtime that has a timer.
    pub async fn allocate_until(
        &self,
        request: AllocRequest,
        deadline: tokio::time::Instant,
    ) -> Result<Lease<'static>, AllocError> {
        let blocks = self.blocks();
        let every = blocks.turn_patience().max(Duration::from_millis(1));
        let before = {
            let mut waiting = pin!(self.allocate_async(request));
            loop {
                // Now and then it is polled for nothing, so that it sees that the first in line does not come.
                let look = Instant::now().checked_add(every).map_or(deadline, |look| look.min(deadline));
                match timeout_at(look, waiting.as_mut()).await {
                    Ok(outcome) => return outcome,
                    Err(_) if Instant::now() < deadline => {}
                    Err(_) => break blocks.first_in_line(),
                }
            }
        };
        // The head, unless that was this request, which has left the line.
        let head = before.filter(|&(number, _)| blocks.first_in_line().is_some_and(|(now, _)| now == number));
        let (counts, oldest_batch) = (blocks.counts(), blocks.oldest_batch());
        Err(AllocError::Deadline {
            asked: request.blocks,
            free: counts.free(),
            retired: counts.retired,
            oldest_batch,
            head: head.map(|(_, head)| head),
        })
    }
}

/// Has blocks moved for a request that needs a run.
#[derive(Default)]
struct RunMaker {
    /// Batches that may still read what the last moves left.
    left: Ticket,
}

impl RunMaker {
    /// True: the next turn came while somebody else's run, or resize, went on.
    async fn make(&mut self, pool: &Pool, blocks: usize, turn: impl Future<Output = ()>) -> bool {
        let clock = pool.blocks().clock();
        if !clock.ended(self.left) {
            // What was moved out of the way is not free yet. The end of those batches gives the next turn.
            return false;
        }
        let Some(made) = pool.compactor().make_run(blocks as u32, turn).await else { return true };
        // A copy that failed is no reason to stop waiting: others free, too.
        if made.is_ok_and(|report| report.moved_blocks > 0) {
            self.left = clock.newest();
        }
        false
    }
}

/// The shortest and the longest rest.
const REST: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(100));

/// Rests after a try in vain that took so long: who waits for a run looks at the whole pool, and is told of every free. It
/// looks for a ninth of the time at the most, and never more seldom than ten times a second, so that nothing that comes
/// free is missed. A turn that comes meanwhile is kept.
async fn rest(took: Duration) {
    // At least a little, also where the clock stands: a look tells the line, that is itself, of what it had in its hands.
    let rest = (8 * took).clamp(REST.0, REST.1);
    if cfg!(kvpool_loom) {
        // A model has no time.
    } else if tokio::runtime::Handle::try_current().is_ok() {
        tokio::time::sleep(rest).await;
    } else {
        let until = Instant::now() + rest;
        while Instant::now() < until {
            tokio::task::yield_now().await;
        }
    }
}

const _: () = {
    const fn sent<T: Send>() {}
    sent::<Lease<'static>>();
};
