//! The queues of evictable blocks: one per class of the policy, one for useless blocks and, in some
//! caches, one for [evict-first](super::evict_first) blocks.
//!
//! Blocks that are released together are mostly evicted together, the end of a sequence first. So a
//! queue holds *entries*: lists of up to [`ENTRY_MAX`] blocks, linked by `below`, with consecutive
//! or equal ranks. The [rank queue](super::queue) orders entries by the rank of their first block.
//! No rank lies between those of an entry, so the order is that of the blocks.
//!
//! ```text
//! rank queue:   7 -> 100 -> 260
//!               |     |      |
//! entries:      7    100    260
//!               8    101
//!                    102
//! ```
//!
//! # Enqueueing
//!
//! A block is in at most one entry, which may be outdated, and in at most one more of evict-first
//! blocks. `enqueued` in its row is set while it is in one, and its links have the
//! rank under which it was enqueued:
//!
//! ```text
//! release   word: evictable;  row: place;   enqueued: swap true,  was false  =>  link into a new entry, push
//! take      pop an entry; for each of its blocks that is used up:
//!           in its place, word: evictable -> free  =>  evicted;  enqueued: store false
//!           else  enqueued: swap false;  look at the word and the row:
//!           owned                                =>  drop: the next release finds `enqueued` false, and enqueues it
//!           evictable, but its place has changed =>  enqueued: swap true, was false  =>  push it alone;
//!                                                    or drop it, if its place is in a run
//!           evictable                            =>  the caller evicts it, or puts it back
//!           push the rest of the entry, whose blocks are still enqueued
//! ```
//!
//! # Theorem
//!
//! An evictable block that no thread holds is in an entry of a queue, or in a
//! [run](super::retention). The swaps of one flag are
//! totally ordered. If a release finds `enqueued` true, the next take in that order reads from that
//! swap or a later one, so it sees the word evictable, or changed again since, and does not drop
//! the block. If the release finds it false, it enqueues the block.
//!
//! The store comes between an eviction and the reuse of the frame, so it is ordered with all swaps
//! but that of the release whose block was evicted. If that release swaps before the store, it
//! enqueues nothing; if after it, an entry is left whose block is free: it is dropped, or found
//! outdated, like that of any block that was evicted out of order.
//!
//! Only the thread that set `enqueued`, or popped the entry, changes a block's links, and it reads
//! `below` before it clears `enqueued`. A thread holds the blocks that it is about to enqueue, and
//! those of the entry that it popped. If it stops, it withholds these, at most [`ENTRY_MAX`] or
//! those of one release; only the walk at the end of the allocation ladder finds them.

use smallvec::SmallVec;

use crate::block::GrowTable;
use crate::ids::BlockId;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, CachePadded, Ordering, Ordering::*, prefetch};

use super::evict_first::EvictFirst;
use super::policy::{Head, Millis, Policy, QUEUES_MAX, asked};
use super::queue::{Links, RankQueue};
use super::retention::{BESIDE_BIT, BesideOrder, QUEUE};
use super::row::{QueueLinks, Row, RowPart};

pub(super) const ENTRY_MAX: usize = if cfg!(kvpool_loom) { 2 } else { 64 };

/// Distance in blocks at which a walk along an entry prefetches links.
const LINKS_AHEAD: usize = 48;

const PUSHED: usize = 16;

/// An entry that this thread holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub queue: usize,
    pub first: BlockId,
}

pub(super) struct Enqueued<'a> {
    pub row: &'a Row,
    flag: &'a AtomicBool,
    /// Queue and rank under which it was enqueued.
    place: (usize, u64),
}

impl Enqueued<'_> {
    #[inline]
    pub(super) fn rank(&self) -> u64 {
        self.place.1
    }

    #[inline]
    pub(super) fn is_outdated(&self) -> bool {
        self.row.place() != self.place
    }

    /// Removes a block that the caller has evicted from the entry: no release of its own is left
    /// to find the flag, and the caller has not passed its frame on.
    #[inline]
    pub(super) fn clear(&self) {
        // Release: who sets the flag next writes links that were read before.
        self.flag.store(false, Release);
    }

    /// Removes the block from the entry, and returns whether its place is still that of the entry.
    /// The caller keeps the other blocks, and reads this block's word afterwards.
    #[inline]
    pub(super) fn dequeue(&self) -> bool {
        self.flag.swap(false, TAKE_ORDER);
        !self.is_outdated()
    }
}

/// The ordering of a take. Acquire: the taker sees what the release that enqueued the block, or
/// found it enqueued, did before. Release: extends the order of swaps.
const TAKE_ORDER: Ordering = AcqRel;

pub(super) struct Queues {
    /// By queue of the policy; then useless blocks; then evict-first blocks, if any.
    wheels: Box<[RankQueue]>,
    evict_first: Option<EvictFirst>,
    pub(super) beside: BesideOrder,
    /// With several policy queues: the next block of each, plus one, or 0. Counts as enqueued.
    fronts: Box<[CachePadded<AtomicU64>]>,
}

fn queue(blocks: usize) -> RankQueue {
    if cfg!(kvpool_loom) { RankQueue::with_digits(1, 3) } else { RankQueue::new(blocks) }
}

const fn front_of(id: BlockId) -> u64 {
    id.0 as u64 + 1
}

struct LinksOf<'a>(&'a GrowTable<RowPart>);

impl Links for LinksOf<'_> {
    fn next(&self, id: BlockId) -> &AtomicU32 {
        &links(self.0, id).next
    }

    fn rank(&self, id: BlockId) -> u64 {
        links(self.0, id).rank.load(Relaxed)
    }
}

#[inline]
pub(super) fn row(rows: &GrowTable<RowPart>, id: BlockId) -> &Row {
    let (part, row) = rows.locate(id.index());
    &part.rows[row]
}

#[inline]
fn links(rows: &GrowTable<RowPart>, id: BlockId) -> &QueueLinks {
    let (part, row) = rows.locate(id.index());
    &part.links[row]
}

/// Enqueues blocks; consecutive ones with consecutive or equal ranks in a queue form one entry.
/// Dropping it pushes the last entries.
pub(super) struct Enqueueing<'a> {
    queues: &'a Queues,
    rows: &'a GrowTable<RowPart>,
    queue: usize,
    entries: SmallVec<[BlockId; PUSHED]>,
    /// Links and rank of the last block of the newest entry, and the length of that entry.
    last: Option<&'a QueueLinks>,
    rank: u64,
    len: usize,
}

impl<'a> Enqueueing<'a> {
    /// Enqueues a block by the place in its row, unless it is enqueued, or in a
    /// [run](super::retention).
    #[inline]
    pub(super) fn add(&mut self, id: BlockId) {
        let (part, at) = self.rows.locate(id.index());
        let row = &part.rows[at];
        // Read once: flag and links belong to this queue. A later place makes the entry outdated.
        let place = row.place();
        if place.1 & BESIDE_BIT != 0 {
            // Its run has it, whatever the queue is.
            return;
        }
        if place.0 < QUEUE {
            self.add_placed(id, row, &part.links[at], place);
        } else {
            // A release stored its rank beside a hint's queue.
            row.set_place(0, place.1, 0);
            self.add_placed(id, row, &part.links[at], (0, place.1));
        }
    }

    /// Like [`add`](Self::add), for a block whose row this thread has placed.
    #[inline]
    pub(super) fn add_placed(
        &mut self,
        id: BlockId,
        row: &'a Row,
        links: &'a QueueLinks,
        (queue, rank): (usize, u64),
    ) {
        let (flag, mine) = match self.queues.evict_first_of(queue) {
            None => (&row.enqueued, links),
            Some(evict_first) => evict_first.of(id),
        };
        // Release: the taker sees the word and the place. Acquire: extends the order of swaps.
        if flag.swap(true, AcqRel) {
            return;
        }
        mine.rank.store(rank, Relaxed);
        mine.set_below(None);
        let follows = rank >= self.rank && rank - self.rank <= 1;
        match self.last {
            Some(last) if follows && queue == self.queue && self.len < ENTRY_MAX => {
                last.set_below(Some(id));
                self.len += 1;
            }
            _ => self.begin_entry(queue, id),
        }
        (self.last, self.rank) = (Some(mine), rank);
    }

    fn begin_entry(&mut self, queue: usize, id: BlockId) {
        if queue != self.queue || self.entries.len() == PUSHED {
            self.push();
        }
        self.queue = queue;
        self.entries.push(id);
        self.len = 1;
    }

    fn push(&mut self) {
        if !self.entries.is_empty() {
            let wheel = &self.queues.wheels[self.queue];
            match self.queues.evict_first_of(self.queue) {
                None => wheel.push_all(&LinksOf(self.rows), &self.entries),
                Some(evict_first) => wheel.push_all(evict_first, &self.entries),
            }
            self.entries.clear();
        }
    }
}

impl Drop for Enqueueing<'_> {
    fn drop(&mut self) {
        self.push();
    }
}

impl Queues {
    /// `built`: the time of the cache's clock.
    pub(super) fn new(policy_queues: usize, blocks: usize, built: Millis) -> Self {
        Self {
            wheels: (0..=policy_queues).map(|_| queue(blocks)).collect(),
            evict_first: None,
            beside: BesideOrder::new(built),
            fronts: (0..policy_queues).map(|_| CachePadded::new(AtomicU64::new(0))).collect(),
        }
    }

    /// Like [`new`](Self::new), with an evict-first queue for `rows` blocks, up to `blocks`.
    pub(super) fn with_evict_first(policy_queues: usize, rows: usize, blocks: usize, built: Millis) -> Self {
        let queues = Self::new(policy_queues, blocks, built);
        let wheels = queues.wheels.into_iter().chain([queue(blocks)]).collect();
        Self { wheels, evict_first: Some(EvictFirst::new(rows)), ..queues }
    }

    pub(super) fn grow(&self, rows: usize) {
        self.evict_first.iter().for_each(|evict_first| evict_first.grow(rows));
    }

    /// Returns the queue of useless blocks, which is served first.
    #[inline]
    pub(super) fn useless(&self) -> usize {
        self.fronts.len()
    }

    /// Returns the queue of evict-first blocks, which is served second.
    pub(super) fn evict_first(&self) -> Option<usize> {
        self.evict_first.as_ref().map(|_| self.useless() + 1)
    }

    #[inline]
    fn evict_first_of(&self, queue: usize) -> Option<&EvictFirst> {
        self.evict_first.as_ref().filter(|_| queue > self.useless())
    }

    pub(super) fn filing<'a>(&'a self, rows: &'a GrowTable<RowPart>) -> Enqueueing<'a> {
        Enqueueing { queues: self, rows, queue: 0, entries: SmallVec::new(), last: None, rank: 0, len: 0 }
    }

    pub(super) fn enqueue(&self, rows: &GrowTable<RowPart>, ids: impl IntoIterator<Item = BlockId>) {
        let mut filing = self.filing(rows);
        ids.into_iter().for_each(|id| filing.add(id));
    }

    /// Takes the entry that the policy evicts next, or one whose first block is not of this `era`.
    /// Its blocks count as enqueued until [`dequeue`](Enqueued::dequeue); each may be owned,
    /// evictable or free. The caller [puts back](Self::put_back) the rest. Skips queues with a bit
    /// in `skipped_queues`, except for a policy's only one. `None`: other threads hold the others.
    pub(super) fn take(
        &self,
        rows: &GrowTable<RowPart>,
        policy: &dyn Policy,
        skipped_queues: u32,
        era: u64,
        now: impl Fn() -> Millis,
    ) -> Option<Entry> {
        let is_searched = |&queue: &usize| skipped_queues >> queue & 1 == 0;
        loop {
            let useless = self.useless();
            let pop = |queue: usize| {
                let first = self.wheels[queue].pop(&LinksOf(rows))?;
                Some(Entry { queue, first })
            };
            let pop_evict_first = || {
                let (queue, evict_first) =
                    (self.evict_first().filter(is_searched)?, self.evict_first.as_ref()?);
                Some(Entry { queue, first: self.wheels[queue].pop(evict_first)? })
            };
            let next = match Some(useless).filter(is_searched).and_then(pop).or_else(pop_evict_first) {
                Some(entry) => Some(entry),
                None if useless == 1 => pop(0),
                None => self.take_front(rows, policy, skipped_queues, era, &now),
            };
            // Stopped threads may leave wrong hints. Skipped queues may be nonempty.
            if next.is_some() || skipped_queues != 0 || !self.look() {
                return next;
            }
        }
    }

    #[inline]
    pub(super) fn below(&self, rows: &GrowTable<RowPart>, queue: usize, id: BlockId) -> Option<BlockId> {
        if let Some(evict_first) = self.evict_first_of(queue) {
            return evict_first.of(id).1.below();
        }
        let (part, at) = rows.locate(id.index());
        // Most entries are blocks in descending order, four to a cache line.
        if let Some(links) = part.links.get(at.wrapping_sub(LINKS_AHEAD)) {
            prefetch(links);
        }
        part.links[at].below()
    }

    #[inline]
    pub(super) fn enqueued<'a>(
        &'a self,
        rows: &'a GrowTable<RowPart>,
        queue: usize,
        id: BlockId,
    ) -> Enqueued<'a> {
        let (part, at) = rows.locate(id.index());
        let row = &part.rows[at];
        let (flag, links) = match self.evict_first_of(queue) {
            None => (&row.enqueued, &part.links[at]),
            Some(evict_first) => evict_first.of(id),
        };
        Enqueued { row, flag, place: (queue, links.rank.load(Relaxed)) }
    }

    /// Puts back an entry, or its blocks from `first` on.
    pub(super) fn put_back(&self, rows: &GrowTable<RowPart>, entry: Entry) {
        let wheel = &self.wheels[entry.queue];
        match self.evict_first_of(entry.queue) {
            None => wheel.push(&LinksOf(rows), entry.first),
            Some(evict_first) => wheel.push(evict_first, entry.first),
        }
    }

    /// Returns whether there is an entry, perhaps hidden by a stopped thread. For callers that
    /// found nothing and have no alternative.
    #[cold]
    pub(super) fn look(&self) -> bool {
        let found = self.wheels.iter().filter(|queue| queue.look()).count();
        found > 0
    }

    fn take_front(
        &self,
        rows: &GrowTable<RowPart>,
        policy: &dyn Policy,
        skipped_queues: u32,
        era: u64,
        now: impl Fn() -> Millis,
    ) -> Option<Entry> {
        let is_skipped = |queue: usize| skipped_queues >> queue & 1 == 1;
        loop {
            let fronts: SmallVec<[Option<BlockId>; QUEUES_MAX]> = (0..self.useless())
                .map(|queue| if is_skipped(queue) { None } else { self.front(rows, queue) })
                .collect();
            let head = |id: &BlockId| {
                let row = row(rows, *id);
                Head { rank: row.rank.load(Relaxed), state: row.state.load(Relaxed) }
            };
            let heads: SmallVec<[Option<Head>; QUEUES_MAX]> =
                fronts.iter().map(|front| front.as_ref().map(head)).collect();
            let is_stale = |front: &Option<BlockId>| front.is_some_and(|id| !row(rows, id).is_of(era));
            // If the policy names no queue, or an empty one: the first nonempty queue.
            let named = || {
                asked(|| policy.victim(&heads, now()))
                    .flatten()
                    .filter(|&queue| fronts.get(queue).is_some_and(Option::is_some))
            };
            let queue = fronts
                .iter()
                .position(is_stale)
                .or_else(named)
                .or_else(|| fronts.iter().position(Option::is_some))?;
            let Some(id) = fronts[queue] else { continue };
            if self.clear_front(queue, id) {
                return Some(Entry { queue, first: id });
            }
        }
    }

    fn front(&self, rows: &GrowTable<RowPart>, queue: usize) -> Option<BlockId> {
        let links = LinksOf(rows);
        loop {
            // Acquire: pairs with the Release below, for the row by which the policy judges. The
            // exchange that takes the front also acquires: the block may have returned here.
            let front = self.fronts[queue].load(Acquire);
            if front == 0 {
                let id = self.wheels[queue].pop(&links)?;
                // Release: publishes the row and the entry as popped. Acquire: as above.
                if self.fronts[queue].compare_exchange(0, front_of(id), AcqRel, Relaxed).is_err() {
                    self.wheels[queue].push(&links, id);
                }
                continue;
            }
            let id = BlockId(front as u32 - 1);
            let enqueued = self.enqueued(rows, queue, id);
            if enqueued.is_outdated() {
                // Reused and released since: its new place would make the policy skip the queue.
                if self.clear_front(queue, id) {
                    let rest = self.below(rows, queue, id);
                    enqueued.dequeue();
                    self.enqueue(rows, [id]);
                    rest.into_iter().for_each(|first| self.put_back(rows, Entry { queue, first }));
                }
                continue;
            }
            // Blocks that were enqueued since this one reached the front may precede it.
            let may_be_late = self.wheels[queue].head().is_some_and(|head| head < links.rank(id));
            if !may_be_late {
                return Some(id);
            }
            let Some(other) = self.wheels[queue].pop(&links) else { return Some(id) };
            // The rank queue's head is the start of a slot, perhaps far below the first block in
            // it. Compare the ranks themselves, or two blocks would swap places forever. Reached by
            // `a_front_gives_way_to_smaller_ranks_alone`.
            let is_late = links.rank(other) < links.rank(id);
            // Acquire and Release: as in `clear_front`, for the re-pushed entry, and as above.
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

    fn clear_front(&self, queue: usize, id: BlockId) -> bool {
        // Acquire: pairs with the Release in `front`, for the entry, also if the block was taken
        // and enqueued again since. Release: extends the order of swaps. Models: `queues`.
        self.fronts[queue].compare_exchange(front_of(id), 0, AcqRel, Relaxed).is_ok()
    }
}
