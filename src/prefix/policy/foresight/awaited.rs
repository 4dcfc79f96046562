//! Released blocks whose reuse is awaited, cached or not: what is learned from.
//!
//! Not every block is noted, but those with a power of two of blocks from them to the end of their chain: a few a request,
//! each of which stands for the blocks from it to the next. A note outlives the block, so that what was evicted too early
//! is learned as well.
//!
//! | word | what |
//! |---|---|
//! | hash | of the block; 0: no note. Who swaps it to something else has taken the note out |
//! | state | of the block, as [`features`](super::features) packs it |
//! | counted | the age up to which the waiting has been counted, the number of blocks that it stands for above |
//!
//! The three are written one after the other. Who reads a note while it is replaced may see the hash of one and the rest of
//! another, and counts a wait that was none: statistics, a grain of it.

use crate::sync::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::features::State;

/// Notes in which one hash may lie.
const WAYS: usize = 8;
/// Notes for each block of the pool, and the most there are: those of the last ten thousand requests or so.
const NOTES_A_BLOCK: usize = 2;
const NOTES_MAX: usize = 1 << 16;
/// Lookups in which all notes are looked through once.
const ROUND_LOOKUPS: usize = 256;

const COUNTED_BITS: u32 = 40;

struct Note {
    hash: AtomicU64,
    state: AtomicU64,
    counted: AtomicU64,
}

/// A wait, or a part of it, that is to be counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    pub state: State,
    /// Blocks that it stands for.
    pub blocks: u32,
    /// Age up to which it was counted before.
    pub from: u64,
}

/// See the [module](self).
pub(super) struct Awaited {
    notes: Box<[Note]>,
    hand: AtomicUsize,
}

impl Note {
    fn wait(&self) -> Wait {
        let counted = self.counted.load(Relaxed);
        Wait {
            state: State(self.state.load(Relaxed)),
            blocks: (counted >> COUNTED_BITS) as u32,
            from: counted & ((1 << COUNTED_BITS) - 1),
        }
    }
}

impl Awaited {
    /// For a pool of so many blocks.
    pub(super) fn new(blocks: usize) -> Self {
        let notes = blocks.saturating_mul(NOTES_A_BLOCK).min(NOTES_MAX).next_multiple_of(WAYS).max(WAYS);
        let note = || Note { hash: AtomicU64::new(0), state: AtomicU64::new(0), counted: AtomicU64::new(0) };
        Self { notes: (0..notes).map(|_| note()).collect(), hand: AtomicUsize::new(0) }
    }

    fn set(&self, hash: u64) -> &[Note] {
        let sets = self.notes.len() / WAYS;
        let set = ((u128::from(hash) * sets as u128) >> 64) as usize;
        &self.notes[set * WAYS..][..WAYS]
    }

    /// Takes out the note of a hash.
    pub(super) fn take(&self, hash: u64) -> Option<Wait> {
        let note = self.set(hash).iter().find(|note| note.hash.load(Relaxed) == hash && hash != 0)?;
        let wait = note.wait();
        // Relaxed: only who takes it counts it; what else is in it is statistics.
        note.hash.compare_exchange(hash, 0, Relaxed, Relaxed).is_ok().then_some(wait)
    }

    /// Notes a block that stands for so many. Returns the wait of another that had to give way.
    pub(super) fn note(&self, hash: u64, state: State, blocks: u32, latest: u64) -> Option<Wait> {
        let set = self.set(hash);
        let free = |note: &&Note| [0, hash].contains(&note.hash.load(Relaxed));
        let oldest = |note: &&Note| State(note.state.load(Relaxed)).age(latest);
        let note = set.iter().find(|note| note.hash.load(Relaxed) == hash);
        let note = note.or_else(|| set.iter().find(free)).or_else(|| set.iter().max_by_key(oldest))?;
        let wait = note.wait();
        let before = note.hash.swap(0, Relaxed);
        note.state.store(state.0, Relaxed);
        note.counted.store(u64::from(blocks.min(1 << 20)) << COUNTED_BITS, Relaxed);
        note.hash.store(hash, Relaxed);
        (before != 0 && before != hash).then_some(wait)
    }

    /// Looks through the next few notes, and passes on how long each has waited since it was counted last.
    pub(super) fn look_through(&self, latest: u64, mut count: impl FnMut(Wait, u64)) {
        let fast_path = self.notes.len() / ROUND_LOOKUPS + 1;
        let hand = self.hand.fetch_add(fast_path, Relaxed);
        for at in hand..hand.wrapping_add(fast_path) {
            let note = &self.notes[at % self.notes.len()];
            if note.hash.load(Relaxed) == 0 {
                continue;
            }
            let wait = note.wait();
            let age = wait.state.age(latest).min((1 << COUNTED_BITS) - 1);
            if age <= wait.from + wait.from / 8 {
                continue;
            }
            let (old, new) = (wait.packed(wait.from), wait.packed(age));
            // Relaxed: as in `take`. Who fails leaves it to who was first.
            if note.counted.compare_exchange(old, new, Relaxed, Relaxed).is_ok() {
                count(wait, age);
            }
        }
    }
}

impl Wait {
    fn packed(&self, age: u64) -> u64 {
        u64::from(self.blocks) << COUNTED_BITS | age
    }
}
