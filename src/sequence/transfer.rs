//! Transfer of a sequence, of one list of blocks or several, to another pool.
//!
//! ```text
//! depart     source: a reference on each block, so that they stay readable whatever happens to the sequence   BlockRefs
//! open       target: the id is registered                                                                     Arrival
//! take       target: blocks are allocated (or shared, if cached there), at once or in a turn of the queue      BlockRefs
//! (the bytes are copied)
//! commit     target: the blocks become the list; full blocks of final tokens are sealed and registered        Sequence
//! ```
//!
//! The blocks of a transfer are, in this order: those of each list, without blocks that were given
//! up, and those of each state. A state's are its run, or the checkpoint with which it begins; they
//! arrive in a run. The target must have the same groups.
//!
//! Dropping any of these undoes it. Views of the arriving sequence are empty until the commit.
//!
//! No thread writes in the source: a departure is refused while a batch that wrote to the sequence
//! is in flight, and the second reference on each block makes later writes go to a copy, or refuses
//! them: a sequence does not grow while another owner reads the run of its states. In the
//! target only the copying thread knows the blocks; they are not sealed, so nothing moves them.

use std::borrow::Cow;
use std::fmt;

use crate::block::{AllocRequest, Blocks, ListEnd, Tenant, Waiting};
use crate::clock::BatchSet;
use crate::error::{AllocError, SequenceError, TenantError, TransferError};
use crate::ids::{BlockId, FrameId, SequenceId};
use crate::prefix::{BlockHash, PolicyInfo, is_older};

use super::footprint::Footprint;
use super::grouped::GroupedSequence;
use super::outline::{ListOutline, Outline};
use super::registry::Sequences;
use super::reserve::Allocate;
use super::sequence::Sequence;
use super::state::State;
use super::token_hashes::TokenHashes;
use super::window::NULL;

/// References on blocks of sequences' lists, released when dropped, in reverse order.
pub(crate) struct BlockRefs {
    sequences: Sequences,
    pub(crate) blocks: Vec<BlockId>,
    policy_info: PolicyInfo,
}

impl BlockRefs {
    /// Creates an empty set. Blocks added to it bring their references.
    pub(crate) fn new(sequences: &Sequences) -> Self {
        Self { sequences: sequences.clone(), blocks: Vec::new(), policy_info: PolicyInfo::default() }
    }

    /// Allocates as many blocks as there are, up to `wanted`, and returns their number, if any.
    pub(crate) fn allocate_up_to(&mut self, wanted: usize) -> Result<usize, AllocError> {
        let (pool, mut blocks) = (self.sequences.0.blocks.clone(), wanted);
        loop {
            let request = AllocRequest::new(blocks);
            let Err(error) = pool.allocate_listed(&request, None, &mut |id| self.blocks.push(id)) else {
                return Ok(blocks);
            };
            let most = match error {
                AllocError::Exhausted { free, evictable, .. } => free + evictable,
                AllocError::TooLarge { total, .. } => total,
                AllocError::Reserved { total, reserve, .. } => total.saturating_sub(reserve),
                _ => 0,
            };
            // Not one less each time: the counted blocks may be unavailable for a while.
            blocks = most.min(blocks - blocks.div_ceil(8));
            if blocks == 0 {
                return Err(error);
            }
        }
    }

    fn pool(&self) -> &Blocks {
        &self.sequences.0.blocks
    }
}

impl Drop for BlockRefs {
    fn drop(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        self.blocks.reverse();
        // No fence: a view's reader may have found these blocks in the departed sequence, but if
        // ours are the last references, that sequence fenced between unlinking them and releasing
        // its own, which happens before.
        match self.sequences.cache() {
            Some(cache) => {
                let policy_info = PolicyInfo { chain: self.blocks.len() as u32, ..self.policy_info };
                let keep = |kept: &[_], tag| cache.keep(self.pool(), kept, tag, policy_info);
                self.pool().release_cached(&self.blocks, keep);
            }
            None => self.pool().release_listed(&self.blocks),
        }
    }
}

/// A sequence that can leave its pool: a [`Sequence`] or a [`GroupedSequence`].
pub trait AnySequence: fmt::Debug + Send + Sync + Sized + 'static {
    /// Returns its id.
    fn id(&self) -> SequenceId;

    #[doc(hidden)]
    fn lists(&self) -> Lists<'_>;

    #[doc(hidden)]
    fn of_lists(lists: GroupedSequence) -> Self;

    #[doc(hidden)]
    fn into_lists(self) -> GroupedSequence;

    #[doc(hidden)]
    fn close(self, comes_back: bool) -> Footprint;
}

impl AnySequence for Sequence {
    fn id(&self) -> SequenceId {
        self.id()
    }

    fn lists(&self) -> Lists<'_> {
        Lists { parts: std::slice::from_ref(self), states: &[] }
    }

    fn of_lists(mut lists: GroupedSequence) -> Self {
        lists.parts.pop().expect("it left a pool with one list")
    }

    fn into_lists(self) -> GroupedSequence {
        GroupedSequence::of_one(self)
    }

    fn close(self, comes_back: bool) -> Footprint {
        self.close_counted(comes_back)
    }
}

impl AnySequence for GroupedSequence {
    fn id(&self) -> SequenceId {
        self.id()
    }

    fn lists(&self) -> Lists<'_> {
        Lists { parts: &self.parts, states: &self.states }
    }

    fn of_lists(lists: GroupedSequence) -> Self {
        lists
    }

    fn into_lists(self) -> GroupedSequence {
        self
    }

    fn close(self, comes_back: bool) -> Footprint {
        self.close_counted(comes_back)
    }
}

/// The lists of blocks and the states of a sequence.
#[derive(Clone, Copy)]
pub struct Lists<'a> {
    parts: &'a [Sequence],
    states: &'a [State],
}

impl<'a> Lists<'a> {
    pub(crate) fn first(self) -> &'a Sequence {
        &self.parts[0]
    }

    /// Returns the length to which all parts and states will have caught up.
    pub(crate) fn length(self) -> usize {
        let length = self.parts.iter().map(Sequence::len).min().unwrap_or(0);
        // As `GroupedSequence::level`: a state of other tokens begins again, and so does the
        // sequence.
        let begins_again = |state: &State| state.is_lost() || state.at as usize > length;
        if self.states.iter().any(begins_again) { 0 } else { length }
    }

    /// Returns what batches write: the lists, and the runs of the states.
    fn written(self) -> impl Iterator<Item = &'a Sequence> {
        self.parts.iter().chain(self.states.iter().map(|state| &state.run))
    }

    /// Returns the batches that wrote to its lists and states and may be in flight.
    pub(crate) fn writers(self) -> Vec<BatchSet> {
        self.written().map(Sequence::writers).collect()
    }

    /// Takes a reference on each block, for copying the bytes to another pool.
    pub(crate) fn depart(self, from: &Sequences) -> Result<BlockRefs, TransferError> {
        let (first, pool, length) = (self.first(), from.blocks(), self.length());
        if !first.sequences.same(from) {
            return Err(TransferError::ForeignSequence { id: first.id(), pool: pool.tag() });
        }
        if (self.parts.len(), self.states.len()) != (from.kinds().len(), from.states().len()) {
            from.check_one_group(first.id())?;
        }
        if let Some(batch) = self.written().find_map(Sequence::writing) {
            return Err(TransferError::BeingWritten { id: first.id(), batch: batch.ticket() });
        }
        self.parts.iter().try_for_each(|part| part.check_continues(length))?;
        let mut held = BlockRefs::new(from);
        let kept = |part: &Sequence| length.div_ceil(part.block_tokens());
        let blocks = self.parts.iter().flat_map(|part| part.listed().take(kept(part)));
        let mut blocks: Vec<BlockId> = blocks.filter(|&id| !from.is_null(id)).collect();
        blocks.extend(self.states.iter().flat_map(State::latest));
        pool.share_listed(&blocks)?;
        held.blocks = blocks;
        held.policy_info = first.known.as_deref().map_or_else(PolicyInfo::default, |known| known.policy_info);
        Ok(held)
    }

    /// Returns the outline of the sequence. No batch may be [writing](Self::depart) to it.
    pub(crate) fn outline(self) -> Outline {
        let (first, length) = (self.first(), self.length());
        let announced = self.parts.iter().map(Sequence::announced).min().unwrap_or(0);
        let known = |part: &Sequence| {
            let (known, cache) = part.token_hashes()?;
            let (mut known, computed) = (Cow::Borrowed(known), part.writers() != BatchSet::default());
            if let Some(write) = part.withdrawn() {
                known.to_mut().truncate(cache, write.announced.max(write.from) as usize, usize::MAX);
            }
            // As `GroupedSequence::level`: also unknown tokens that were final are gone.
            if part.len() > length || known.announced() > announced.max(length) {
                known.to_mut().truncate(cache, announced.max(length), usize::MAX);
            }
            Some(known.known_tokens(cache, computed, length))
        };
        let list = |part: &Sequence| ListOutline {
            keeps: part.kind.into(),
            front: part.gap().end.min(length.div_ceil(part.block_tokens()) as u32),
            known: known(part),
        };
        let committed = self.parts.iter().map(Sequence::committed).min().unwrap_or(0);
        let mut lists: Vec<ListOutline> = self.parts.iter().map(list).collect();
        if let [first, others @ ..] = &mut lists[..]
            && let Some(first) = &mut first.known
        {
            // If blocks of one list were uncached, nothing is found by the hashes of any.
            first.is_stale |= others.iter().flat_map(|list| &list.known).any(|known| known.is_stale);
            others.iter_mut().flat_map(|list| &mut list.known).for_each(|known| known.follow(first));
            first.drop_stale();
        }
        Outline {
            id: first.id(),
            priority: first.priority(),
            length: length as u32,
            committed: committed.min(length) as u32,
            reuses_tail: first.reuses_tail,
            tenant: first.tenant_id,
            lists,
            states: first.sequences.states().iter().map(|&frames| frames as u32).collect(),
            state_tokens: self.states.first().map_or(0, |state| state.at.min(length as u32)),
        }
    }
}

/// Blocks that a sequence needs, besides its own, to be [resumed](crate::Pool::resume).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use]
pub struct ResumeOptions {
    headroom: usize,
    leave: usize,
}

impl ResumeOptions {
    /// Requires no further blocks.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of tokens for which blocks are [reserved](Sequence::reserve) too.
    pub fn headroom(mut self, tokens: usize) -> Self {
        self.headroom = tokens;
        self
    }

    /// Sets the number of blocks to [leave](super::AdmitRequest::leave).
    pub fn leave(mut self, blocks: usize) -> Self {
        self.leave = blocks;
        self
    }
}

pub(crate) struct Arrival {
    sequence: GroupedSequence,
    /// Number of leading blocks of each list that were cached here.
    shared: Vec<usize>,
    length: u32,
    committed: u32,
    state_tokens: u32,
    room: ResumeOptions,
}

/// Returns the places of a list of this many tokens whose blocks were not given up.
fn kept(part: &Sequence, tokens: usize) -> impl Iterator<Item = u32> + use<> {
    let gap = part.gap();
    (0..tokens.div_ceil(part.block_tokens()) as u32).filter(move |place| !gap.contains(place))
}

impl Arrival {
    /// Opens the sequence of this outline in the target, without blocks. Its hashes, unless stale,
    /// are those of the target's cache, in whose `era` they are noted. A target without tenants
    /// keeps the name of its tenant; one with others than this is no place for it.
    pub(crate) fn open(
        outline: Outline,
        target: &Sequences,
        era: u64,
        room: ResumeOptions,
    ) -> Result<Self, TransferError> {
        outline.check_groups(target)?;
        let Outline { id, priority, length, committed, reuses_tail, tenant, lists, state_tokens, .. } =
            outline;
        let account = match (tenant, target.blocks().tenants()) {
            (Some(tenant), Some(tenants)) => {
                tenants.find(tenant).ok_or(SequenceError::Tenant(TenantError::Unknown { tenant }))?
            }
            _ => Tenant::NONE,
        };
        let session = lists.iter().flat_map(|list| &list.known).find_map(|known| known.session);
        let mut sequence = target.open_grouped(id, priority, (account, tenant), session)?;
        for (part, list) in sequence.parts.iter_mut().zip(lists) {
            (part.front, part.reuses_tail) = (list.front, reuses_tail);
            if let (Some(known), Some(cache)) = (list.known, target.cache()) {
                part.known = Some(Box::new(TokenHashes::arrived(known, cache, part.group, era)));
            }
        }
        let shared = vec![0; sequence.parts.len()];
        Ok(Self { sequence, shared, length, committed, state_tokens, room })
    }

    fn first(&self) -> &Sequence {
        &self.sequence.parts[0]
    }

    /// Takes its blocks, cached or fresh, without waiting. `is_first`: only if no request of its
    /// priority waits. On an error nothing was taken.
    pub(crate) fn take_now(&mut self, is_first: bool) -> Result<BlockRefs, AllocError> {
        let pool = self.first().pool_blocks().clone();
        let whole = self.request(0);
        if whole.blocks > 0 {
            pool.check_request(&whole).inspect_err(|error| pool.count_refusal(error))?;
            if is_first {
                pool.check_is_first(&whole)?;
            }
        }
        self.take(false, &mut |request, end, take| pool.allocate_listed(request, Some(end), take))
    }

    /// As [`take_now`](Self::take_now), in the turn of a place in the queue.
    pub(crate) fn take_in_turn(&mut self, place: &mut Waiting<'_>) -> Result<BlockRefs, AllocError> {
        let pool = self.first().pool_blocks();
        // Before the counts, which determine whether to wait: the pool may have shrunk.
        pool.check_request(&self.request(0)).inspect_err(|error| pool.count_refusal(error))?;
        let (mut hits, mut evictable) = (0, 0);
        for part in &self.sequence.parts {
            let Some((known, cache)) = part.token_hashes() else { continue };
            let (of, cold) = cache.count_prefix(pool, &self.final_hashes(part), known.era());
            (hits, evictable) = (hits + of, evictable + cold);
        }
        place.check_counts(&self.request(hits), self.first().tenant, evictable)?;
        let taken = self.take(true, &mut |request, end, take| place.allocate(request, Some(end), take));
        if taken.is_err() {
            // The new head of the queue may have searched while cached blocks were held.
            place.kept_no_longer();
        }
        taken
    }

    /// Returns the request for all its blocks but `shared` ones, and for its headroom.
    pub(crate) fn request(&self, shared: usize) -> AllocRequest {
        let tokens = (self.length as usize).saturating_add(self.room.headroom);
        let whole = |part: &Sequence| tokens.div_ceil(part.block_tokens()) - part.gap().len();
        let lists = self.sequence.parts.iter().map(whole);
        let blocks = lists.fold(self.states(), usize::saturating_add) - shared;
        AllocRequest::new(blocks.saturating_add(self.room.leave))
            .sequence(self.id())
            .priority(self.first().priority())
    }

    fn states(&self) -> usize {
        self.first().sequences.states().iter().sum()
    }

    fn take(&mut self, is_in_line: bool, allocate: Allocate<'_>) -> Result<BlockRefs, AllocError> {
        let (sequences, tenant) = (self.first().sequences.clone(), self.first().tenant);
        let (pool, cache, run) = (sequences.blocks(), sequences.cache(), self.states());
        let shared = |part| self.share_cached(part, is_in_line);
        let mut shared: Vec<Vec<BlockId>> = self.sequence.parts.iter().map(shared).collect();
        let request = self.request(shared.iter().map(Vec::len).sum());
        let mut fresh = Vec::with_capacity(request.blocks);
        if request.blocks > 0 {
            let mut end = ListEnd { run, tenant, ..ListEnd::default() };
            if let [only] = &shared[..] {
                end.next = only.last().map(|&last| FrameId(pool.frame(last).0 + 1));
            }
            let kept = shared.iter().flatten().copied();
            let fits = if is_in_line { pool.check_floors(&request, tenant, kept) } else { Ok(()) };
            let outcome = fits.and_then(|()| allocate(&request, end, &mut |id| fresh.push(id)));
            if let (Err(_), Some(cache)) = (&outcome, cache) {
                shared
                    .iter()
                    .filter(|ids| !ids.is_empty())
                    .for_each(|ids| cache.untake(pool, ids, is_in_line));
            }
            outcome?;
        }
        self.shared = shared.iter().map(Vec::len).collect();
        let (mut fresh, mut held) = (fresh.into_iter(), BlockRefs::new(&sequences));
        let run: Vec<BlockId> = fresh.by_ref().take(run).collect();
        let length = self.length as usize;
        let whole = length.saturating_add(self.room.headroom);
        for (part, shared) in self.sequence.parts.iter_mut().zip(&mut shared) {
            if let (Some(known), Some(cache), false) = (&mut part.known, cache, shared.is_empty()) {
                known.join_origins(cache, &cache.joined_origins(shared));
            }
            let own = kept(part, length).count();
            let own = own - shared.len();
            held.blocks.append(shared);
            held.blocks.extend(fresh.by_ref().take(own));
            let room = whole.div_ceil(part.block_tokens()) - length.div_ceil(part.block_tokens());
            part.reserve_but(fresh.by_ref().take(room).collect(), 0);
        }
        held.blocks.extend(run);
        let left: Vec<BlockId> = fresh.collect();
        if !left.is_empty() {
            pool.release_unpublished(&left);
        }
        Ok(held)
    }

    /// Returns the hashes of the final full blocks that a list keeps.
    fn final_hashes(&self, part: &Sequence) -> Vec<BlockHash> {
        let full = self.committed as usize / part.block_tokens() * part.block_tokens();
        let hash = |place| part.known.as_ref().and_then(|known| known.hash(place));
        kept(part, full).map_while(hash).collect()
    }

    /// Shares final full blocks that are cached here, unless computed in another era of a cache.
    fn share_cached(&self, part: &Sequence, is_in_line: bool) -> Vec<BlockId> {
        let mut shared = Vec::new();
        let Some((known, cache)) = part.token_hashes() else { return shared };
        let (pool, origins) = (part.pool_blocks(), known.origins(cache));
        for hash in self.final_hashes(part) {
            let Some(id) = cache.take(pool, hash, known.era()) else { break };
            let there = if cache.has_origins() { cache.origins_of(id) } else { Vec::new() };
            if is_older(&there, &origins) || is_older(&origins, &there) {
                cache.untake(pool, &[id], is_in_line);
                break;
            }
            shared.push(id);
        }
        shared
    }

    pub(crate) fn id(&self) -> SequenceId {
        self.sequence.id()
    }

    /// Returns the places of the blocks whose bytes must be copied.
    pub(crate) fn missing(&self) -> Vec<u32> {
        let (mut missing, mut at) = (Vec::new(), 0);
        for (part, &shared) in self.sequence.parts.iter().zip(&self.shared) {
            let own = kept(part, self.length as usize).count();
            missing.extend((at + shared..at + own).map(|place| place as u32));
            at += own;
        }
        missing.extend((at..at + self.states()).map(|place| place as u32));
        missing
    }

    /// Drops the hashes of its blocks: they are neither registered nor found.
    pub(crate) fn forget(&mut self) {
        self.sequence.parts.iter_mut().flat_map(|part| &mut part.known).for_each(|known| known.forget());
    }

    pub(crate) fn join(&mut self, lists: &[ListOutline]) {
        let Some(cache) = self.first().sequences.cache().cloned() else { return };
        for (part, list) in self.sequence.parts.iter_mut().zip(lists) {
            let (Some(own), Some(known)) = (&mut part.known, &list.known) else { continue };
            if known.is_stale || !cache.accepts_in(own.era(), &known.origins) {
                own.forget();
            }
            own.join_origins(&cache, &known.origins);
        }
    }

    pub(crate) fn commit(self, mut held: BlockRefs) -> GroupedSequence {
        let Self { mut sequence, shared, length, committed, state_tokens, .. } = self;
        let mut blocks = std::mem::take(&mut held.blocks).into_iter();
        for (part, shared) in sequence.parts.iter_mut().zip(shared) {
            let (gap, count) = (part.gap(), length.div_ceil(part.kind.block_tokens));
            let full = committed / part.kind.block_tokens;
            part.list.reserve(count as usize);
            for place in 0..count {
                let block = if gap.contains(&place) { Some(NULL) } else { blocks.next() };
                part.list.stage(place as usize, block.expect("a block for each place"));
            }
            part.publish(length);
            part.reserve_end();
            part.committed = committed;
            part.seals.adopt(kept(part, length as usize).nth(shared).map_or(full, |place| place.min(full)));
        }
        for (state, &frames) in sequence.states.iter_mut().zip(sequence.parts[0].sequences.states()) {
            state.adopt_run(&blocks.by_ref().take(frames).collect::<Vec<_>>());
            state.at = state_tokens;
        }
        sequence.catch_up();
        // All writers have ended: this seals the blocks, and registers those with known hashes.
        for part in &mut sequence.parts {
            // Of what it still has: lists of which one cannot continue begin again.
            part.complete(part.committed / part.kind.block_tokens);
            part.settle();
            part.known.iter_mut().for_each(|known| known.compute());
        }
        sequence
    }
}
