//! Abandoned batches: what was written under a batch that did not finish is withdrawn.
//!
//! A batch that is dropped, that a panic ends, or whose device fails may not have computed what was
//! appended under it. Nothing of it may be found, and nothing that was computed from it. The batch
//! does not know its sequences, which are on other threads, so each sequence keeps a [`Write`] for
//! every batch that wrote to it and may still be abandoned, and looks for that batch in the pool's
//! log before its next operation.
//!
//! ```text
//! batch      writes to a sequence    the sequence notes (batch, first position, tokens announced before)
//!            abandoned               log the batch;  count += 1 (Release);  end the lease
//! sequence   operation               seen != count (Acquire)?  withdraw: cut to the first position of a logged batch;
//!                                    the blocks go to its reservation, so that the same tokens can be appended again
//!            seal, promise           the other writers have ended;  then seen == count, or the sequence does neither
//! ```
//!
//! # Theorem
//!
//! No block is sealed or registered that holds a token which an abandoned batch wrote, or one that
//! was appended behind such a token.
//!
//! A sequence seals a block, and promises one to a batch, only after it found that all other
//! batches that wrote to the sequence had ended. An abandoned one was logged before its end, so the
//! load of the count that follows sees it, and neither happens. A batch that is abandoned seals
//! nothing that was promised to it. A fork has a copy of the notes, and does the same for itself.
//!
//! Until the owner's next operation, [views](super::SequenceView) show the withdrawn tokens.
//!
//! # Bounds
//!
//! The log keeps the last [`KEPT`] batches. A sequence that was idle while more were abandoned
//! cannot tell which ones wrote to it, and withdraws all tokens whose batch it has not seen end.
//!
//! Model: `loom-tests/tests/abandoned.rs`.

use std::collections::VecDeque;
use std::sync::PoisonError;

use smallvec::SmallVec;

use crate::clock::BatchRef;
use crate::ids::BlockId;
use crate::sync::{AtomicU64, CachePadded, Mutex, Ordering::*};

use super::sequence::Sequence;

/// Number of abandoned batches that the log keeps.
const KEPT: usize = if cfg!(kvpool_loom) { 2 } else { 1 << 16 };

/// The abandoned batches of a pool.
#[derive(Default)]
pub(super) struct Abandoned {
    count: CachePadded<AtomicU64>,
    last: Mutex<VecDeque<BatchRef>>,
}

/// What one batch wrote to a sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Write {
    pub(super) batch: BatchRef,
    /// First position that it wrote.
    pub(super) from: u32,
    /// Number of tokens that were announced before it wrote.
    pub(super) announced: u32,
}

/// The writes of batches that a sequence has not seen end, and of some that it has.
pub(super) type Writes = SmallVec<[Write; 2]>;

impl Abandoned {
    /// Returns the number of batches that were abandoned.
    #[inline]
    pub(super) fn count(&self) -> u64 {
        // Acquire: pairs with `add`.
        self.count.load(Acquire)
    }

    /// Logs a batch, before it ends.
    pub(super) fn add(&self, batch: BatchRef) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.len() == KEPT {
            last.pop_front();
        }
        last.push_back(batch);
        // Release: the batch's end follows, so that a thread that has seen the end sees the count.
        self.count.store(self.count.load(Relaxed) + 1, Release);
    }

    /// Returns the count, and of these writes the first one by a batch that was abandoned since the
    /// count was `seen`.
    fn first_of(&self, seen: u64, writes: &[Write]) -> (u64, Option<Write>) {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let count = self.count.load(Relaxed);
        let new = (count - seen) as usize;
        let is_abandoned = |write: &&Write| {
            new > last.len() || last.iter().rev().take(new).any(|&batch| batch == write.batch)
        };
        (count, writes.iter().filter(is_abandoned).min_by_key(|write| write.from).copied())
    }
}

impl Sequence {
    /// Returns whether batches were abandoned since the sequence last looked.
    #[inline(always)]
    pub(super) fn is_stale(&self) -> bool {
        // Relaxed: only the owner stores it.
        self.seen.load(Relaxed) != self.sequences.0.abandoned.count()
    }

    /// Returns the first write that will be withdrawn, if there is one.
    #[inline]
    pub(super) fn withdrawn(&self) -> Option<Write> {
        if self.is_stale() { self.find_withdrawn() } else { None }
    }

    #[cold]
    fn find_withdrawn(&self) -> Option<Write> {
        // Relaxed: as above, or by readers of this very sequence, which all find the same.
        let (count, first) = self.sequences.0.abandoned.first_of(self.seen.load(Relaxed), &self.writes);
        if first.is_none() {
            self.seen.store(count, Relaxed);
        }
        first
    }

    /// Withdraws what abandoned batches wrote. Every operation that changes the sequence begins
    /// with this.
    #[inline(always)]
    pub(super) fn catch_up(&mut self) {
        if self.is_stale() {
            self.withdraw();
        }
    }

    #[cold]
    fn withdraw(&mut self) {
        let (count, first) = self.sequences.0.abandoned.first_of(self.seen.load(Relaxed), &self.writes);
        if let Some(Write { batch, from, announced }) = first {
            let place = from / self.sequences.0.block_tokens;
            if self.seals.is_promised_to(place, batch.ticket()) {
                // The batch seals nothing.
                self.seals.reopen(place);
            }
            let gone = self.unlink(from);
            let pool = self.sequences.0.blocks.clone();
            let is_open = |&id: &BlockId| {
                let word = pool.word(id);
                word.refs() == 1 && !word.is_sealed() && !word.is_cached()
            };
            let (kept, gone): (Vec<_>, Vec<_>) = gone.into_iter().partition(is_open);
            self.reserved.extend(kept);
            self.was_listed |= !self.reserved.is_empty();
            self.note_reserved();
            self.release_unlinked(&gone);
            let cut = announced.max(from);
            if let (Some(known), Some(cache)) = (&mut self.known, self.sequences.0.cache.as_ref()) {
                known.truncate(cache, cut);
            }
        }
        self.seen.store(count, Relaxed);
    }

    /// Notes a write by a batch in flight. The end of the batch `ended` was seen.
    #[inline(always)]
    pub(super) fn note_write(&mut self, batch: BatchRef, from: u32, ended: BatchRef) {
        let announced = self.known.as_ref().map_or(0, |known| known.announced() as u32);
        let write = Write { batch, from, announced };
        match self.writes.last() {
            Some(last) if last.batch == write.batch && last.from <= write.from => {}
            Some(last) if last.batch == ended && self.writes.len() == 1 && !self.is_stale() => {
                self.writes[0] = write;
            }
            _ => self.note_write_beside(write),
        }
    }

    #[cold]
    fn note_write_beside(&mut self, write: Write) {
        if let Some(known) = self.writes.iter_mut().find(|known| known.batch == write.batch) {
            known.from = known.from.min(write.from);
            return;
        }
        let clock = self.sequences.0.blocks.clock();
        let ended = |write: &Write| !clock.is_in_flight(write.batch);
        let ended: SmallVec<[BatchRef; 8]> =
            self.writes.iter().filter(|&w| ended(w)).map(|w| w.batch).collect();
        // Only now: the log has those of them that were abandoned.
        if !self.is_stale() {
            self.writes.retain(|write| !ended.contains(&write.batch));
        }
        self.writes.push(write);
    }
}
