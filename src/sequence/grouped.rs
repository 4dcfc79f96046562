//! Sequences of models whose layers differ: a list of blocks in each group, one length and one hit.
//!
//! ```text
//! pool       one registry: an id has a list in each group;  one log of abandoned batches
//! sequence   a part of each group: equal lengths, equal tokens
//! batch      one: it grows all parts, and ends for all of them at once
//! ```
//!
//! Groups differ in what they keep: all tokens, or those of a [window](super::window). Each hashes
//! the tokens from a root of its own, so that no group finds a block of another.
//!
//! # One length
//!
//! Every operation first catches up: parts withdraw what abandoned batches wrote until all have
//! seen the same part of the log, and so have cut to the same length. Then none looks at the log
//! again before the operation is over: a batch that is abandoned meanwhile is withdrawn by the next
//! one. What can fail (blocks, copies on write) is done for all parts before the first one grows.
//!
//! If blocks of one part were uncached, nothing is found by the hashes of any.
//!
//! # One boundary
//!
//! A hit is a boundary at which every group has what its next token sees. It is the fixed point of
//! the groups' own longest hits: each is asked for its longest hit up to the boundary so far, until
//! none is shorter. Lengths only fall, so this ends. Only then are references taken, at exactly
//! that boundary in every group; if a block was evicted meanwhile, all are given back, and the
//! search goes on below it. The longest hit of one group beside that of another at a different
//! boundary would be wrong tokens.
//!
//! # All groups or none
//!
//! An admission allocates the blocks of all groups by one request, so it waits in one place of the
//! queue. So do an append and a reservation, after all groups are planned: a refused one evicts
//! nothing, and holds no blocks for which another thread is refused. Model:
//! `loom-tests/tests/grouped.rs`.
//!
//! # Uncached blocks
//!
//! A group cannot tell by its own hashes whether a block of another was uncached. So the newest
//! call up to which the sequence was checked is that of the look at all groups, when an operation
//! begins: blocks that are noted later are not registered if there was a call in between.

use std::fmt;
use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use crate::block::{AllocRequest, ListShare, Waiting};
use crate::error::{AllocError, SequenceError};
use crate::ids::{BlockId, SequenceId, SessionId};
use crate::prefix::ExtraKey;
use crate::storage::{Element, Elements};
use crate::sync::{Ordering::Relaxed, call};

use super::batch::Batch;
use super::sequence::Sequence;
use super::state::State;
use super::versions::VersionRange;

/// A sequence with a list of blocks in each group of layers. Dropping it closes it.
pub struct GroupedSequence {
    /// Not empty; all of the same length.
    pub(super) parts: Vec<Sequence>,
    /// Of the same length too.
    pub(super) states: Vec<State>,
    /// Tokens at admission whose blocks were cached in all groups: no state is kept behind those
    /// beyond the hit.
    pub(super) cached: usize,
    /// Tokens at admission of its cached prefix.
    pub(super) hit: usize,
    pub(super) session: Option<SessionId>,
}

/// Numbers of blocks, one for each part.
pub(crate) type Counts = SmallVec<[usize; 8]>;

impl GroupedSequence {
    pub(crate) fn of_one(part: Sequence) -> Self {
        Self::new(vec![part], Vec::new(), None)
    }

    /// Returns the sequence of its one list, if it has one list and no state: of a pool with one
    /// group of layers.
    pub fn into_one(mut self) -> Result<Sequence, Self> {
        if (self.parts.len(), self.states.len()) != (1, 0) {
            return Err(self);
        }
        Ok(self.parts.pop().expect("of one list"))
    }

    pub(super) fn new(parts: Vec<Sequence>, states: Vec<State>, session: Option<SessionId>) -> Self {
        Self { parts, states, cached: 0, hit: 0, session }
    }

    /// Returns the versions of the weights with which its tokens were computed: see
    /// [`Sequence::versions`].
    pub fn versions(&self) -> impl Iterator<Item = VersionRange> {
        self.parts[0].versions()
    }

    /// Returns its id.
    pub fn id(&self) -> SequenceId {
        self.parts[0].id()
    }

    /// Returns the number of its tokens, in every group. In a pool with
    /// [states](crate::pool::PoolBuilder::states), 0 after an abandoned batch appended to it: a
    /// state cannot be taken back, so that the sequence begins again. It also does where that batch
    /// copied a block of a group, and another one, with [fewer
    /// tokens](crate::pool::PoolBuilder::list_tokens) per block, has given up what the first token
    /// of that block sees.
    pub fn len(&self) -> usize {
        if self.is_lost() { 0 } else { self.parts[0].len() }
    }

    /// Returns whether it will begin again, at its next call.
    fn is_lost(&self) -> bool {
        self.states.iter().any(State::is_lost)
    }

    /// Returns whether it has no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns its list in a group of layers, for tables, slots and statistics.
    ///
    /// # Panics
    /// If the pool has no such group.
    pub fn group(&self, group: usize) -> &Sequence {
        &self.parts[group]
    }

    /// Returns the number of groups, without those that keep a state.
    pub fn groups(&self) -> usize {
        self.parts.len()
    }

    /// Returns the number of its [states](crate::pool::PoolBuilder::states).
    pub fn states(&self) -> usize {
        self.states.len()
    }

    /// Returns the number of tokens that its states hold: the final ones at the last append. 0
    /// without states, and after an abandoned batch.
    pub fn state_tokens(&self) -> usize {
        let first = self.states.first().filter(|_| !self.is_lost());
        first.map_or(0, |state| state.at as usize)
    }

    /// Returns the frames of a [state](crate::pool::PoolBuilder::states), which are consecutive,
    /// and the same until the sequence is closed.
    ///
    /// Kernels overwrite them in the order of the tokens. If an append begins at position 0, they
    /// hold nothing yet: the engine initializes them, in stream order behind earlier work on them.
    ///
    /// # Panics
    /// If the pool has no such state.
    pub fn state(&self, state: usize) -> Range<usize> {
        self.states[state].frames()
    }

    /// Returns the number of tokens with known ids, as [`Sequence::announced`], in every group.
    pub fn announced(&self) -> usize {
        self.parts[0].announced()
    }

    /// Returns the number of final tokens, as [`Sequence::committed`], in every group.
    pub fn committed(&self) -> usize {
        self.parts[0].committed().min(self.len())
    }

    /// Returns the number of blocks reserved beyond its tokens, in all groups.
    pub fn reserved_blocks(&self) -> usize {
        self.parts.iter().map(Sequence::reserved_blocks).sum()
    }

    /// Returns the number of blocks that it holds, without those given up, in all groups.
    pub fn held_blocks(&self) -> usize {
        let parts = self.parts.iter().map(|part| part.block_count() - part.blocks_given_up());
        let sources = self.states.iter().map(State::source_blocks);
        parts.sum::<usize>() + self.state_blocks() + sources.sum::<usize>()
    }

    fn state_blocks(&self) -> usize {
        self.states.iter().map(|state| state.run.list.len()).sum()
    }

    /// Lets all parts see the same abandoned batches, and the same uncached blocks.
    pub(super) fn catch_up(&mut self) {
        loop {
            let seen = |parts: &[Sequence]| -> SmallVec<[u64; 8]> {
                parts.iter().map(|part| part.seen.load(Relaxed)).collect()
            };
            let before = seen(&self.parts);
            self.parts.iter_mut().for_each(Sequence::catch_up);
            let now = seen(&self.parts);
            // A part may keep an older number, while the log has dropped batches.
            if now.iter().all(|&seen| seen == now[0]) || now == before {
                break;
            }
        }
        let of = |part: &Sequence| (part.list.tokens(), part.announced_now(), part.committed);
        self.states.iter_mut().for_each(State::look_for_abandoned);
        let first = of(&self.parts[0]);
        let is_uneven = self.states.iter().any(|state| state.at > first.0);
        if is_uneven || self.parts.iter().any(|part| of(part) != first) {
            self.level();
        }
        // Not of `looked`, which stays older while a last block has no hash yet.
        let compared = self.parts.iter_mut().filter_map(|part| part.look_for_uncached(part.list.len()));
        let checked = compared.min();
        let is_wrong = |part: &Sequence| part.known.as_ref().is_some_and(|known| known.is_forgotten());
        if self.parts.iter().any(is_wrong) {
            self.parts.iter_mut().flat_map(|part| &mut part.known).for_each(|known| known.forget());
        }
        let known = self.parts.iter_mut().flat_map(|part| &mut part.known);
        known.zip(checked.into_iter().cycle()).for_each(|(known, checked)| known.checked = checked);
    }

    /// Cuts all parts to what the shortest has, after a log that dropped batches: parts may have
    /// forgotten different writes. A state that was computed from more tokens begins again.
    #[cold]
    fn level(&mut self) {
        let parts = &mut self.parts;
        let length = parts.iter().map(|part| part.list.tokens()).min().unwrap_or(0);
        let announced = parts.iter().map(Sequence::announced_now).min().unwrap_or(0);
        let committed = parts.iter().map(|part| part.committed).min().unwrap_or(0);
        let continues = parts.iter().all(|part| part.check_continues(length as usize).is_ok());
        let continues = continues && self.states.iter().all(|state| state.at <= length);
        // A part that has given up what the next token would see begins again.
        let length = if continues { length } else { 0 };
        if length == 0 {
            self.states.iter_mut().for_each(State::restart);
        }
        for part in parts {
            part.cut_to(length, announced);
            part.committed = part.committed.min(committed);
        }
    }

    /// As [`Sequence::announce`], in every group.
    pub fn announce(&mut self, tokens: &[u32]) -> Result<(), SequenceError> {
        self.catch_up();
        self.parts.iter_mut().try_for_each(|part| part.announce_now(tokens))
    }

    /// As [`Sequence::extra_key`], in every group.
    pub fn extra_key(&mut self, tokens: Range<usize>, key: &[u8]) -> Result<(), SequenceError> {
        self.catch_up();
        let key = ExtraKey::new(tokens, key);
        self.parts.iter_mut().try_for_each(|part| part.extra_key_now(key.clone()))
    }

    /// As [`Sequence::commit`], in every group.
    pub fn commit(&mut self, length: usize) -> Result<(), SequenceError> {
        self.catch_up();
        self.parts.iter_mut().try_for_each(|part| part.commit_now(length))
    }

    /// As [`Sequence::accept`], in every group.
    pub fn accept(&mut self, tokens: &[u32]) -> Result<(), SequenceError> {
        self.catch_up();
        self.parts.iter_mut().try_for_each(|part| part.accept_now(tokens))
    }

    /// As [`Sequence::truncate`], in every group. If a group has given up tokens that the next one
    /// would see, nothing has changed in any.
    ///
    /// # Errors
    /// Also [`SequenceError::StateAhead`] if its states hold [more tokens](Self::state_tokens),
    /// unless none are left.
    pub fn truncate(&mut self, length: usize) -> Result<(), SequenceError> {
        self.catch_up();
        let check = |part: &Sequence| part.check_continues(length.min(part.list.tokens() as usize));
        self.parts.iter().try_for_each(check)?;
        let tokens = self.state_tokens();
        if length < tokens && length > 0 {
            return Err(SequenceError::StateAhead { id: self.id(), asked: length, tokens });
        }
        if length == 0 {
            self.states.iter_mut().for_each(State::restart);
        }
        self.parts.iter_mut().try_for_each(|part| part.truncate_now(length))
    }

    /// As [`Sequence::reserve`], in every group, or in none.
    pub fn reserve(&mut self, tokens: usize) -> Result<(), SequenceError> {
        let (_, lacking) = self.reservation(tokens)?;
        Ok(self.allocate_reserved(&lacking)?)
    }

    /// Returns the request for what the reservations of all parts lack for this many more tokens,
    /// and the number for each.
    pub(crate) fn reservation(&mut self, tokens: usize) -> Result<(AllocRequest, Counts), SequenceError> {
        self.catch_up();
        let mut lacking = Counts::new();
        for part in &mut self.parts {
            lacking.push(part.reservation(tokens)?.map_or(0, |request| request.blocks));
        }
        Ok((self.request(lacking.iter().sum()), lacking))
    }

    fn request(&self, blocks: usize) -> AllocRequest {
        AllocRequest::new(blocks).sequence(self.id()).priority(self.parts[0].priority())
    }

    /// Allocates this number of blocks for the reservation of each part, all or none.
    pub(super) fn allocate_reserved(&mut self, lacking: &[usize]) -> Result<(), AllocError> {
        let pool = self.parts[0].pool_blocks().clone();
        self.take_reserved(lacking, |request, shares, take| pool.allocate_for_lists(request, shares, take))
    }

    /// Tries once to do the same, in the turn of a place in the queue.
    pub(crate) fn reserve_in_turn(
        &mut self,
        lacking: &[usize],
        place: &mut Waiting<'_>,
    ) -> Result<(), AllocError> {
        let first = &self.parts[0];
        let kept = self.parts.iter().flat_map(Sequence::owned_ids);
        first.pool_blocks().check_floors(&self.request(lacking.iter().sum()), first.tenant, kept)?;
        self.take_reserved(lacking, |request, shares, take| place.allocate_for_lists(request, shares, take))
    }

    fn take_reserved(
        &mut self,
        lacking: &[usize],
        allocate: impl FnOnce(
            &AllocRequest,
            &[ListShare],
            &mut dyn FnMut(usize, BlockId),
        ) -> Result<(), AllocError>,
    ) -> Result<(), AllocError> {
        let sum = lacking.iter().sum();
        if sum == 0 {
            return Ok(());
        }
        // Otherwise no free would satisfy it.
        self.parts[0].pool_blocks().check_request(&self.request(self.held_now() + sum))?;
        let share = |(part, &blocks): (&Sequence, &usize)| ListShare::new(part.list_end(), blocks);
        let shares: SmallVec<[ListShare; 8]> = self.parts.iter().zip(lacking).map(share).collect();
        let mut fresh: SmallVec<[SmallVec<[BlockId; 4]>; 8]> = smallvec![SmallVec::new(); shares.len()];
        allocate(&self.request(sum), &shares, &mut |list, id| fresh[list].push(id))?;
        let fresh = self.parts.iter_mut().zip(fresh).filter(|(_, fresh)| !fresh.is_empty());
        fresh.for_each(|(part, fresh)| part.add_reserved(&fresh));
        Ok(())
    }

    /// As [`Sequence::release_reservation`], in every group.
    pub fn release_reservation(&mut self) -> usize {
        self.parts.iter_mut().map(Sequence::release_reservation).sum()
    }

    fn held_now(&self) -> usize {
        let held = |part: &Sequence| part.list.len() - part.gap().len() + part.reserved.len();
        self.parts.iter().map(held).sum::<usize>() + self.state_blocks()
    }

    /// Releases what is left of these numbers of blocks, which were allocated last.
    pub(super) fn unreserve(&mut self, reserved: &[usize]) {
        self.parts.iter_mut().zip(reserved).for_each(|(part, &blocks)| part.unreserve(blocks));
    }

    /// As [`Sequence::fork`], in every group.
    ///
    /// # Errors
    /// Also [`SequenceError::Invalid`] in a pool with states, which are not shared: admit another
    /// sequence with the same tokens, behind a [checkpoint](Batch::checkpoint).
    pub fn fork(&mut self, id: SequenceId) -> Result<Self, SequenceError> {
        let _call = call();
        if !self.states.is_empty() {
            return Err(SequenceError::invalid(id, "fork", "one of a state", "a pool without states"));
        }
        self.catch_up();
        let sequences = &self.parts[0].sequences;
        let lists = sequences.register_grouped(id, self.parts[0].priority())?;
        let parts = Vec::with_capacity(lists.len());
        let mut fork = Self::new(parts, Vec::new(), None);
        for (part, list) in self.parts.iter().zip(lists) {
            match part.fork_to(id, list) {
                Ok(part) => fork.parts.push(part),
                Err(error) => {
                    if fork.parts.is_empty() {
                        sequences.unregister(id);
                    }
                    return Err(error);
                }
            }
        }
        Ok(fork)
    }
}

impl Drop for GroupedSequence {
    fn drop(&mut self) {
        // A fork that was refused.
        if self.parts.is_empty() {
            return;
        }
        self.catch_up();
        self.close_states();
        // The first part last, which unregisters the id.
        while self.parts.pop().is_some() {}
    }
}

impl fmt::Debug for GroupedSequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let states: Vec<_> = self.states.iter().map(State::frames).collect();
        f.debug_struct("GroupedSequence").field("parts", &self.parts).field("states", &states).finish()
    }
}

impl Batch {
    /// Notes this batch in all parts from the first position that it wrote in any, so that all
    /// withdraw the same tokens if it is abandoned: all tokens, if a part cannot continue there.
    /// Its blocks may be shorter than the copied one of another part, which is written from its
    /// first token on.
    pub(super) fn note_in_all(&mut self, sequence: &mut GroupedSequence) {
        let ticket = self.ticket();
        let notes = sequence.parts.iter().flat_map(|part| &part.writes);
        let own = notes.filter(|write| write.batch.ticket() == ticket).map(|write| write.from).min();
        if let Some(from) = own {
            let continues = sequence.parts.iter().all(|part| part.check_continues(from as usize).is_ok());
            let from = if continues { from } else { 0 };
            sequence.parts.iter_mut().for_each(|part| self.step.note(part, from, None));
        }
    }

    /// Returns an error if a group has settled the block of a token: a write to another group would
    /// let a withdrawal cut it below what it has given up.
    fn check_writable_in_all(
        &self,
        sequence: &mut GroupedSequence,
        position: usize,
    ) -> Result<(), SequenceError> {
        let id = sequence.id();
        self.check(&sequence.parts[0].sequences, id)?;
        sequence.catch_up();
        let ticket = self.ticket();
        let refused = |part: &Sequence| {
            let (place, settled) =
                (position / part.kind.block_tokens as usize, part.seals.settled() as usize);
            let is_refused = place < part.list.len()
                && place < settled
                && !part.seals.is_promised_to(place as u32, ticket);
            is_refused.then(|| part.list.id(place))
        };
        match sequence.parts.iter().find_map(refused) {
            Some(block) => Err(SequenceError::NotWritable { id, position, block }),
            None => Ok(()),
        }
    }

    /// As [`note_in_all`](Self::note_in_all), after a write to open blocks, which may be due.
    fn wrote_in_all(&mut self, sequence: &mut GroupedSequence) {
        self.note_in_all(sequence);
        let ticket = self.ticket();
        sequence.parts.iter_mut().for_each(|part| part.seals.wrote_again(ticket));
    }

    /// Stores K and V of tokens in one layer of a group, as [`store`](Self::store).
    ///
    /// # Errors
    /// Also [`SequenceError::NotWritable`] if another group has sealed or given up the first block.
    ///
    /// # Panics
    /// If the sequence has no such group.
    pub fn store_grouped(
        &mut self,
        sequence: &mut GroupedSequence,
        (group, layer): (usize, usize),
        tokens: Range<usize>,
        k: Elements<'_>,
        v: Elements<'_>,
    ) -> Result<(), SequenceError> {
        self.check_writable_in_all(sequence, tokens.start)?;
        let stored = self.store(&mut sequence.parts[group], layer, tokens, k, v);
        self.wrote_in_all(sequence);
        stored
    }

    /// Returns K and V of one block in one layer of a group for writing, as
    /// [`tile_mut`](Self::tile_mut). In a layout with dynamic scales, store instead.
    ///
    /// # Errors
    /// Also [`SequenceError::NotWritable`] if another group has sealed or given up the block.
    ///
    /// # Panics
    /// If the sequence has no such group.
    pub fn tile_mut_grouped<'a, T: Element>(
        &'a mut self,
        sequence: &'a mut GroupedSequence,
        (group, layer): (usize, usize),
        index: usize,
    ) -> Result<(&'a mut [T], &'a mut [T]), SequenceError> {
        self.check_writable_in_all(
            sequence,
            index.saturating_mul(sequence.parts[group].kind.block_tokens as usize),
        )?;
        self.tile_mut::<T>(&mut sequence.parts[group], layer, index)?;
        self.wrote_in_all(sequence);
        self.tile_mut(&mut sequence.parts[group], layer, index)
    }
}
