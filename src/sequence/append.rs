//! Appends tokens to a sequence.
//!
//! ```text
//! room        withdraw what was abandoned, plan, look at the last block
//! grow        if that block does not do: take blocks, copy on write, reopen      an error changes nothing
//! complete    announce, make final, promise full blocks to the batch
//! ```

use std::ops::Range;

use crate::error::SequenceError;
use crate::ids::BlockId;
use crate::sync::{Ordering::Relaxed, call};

use super::batch::Batch;
use super::batch_inner::Promise;
use super::grow::{Copied, Grown, Tail};
use super::plan::{Growth, too_long, zero_tokens};
use super::sequence::{Access, Sequence};
use super::tokens::Tokens;

/// Result of an append.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Appended {
    /// Positions of the new tokens in the sequence.
    pub tokens: Range<usize>,
    /// Number of allocated blocks, including a copy.
    pub new_blocks: usize,
    /// The block that was copied because it could not be written in place.
    pub copied: Option<Copied>,
}

pub(super) enum Room {
    NoTokens,
    /// The last block, which is open, takes them.
    InPlace(Growth),
    /// The list must [grow](Batch::grow_list). The last block, if it has tokens.
    InList(Growth, Option<Tail>),
}

impl Grown {
    const IN_PLACE: Self = Self { new_blocks: 0, copied: None };

    #[inline]
    fn appended(self, plan: &Growth) -> Appended {
        let tokens = plan.from as usize..plan.length as usize;
        Appended { tokens, new_blocks: self.new_blocks, copied: self.copied }
    }
}

impl Sequence {
    /// Returns the last block if these are one final token that it takes without becoming full.
    #[inline(always)]
    pub(super) fn takes_one(&self, tokens: Tokens<'_>) -> Option<BlockId> {
        let is_one = match tokens {
            Tokens::Ids(ids) => ids.len() == 1,
            Tokens::Final(tokens) => tokens == 1 && self.known.is_none(),
            _ => false,
        };
        let is_simple = is_one && self.list.room() > 1 && self.committed == self.list.tokens();
        self.list.last().filter(|_| is_simple)
    }
}

impl Batch {
    /// Appends tokens to a sequence: a number of final ones, ids, or [others](Tokens).
    ///
    /// Allocates blocks as needed, and copies the last block if it cannot be written in place.
    /// Final tokens also make earlier drafted ones final.
    ///
    /// # Errors
    /// [`SequenceError::Alloc`] if there are no blocks, [`SequenceError::Invalid`] for no tokens or
    /// too many in all, [`SequenceError::ForeignSequence`], [`SequenceError::Storage`] if the copy
    /// failed. With [ids](Tokens::Ids), [`SequenceError::TokensUnknown`] if earlier tokens were not
    /// announced, and [`SequenceError::TokensAhead`] if other announced tokens must be appended
    /// first. Nothing has changed.
    #[inline]
    pub fn append<'t>(
        &mut self,
        sequence: &mut Sequence,
        tokens: impl Into<Tokens<'t>>,
    ) -> Result<Appended, SequenceError> {
        let _call = call();
        let tokens = tokens.into();
        if let Some(last) = self.takes_one(sequence, tokens) {
            let from = sequence.list.tokens() as usize;
            self.append_one(sequence, last, tokens);
            return Ok(Appended { tokens: from..from + 1, new_blocks: 0, copied: None });
        }
        self.append_any(sequence, tokens)
    }

    // Not inlined: it costs much more than a call.
    #[inline(never)]
    fn append_any(&mut self, sequence: &mut Sequence, tokens: Tokens<'_>) -> Result<Appended, SequenceError> {
        sequence.catch_up();
        match self.room_now(sequence, tokens)? {
            Room::NoTokens => {
                let length = sequence.list.tokens() as usize;
                Ok(Appended { tokens: length..length, new_blocks: 0, copied: None })
            }
            Room::InPlace(plan) => {
                self.append_in_place(sequence, &plan, tokens);
                Ok(Grown::IN_PLACE.appended(&plan))
            }
            Room::InList(plan, tail) => self.append_to_list(sequence, &plan, tail, tokens),
        }
    }

    /// Returns the last block if [`append_one`](Self::append_one) can append these tokens: one id,
    /// or, without a cache, a final token; nothing is to be withdrawn, sealed or announced before;
    /// and that block is open and has room for more. Then [`room_now`](Self::room_now) is in place.
    #[inline(always)]
    pub(super) fn takes_one(&self, sequence: &Sequence, tokens: Tokens<'_>) -> Option<BlockId> {
        // Of the sequence's own pool, which may be another one.
        let (blocks, list) = (&sequence.sequences.0.blocks, &sequence.list);
        let last = sequence.takes_one(tokens)?;
        let word = blocks.word(last);
        (self.step.sequences.same(&sequence.sequences)
            && !sequence.is_stale()
            && sequence.known.as_ref().is_none_or(|known| known.takes_one(list.tokens() as usize))
            && sequence.seals.due().is_none()
            && sequence.frames.as_of(blocks.moves_logged()).is_some()
            && list.len() > sequence.seals.settled() as usize
            && (word.refs() == 1 && !word.is_cached() && !word.is_sealed()))
        .then_some(last)
    }

    /// Appends a final token to the last block, which is open and does not become full.
    #[inline(always)]
    pub(super) fn append_one(&mut self, sequence: &mut Sequence, last: BlockId, tokens: Tokens<'_>) {
        debug_assert!(matches!(self.room_now(sequence, tokens), Ok(Room::InPlace(_))), "{sequence:?}");
        let from = sequence.list.tokens();
        self.step.sequences.0.blocks.touch(&[last]);
        sequence.list.push();
        self.step.note(sequence, from, Some(from));
        if let (Tokens::Ids(&[token]), Some(known)) = (tokens, &mut sequence.known) {
            known.push(token);
        }
        sequence.committed = from + 1;
    }

    /// Determines what tokens require of a sequence, which has withdrawn what was abandoned.
    // Always inline, like its callees: results in memory would take longer than the rest.
    #[inline(always)]
    pub(super) fn room_now(
        &self,
        sequence: &mut Sequence,
        tokens: Tokens<'_>,
    ) -> Result<Room, SequenceError> {
        let Some(plan) = self.plan(sequence, tokens)? else { return Ok(Room::NoTokens) };
        sequence.settle();
        sequence.frames.catch_up(&sequence.list, &self.step.sequences.0.blocks);
        if plan.fresh > 0 {
            sequence.slide();
        }
        let Some(id) = sequence.list.last().filter(|_| plan.tail) else {
            return Ok(Room::InList(plan, None));
        };
        let tail = self.tail(sequence, plan.first, id);
        let is_open = plan.fresh == 0 && tail.access == Access::Open;
        Ok(if is_open { Room::InPlace(plan) } else { Room::InList(plan, Some(tail)) })
    }

    /// `None`: it would append announced tokens, and there are none left.
    #[inline(always)]
    fn plan(&self, sequence: &Sequence, tokens: Tokens<'_>) -> Result<Option<Growth>, SequenceError> {
        let (id, length) = (sequence.id(), sequence.list.tokens());
        self.check(&sequence.sequences, id)?;
        let count = tokens.count(sequence);
        match (tokens, sequence.known.as_deref()) {
            (Tokens::Announced(_), None) => return Err(SequenceError::TokensUnknown { id, known: 0 }),
            (Tokens::Announced(_), _) if count == 0 => return Ok(None),
            (Tokens::Ids(_), Some(known)) => known.check_all_announced(id, length as usize)?,
            _ => {}
        }
        if count == 0 {
            return Err(zero_tokens(id));
        }
        let blocks = sequence.list.len() as u32;
        Growth::plan(length, blocks, count, sequence.kind.block_tokens)
            .map(Some)
            .ok_or_else(|| too_long(id, count, length as usize))
    }

    #[inline(always)]
    pub(super) fn append_in_place(&mut self, sequence: &mut Sequence, plan: &Growth, tokens: Tokens<'_>) {
        sequence.list.last().into_iter().for_each(|last| self.step.sequences.0.blocks.touch(&[last]));
        sequence.publish(plan.length);
        self.step.note(sequence, plan.from, Some(plan.from));
        self.complete(sequence, plan, tokens);
    }

    #[inline(never)]
    pub(super) fn append_to_list(
        &mut self,
        sequence: &mut Sequence,
        plan: &Growth,
        tail: Option<Tail>,
        tokens: Tokens<'_>,
    ) -> Result<Appended, SequenceError> {
        let grown = self.grow_list(sequence, plan, tail)?;
        // Last, so that an error needs no rollback.
        self.complete(sequence, plan, tokens);
        Ok(grown.appended(plan))
    }

    /// Announces the tokens of a growth that have ids, and makes them final unless drafted.
    #[inline(always)]
    fn complete(&mut self, sequence: &mut Sequence, plan: &Growth, tokens: Tokens<'_>) {
        if let (Tokens::Ids(ids), Some(known), Some(cache)) =
            (tokens, &mut sequence.known, &self.step.sequences.0.cache)
        {
            known.announce_checked(cache, ids);
        }
        if !matches!(tokens, Tokens::Draft(_)) {
            self.make_final(sequence, plan);
        }
    }

    #[inline]
    pub(super) fn make_final(&mut self, sequence: &mut Sequence, plan: &Growth) {
        let has_drafts = sequence.committed < plan.from;
        sequence.committed = plan.length;
        if let Some(known) = &mut sequence.known {
            known.committed(plan.length);
        }
        if plan.full > plan.first {
            self.filled(sequence, plan);
        } else if has_drafts {
            sequence.complete(plan.full);
        }
    }

    /// Promises final full blocks to this batch, unless another writer is in flight.
    fn filled(&mut self, sequence: &mut Sequence, plan: &Growth) {
        let (ticket, blocks) = (self.ticket(), &self.step.sequences.0.blocks);
        let written = (plan.first + u32::from(plan.tail)) as usize;
        sequence.look_for_uncached(written);
        // This batch was added last.
        let is_last_writer = blocks.clock().others_ended(&sequence.writers);
        // Only after the others have ended: abandoned ones are in the log by then.
        let is_last_writer = is_last_writer && !sequence.is_stale();
        // Earlier blocks are settled: the promise begins where they end.
        if sequence.seals.settled() == plan.first && is_last_writer {
            let ids = &sequence.list.ids()[plan.first as usize..plan.full as usize];
            let known = sequence.token_hashes();
            self.step.promised.extend((plan.first..plan.full).zip(ids).map(|(place, id)| {
                // Relaxed: only the owner, borrowed here, changes it.
                let id = BlockId(id.load(Relaxed));
                let hash = known.and_then(|(known, cache)| Some((known, cache, known.hash(place)?)));
                if let Some((known, cache, hash)) = hash {
                    cache.note(id, hash, known.era(), place, known.mark());
                }
                Promise {
                    handle: blocks.handle(id),
                    checked: hash.map(|(known, ..)| known.checked),
                    stored: hash.and_then(|(known, cache, _)| known.stored(cache, id, place)),
                }
            }));
            sequence.seals.promise(plan.full, ticket);
        } else {
            sequence.complete(plan.full);
        }
    }

    /// Makes the last block writable if the growth writes to it. On an error, nothing has changed.
    pub(super) fn open_tail(
        &mut self,
        sequence: &mut Sequence,
        plan: &Growth,
    ) -> Result<Option<Copied>, SequenceError> {
        let Some(id) = sequence.list.last().filter(|_| plan.tail) else { return Ok(None) };
        let tail = self.tail(sequence, plan.first, id);
        if tail.access == Access::Open {
            return Ok(None);
        }
        let plan = Growth { length: plan.from, fresh: 0, full: plan.first, ..*plan };
        Ok(self.grow_list(sequence, &plan, Some(tail))?.copied)
    }

    #[inline(always)]
    pub(super) fn tail(&self, sequence: &Sequence, place: u32, id: BlockId) -> Tail {
        let blocks = &self.step.sequences.0.blocks;
        let word = blocks.word(id);
        let access = sequence.access(place, word, self.ticket());
        debug_assert!(
            access != Access::Open
                || sequence.frames.last() == Some(word.frame())
                || sequence.frames.as_of(blocks.moves_logged()).is_none()
        );
        Tail { id, access }
    }
}
