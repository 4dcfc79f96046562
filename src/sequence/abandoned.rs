//! Abandoned batches: what was written under a batch that did not finish is withdrawn.
//!
//! The batch cannot reach its sequences on other threads: each sequence keeps a [`Write`] for every
//! [batch](super::Batch) that wrote to it and may be abandoned, and looks for it in the pool's log
//! before its next operation. Nothing that it wrote, or that was computed from that, may be found.
//!
//! ```text
//! batch      writes to a sequence    the sequence notes (batch, first position, tokens announced before)
//!            abandoned               log the batch;  count += 1 (Release);  end the lease
//! sequence   operation               seen != count (Acquire)?  withdraw: cut to the first position of a logged batch;
//!                                    the blocks go to its reservation, so that the same tokens can be appended again;
//!                                    while any of its writers is in flight, they are released, and retired until it has ended
//!            seal, promise           the other writers have ended;  then seen == count, or the sequence does neither
//! ```
//!
//! # Theorem
//!
//! No block is sealed or registered that holds a token which an abandoned batch wrote, or one that
//! was appended behind such a token.
//!
//! A sequence seals a block, or promises it to a batch, only after all other batches that wrote to
//! the sequence have ended. An abandoned one was logged before its end, so the load of the count
//! that follows sees it, and the sequence does neither. An abandoned batch does not seal promised
//! blocks. A fork copies the notes, and does the same for itself.
//!
//! Until the owner's next operation, [views](super::SequenceView) show the withdrawn tokens.
//!
//! The log keeps the last [`KEPT`] batches. If more are abandoned while a sequence is idle, it
//! cannot tell which ones wrote to it: it seals nothing, and withdraws all tokens whose batch it
//! has not seen end, once that batch has ended.
//!
//! Model: `loom-tests/tests/abandoned.rs`.

use std::collections::VecDeque;
use std::sync::PoisonError;

use smallvec::SmallVec;

use crate::clock::{BatchRef, Clock};
use crate::sync::{AtomicU64, CachePadded, Mutex, Ordering::*};

const KEPT: usize = if cfg!(kvpool_loom) { 2 } else { 1 << 16 };

#[derive(Default)]
pub(super) struct Abandoned {
    count: CachePadded<AtomicU64>,
    last: Mutex<VecDeque<BatchRef>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Write {
    pub(super) batch: BatchRef,
    pub(super) from: u32,
    /// Number of tokens announced before it wrote.
    pub(super) announced: u32,
}

/// The writes of batches that a sequence has not seen end, and of some that it has.
pub(super) type Writes = SmallVec<[Write; 2]>;

impl Abandoned {
    #[inline]
    pub(super) fn count(&self) -> u64 {
        // Acquire: pairs with `add`.
        self.count.load(Acquire)
    }

    pub(super) fn add(&self, batch: BatchRef) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() == KEPT {
            last.pop_front();
        }
        last.push_back(batch);
        // Release: pairs with `count`. The batch's end follows, and is a Release too: a thread that
        // has seen it sees the count.
        self.count.store(self.count.load(Relaxed) + 1, Release);
    }

    /// Returns the count, and the first of these writes by a batch abandoned since the count was
    /// `seen`. The count is still `seen` if a batch in flight may be one that the log has dropped.
    pub(super) fn first_of(&self, seen: u64, writes: &[Write], clock: &Clock) -> (u64, Option<Write>) {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let count = self.count.load(Relaxed);
        let new = (count - seen) as usize;
        let in_flight = |write: &Write| clock.is_in_flight(write.batch);
        let is_logged = |write: &Write| last.iter().rev().take(new).any(|&batch| batch == write.batch);
        let is_missed = new > last.len();
        let is_abandoned = |&write: &&Write| is_logged(write) || is_missed && !in_flight(write);
        let count = if is_missed && writes.iter().any(in_flight) { seen } else { count };
        (count, writes.iter().filter(is_abandoned).min_by_key(|write| write.from).copied())
    }
}
