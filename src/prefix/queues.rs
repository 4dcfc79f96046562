//! The queues of evictable blocks: one per class of the policy, one for useless blocks and, in a
//! frame pool, one for blocks that are evicted [first](super::evict_first).
//!
//! # Entries
//!
//! Blocks that were released together are mostly evicted together: the end of a sequence first. So
//! a queue holds *entries*. An entry is a list of up to [`ENTRY_MAX`] blocks, linked by `below`,
//! whose ranks are consecutive or equal; the [rank queue](super::queue) orders entries by the rank
//! of their first block. A release of hundreds of blocks files a few entries, and an eviction walks
//! along an entry. No rank lies between those of an entry, so the order is that of the blocks.
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
//! A block is in at most one entry, which may be outdated; in a frame pool, in at most one more, of
//! the blocks that are evicted first. `enqueued` in its row says that it is in one, and its links
//! have the rank under which it was enqueued:
//!
//! ```text
//! release   word: evictable;  row: place;   enqueued: swap true,  was false  =>  link into a new entry, push
//! take      pop an entry; for each of its blocks that is used up:
//!           enqueued: swap false;  look at the word and the row:
//!           owned                                =>  drop: the next release finds `enqueued` false, and enqueues it
//!           evictable, but its place has changed =>  enqueued: swap true, was false  =>  push it alone
//!           evictable                            =>  the caller evicts it, or puts it back
//!           push the rest of the entry, whose blocks are still enqueued
//! ```
//!
//! # Theorem
//!
//! An evictable block that no thread holds is in an entry of a queue. The swaps of one flag are
//! totally ordered. If a release finds `enqueued` true, the next take in that order reads from that
//! swap or a later one, and so sees the word evictable, or changed again since; then it does not
//! drop the block. If the release finds it false, it files the block.
//!
//! The links of a block change only in the hands of the thread that changed `enqueued` from false
//! to true, or that popped its entry; `below` is read before `enqueued` becomes false.
//!
//! A thread holds the blocks that it is about to file, and those of the entry that it popped. A
//! thread stopped there withholds these, at most [`ENTRY_MAX`] or those of one release, from the
//! queues; only the walk at the end of the allocation ladder finds them.

use smallvec::SmallVec;

use crate::block::GrowTable;
use crate::ids::BlockId;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, CachePadded, Ordering, Ordering::*, prefetch};

use super::evict_first::EvictFirst;
use super::policy::{Head, Millis, Policy, QUEUES_MAX, asked};
use super::queue::{Links, RankQueue};
use super::row::{QueueLinks, Row, RowPart};

/// Maximum number of blocks of an entry: what a stopped thread may withhold.
pub(super) const ENTRY_MAX: usize = if cfg!(kvpool_loom) { 2 } else { 64 };

/// Distance in blocks at which a walk along an entry prefetches links.
const LINKS_AHEAD: usize = 48;

/// Number of entries that are pushed together.
const PUSHED: usize = 16;

/// An entry in the hands of a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    /// The queue from which it was taken.
    pub queue: usize,
    /// Its first block; the others follow by [`Queues::below`].
    pub first: BlockId,
}

/// A block of an entry that this thread holds.
pub(super) struct Enqueued<'a> {
    pub row: &'a Row,
    flag: &'a AtomicBool,
    /// Queue and rank under which it was enqueued.
    place: (usize, u64),
}

impl Enqueued<'_> {
    /// Returns the rank under which the block was enqueued.
    #[inline]
    pub(super) fn rank(&self) -> u64 {
        self.place.1
    }

    /// Returns whether the block has got another place since it was enqueued.
    #[inline]
    pub(super) fn is_outdated(&self) -> bool {
        self.row.place() != self.place
    }

    /// Takes the block out of the entry, whose other blocks the caller keeps. Returns whether its
    /// place is still that of the entry. The caller reads the block's word afterwards.
    #[inline]
    pub(super) fn dequeue(&self) -> bool {
        self.flag.swap(false, TAKE_ORDER);
        !self.is_outdated()
    }
}

/// The ordering of a take. Acquire: the taker of an entry sees what the release that enqueued the
/// block, or found it enqueued, did before. Release: extends the order of swaps.
const TAKE_ORDER: Ordering = AcqRel;

/// The queues of evictable blocks of one cache.
pub(super) struct Queues {
    /// One per queue of the policy, then the queue of useless blocks, then, if there is one, that of
    /// the blocks that are evicted first.
    wheels: Box<[RankQueue]>,
    evict_first: Option<EvictFirst>,
    /// For a policy with several queues: the next block of each, or 0. It was popped, and still
    /// counts as enqueued.
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

/// Links of the rank queues.
struct LinksOf<'a>(&'a GrowTable<RowPart>);

impl Links for LinksOf<'_> {
    fn next(&self, id: BlockId) -> &AtomicU32 {
        &links(self.0, id).next
    }

    fn rank(&self, id: BlockId) -> u64 {
        links(self.0, id).rank.load(Relaxed)
    }
}

/// Returns the row of a block of this pool.
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

/// Enqueues blocks one by one: those with consecutive or equal ranks of a queue as one entry. Dropping
/// it pushes the last entries.
pub(super) struct Enqueueing<'a> {
    queues: &'a Queues,
    rows: &'a GrowTable<RowPart>,
    queue: usize,
    /// First blocks of entries of one queue, to be pushed.
    entries: SmallVec<[BlockId; PUSHED]>,
    /// Links of the last block of the newest entry, its rank, and the number of blocks in that entry.
    last: Option<&'a QueueLinks>,
    rank: u64,
    len: usize,
}

impl<'a> Enqueueing<'a> {
    /// Enqueues a block by the place in its row, unless it is enqueued.
    #[inline]
    pub(super) fn add(&mut self, id: BlockId) {
        let (part, at) = self.rows.locate(id.index());
        self.add_row(id, &part.rows[at], &part.links[at]);
    }

    /// As [`add`](Self::add), with the block's row and links.
    #[inline]
    pub(super) fn add_row(&mut self, id: BlockId, row: &'a Row, links: &'a QueueLinks) {
        // Read once: the flag and the links are those of this queue. A later place makes the entry
        // outdated.
        let (queue, rank) = row.place();
        let (flag, mine) = match self.queues.evict_first_of(queue) {
            None => (&row.enqueued, links),
            Some(evict_first) => evict_first.of(id),
        };
        // Release: the taker of the entry sees the word and the place. Acquire: extends the order of
        // swaps.
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

    /// Pushes the entries, which are complete.
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
    pub(super) fn new(policy_queues: usize, blocks: usize) -> Self {
        Self {
            wheels: (0..=policy_queues).map(|_| queue(blocks)).collect(),
            evict_first: None,
            fronts: (0..policy_queues).map(|_| CachePadded::new(AtomicU64::new(0))).collect(),
        }
    }

    /// As [`new`](Self::new), with a queue of blocks that are evicted first, for a pool of `rows`
    /// blocks that may grow to `blocks`.
    pub(super) fn with_evict_first(policy_queues: usize, rows: usize, blocks: usize) -> Self {
        let queues = Self::new(policy_queues, blocks);
        let wheels = queues.wheels.into_iter().chain([queue(blocks)]).collect();
        Self { wheels, evict_first: Some(EvictFirst::new(rows)), ..queues }
    }

    /// Adds links for a pool of `rows` blocks.
    pub(super) fn grow(&self, rows: usize) {
        self.evict_first.iter().for_each(|evict_first| evict_first.grow(rows));
    }

    /// Returns the queue of useless blocks, which is served before all others.
    #[inline]
    pub(super) fn useless(&self) -> usize {
        self.fronts.len()
    }

    /// Returns the queue of the blocks that are evicted first, after useless ones.
    pub(super) fn evict_first(&self) -> Option<usize> {
        self.evict_first.as_ref().map(|_| self.useless() + 1)
    }

    /// Returns the links of a queue if it is that of the blocks that are evicted first.
    #[inline]
    fn evict_first_of(&self, queue: usize) -> Option<&EvictFirst> {
        self.evict_first.as_ref().filter(|_| queue > self.useless())
    }

    /// Begins to file blocks.
    pub(super) fn filing<'a>(&'a self, rows: &'a GrowTable<RowPart>) -> Enqueueing<'a> {
        Enqueueing { queues: self, rows, queue: 0, entries: SmallVec::new(), last: None, rank: 0, len: 0 }
    }

    /// Enqueues blocks by the places in their rows, unless they are enqueued.
    pub(super) fn enqueue(&self, rows: &GrowTable<RowPart>, ids: impl IntoIterator<Item = BlockId>) {
        let mut filing = self.filing(rows);
        ids.into_iter().for_each(|id| filing.add(id));
    }

    /// Takes the entry of the block that the policy evicts next, or of one at the front of its
    /// queue that was not noted in the current `era`.
    ///
    /// Its blocks are enqueued until [`dequeue`](Enqueued::dequeue); each may be owned, evictable
    /// or free. The caller [puts back](Self::put_back) the rest. Queues with a bit in
    /// `skipped_queues` are skipped, except for the only one of a policy. Returns `None` if
    /// all other entries are held by other threads.
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
            // The hints may be wrong where a thread is stopped. Reserved for growth queues may be
            // nonempty without being searched.
            if next.is_some() || skipped_queues != 0 || !self.look() {
                return next;
            }
        }
    }

    /// Returns the block behind an enqueued block of the caller's entry of a queue.
    #[inline]
    pub(super) fn below(&self, rows: &GrowTable<RowPart>, queue: usize, id: BlockId) -> Option<BlockId> {
        if let Some(evict_first) = self.evict_first_of(queue) {
            return evict_first.of(id).1.below();
        }
        let (part, at) = rows.locate(id.index());
        // Most entries are blocks in descending order, of which four share a line.
        if let Some(links) = part.links.get(at.wrapping_sub(LINKS_AHEAD)) {
            prefetch(links);
        }
        part.links[at].below()
    }

    /// Returns a block of the caller's entry.
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

    /// Puts an entry back, or the rest of one: its blocks from `first` on.
    pub(super) fn put_back(&self, rows: &GrowTable<RowPart>, entry: Entry) {
        let wheel = &self.wheels[entry.queue];
        match self.evict_first_of(entry.queue) {
            None => wheel.push(&LinksOf(rows), entry.first),
            Some(evict_first) => wheel.push(evict_first, entry.first),
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

    /// Takes a front of another era, or the one that the policy selects.
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
            // If the policy names no queue, or an empty one, take the first nonempty queue.
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

    /// Returns the next block of a queue.
    fn front(&self, rows: &GrowTable<RowPart>, queue: usize) -> Option<BlockId> {
        let links = LinksOf(rows);
        loop {
            // Acquire: pairs with the Release below, for the row. The exchange that takes the front
            // acquires by itself, as the block may have come back here; the policy judges by these
            // loads.
            let front = self.fronts[queue].load(Acquire);
            if front == 0 {
                let id = self.wheels[queue].pop(&links)?;
                // Release: publishes the row and the entry as the popping thread saw them. Acquire: as
                // above.
                if self.fronts[queue].compare_exchange(0, front_of(id), AcqRel, Relaxed).is_err() {
                    self.wheels[queue].push(&links, id);
                }
                continue;
            }
            let id = BlockId(front as u32 - 1);
            let enqueued = self.enqueued(rows, queue, id);
            if enqueued.is_outdated() {
                // Reused and released since it was enqueued: a policy that judged this queue by it
                // would spare all other blocks in it.
                if self.clear_front(queue, id) {
                    let rest = self.below(rows, queue, id);
                    enqueued.dequeue();
                    self.enqueue(rows, [id]);
                    rest.into_iter().for_each(|first| self.put_back(rows, Entry { queue, first }));
                }
                continue;
            }
            // Enqueued since it reached the front: others may precede it.
            let may_be_late = self.wheels[queue].head().is_some_and(|head| head < links.rank(id));
            if !may_be_late {
                return Some(id);
            }
            let Some(other) = self.wheels[queue].pop(&links) else { return Some(id) };
            // The rank queue's head is the beginning of a slot, which may be far below the first
            // block in it. Compare the ranks themselves, or two blocks would swap places forever.
            // Reached by `a_front_gives_way_to_smaller_ranks_alone`.
            let is_late = links.rank(other) < links.rank(id);
            // Acquire and Release: as in `clear_front`, for the entry that goes back to the rank queue,
            // and as above.
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
        // Acquire: pairs with the Release in `front`, for the entry, also if the block was taken and
        // enqueued again since. Release: extends the order of swaps. Models: `queues`.
        self.fronts[queue].compare_exchange(front_of(id), 0, AcqRel, Relaxed).is_ok()
    }
}
