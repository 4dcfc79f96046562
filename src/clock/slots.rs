//! The slots of the batches in flight, and the high-water mark: all slots in use are below it.
//!
//! Threads look for an empty slot in the first chunk, each from its own start. Further chunks are
//! used from the lowest slot known to be empty; each is twice as long as the last, and is never
//! removed.
//!
//! | word | bits | field | meaning |
//! |---|---|---|---|
//! | slot | 0..44 | ticket | that of the batch in the slot; 0: the slot is empty, or closed |
//! | | 62 | closed | no batch is in the slot, and none takes it without raising the high-water mark |
//! | | 63 | provisional | the batch is beginning, and the ticket is a lower bound of its own |
//! | mark | 0..21 | slots | the high-water mark: slots from here on are closed, or hold batches without a ticket |
//! | | 21..64 | version | number of changes |
//!
//! ```text
//! take:    slot: empty -> bound, provisional
//! open:    slot: closed -> bound, provisional;
//!          mark: at least slot + 1, version + 1, even if it is that high
//! leave:   slot := empty
//! lower:   m := mark;  each slot from `used` up to m: empty -> closed, or it is closed;
//!          mark: m -> used, version + 1
//! ```
//!
//! # Invariant
//!
//! A thread that sees a batch's ticket in the clock's word, and then reads the high-water mark,
//! finds the batch's slot below it, or closed by a thread that saw the batch end:
//!
//! - A batch that opens its slot raises the mark before it gets a ticket. A thread that lowers the
//!   mark later has read it after that, because of the version, and so has seen the slot in use.
//! - A batch that takes an empty slot gets it from a batch that ended there, whose changes happen
//!   before its own. The slot was opened for one of its predecessors and has not been closed since.
//!
//! A thread that is stopped between opening and raising has no ticket yet, and no other batch takes
//! its slot. Model: `loom-tests/tests/retire_reclaim.rs`, `beside_a_lowered_mark`.

use std::ptr;

use crate::sync::{AtomicPtr, AtomicU64, AtomicUsize, CachePadded, Ordering::*};

use super::batch_set::BatchRef;
use super::word::ClockWord;

pub(super) const BEGINNING: u64 = 1 << 63;

const CLOSED: u64 = 1 << 62;

pub(crate) const SLOTS: usize = if cfg!(kvpool_loom) { 2 } else { 64 };

const CHUNKS: usize = if cfg!(kvpool_loom) { 3 } else { 13 };
const SLOTS_MAX: usize = (SLOTS << (CHUNKS + 1)) - SLOTS;
const _: () = assert!(SLOTS_MAX <= BatchRef::SLOTS_MAX && SLOTS_MAX >> MARK_BITS == 0);

/// Number of slots below the high-water mark that a search beyond the first chunk checks.
const PROBES: usize = if cfg!(kvpool_loom) { 1 } else { 16 };

/// The high-water mark is lowered if it is more than this many slots above the last one in use.
const SLACK: usize = if cfg!(kvpool_loom) { 0 } else { 64 };

const MARK_BITS: u32 = 21;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Mark(u64);

impl Mark {
    #[inline]
    pub(super) const fn slots(self) -> usize {
        self.0 as usize & ((1 << MARK_BITS) - 1)
    }

    const fn moved(self, slots: usize) -> Self {
        Self(((self.0 >> MARK_BITS) + 1) << MARK_BITS | slots as u64)
    }
}

pub(super) struct Slots {
    first: CachePadded<[AtomicU64; SLOTS]>,
    /// Chunk `i` has `SLOTS << (i + 1)` slots; null until one is needed.
    chunks: [AtomicPtr<AtomicU64>; CHUNKS],
    mark: CachePadded<AtomicU64>,
    /// Hint: about the lowest empty slot beyond the first chunk.
    vacant: AtomicUsize,
}

impl Default for Slots {
    fn default() -> Self {
        Self {
            first: CachePadded::new(std::array::from_fn(|_| AtomicU64::new(0))),
            chunks: std::array::from_fn(|_| AtomicPtr::new(ptr::null_mut())),
            mark: CachePadded::new(AtomicU64::new(Mark(0).moved(SLOTS).0)),
            vacant: AtomicUsize::new(SLOTS),
        }
    }
}

impl Slots {
    /// Takes a slot for a batch that begins after `now`, preferably in the first chunk.
    #[inline]
    pub(super) fn take(&self, first: usize, now: ClockWord) -> usize {
        let bound = (now.newest().0 + 1) | BEGINNING;
        if now.in_flight() < SLOTS as u64 {
            let taken = (first..SLOTS).chain(0..first).find(|&at| {
                // Acquire: the changes of the slot's previous batch, including the mark's, happen
                // before ours. If another batch wins the slot, that is progress.
                let slot = &self.first[at];
                slot.load(Relaxed) == 0 && slot.compare_exchange(0, bound, Acquire, Relaxed).is_ok()
            });
            if let Some(taken) = taken {
                return taken;
            }
        }
        self.take_beyond(bound, now.in_flight() as usize)
    }

    /// Reached by `more_batches_than_a_chunk`.
    #[cold]
    fn take_beyond(&self, bound: u64, in_flight: usize) -> usize {
        let (vacant, mark) = (self.vacant.load(Relaxed), self.mark().slots());
        // If most slots below the mark are empty, a search finds one soon, and the mark stays.
        let (probes, low) =
            if mark > 2 * (in_flight + SLOTS) { (mark, vacant.min(mark)) } else { (PROBES, 0) };
        // Far fewer batches are in flight than there are slots: the last search ends.
        let all = (SLOTS..SLOTS_MAX).cycle();
        for at in (vacant..mark).take(probes).chain(SLOTS..low).chain(mark..SLOTS_MAX).chain(all) {
            let slot = self.slot_or_add(at);
            let value = slot.load(Relaxed);
            // Acquire: as in `take`.
            if value & !CLOSED != 0 || slot.compare_exchange(value, bound, Acquire, Relaxed).is_err() {
                continue;
            }
            if value == CLOSED {
                // Even if it is high enough: a thread that saw the slot closed may be lowering it.
                // Release: publishes the slot in use to a thread that lowers the mark later.
                let raised = |mark| Some(Mark(mark).moved(Mark(mark).slots().max(at + 1)).0);
                let _ = self.mark.fetch_update(Release, Relaxed, raised);
            }
            // The next search continues where this one stopped, or after its slot.
            let is_behind = at >= mark && vacant + PROBES < mark;
            self.vacant.store(if is_behind { vacant + PROBES } else { at + 1 }, Relaxed);
            return at;
        }
        unreachable!("the search repeats")
    }

    #[inline]
    pub(super) fn leave(&self, index: usize) {
        // Release: the batch's accesses happen before the reuse of its frames. Pairs with the
        // Acquires of scans, of `lower`, and of the slot's next batch.
        self.slot(index).store(0, Release);
        if index >= SLOTS && index < self.vacant.load(Relaxed) {
            self.vacant.store(index, Relaxed);
        }
    }

    /// Acquire: what the thread that lowered the mark did happens before what follows.
    #[inline]
    pub(super) fn mark(&self) -> Mark {
        Mark(self.mark.load(Acquire))
    }

    #[inline]
    pub(super) fn for_each(&self, mark: Mark, mut f: impl FnMut(usize, u64)) {
        let (mut base, mut chunk): (_, &[AtomicU64]) = (0, &*self.first);
        for index in 0.. {
            for (at, slot) in (base..mark.slots()).zip(chunk) {
                // Acquire: pairs with `leave`.
                let value = slot.load(Acquire);
                if value & !CLOSED != 0 {
                    f(at, value);
                }
            }
            base += chunk.len();
            if base >= mark.slots() {
                return;
            }
            chunk = self.chunk(index).expect("chunks below the mark exist");
        }
    }

    /// Closes the slots from `used` on and lowers the mark, unless a slot is taken or opened
    /// meanwhile. New batches take slots from `vacant` on. One thread at a time.
    pub(super) fn lower(&self, mark: Mark, used: usize, vacant: usize) {
        self.vacant.store(vacant.max(SLOTS), Relaxed);
        let used = used.max(SLOTS);
        if mark.slots() - used <= SLACK {
            return;
        }
        // Release: publishes the end of the slot's last batch, which the Acquire sees.
        let close = |at| self.slot(at).compare_exchange(0, CLOSED, AcqRel, Acquire);
        if (used..mark.slots()).all(|at| close(at).map_or_else(|value| value == CLOSED, |_| true)) {
            // Release: publishes the ends of these slots' batches; pairs with `mark`. If the mark
            // has changed, the next thread that looks for the oldest batch tries again.
            let _ = self.mark.compare_exchange(mark.0, mark.moved(used).0, Release, Relaxed);
        }
    }

    #[inline]
    pub(super) fn slot(&self, index: usize) -> &AtomicU64 {
        if index < SLOTS { &self.first[index] } else { self.slot_or_add(index) }
    }

    fn slot_or_add(&self, index: usize) -> &AtomicU64 {
        let chunk = (index / SLOTS + 1).ilog2() as usize;
        let at = index - ((SLOTS << chunk) - SLOTS);
        &self.chunk(chunk - 1).unwrap_or_else(|| self.add_chunk(chunk - 1))[at]
    }

    fn chunk(&self, index: usize) -> Option<&[AtomicU64]> {
        // Acquire: pairs with `add_chunk`.
        let chunk = self.chunks[index].load(Acquire);
        // SAFETY: published chunks have this length, and live as long as the clock.
        (!chunk.is_null()).then(|| unsafe { std::slice::from_raw_parts(chunk, SLOTS << (index + 1)) })
    }

    #[cold]
    fn add_chunk(&self, index: usize) -> &[AtomicU64] {
        let fresh: Box<[AtomicU64]> = (0..SLOTS << (index + 1)).map(|_| AtomicU64::new(CLOSED)).collect();
        let (fresh, len) = (Box::into_raw(fresh), SLOTS << (index + 1));
        // Release: publishes the slots. Acquire: sees the slots of a faster thread's chunk.
        match self.chunks[index].compare_exchange(ptr::null_mut(), fresh.cast(), AcqRel, Acquire) {
            // SAFETY: just created and published; freed only with the clock.
            Ok(_) => unsafe { &*fresh },
            Err(other) => {
                // SAFETY: created here and never published.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: published chunks have this length, and live as long as the clock.
                unsafe { std::slice::from_raw_parts(other, len) }
            }
        }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        for (index, chunk) in self.chunks.iter().enumerate() {
            let chunk = chunk.load(Relaxed);
            if !chunk.is_null() {
                let chunk = ptr::slice_from_raw_parts_mut(chunk, SLOTS << (index + 1));
                // SAFETY: `&mut self`: no other thread uses the clock; each chunk came from
                // `Box::into_raw` of a slice of this length, and is freed once.
                drop(unsafe { Box::from_raw(chunk) });
            }
        }
    }
}
