//! Released blocks whose reuse is awaited, cached or evicted: the observations to learn from.
//!
//! Only blocks at a power of two of blocks from the end of their chain are noted: a few per
//! request, each standing for the blocks from it to the next one. A note outlives the block, so
//! that early evictions are learned as well.
//!
//! | word | content |
//! |---|---|
//! | hash | of the block; 0: no note. The thread that swaps it to another value has taken the note |
//! | state | of the block, as [`features`](super::features) packs it |
//! | counted | bits 0..40: the age up to which the wait was counted; 40..60: the number of blocks that the note stands for; 60..64: its queue |
//!
//! The words are written one after the other. A thread that reads a note during its replacement may
//! combine the hash of one with the rest of another, and counts a wait that did not happen: an
//! error in the statistics only.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::features::State;

/// Notes of a set: the places of one hash.
const WAYS: usize = 8;
/// Notes per block of the pool, and their largest number: some two thousand requests.
const NOTES_A_BLOCK: usize = 2;
const NOTES_MAX: usize = 1 << 14;
/// Lookups during which every note is examined once.
const ROUND_LOOKUPS: usize = 256;

const COUNTED_BITS: u32 = 40;
const BLOCKS_BITS: u32 = 20;
const QUEUE_SHIFT: u32 = COUNTED_BITS + BLOCKS_BITS;
const BLOCKS_MAX: u32 = (1 << BLOCKS_BITS) - 1;

/// The hashes of a set, in one cache line: a lookup that finds none reads no more.
#[repr(align(64))]
struct Hashes([AtomicU64; WAYS]);

/// What is noted beside a hash.
struct Words {
    state: AtomicU64,
    counted: AtomicU64,
}

/// A note in the table.
#[derive(Clone, Copy)]
struct Note<'a> {
    hash: &'a AtomicU64,
    words: &'a Words,
}

/// A wait, or a part of one, to be counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Wait {
    pub state: State,
    /// Blocks that the note stands for.
    pub blocks: u32,
    /// The queue in which the block was placed.
    pub queue: usize,
    /// Age up to which the wait was counted before.
    pub from: u64,
}

/// A bounded, set-associative table of notes.
pub(super) struct Awaited {
    hashes: Box<[Hashes]>,
    words: Box<[Words]>,
    hand: AtomicUsize,
}

impl Note<'_> {
    fn wait(&self) -> Wait {
        let counted = self.words.counted.load(Relaxed);
        Wait {
            state: State(self.words.state.load(Relaxed)),
            blocks: (counted >> COUNTED_BITS) as u32 & BLOCKS_MAX,
            queue: (counted >> QUEUE_SHIFT) as usize,
            from: counted & ((1 << COUNTED_BITS) - 1),
        }
    }
}

impl Awaited {
    /// Creates an empty table for a pool of `blocks` blocks.
    pub(super) fn new(blocks: usize) -> Self {
        let notes = blocks.saturating_mul(NOTES_A_BLOCK).min(NOTES_MAX).next_multiple_of(WAYS).max(WAYS);
        let word = || AtomicU64::new(0);
        let hashes = (0..notes / WAYS).map(|_| Hashes(std::array::from_fn(|_| word()))).collect();
        let words = (0..notes).map(|_| Words { state: word(), counted: word() }).collect();
        Self { hashes, words, hand: AtomicUsize::new(0) }
    }

    fn note_at(&self, at: usize) -> Note<'_> {
        Note { hash: &self.hashes[at / WAYS].0[at % WAYS], words: &self.words[at] }
    }

    fn set(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.hashes.len() as u128) >> 64) as usize
    }

    /// Returns the note of a hash.
    fn find(&self, hash: u64) -> Option<Note<'_>> {
        let set = self.set(hash);
        let way = self.hashes[set].0.iter().position(|other| other.load(Relaxed) == hash)?;
        Some(self.note_at(set * WAYS + way))
    }

    /// Removes and returns the note of a hash.
    pub(super) fn take(&self, hash: u64) -> Option<Wait> {
        let note = self.find(hash).filter(|_| hash != 0)?;
        let wait = note.wait();
        // Relaxed: only the thread that takes a note counts it; the other words are statistics.
        note.hash.compare_exchange(hash, 0, Relaxed, Relaxed).is_ok().then_some(wait)
    }

    /// Notes a block. Returns the wait of the note that it replaced.
    pub(super) fn note(&self, hash: u64, new: Wait, latest: u64) -> Option<Wait> {
        let set = self.set(hash) * WAYS;
        let notes = || (set..set + WAYS).map(|at| self.note_at(at));
        let oldest = |note: &Note<'_>| note.wait().state.age(latest);
        let free = || notes().find(|note| note.hash.load(Relaxed) == 0);
        let note = self.find(hash).or_else(free).or_else(|| notes().max_by_key(oldest))?;
        let wait = note.wait();
        let before = note.hash.swap(0, Relaxed);
        note.words.state.store(new.state.0, Relaxed);
        note.words.counted.store(new.packed(new.from), Relaxed);
        note.hash.store(hash, Relaxed);
        (before != 0 && before != hash).then_some(wait)
    }

    /// Examines the next few notes, and passes each wait since its last count to `count`.
    pub(super) fn look_through(&self, latest: u64, mut count: impl FnMut(Wait, u64)) {
        let notes = self.words.len() / ROUND_LOOKUPS + 1;
        let hand = self.hand.fetch_add(notes, Relaxed);
        for at in hand..hand.wrapping_add(notes) {
            let note = self.note_at(at % self.words.len());
            if note.hash.load(Relaxed) == 0 {
                continue;
            }
            let wait = note.wait();
            let age = wait.state.age(latest).min((1 << COUNTED_BITS) - 1);
            if age <= wait.from + wait.from / 8 {
                continue;
            }
            let (old, new) = (wait.packed(wait.from), wait.packed(age));
            // Relaxed: as in `take`. After a failure the wait is counted by the other thread.
            if note.words.counted.compare_exchange(old, new, Relaxed, Relaxed).is_ok() {
                count(wait, age);
            }
        }
    }
}

impl Wait {
    fn packed(&self, age: u64) -> u64 {
        (self.queue as u64) << QUEUE_SHIFT | u64::from(self.blocks.min(BLOCKS_MAX)) << COUNTED_BITS | age
    }
}
