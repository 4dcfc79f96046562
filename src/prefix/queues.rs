//! Where evictable blocks wait: a queue for each class that the policy makes, and one for blocks that are of no use any
//! more.
//!
//! A block is in one queue at the most, by an entry that may be old. `filed` of its row says that there is one:
//!
//! ```text
//! release   word: evictable;  row: place;   filed: swap true,  was false  =>  push
//! take      pop;                            filed: swap false;  look at the word:
//!           owned    =>  drop the entry: the release to come finds `filed` false, and pushes
//!           evictable, and its place is elsewhere or later by now  =>  filed: swap true, was false  =>  push there
//!           evictable  =>  it is the caller's to evict, or to put back
//! ```
//!
//! # Theorem
//!
//! A block that is evictable, and in nobody's hands, is in a queue. For the swaps of one row are in one order. If a
//! release finds `filed` true, the take that comes next in that order reads from it, or from a later one, and so sees the
//! word evictable, or changed again since; then it drops nothing. If it finds it false, it pushes.
//!
//! In somebody's hands is what a thread is about to push, or has popped. A thread that is stopped there keeps one block, or
//! those of one release, from the queues; nothing else finds them but the walk at the end of the ladder.

use smallvec::SmallVec;

use crate::block::Rows;
use crate::ids::BlockId;
use crate::sync::{AtomicU32, AtomicU64, CachePadded, Ordering, Ordering::*};

use super::policy::{Head, Millis, Policy, QUEUES_MAX, asked};
use super::queue::{Links, RankQueue};
use super::row::{Row, RowBucket};

/// Blocks that are filed together.
const FILED: usize = 64;

/// Acquire: what the release that filed a block, or found it filed, did before is seen by who takes its entry. Release: goes
/// on with the order.
fn take_order() -> Ordering {
    if cfg!(kvpool_mutant = "unfiled_relaxed") { Relaxed } else { AcqRel }
}

/// See the [module](self).
pub(super) struct Queues {
    /// One for each queue of the policy, then that of the useless.
    wheels: Box<[RankQueue]>,
    /// Of a policy with several queues, the block of each that goes next; 0: none yet. It was popped, and is still filed.
    fronts: Box<[CachePadded<AtomicU64>]>,
}

/// A rank queue for a pool of so many blocks; in a model a small one.
fn queue(blocks: usize) -> RankQueue {
    if cfg!(kvpool_loom) { RankQueue::with_digits(1, 3) } else { RankQueue::new(blocks) }
}

/// A front that holds a block.
const fn front_of(id: BlockId) -> u64 {
    id.0 as u64 + 1
}

/// The links of one rank queue: to it, a block whose place is in another queue is due at once, so that it leaves.
struct LinksOf<'a> {
    rows: &'a Rows<RowBucket>,
    queue: usize,
}

impl Links for LinksOf<'_> {
    fn next(&self, id: BlockId) -> &AtomicU32 {
        &row(self.rows, id).next
    }

    fn rank(&self, id: BlockId) -> u64 {
        let row = row(self.rows, id);
        if row.queue() == self.queue { row.rank.load(Relaxed) } else { 0 }
    }
}

/// The row of a block of this pool.
#[inline]
pub(super) fn row(rows: &Rows<RowBucket>, id: BlockId) -> &Row {
    let (bucket, row) = rows.locate(id.index());
    &bucket.0[row]
}

impl Queues {
    pub(super) fn new(policy_queues: usize, blocks: usize) -> Self {
        Self {
            wheels: (0..=policy_queues).map(|_| queue(blocks)).collect(),
            fronts: (0..policy_queues).map(|_| CachePadded::new(AtomicU64::new(0))).collect(),
        }
    }

    /// The queue of blocks that are of no use: they go before all others.
    pub(super) fn useless(&self) -> usize {
        self.wheels.len() - 1
    }

    /// Files blocks whose places are in their rows, those in one queue together, unless they are filed by an older entry.
    pub(super) fn file(&self, rows: &Rows<RowBucket>, ids: impl IntoIterator<Item = BlockId>) {
        let mut together = SmallVec::<[BlockId; FILED]>::new();
        let mut queue = 0;
        for id in ids {
            let row = row(rows, id);
            // Release: the word and the place are seen by who takes the entry. Acquire: goes on with the order.
            if row.filed.swap(true, AcqRel) && !cfg!(kvpool_mutant = "filed_twice") {
                continue;
            }
            let to = row.queue();
            if to != queue && !together.is_empty() {
                self.push(rows, queue, &together);
                together.clear();
            }
            queue = to;
            together.push(id);
        }
        if !together.is_empty() {
            self.push(rows, queue, &together);
        }
    }

    fn push(&self, rows: &Rows<RowBucket>, queue: usize, ids: &[BlockId]) {
        self.wheels[queue].push_all(&LinksOf { rows, queue }, ids);
    }

    /// Takes the entry of a block that is about the next to go, by the policy, and says of which queue: the block may be
    /// owned, evictable or free. Of several queues of a policy, those with a bit in `spared` are left alone. `None`: there is
    /// none, but in other threads' hands.
    pub(super) fn take(
        &self,
        rows: &Rows<RowBucket>,
        policy: &dyn Policy,
        spared: u32,
        now: impl Fn() -> Millis,
    ) -> Option<(usize, BlockId)> {
        loop {
            let useless = self.useless();
            let popped = self.wheels[useless].pop(&LinksOf { rows, queue: useless });
            let next = match popped {
                Some(id) => Some((useless, id)),
                None if useless == 1 => self.wheels[0].pop(&LinksOf { rows, queue: 0 }).map(|id| (0, id)),
                None => self.take_front(rows, policy, spared, &now),
            };
            let Some((queue, id)) = next else {
                // The hints may be wrong where a thread is stopped. What is spared is there, and is not to be found.
                if spared == 0 && self.look() {
                    continue;
                }
                return None;
            };
            let row = row(rows, id);
            row.filed.swap(false, take_order());
            if row.queue() == queue {
                return Some((queue, id));
            }
            self.file(rows, [id]);
        }
    }

    /// Whether there is something to be taken after all, that a thread hides which is stopped between two steps. For who was
    /// told that there is nothing, and has no other way.
    #[cold]
    pub(super) fn look(&self) -> bool {
        let found = self.wheels.iter().filter(|queue| queue.look()).count();
        found > 0
    }

    /// The front that the policy gives up.
    fn take_front(
        &self,
        rows: &Rows<RowBucket>,
        policy: &dyn Policy,
        spared: u32,
        now: impl Fn() -> Millis,
    ) -> Option<(usize, BlockId)> {
        let is_spared = |queue: usize| spared >> queue & 1 == 1;
        loop {
            let fronts: SmallVec<[Option<BlockId>; QUEUES_MAX]> = (0..self.useless())
                .map(|queue| if is_spared(queue) { None } else { self.front(rows, queue) })
                .collect();
            let head = |id: &BlockId| {
                let row = row(rows, *id);
                Head { rank: row.rank.load(Relaxed), state: row.state.load(Relaxed) }
            };
            let heads: SmallVec<[Option<Head>; QUEUES_MAX]> =
                fronts.iter().map(|front| front.as_ref().map(head)).collect();
            // A policy that names no queue, or an empty one, gets the first that is not.
            let named = asked(|| policy.victim(&heads, now()))
                .flatten()
                .filter(|&queue| fronts.get(queue).is_some_and(Option::is_some));
            let queue = named.or_else(|| fronts.iter().position(Option::is_some))?;
            let Some(id) = fronts[queue] else { continue };
            if self.clear_front(queue, id) {
                return Some((queue, id));
            }
        }
    }

    /// The block of a queue that goes next.
    fn front(&self, rows: &Rows<RowBucket>, queue: usize) -> Option<BlockId> {
        let links = LinksOf { rows, queue };
        loop {
            // Acquire: pairs with the Release below, for the row.
            let front = self.fronts[queue].load(Acquire);
            if front == 0 {
                let id = self.wheels[queue].pop(&links)?;
                // Release: the row is as who popped it saw it. Acquire: as above.
                if self.fronts[queue].compare_exchange(0, front_of(id), AcqRel, Relaxed).is_err() {
                    self.wheels[queue].push(&links, id);
                }
                continue;
            }
            let id = BlockId(front as u32 - 1);
            if row(rows, id).queue() != queue {
                // Reused and released since it came to the front, and its place is elsewhere by now: a policy that judges
                // this queue by it would spare all others in it.
                if self.clear_front(queue, id) {
                    // As in `take`.
                    row(rows, id).filed.swap(false, take_order());
                    self.file(rows, [id]);
                }
                continue;
            }
            // Reused and released since it came to the front: others may go before it.
            let may_be_late = self.wheels[queue].head().is_some_and(|head| head < links.rank(id));
            if !may_be_late {
                return Some(id);
            }
            let Some(other) = self.wheels[queue].pop(&links) else { return Some(id) };
            // The rank queue's head is where a slot begins, which may be long before the first block in it: by the ranks
            // themselves, or two blocks would change places for ever. Reached by `a_front_gives_way_to_smaller_ranks_alone`.
            let is_late = links.rank(other) < links.rank(id);
            // Acquire and Release: as in `clear_front`, and as above.
            let to = front_of(other);
            if is_late && self.fronts[queue].compare_exchange(front, to, AcqRel, Relaxed).is_ok() {
                self.wheels[queue].push(&links, id);
                return Some(other);
            }
            self.wheels[queue].push(&links, other);
            if !is_late {
                return Some(id);
            }
        }
    }

    /// Takes a block from a front, if it is still there.
    fn clear_front(&self, queue: usize, id: BlockId) -> bool {
        // Acquire: as in `front`. Release: goes on with the order.
        self.fronts[queue].compare_exchange(front_of(id), 0, AcqRel, Relaxed).is_ok()
    }
}
