//! Sequences that were closed while a batch was writing to them.
//!
//! Their last blocks are registered once that batch has finished. Until then the blocks keep their
//! references: the sequence goes to a list, without its id, and whoever ends a batch drops those
//! whose writers have all ended. A sequence that has nothing to register is released at once.
//!
//! ```text
//! close      push the sequence (lock);  fence(SeqCst);  look at the list
//! end        slot := 0;  word -= END;   fence(SeqCst);  count != 0?  look at the list
//! look       take those whose writers have ended (lock);  drop them: register, release
//! ```
//!
//! No sequence stays in the list once its writers have ended: of the two fences, one comes later,
//! and its thread sees what the other one did before its own. The one that takes a sequence out,
//! under the lock, is the one that drops it.
//!
//! Model: `loom-tests/tests/abandoned.rs`.

use std::sync::PoisonError;

use crate::sync::{AtomicUsize, CachePadded, Mutex, Ordering::*, fence};

use super::list::ListOwner;
use super::sequence::Sequence;

/// The closed sequences of a pool whose blocks wait for batches in flight.
#[derive(Default)]
pub(super) struct Closing {
    count: CachePadded<AtomicUsize>,
    sequences: Mutex<Vec<Sequence>>,
}

impl Closing {
    /// Returns the number of sequences.
    pub(super) fn len(&self) -> usize {
        // Relaxed: a statistic.
        self.count.load(Relaxed)
    }

    fn add(&self, sequence: Sequence) {
        {
            let mut sequences = self.sequences.lock().unwrap_or_else(PoisonError::into_inner);
            sequences.push(sequence);
            // Relaxed: the fences order it.
            self.count.store(sequences.len(), Relaxed);
        }
        // Pairs with the fence of the end of a batch.
        fence(SeqCst);
        self.look();
    }

    /// Closes the sequences whose writers have all ended. Called after a fence that follows the end
    /// of a batch.
    #[inline]
    pub(super) fn look(&self) {
        if self.count.load(Relaxed) != 0 {
            self.close_ended();
        }
    }

    #[cold]
    fn close_ended(&self) {
        let ended: Vec<Sequence> = {
            let mut sequences = self.sequences.lock().unwrap_or_else(PoisonError::into_inner);
            let ended = sequences.extract_if(.., |sequence| sequence.writing().is_none()).collect();
            self.count.store(sequences.len(), Relaxed);
            ended
        };
        // Outside the lock: the cache's policy is user code.
        drop(ended);
    }
}

impl Sequence {
    /// Returns whether blocks of a closed sequence are to be registered after a batch in flight.
    pub(super) fn registers_later(&self) -> bool {
        let Some((known, cache)) = self.token_hashes() else { return false };
        let full = (self.committed / self.sequences.0.block_tokens).min(known.hashes().len() as u32);
        let is_registered = |last: u32| self.pool_blocks().word(self.list.id(last as usize)).is_cached();
        let has_block = full.checked_sub(1).is_some_and(|last| !is_registered(last));
        let has_tail = self.reuses_tail && known.tail_hash(cache, self.len()).is_some();
        (has_block || has_tail) && known.era() == cache.era() && self.writing().is_some()
    }

    /// Moves the blocks of a closed sequence to the list of those that wait for batches.
    #[cold]
    pub(super) fn close_later(&mut self) {
        let sequences = self.sequences.clone();
        let list = std::mem::replace(&mut self.list, ListOwner::new(sequences.0.block_tokens));
        let mut rest = Self::new(sequences.clone(), self.id(), self.priority(), list);
        rest.frames = std::mem::take(&mut self.frames);
        (rest.committed, rest.seals, rest.writers) = (self.committed, self.seals, self.writers);
        (rest.writes, rest.seen) = (std::mem::take(&mut self.writes), std::mem::take(&mut self.seen));
        (rest.known, rest.reuses_tail) = (self.known.take(), self.reuses_tail);
        rest.is_closed = true;
        sequences.0.closing.add(rest);
    }
}
