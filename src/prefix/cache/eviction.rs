//! One eviction: blocks in the order of the policy, a few at a time.
//!
//! A block costs mostly cache misses on its word, row and index entry, and writes to shared lines.
//! So an eviction takes steps of a few blocks of one entry: it prefetches them, changes their
//! words, removes them from the index under one fence, counts them, and only then passes on their
//! frames, after which the rows may belong to the blocks' next contents.
//!
//! A block that a batch in flight may see keeps its place, as does the rest of its entry, released
//! with it. If it is the first of its entry, the others are not read: with several threads, most of
//! the queue may be such entries. A moving block is enqueued again alone. An eviction stops after
//! too many skips.

use smallvec::SmallVec;

use crate::block::{BlockWord, Core, EvictedFor, NotEvicted, Tenant};
use crate::ids::{BlockId, FrameId, Ticket};
use crate::sync::Ordering::Relaxed;

use super::super::policy::QUEUES_MAX;
use super::super::queues::{ENTRY_MAX, Enqueued, Entry, Queues};
use super::super::retention::{CLASSES, DEMOTED, PlacedRun, Taken};
use super::super::row::Row;
use super::super::stats::RETAINED;
use super::{PrefixCache, key_of};

/// Skipped entries that a batch may see, and moving blocks, after which an eviction gives up.
const SKIPPED_MAX: usize = if cfg!(kvpool_loom) { 2 } else { 32 };

/// Skips per queue of a policy with several queues, so that a queue of recently released blocks
/// cannot use up the budget. Useless and evict-first blocks are mostly in the order of
/// releases: if a batch may see one entry, it probably sees the rest of the queue.
const SKIPPED_MAX_QUEUE: u8 = if cfg!(kvpool_loom) { 1 } else { (SKIPPED_MAX / QUEUES_MAX) as u8 };

const STEP: usize = if cfg!(kvpool_loom) { 2 } else { 16 };

struct Few<T> {
    items: [T; STEP],
    len: usize,
}

impl<T: Copy> Few<T> {
    fn new(filler: T) -> Self {
        Self { items: [filler; STEP], len: 0 }
    }

    #[inline]
    fn push(&mut self, item: T) {
        self.items[self.len] = item;
        self.len += 1;
    }

    #[inline]
    fn as_slice(&self) -> &[T] {
        &self.items[..self.len]
    }
}

/// An eviction in progress. Dropping it puts back what it holds.
pub(super) struct Eviction<'a> {
    cache: &'a PrefixCache,
    /// All that it evicts from: those of one tenant.
    queues: &'a Queues,
    core: &'a Core,
    oldest: Ticket,
    by: EvictedFor,
    freed: &'a dyn Fn(&[FrameId]),
    /// Entries to put back, whose first blocks a batch may see.
    seen: SmallVec<[Entry; SKIPPED_MAX]>,
    /// Dequeued blocks to enqueue again: moving ones, and ones that a batch may see after all.
    dequeued: SmallVec<[BlockId; SKIPPED_MAX]>,
    /// Runs to put back, whose first blocks a batch may see.
    beside: Vec<PlacedRun>,
    skipped: usize,
    /// Skips per queue, a byte each, and the set of queues that reached their limit.
    in_queue: [u8; QUEUES_MAX],
    skipped_queues: u32,
}

impl<'a> Eviction<'a> {
    pub(super) fn new(
        cache: &'a PrefixCache,
        queues: &'a Queues,
        core: &'a Core,
        oldest: Ticket,
        freed: &'a dyn Fn(&[FrameId]),
    ) -> Self {
        let (seen, dequeued) = (SmallVec::new(), SmallVec::new());
        Self {
            cache,
            queues,
            core,
            oldest,
            by: EvictedFor::ANY,
            freed,
            seen,
            dequeued,
            beside: Vec::new(),
            skipped: 0,
            in_queue: [0; QUEUES_MAX],
            skipped_queues: 0,
        }
    }

    pub(super) fn for_tenant(mut self, tenant: Tenant) -> Self {
        self.by = EvictedFor::Tenant(tenant);
        self
    }

    pub(super) fn run(mut self, wanted: usize) {
        let (cache, queues, mut has_looked) = (self.cache, self.queues, false);
        let mut got = self.begin(wanted);
        while got < wanted && !self.is_over() {
            match self.take_next() {
                Some(entry) => got += self.evict_entry(entry, wanted - got),
                None => {
                    let is_odd = got == 0 && self.skipped == 0 && self.core.evictable() > 0;
                    if is_odd && !has_looked && queues.look() {
                        has_looked = true;
                    } else if !queues.beside.is_used()
                        || !cache.end_retention(queues, self.core, wanted - got)
                    {
                        self.evict_retained(wanted - got);
                        break;
                    }
                }
            }
        }
    }

    /// Evicts demoted blocks, before all others. Returns how many.
    pub(super) fn begin(&mut self, wanted: usize) -> usize {
        if !self.queues.beside.is_used() {
            return 0;
        }
        let got = self.evict_beside(DEMOTED, wanted);
        self.cache.end_retention(self.queues, self.core, wanted - got);
        got
    }

    /// Returns whether it has skipped too many.
    pub(super) fn is_over(&self) -> bool {
        self.skipped >= SKIPPED_MAX
    }

    pub(super) fn take_next(&self) -> Option<Entry> {
        self.cache.take_next_of(self.queues, self.skipped_queues)
    }

    pub(super) fn put_back(&self, entry: Entry) {
        self.queues.put_back(&self.cache.rows, entry);
    }

    pub(super) fn rank_of(&self, entry: Entry) -> u64 {
        self.cache.rank_of(self.queues, entry)
    }

    /// Evicts retained blocks, since no others can be. Returns how many.
    pub(super) fn evict_retained(&mut self, wanted: usize) -> usize {
        let mut got = 0;
        if self.queues.beside.is_used() {
            for class in DEMOTED + 1..CLASSES {
                got += self.evict_beside(class, wanted - got);
                // Those of higher classes do not go for one that another thread looks at.
                if self.queues.beside.is_busy(class) {
                    break;
                }
            }
        }
        got
    }

    /// Evicts blocks beside the policy's order. Returns how many.
    #[cold]
    fn evict_beside(&mut self, class: usize, wanted: usize) -> usize {
        let (cache, queues, core, mut got) = (self.cache, self.queues, self.core, 0);
        let tally = if class == DEMOTED { queues.useless() + 1 } else { RETAINED };
        while got < wanted
            && let Taken::Run(mut run) = queues.beside.take(class, u64::MAX)
        {
            let (mut evicted, mut frames) = (Few::new(BlockId(0)), Few::new(FrameId(0)));
            let (mut done, mut is_seen) = (0, false);
            for &(rank, id) in run.rest().iter().take(STEP.min(wanted - got)) {
                let row = cache.row(id);
                if row.place().1 == rank {
                    match core.evict_unforgotten(id, self.by, |word| self.is_unseen(row, id, word)) {
                        Ok(frame) => {
                            evicted.push(id);
                            frames.push(frame);
                        }
                        Err(NotEvicted::Owned) => {}
                        Err(NotEvicted::Seen | NotEvicted::Moving | NotEvicted::Protected) => {
                            is_seen = true;
                            break;
                        }
                    }
                }
                done += 1;
            }
            if evicted.len > 0 {
                got += evicted.len;
                core.count_not_evictable(evicted.len);
                cache.forget_all(core, Some(tally), evicted.as_slice());
                (self.freed)(frames.as_slice());
            }
            run.skip(done);
            if is_seen {
                // The rest was placed with it: probably seen too.
                self.beside.push(run);
                break;
            }
            queues.beside.push(run);
        }
        got
    }

    pub(super) fn evict_entry(&mut self, entry: Entry, wanted: usize) -> usize {
        let (cache, queues) = (self.cache, self.queues);
        let enqueued = queues.enqueued(&cache.rows, entry.queue, entry.first);
        let has_more = queues.below(&cache.rows, entry.queue, entry.first).is_some();
        // Before the others are read: their lines are mostly in the cache of another core.
        let is_seen = has_more && self.is_seen(&enqueued, entry.first);
        if cache.tolerance > 0.0 && entry.queue < queues.useless() {
            // The rank in the queue: the row's is newer if the block has been hit since.
            // Relaxed: as in `evicts_early`.
            cache.reached.store(enqueued.rank(), Relaxed);
        }
        if is_seen {
            self.set_aside(entry);
            return 0;
        }
        let (mut blocks, mut next) = (SmallVec::<[BlockId; ENTRY_MAX]>::new(), Some(entry.first));
        while let Some(id) = next.filter(|_| blocks.len() < wanted) {
            cache.row(id).prefetch();
            self.core.prefetch_word(id);
            blocks.push(id);
            next = queues.below(&cache.rows, entry.queue, id);
        }
        let mut got = 0;
        let mut steps = blocks.chunks(STEP).peekable();
        self.prefetch_index(steps.peek());
        while let Some(step) = steps.next() {
            self.prefetch_index(steps.peek());
            let (evicted, is_seen) = self.evict_step(entry.queue, step);
            got += evicted;
            if is_seen {
                return got;
            }
        }
        if let Some(first) = next {
            queues.put_back(&cache.rows, Entry { first, ..entry });
        }
        got
    }

    fn prefetch_index(&self, step: Option<&&[BlockId]>) {
        let cache = self.cache;
        step.into_iter()
            .copied()
            .flatten()
            .for_each(|&id| cache.index.prefetch(key_of(cache.row(id).hash())));
    }

    /// Returns the number of evicted blocks, and whether a batch may see the rest of the entry.
    fn evict_step(&mut self, queue: usize, step: &[BlockId]) -> (usize, bool) {
        let (cache, core) = (self.cache, self.core);
        let (mut evicted, mut frames) = (Few::new(BlockId(0)), Few::new(FrameId(0)));
        let mut outdated = SmallVec::<[BlockId; STEP]>::new();
        let mut is_seen = false;
        for &id in step {
            let enqueued = self.queues.enqueued(&cache.rows, queue, id);
            is_seen = self.is_seen(&enqueued, id);
            if is_seen {
                self.set_aside(Entry { queue, first: id });
                break;
            }
            let evict = || core.evict_unforgotten(id, self.by, |word| self.is_unseen(enqueued.row, id, word));
            if !enqueued.is_outdated()
                && let Ok(frame) = evict()
            {
                enqueued.clear();
                evicted.push(id);
                frames.push(frame);
                continue;
            }
            if !enqueued.dequeue() {
                if core.word(id).is_evictable() {
                    outdated.push(id);
                }
                continue;
            }
            match evict() {
                Ok(frame) => {
                    evicted.push(id);
                    frames.push(frame);
                }
                // The next release of an owned block enqueues it again.
                Err(NotEvicted::Owned) => {}
                Err(NotEvicted::Seen | NotEvicted::Moving | NotEvicted::Protected) => {
                    self.skip(queue);
                    self.dequeued.push(id);
                }
            }
        }
        if evicted.len > 0 {
            core.count_not_evictable(evicted.len);
            cache.forget_all(core, Some(queue), evicted.as_slice());
            (self.freed)(frames.as_slice());
        }
        if !outdated.is_empty() {
            cache.enqueue(outdated);
        }
        (evicted.len, is_seen)
    }

    #[inline]
    fn is_unseen(&self, row: &Row, id: BlockId, word: BlockWord) -> bool {
        match row.tag(word) {
            Some(tag) => tag < self.oldest,
            None => self.core.is_unseen(id, word, self.oldest),
        }
    }

    /// Returns whether a batch may see this block of an entry, which then keeps its place.
    #[inline]
    fn is_seen(&self, enqueued: &Enqueued<'_>, id: BlockId) -> bool {
        let word = self.core.word(id);
        word.is_evictable() && !self.is_unseen(enqueued.row, id, word) && !enqueued.is_outdated()
    }

    /// Skips an entry whose first block a batch may see.
    fn set_aside(&mut self, entry: Entry) {
        self.skip(entry.queue);
        let is_of_policy = entry.queue < self.queues.useless();
        self.skipped_queues |= u32::from(!is_of_policy) << entry.queue;
        self.seen.push(entry);
    }

    fn skip(&mut self, queue: usize) {
        self.skipped += 1;
        let of_policy = queue < self.queues.useless();
        if let Some(skipped) = self.in_queue.get_mut(queue).filter(|_| of_policy) {
            *skipped += 1;
            self.skipped_queues |= u32::from(*skipped >= SKIPPED_MAX_QUEUE) << queue;
        }
    }
}

impl PrefixCache {
    /// Returns the rank of an entry; 0 for useless blocks.
    pub(super) fn rank_of(&self, queues: &Queues, entry: Entry) -> u64 {
        let enqueued = queues.enqueued(&self.rows, entry.queue, entry.first);
        if entry.queue == queues.useless() { 0 } else { enqueued.rank() }
    }
}

impl Drop for Eviction<'_> {
    fn drop(&mut self) {
        let cache = self.cache;
        self.seen.iter().for_each(|&entry| self.queues.put_back(&cache.rows, entry));
        self.beside.drain(..).for_each(|run| self.queues.beside.push(run));
        if !self.dequeued.is_empty() {
            cache.enqueue(self.dequeued.drain(..));
        }
    }
}
