//! How a sequence handles [abandoned](super::abandoned) batches, and [closes](super::closing).

use smallvec::SmallVec;

use crate::clock::BatchRef;
use crate::ids::BlockId;
use crate::sync::Ordering::*;

use super::abandoned::Write;
use super::closing::Closed;
use super::list::ListOwner;
use super::sequence::Sequence;
use super::token_hashes::TokenHashes;

#[inline]
fn announced(known: &Option<Box<TokenHashes>>) -> u32 {
    known.as_ref().map_or(0, |known| known.announced().min(u32::MAX as usize) as u32)
}

impl Closed for Sequence {
    fn writing(&self) -> Option<BatchRef> {
        self.writing()
    }

    fn blocks(&self) -> Vec<BlockId> {
        self.held().collect()
    }
}

impl Sequence {
    /// Returns whether batches were abandoned since the sequence last looked.
    #[inline(always)]
    pub(super) fn is_stale(&self) -> bool {
        // Relaxed: readers of this very sequence store what they have seen, too.
        self.seen.load(Relaxed) != self.sequences.0.abandoned.count()
    }

    #[inline]
    pub(super) fn withdrawn(&self) -> Option<Write> {
        if self.is_stale() { self.find_withdrawn() } else { None }
    }

    #[cold]
    fn find_withdrawn(&self) -> Option<Write> {
        // Relaxed: as above. An older number only repeats a look.
        let (count, first) = self.first_abandoned();
        if first.is_none() {
            self.seen.store(count, Relaxed);
        }
        first
    }

    fn first_abandoned(&self) -> (u64, Option<Write>) {
        let clock = self.sequences.0.blocks.clock();
        self.sequences.0.abandoned.first_of(self.seen.load(Relaxed), &self.writes, clock)
    }

    /// Withdraws what abandoned batches wrote, at the start of every operation that changes it.
    #[inline(always)]
    pub(super) fn catch_up(&mut self) {
        if self.is_stale() {
            self.withdraw();
        }
    }

    #[cold]
    fn withdraw(&mut self) {
        let (count, first) = self.first_abandoned();
        if let Some(Write { batch, from, announced }) = first {
            let place = from / self.kind.block_tokens;
            // Work of a batch in flight may still write to these blocks.
            let is_written = self.writing().is_none();
            if is_written && self.seals.is_promised_to(place, batch.ticket()) {
                self.seals.reopen(place);
            }
            let gone = self.unlink(from);
            let pool = self.sequences.0.blocks.clone();
            let is_kept = |&id: &BlockId| {
                let word = pool.word(id);
                is_written && word.refs() == 1 && !word.is_sealed() && !word.is_cached()
            };
            let (kept, gone): (Vec<_>, Vec<_>) = gone.into_iter().partition(is_kept);
            self.reserved.extend(kept);
            self.was_listed |= !self.reserved.is_empty();
            self.note_reserved();
            self.release_unlinked(&gone);
            let cut = announced.max(from);
            if let (Some(known), Some(cache)) = (&mut self.known, self.sequences.0.cache.as_ref()) {
                known.truncate(cache, cut as usize, usize::MAX);
            }
        }
        self.seen.store(count, Relaxed);
    }

    /// Cuts it to `length` tokens, of which and after which `announced` stay known, like a withdrawal.
    #[cold]
    pub(super) fn cut_to(&mut self, length: u32, announced: usize) {
        let gone = self.unlink(length);
        self.release_unlinked(&gone);
        if let (Some(known), Some(cache)) = (&mut self.known, self.sequences.0.cache.as_ref()) {
            known.truncate(cache, announced.max(length as usize), usize::MAX);
        }
    }

    /// Records a write by a batch in flight. `ended` is a batch that was seen to have ended.
    #[inline(always)]
    pub(super) fn note_write(&mut self, batch: BatchRef, from: u32, ended: BatchRef) {
        let is_stale = self.is_stale();
        match &mut self.writes[..] {
            [.., last] if last.batch == batch && last.from <= from => {}
            [only] if only.batch == ended && !is_stale => {
                *only = Write { batch, from, announced: announced(&self.known) };
            }
            _ => self.note_write_beside(Write { batch, from, announced: announced(&self.known) }),
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
        // Only now: abandoned ones are in the log by then.
        if !self.is_stale() {
            self.writes.retain(|write| !ended.contains(&write.batch));
        }
        self.writes.push(write);
    }

    /// Returns a batch in flight whose end the registration of its last blocks has to await.
    pub(super) fn registers_after(&self) -> Option<BatchRef> {
        let (known, cache) = self.token_hashes()?;
        let full = (self.committed / self.kind.block_tokens).min(known.hashes().len() as u32);
        // One that was given up is registered, or never will be.
        let is_registered = |last: u32| {
            let id = self.list.id(last as usize);
            self.is_null(id) || self.pool_blocks().word(id).is_cached()
        };
        let has_block = full.checked_sub(1).is_some_and(|last| !is_registered(last));
        let has_tail = self.reuses_tail && known.tail_hash(cache, self.len()).is_some();
        if (has_block || has_tail) && known.era() == cache.era() { self.writing() } else { None }
    }

    #[cold]
    pub(super) fn close_after(&mut self, writer: BatchRef) {
        let list = std::mem::replace(&mut self.list, ListOwner::new(self.kind.block_tokens));
        let mut rest =
            Self::new(self.sequences.clone(), self.id(), self.priority(), list).in_group(self.group);
        rest.frames = std::mem::take(&mut self.frames);
        (rest.committed, rest.seals, rest.writers) = (self.committed, self.seals, self.writers);
        rest.front = self.front;
        (rest.writes, rest.seen) = (std::mem::take(&mut self.writes), std::mem::take(&mut self.seen));
        (rest.known, rest.reuses_tail) = (self.known.take(), self.reuses_tail);
        rest.is_closed = true;
        self.sequences.0.closing.add(Box::new(rest), writer, self.pool_blocks().clock());
    }
}
