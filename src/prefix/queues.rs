//! The queues of evictable blocks: one per class of the policy, and one for useless blocks.
//!
//! A block has at most one entry, which may be outdated. `filed` in its row says that it has one:
//!
//! ```text
//! release   word: evictable;  row: place;   filed: swap true,  was false  =>  push
//! take      pop;                            filed: swap false;  look at the word:
//!           owned                                =>  drop the entry: the next release finds `filed` false, and pushes
//!           evictable, but its place has changed =>  filed: swap true, was false  =>  push there
//!           evictable                            =>  the caller evicts it, or puts it back
//! ```
//!
//! # Theorem
//!
//! An evictable block that no thread holds is in a queue. The swaps of one row are totally ordered.
//! If a release finds `filed` true, the next take in that order reads from that swap or a later
//! one, and so sees the word evictable, or changed again since; then it does not drop the entry. If
//! the release finds it false, it pushes.
//!
//! A thread holds a block that it is about to push, or has popped. A thread stopped there withholds
//! one block, or those of one release, from the queues; only the walk at the end of the allocation
//! ladder finds them.

use smallvec::SmallVec;

use crate::block::GrowTable;
use crate::ids::BlockId;
use crate::sync::{AtomicU32, AtomicU64, CachePadded, Ordering, Ordering::*};

use super::policy::{Head, Millis, Policy, QUEUES_MAX, asked};
use super::queue::{Links, RankQueue};
use super::row::{Row, RowPart};

/// Number of blocks that are filed together.
const FILED: usize = 64;

/// The ordering of a take. Acquire: the taker of an entry sees what the release that filed the
/// block, or found it filed, did before. Release: extends the order of swaps.
const TAKE_ORDER: Ordering = AcqRel;

/// The queues of evictable blocks of one cache.
pub(super) struct Queues {
    /// One per queue of the policy, then the queue of useless blocks.
    wheels: Box<[RankQueue]>,
    /// For a policy with several queues: the next block of each, or 0. It was popped, and still
    /// counts as filed.
    fronts: Box<[CachePadded<AtomicU64>]>,
}

/// Creates a rank queue for a pool of `blocks` blocks; a small one in a model.
fn queue(blocks: usize) -> RankQueue {
    if cfg!(kvpool_loom) { RankQueue::with_digits(1, 3) } else { RankQueue::new(blocks) }
}

/// Encodes a front that holds a block.
const fn front_of(id: BlockId) -> u64 {
    id.0 as u64 + 1
}

/// Links of one rank queue. A block whose place is in another queue has rank 0, so that it leaves
/// at once.
struct LinksOf<'a> {
    rows: &'a GrowTable<RowPart>,
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

/// Returns the row of a block of this pool.
#[inline]
pub(super) fn row(rows: &GrowTable<RowPart>, id: BlockId) -> &Row {
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

    /// Returns the queue of useless blocks, which is served before all others.
    pub(super) fn useless(&self) -> usize {
        self.wheels.len() - 1
    }

    /// Files blocks by the places in their rows, grouped by queue, unless they still have an entry.
    pub(super) fn file(&self, rows: &GrowTable<RowPart>, ids: impl IntoIterator<Item = BlockId>) {
        let mut together = SmallVec::<[BlockId; FILED]>::new();
        let mut queue = 0;
        for id in ids {
            let row = row(rows, id);
            // Release: the taker of the entry sees the word and the place. Acquire: extends the
            // order of swaps.
            if row.filed.swap(true, AcqRel) {
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

    fn push(&self, rows: &GrowTable<RowPart>, queue: usize, ids: &[BlockId]) {
        self.wheels[queue].push_all(&LinksOf { rows, queue }, ids);
    }

    /// Takes the entry of the block that the policy evicts next, and returns it with its queue.
    ///
    /// The block may be owned, evictable or free. Queues of the policy with a bit in `spared` are
    /// skipped. Returns `None` if all other entries are held by other threads.
    pub(super) fn take(
        &self,
        rows: &GrowTable<RowPart>,
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
                // The hints may be wrong where a thread is stopped. Spared queues may be nonempty
                // without being searched.
                if spared == 0 && self.look() {
                    continue;
                }
                return None;
            };
            let row = row(rows, id);
            row.filed.swap(false, TAKE_ORDER);
            if row.queue() == queue {
                return Some((queue, id));
            }
            self.file(rows, [id]);
        }
    }

    /// Returns whether there is an entry after all, hidden by a thread stopped between two steps.
    ///
    /// For callers that found nothing and have no alternative.
    #[cold]
    pub(super) fn look(&self) -> bool {
        let found = self.wheels.iter().filter(|queue| queue.look()).count();
        found > 0
    }

    /// Takes the front that the policy selects.
    fn take_front(
        &self,
        rows: &GrowTable<RowPart>,
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
            // If the policy names no queue, or an empty one, take the first nonempty queue.
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

    /// Returns the next block of a queue.
    fn front(&self, rows: &GrowTable<RowPart>, queue: usize) -> Option<BlockId> {
        let links = LinksOf { rows, queue };
        loop {
            // Acquire: pairs with the Release below, for the row.
            let front = self.fronts[queue].load(Acquire);
            if front == 0 {
                let id = self.wheels[queue].pop(&links)?;
                // Release: publishes the row as the popping thread saw it. Acquire: as above.
                if self.fronts[queue].compare_exchange(0, front_of(id), AcqRel, Relaxed).is_err() {
                    self.wheels[queue].push(&links, id);
                }
                continue;
            }
            let id = BlockId(front as u32 - 1);
            if row(rows, id).queue() != queue {
                // Reused and released since it reached the front, and its place is in another queue
                // now: a policy that judged this queue by it would spare all other blocks in it.
                if self.clear_front(queue, id) {
                    // As in `take`.
                    row(rows, id).filed.swap(false, TAKE_ORDER);
                    self.file(rows, [id]);
                }
                continue;
            }
            // Reused and released since it reached the front: others may precede it.
            let may_be_late = self.wheels[queue].head().is_some_and(|head| head < links.rank(id));
            if !may_be_late {
                return Some(id);
            }
            let Some(other) = self.wheels[queue].pop(&links) else { return Some(id) };
            // The rank queue's head is the beginning of a slot, which may be far below the first
            // block in it. Compare the ranks themselves, or two blocks would swap places forever.
            // Reached by `a_front_gives_way_to_smaller_ranks_alone`.
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

    /// Removes a block from a front, if it is still there.
    fn clear_front(&self, queue: usize, id: BlockId) -> bool {
        // Acquire: as in `front`. Release: extends the order of swaps.
        self.fronts[queue].compare_exchange(front_of(id), 0, AcqRel, Relaxed).is_ok()
    }
}
