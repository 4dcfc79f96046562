//! Sequences that were closed while a batch was writing to them.
//!
//! Their last blocks are registered once that batch has finished. Until then the blocks keep their
//! references: the sequence, without its id, goes to the list of a batch that writes to it. Each
//! slot of the [clock](crate::clock)'s first chunk has a list, which slots of later chunks share:
//! threads that close what their own batches write change no common list. A sequence with nothing
//! to register is released at once.
//!
//! ```text
//! close   w := a writer in flight;  push the sequence to its list (lock);  fence(SeqCst);
//!         w ended? look
//! end     slot := 0;  word -= END;  fence(SeqCst);  count of its list != 0? look
//! look    take the sequences of the list with no writer in flight that has this list (lock);
//!         each: another writer is in flight? close it again, for that one
//!               else drop it: register, release
//! ```
//!
//! No sequence stays in a list once its writers have ended: the thread of the later of two fences,
//! that of a push for `w` and that of the end of `w`, looks, and sees each end whose fence came
//! before. If it leaves the sequence there because of another writer, the fence of that one's end
//! comes after that of the push, and so its thread looks, too. The thread that takes a sequence
//! out, under the lock, drops it or pushes it to another list. Model:
//! `loom-tests/tests/abandoned.rs`.
//!
//! Of more writers than a [set](BatchSet) names, only the newest ticket is known. Then a batch that
//! is beginning may be one of them, and the sequence waits for it; if it is newer, the sequence
//! stays until that batch ends.

use std::sync::PoisonError;

#[cfg(doc)]
use crate::clock::BatchSet;
use crate::clock::{BatchRef, Clock, SLOTS};
use crate::ids::BlockId;
use crate::sync::{AtomicUsize, CachePadded, Mutex, MutexGuard, Ordering::*, fence};

const LISTS: usize = SLOTS;

/// A closed sequence. Dropping it registers and releases its blocks.
pub(super) trait Closed: Send + Sync {
    fn writing(&self) -> Option<BatchRef>;

    fn blocks(&self) -> Vec<BlockId>;
}

#[derive(Default)]
struct List {
    count: AtomicUsize,
    sequences: Mutex<Vec<Box<dyn Closed>>>,
}

impl List {
    fn lock(&self) -> MutexGuard<'_, Vec<Box<dyn Closed>>> {
        self.sequences.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct Closing([CachePadded<List>; LISTS]);

impl Default for Closing {
    fn default() -> Self {
        Self(std::array::from_fn(|_| CachePadded::default()))
    }
}

impl Closing {
    pub(super) fn len(&self) -> usize {
        // Relaxed: a statistic.
        self.0.iter().map(|list| list.count.load(Relaxed)).sum()
    }

    pub(super) fn blocks(&self) -> Vec<BlockId> {
        let blocks = |list: &CachePadded<List>| -> Vec<BlockId> {
            list.lock().iter().flat_map(|sequence| sequence.blocks()).collect()
        };
        self.0.iter().flat_map(blocks).collect()
    }

    pub(super) fn add(&self, sequence: Box<dyn Closed>, writer: BatchRef, clock: &Clock) {
        let list = &self.0[writer.slot() % LISTS];
        {
            let mut sequences = list.lock();
            sequences.push(sequence);
            // Relaxed: the fences order it.
            list.count.store(sequences.len(), Relaxed);
        }
        // Pairs with the fence of the end of a batch.
        fence(SeqCst);
        // Or it is beginning: then this look is the only one before its end.
        if !clock.is_in_flight(writer) {
            self.look(writer, clock);
        }
    }

    /// Looks at the list of a batch that has ended, after a fence that follows the end.
    #[inline]
    pub(super) fn look(&self, batch: BatchRef, clock: &Clock) {
        let at = batch.slot() % LISTS;
        if self.0[at].count.load(Relaxed) != 0 {
            self.close_ended(at, clock);
        }
    }

    #[cold]
    fn close_ended(&self, at: usize, clock: &Clock) {
        let stays =
            |sequence: &dyn Closed| sequence.writing().is_some_and(|batch| batch.slot() % LISTS == at);
        let taken: Vec<_> = {
            let mut sequences = self.0[at].lock();
            let taken = sequences.extract_if(.., |sequence| !stays(&**sequence)).collect();
            self.0[at].count.store(sequences.len(), Relaxed);
            taken
        };
        let mut ended = Vec::with_capacity(taken.len());
        for sequence in taken {
            match sequence.writing() {
                Some(writer) => self.add(sequence, writer, clock),
                None => ended.push(sequence),
            }
        }
        // Outside the lock: the cache's policy is user code.
        drop(ended);
    }
}
