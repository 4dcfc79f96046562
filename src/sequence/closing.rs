//! Sequences that were closed while a batch was writing to them.
//!
//! Their last blocks are registered once that batch has finished. Until then the blocks keep their
//! references: the sequence, without its id, goes to a list, from which each end of a batch drops
//! those whose writers have all ended. A sequence with nothing to register is released at once.
//!
//! ```text
//! close      push the sequence (lock);  fence(SeqCst);  look at the list
//! end        slot := 0;  word -= END;   fence(SeqCst);  count != 0?  look at the list
//! look       take those whose writers have ended (lock);  drop them: register, release
//! ```
//!
//! No sequence stays in the list once its writers have ended: the thread of the later of the two
//! fences sees what the other thread did before its own. The thread that removes a sequence, under
//! the lock, drops it. Model: `loom-tests/tests/abandoned.rs`.

use std::sync::PoisonError;

use crate::ids::BlockId;
use crate::sync::{AtomicUsize, CachePadded, Mutex, Ordering::*, fence};

/// A closed sequence. Dropping it registers and releases its blocks.
pub(super) trait Closed: Send + Sync {
    fn is_written(&self) -> bool;

    fn blocks(&self) -> Vec<BlockId>;
}

#[derive(Default)]
pub(super) struct Closing {
    count: CachePadded<AtomicUsize>,
    sequences: Mutex<Vec<Box<dyn Closed>>>,
}

impl Closing {
    pub(super) fn len(&self) -> usize {
        // Relaxed: a statistic.
        self.count.load(Relaxed)
    }

    pub(super) fn blocks(&self) -> Vec<BlockId> {
        let sequences = self.sequences.lock().unwrap_or_else(PoisonError::into_inner);
        sequences.iter().flat_map(|sequence| sequence.blocks()).collect()
    }

    pub(super) fn add(&self, sequence: Box<dyn Closed>) {
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

    /// Called after a fence that follows the end of a batch.
    #[inline]
    pub(super) fn look(&self) {
        if self.count.load(Relaxed) != 0 {
            self.close_ended();
        }
    }

    #[cold]
    fn close_ended(&self) {
        let ended: Vec<_> = {
            let mut sequences = self.sequences.lock().unwrap_or_else(PoisonError::into_inner);
            let ended = sequences.extract_if(.., |sequence| sequence.is_written()).collect();
            self.count.store(sequences.len(), Relaxed);
            ended
        };
        // Outside the lock: the cache's policy is user code.
        drop(ended);
    }
}
