//! Transfer of a sequence to another pool.
//!
//! ```text
//! depart     source: a reference on each block, so that they stay readable whatever happens to the sequence   BlockRefs
//! open       target: the id is registered                                                                     Arrival
//! take       target: blocks are allocated (or shared, if cached there), at once or in a turn of the queue      BlockRefs
//! (the bytes are copied)
//! commit     target: the blocks become the list; full blocks of final tokens are sealed and registered        Sequence
//! ```
//!
//! Dropping any of these undoes it. Views of the arriving sequence are empty until the commit.
//!
//! No thread writes in the source: a departure is refused while a batch that wrote to the sequence
//! is in flight, and the second reference on each block makes later writes go to a copy. In the
//! target only the copying thread knows the blocks; they are not sealed, so nothing moves them.

use std::borrow::Cow;

use crate::block::{AllocRequest, Blocks, Waiting};
use crate::clock::BatchSet;
use crate::error::{AllocError, TransferError};
use crate::ids::{BlockId, Priority, SequenceId};
use crate::prefix::{PolicyInfo, is_older};

use super::registry::Sequences;
use super::reserve::Allocate;
use super::sequence::Sequence;
use super::token_hashes::{KnownTokens, TokenHashes};

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

impl Sequence {
    /// Takes a reference on each block, for copying the bytes to another pool.
    pub(crate) fn depart(&self, from: &Sequences) -> Result<BlockRefs, TransferError> {
        let pool = from.blocks();
        if !self.sequences.same(from) {
            return Err(TransferError::ForeignSequence { id: self.id(), pool: pool.tag() });
        }
        if let Some(batch) = self.writing() {
            return Err(TransferError::BeingWritten { id: self.id(), batch: batch.ticket() });
        }
        self.check_kept(0..self.len())?;
        from.check_one_group(self.id())?;
        let mut held = BlockRefs::new(from);
        let blocks: Vec<BlockId> = self.blocks().collect();
        pool.share_listed(&blocks)?;
        held.blocks = blocks;
        held.policy_info = self.known.as_deref().map_or_else(PolicyInfo::default, |known| known.policy_info);
        Ok(held)
    }
}

/// A copy of a sequence in another pool starts with this and the bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct Outline {
    pub(crate) id: SequenceId,
    pub(crate) priority: Priority,
    pub(crate) length: u32,
    pub(crate) committed: u32,
    pub(crate) reuses_tail: bool,
    /// `None` in a pool without a prefix cache.
    pub(crate) known: Option<KnownTokens>,
}

impl Outline {
    /// Drops the hashes, unless the target's cache hashes alike. The ids stay known.
    pub(crate) fn hashed_alike(mut self, is_alike: bool) -> Self {
        self.known.iter_mut().for_each(|known| known.is_stale |= !is_alike);
        self
    }
}

impl Sequence {
    /// Returns its outline. No batch may be [writing](Self::depart) to it.
    pub(crate) fn outline(&self) -> Outline {
        let computed = self.writers() != BatchSet::default();
        let known = |(known, cache): (&TokenHashes, _)| {
            let mut known = Cow::Borrowed(known);
            if let Some(write) = self.withdrawn() {
                known.to_mut().truncate(cache, write.announced.max(write.from) as usize, usize::MAX);
            }
            known.known_tokens(cache, computed, self.len())
        };
        Outline {
            id: self.id(),
            priority: self.priority(),
            length: self.len() as u32,
            committed: self.committed() as u32,
            reuses_tail: self.reuses_tail,
            known: self.token_hashes().map(known),
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
    sequence: Sequence,
    shared: usize,
    length: u32,
    committed: u32,
    room: ResumeOptions,
}

impl Arrival {
    /// Opens the sequence of this outline in the target, without blocks. Its hashes, unless stale,
    /// are those of the target's cache, in whose `era` they are noted.
    pub(crate) fn open(
        outline: Outline,
        target: &Sequences,
        era: u64,
        room: ResumeOptions,
    ) -> Result<Self, TransferError> {
        let Outline { id, priority, length, committed, reuses_tail, known } = outline;
        let list = target.register(id, priority)?;
        let mut sequence = Sequence::new(target.clone(), id, priority, list);
        if let (Some(known), Some(cache)) = (known, target.cache()) {
            sequence.known = Some(Box::new(TokenHashes::arrived(known, cache, era)));
        }
        sequence.reuses_tail = reuses_tail;
        Ok(Self { sequence, shared: 0, length, committed, room })
    }

    /// Takes its blocks, cached or fresh, without waiting. `is_first`: only if no request of its
    /// priority waits. On an error nothing was taken.
    pub(crate) fn take_now(&mut self, is_first: bool) -> Result<BlockRefs, AllocError> {
        let pool = self.sequence.pool_blocks().clone();
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
        let pool = self.sequence.pool_blocks();
        // Before the counts, which determine whether to wait: the pool may have shrunk.
        pool.check_request(&self.request(0)).inspect_err(|error| pool.count_refusal(error))?;
        let (hits, evictable) = self.sequence.token_hashes().map_or((0, 0), |(known, cache)| {
            let full = (self.committed / self.sequence.kind.block_tokens) as usize;
            cache.count_prefix(pool, &known.hashes()[..full.min(known.hashes().len())], known.era())
        });
        place.check_counts(&self.request(hits), self.sequence.tenant, evictable)?;
        let taken = self.take(true, &mut |request, end, take| place.allocate(request, Some(end), take));
        if taken.is_err() {
            // The new head of the queue may have searched while cached blocks were held.
            place.kept_no_longer();
        }
        taken
    }

    /// Returns the request for all its blocks but the first `shared`, and for its headroom.
    pub(crate) fn request(&self, shared: usize) -> AllocRequest {
        let tokens = (self.length as usize).saturating_add(self.room.headroom);
        let blocks = tokens.div_ceil(self.sequence.kind.block_tokens as usize) - shared;
        AllocRequest::new(blocks.saturating_add(self.room.leave))
            .sequence(self.id())
            .priority(self.sequence.priority())
    }

    fn take(&mut self, is_in_line: bool, allocate: Allocate<'_>) -> Result<BlockRefs, AllocError> {
        let mut held = BlockRefs::new(&self.sequence.sequences);
        held.blocks = self.share_cached(is_in_line);
        self.shared = held.blocks.len();
        let (request, last) = (self.request(self.shared), held.blocks.last().copied());
        if is_in_line && request.blocks > 0 {
            let (pool, kept) = (self.sequence.pool_blocks(), held.blocks.iter().copied());
            let fits = pool.check_floors(&request, self.sequence.tenant, kept);
            if fits.is_err()
                && let Some(cache) = self.sequence.sequences.cache()
            {
                cache.untake(pool, &std::mem::take(&mut held.blocks), is_in_line);
            }
            fits?;
        }
        let shared = || std::mem::take(&mut held.blocks);
        let mut fresh = self.sequence.allocate_behind(last, shared, &request, is_in_line, allocate)?;
        let own = self.length.div_ceil(self.sequence.kind.block_tokens) as usize - self.shared;
        self.sequence.reserve_but(fresh.split_off(own), self.room.leave);
        held.blocks.append(&mut fresh);
        if let (Some(known), Some(cache)) = (&mut self.sequence.known, self.sequence.sequences.cache())
            && self.shared > 0
        {
            known.join_origins(cache, &cache.joined_origins(&held.blocks[..self.shared]));
        }
        Ok(held)
    }

    /// Shares final full blocks that are cached here, unless computed in another era of a cache.
    fn share_cached(&self, is_in_line: bool) -> Vec<BlockId> {
        let mut shared = Vec::new();
        let Some((known, cache)) = self.sequence.token_hashes() else { return shared };
        let (pool, origins) = (self.sequence.pool_blocks(), known.origins(cache));
        for place in 0..self.committed / self.sequence.kind.block_tokens {
            let cached = known.hash(place).and_then(|hash| cache.take(pool, hash, known.era()));
            let Some(id) = cached else { break };
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

    pub(crate) fn shared(&self) -> usize {
        self.shared
    }

    /// Drops the hashes of its blocks: they are neither registered nor found.
    pub(crate) fn forget(&mut self) {
        self.sequence.known.iter_mut().for_each(|known| known.forget());
    }

    pub(crate) fn join(&mut self, known: &KnownTokens) {
        let (Some(own), Some(cache)) = (&mut self.sequence.known, self.sequence.sequences.cache()) else {
            return;
        };
        if known.is_stale || !cache.accepts_in(own.era(), &known.origins) {
            own.forget();
        }
        own.join_origins(cache, &known.origins);
    }

    pub(crate) fn commit(self, mut held: BlockRefs) -> Sequence {
        let Self { mut sequence, shared, length, committed, .. } = self;
        let blocks = std::mem::take(&mut held.blocks);
        sequence.list.reserve(blocks.len());
        blocks.iter().enumerate().for_each(|(place, &id)| sequence.list.stage(place, id));
        sequence.publish(length);
        sequence.reserve_end();
        sequence.committed = committed;
        sequence.seals.adopt(shared as u32);
        // All writers have ended: this seals the blocks, and registers those with known hashes.
        sequence.complete(committed / sequence.kind.block_tokens);
        sequence.catch_up();
        sequence.settle();
        sequence.known.iter_mut().for_each(|known| known.compute());
        sequence
    }
}
