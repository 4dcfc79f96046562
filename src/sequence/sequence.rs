//! The owner's operations on a sequence: fork, commit, truncate, close.

use std::fmt;
use std::ops::Range;
use std::time::Instant;

use smallvec::{SmallVec, smallvec};

use crate::block::{BlockWord, Blocks, ListEnd, Operation, Priority, Tenant, unit_of};
use crate::clock::{BatchRef, BatchSet};
use crate::error::SequenceError;
use crate::ids::{BlockHandle, BlockId, FrameId, PoolTag, SequenceId, TenantId, Ticket};
use crate::prefix::{BlockHash, ExtraKey, PolicyInfo, PrefixCache, Weights};
use crate::sync::{AtomicU64, Ordering::*, call, fence};

use super::abandoned::{Write, Writes};
use super::frames::Frames;
use super::list::ListOwner;
use super::registry::Sequences;
use super::seals::Seals;
use super::token_hashes::TokenHashes;
use super::versions::VersionRange;
use super::window::ListKind;

/// The tokens of one request, and the blocks that hold them. Dropping it closes it and releases its
/// blocks, in reverse order.
pub struct Sequence {
    pub(super) sequences: Sequences,
    id: SequenceId,
    priority: Priority,
    pub(super) tenant: Tenant,
    /// The id of its tenant, which it keeps in pools without tenants.
    pub(super) tenant_id: Option<TenantId>,
    pub(super) list: ListOwner,
    pub(super) frames: Frames,
    /// A frame of the unit that is reserved for its growth.
    reserved_for_growth: Option<FrameId>,
    /// Blocks for the next tokens, the last one first.
    pub(super) reserved: Vec<BlockId>,
    pub(super) committed: u32,
    /// Places below it, except those of sinks, hold the null block: see [`slide`](super::slide).
    pub(super) front: u32,
    /// Its group of layers, and the list in that.
    pub(super) group: u32,
    pub(super) kind: ListKind,
    pub(super) seals: Seals,
    /// Whether batches in flight may have seen reserved blocks in the list.
    pub(super) was_listed: bool,
    /// Batches that wrote to its blocks, including all that are in flight, unlike `seals`.
    pub(super) writers: BatchSet,
    /// Writes of batches that may be abandoned.
    pub(super) writes: Writes,
    /// Number of abandoned batches at the last look.
    pub(super) seen: AtomicU64,
    pub(super) known: Option<Box<TokenHashes>>,
    /// Full blocks of the looked-up prompt and of its cached prefix, until they are counted.
    pub(super) lookup: Option<(usize, usize)>,
    /// Whether close registers the unfinished last block.
    pub(super) reuses_tail: bool,
    pub(super) is_closed: bool,
}

/// What a write into a block with tokens requires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Access {
    /// Nothing: the block is open, and owned exclusively.
    Open,
    /// Reopen it: it is sealed, and owned exclusively.
    Reopen,
    /// Withdraw the writing batch's promise to seal it.
    Withdraw,
    /// Copy it: it is shared, cached, or promised to another batch.
    Copy,
}

impl Sequence {
    #[inline]
    pub(super) fn new(sequences: Sequences, id: SequenceId, priority: Priority, list: ListOwner) -> Self {
        let kind = sequences.kinds()[0];
        Self {
            seen: AtomicU64::new(sequences.0.abandoned.count()),
            sequences,
            id,
            priority,
            tenant: Tenant::NONE,
            tenant_id: None,
            list,
            frames: Frames::default(),
            reserved_for_growth: None,
            reserved: Vec::new(),
            committed: 0,
            front: 0,
            group: 0,
            kind,
            seals: Seals::default(),
            was_listed: false,
            writers: BatchSet::default(),
            writes: Writes::new(),
            known: None,
            lookup: None,
            reuses_tail: false,
            is_closed: false,
        }
    }

    /// Makes it the list of a sequence in another group of layers than the first.
    pub(super) fn in_group(mut self, group: u32) -> Self {
        // A state keeps all of its blocks.
        let of_state = ListKind { window: None, ..self.kind };
        let kind = self.sequences.kinds().get(group as usize).copied().unwrap_or(of_state);
        (self.group, self.kind) = (group, kind);
        self
    }

    /// Returns its id.
    pub fn id(&self) -> SequenceId {
        self.id
    }

    pub(crate) fn pool_tag(&self) -> PoolTag {
        self.pool_blocks().tag()
    }

    pub(crate) fn sequences(&self) -> &Sequences {
        &self.sequences
    }

    /// Returns its priority.
    pub fn priority(&self) -> Priority {
        self.priority
    }

    /// Returns its [tenant](crate::tenants), also in a pool without tenants to which it was moved.
    pub fn tenant(&self) -> Option<TenantId> {
        self.tenant_id
    }

    /// Returns the number of tokens per block.
    pub fn block_tokens(&self) -> usize {
        self.kind.block_tokens as usize
    }

    /// Returns the number of its tokens, with drafted but without [abandoned](super::Batch) ones.
    #[inline]
    pub fn len(&self) -> usize {
        self.extent().0 as usize
    }

    #[inline]
    pub(super) fn extent(&self) -> (u32, usize) {
        match self.withdrawn() {
            None => (self.list.tokens(), self.list.len()),
            Some(Write { from, .. }) => (from, from.div_ceil(self.kind.block_tokens) as usize),
        }
    }

    /// Returns whether it has no tokens.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of final tokens.
    #[inline]
    pub fn committed(&self) -> usize {
        self.committed.min(self.extent().0) as usize
    }

    /// Returns the number of blocks of its tokens, including those [given
    /// up](Self::blocks_given_up).
    #[inline]
    pub fn block_count(&self) -> usize {
        self.extent().1
    }

    /// Returns its blocks, in order. The null block stands for each that was
    /// [given up](Self::blocks_given_up).
    pub fn blocks(&self) -> impl ExactSizeIterator<Item = BlockId> + DoubleEndedIterator {
        self.list.ids()[..self.block_count()].iter().map(|id| BlockId(id.load(Relaxed)))
    }

    /// Returns the number of leading blocks that are sealed, or that a batch in flight seals at its
    /// end. The sequence seals other full blocks of final tokens once their writers have ended.
    #[inline]
    pub fn settled_blocks(&self) -> usize {
        (self.seals.settled() as usize).min(self.block_count())
    }

    /// Returns a handle for each block, valid while the block is in the sequence. Those of blocks
    /// that were [given up](Self::blocks_given_up) name the null block.
    pub fn handles(&self) -> impl ExactSizeIterator<Item = BlockHandle> + DoubleEndedIterator {
        self.blocks().map(|id| self.pool_blocks().handle(id))
    }

    /// Returns the number of tokens with known ids, appended or not. 0 without a prefix cache.
    pub fn announced(&self) -> usize {
        let announced = self.known.as_ref().map_or(0, |known| known.announced());
        self.withdrawn().map_or(announced, |write| announced.min(write.announced.max(write.from) as usize))
    }

    /// Returns the hashes of the full blocks of its [announced](Self::announced) tokens, in order.
    pub fn block_hashes(&self) -> &[BlockHash] {
        let blocks = self.announced() / self.kind.block_tokens as usize;
        self.known.as_ref().map_or(&[], |known| &known.hashes()[..blocks.min(known.hashes().len())])
    }

    /// Returns the versions of the [weights](crate::Pool::begin_version) with which its blocks can
    /// be found: the current ones when it was opened or admitted. `None` without a prefix cache.
    pub fn weights(&self) -> Option<Weights> {
        self.known.as_ref().map(|known| known.versions.hashed())
    }

    /// Returns the versions of the weights with which its tokens were computed, in the order of
    /// their positions: of a cached block those with which it was found, of others those of the
    /// batch that appended them. Nothing without a prefix cache here, and in the pool that it came
    /// from.
    ///
    /// Tokens of the second and later ranges were computed from K and V of other weights. From the
    /// first batch whose versions are not those of [its hashes](Self::weights) on, also if it was
    /// abandoned or its tokens were removed, no block that the sequence fills can be found.
    pub fn versions(&self) -> impl Iterator<Item = VersionRange> {
        let length = self.len();
        self.known.iter().flat_map(move |known| known.versions.of(length))
    }

    /// Announces the next tokens, before they are appended, or before drafted ones become final.
    ///
    /// Blocks full of known tokens can be reused. If tokens become final unannounced, their blocks
    /// and all later ones cannot be reused until those tokens are [removed](Self::truncate). Takes
    /// constant time per token; does nothing without a prefix cache.
    ///
    /// # Errors
    /// [`SequenceError::TokensUnknown`] if there are final tokens that were not announced.
    pub fn announce(&mut self, tokens: &[u32]) -> Result<(), SequenceError> {
        self.catch_up();
        self.announce_now(tokens)
    }

    pub(super) fn announce_now(&mut self, tokens: &[u32]) -> Result<(), SequenceError> {
        match (&mut self.known, self.sequences.cache()) {
            (Some(known), Some(cache)) => known.announce(cache, self.id, tokens),
            _ => Ok(()),
        }
    }

    /// Adds the extra key of a range of the next tokens before the first of them is announced, such
    /// as an image in a later turn. A prompt's belong to its
    /// [keys](crate::prefix::PrefixKeys::extra_keys).
    ///
    /// Forks and copies in other pools keep it; [truncation](Self::truncate) at or before the start
    /// of its range removes it. Does nothing without a prefix cache.
    ///
    /// # Errors
    /// [`SequenceError::Prefix`] if the key or the range is empty, or the range begins before
    /// [`announced`](Self::announced) or ends past the longest sequence.
    pub fn extra_key(&mut self, tokens: Range<usize>, key: &[u8]) -> Result<(), SequenceError> {
        self.catch_up();
        self.extra_key_now(ExtraKey::new(tokens, key))
    }

    pub(super) fn extra_key_now(&mut self, key: ExtraKey) -> Result<(), SequenceError> {
        match (&mut self.known, self.sequences.cache()) {
            (Some(known), Some(cache)) => Ok(known.extra_key(cache, key)?),
            _ => Ok(()),
        }
    }

    /// Creates another sequence with the same tokens in the same blocks. The first write to a
    /// shared block, by either sequence, goes to a copy.
    ///
    /// Only written bytes are shared: first store a batch's tokens, or enqueue the stores.
    ///
    /// # Errors
    /// [`SequenceError::AlreadyOpen`], or [`SequenceError::Handle`] if a block has the maximum of
    /// 8,191 references. Nothing is then shared.
    pub fn fork(&self, id: SequenceId) -> Result<Self, SequenceError> {
        let _call = call();
        let list = self.sequences.register(id, self.priority)?;
        self.fork_to(id, list).inspect_err(|_| self.sequences.unregister(id))
    }

    /// Forks it to a list that is registered.
    pub(super) fn fork_to(&self, id: SequenceId, mut list: ListOwner) -> Result<Self, SequenceError> {
        let ids: SmallVec<[BlockId; 64]> = self.held().collect();
        self.pool_blocks().share_listed(&ids)?;
        list.reserve(self.list.len());
        self.listed().enumerate().for_each(|(place, id)| list.stage(place, id));
        list.publish(self.list.tokens());
        let mut fork = Self::new(self.sequences.clone(), id, self.priority, list).in_group(self.group);
        (fork.tenant, fork.tenant_id, fork.frames) = (self.tenant, self.tenant_id, self.frames.clone());
        (fork.committed, fork.seals, fork.writers) = (self.committed, self.seals.forked(), self.writers);
        fork.front = self.front;
        (fork.writes, fork.seen) = (self.writes.clone(), AtomicU64::new(self.seen.load(Relaxed)));
        (fork.known, fork.reuses_tail) = (self.known.clone(), self.reuses_tail);
        fork.catch_up();
        Ok(fork)
    }

    /// Returns the blocks of its list that hold a reference, including those that may be withdrawn.
    pub(super) fn held(&self) -> impl Iterator<Item = BlockId> {
        self.listed().filter(|&id| !self.is_null(id))
    }

    /// Returns the blocks of its list, including null blocks and those that may be withdrawn.
    pub(super) fn listed(&self) -> impl ExactSizeIterator<Item = BlockId> {
        self.list.ids().iter().map(|id| BlockId(id.load(Relaxed)))
    }

    /// Declares the first `length` tokens final; no effect below [`committed`](Self::committed).
    /// Full blocks of final tokens are sealed once the batches that wrote them have ended.
    ///
    /// # Errors
    /// [`SequenceError::Invalid`] if the sequence has fewer tokens.
    pub fn commit(&mut self, length: usize) -> Result<(), SequenceError> {
        let _call = call();
        self.catch_up();
        self.commit_now(length)
    }

    pub(super) fn commit_now(&mut self, length: usize) -> Result<(), SequenceError> {
        if length > self.list.tokens() as usize {
            return Err(self.beyond("tokens to commit", length));
        }
        self.committed = self.committed.max(length as u32);
        if let Some(known) = &mut self.known {
            known.committed(self.committed);
        }
        self.complete(self.committed / self.kind.block_tokens);
        self.settle();
        Ok(())
    }

    /// Announces the ids of the first tokens of a [draft](super::Tokens::Draft), makes them final,
    /// and removes the rest of the draft.
    ///
    /// # Errors
    /// [`SequenceError::Invalid`] if fewer tokens were drafted; with a prefix cache
    /// [`SequenceError::TokensUnknown`] if not all final tokens were announced, and
    /// [`SequenceError::TokensAhead`] if others were. Nothing has changed, or only an
    /// [abandoned](super::Batch) batch was withdrawn.
    pub fn accept(&mut self, tokens: &[u32]) -> Result<(), SequenceError> {
        let _call = call();
        self.catch_up();
        self.accept_now(tokens)
    }

    pub(super) fn accept_now(&mut self, tokens: &[u32]) -> Result<(), SequenceError> {
        let length = self.list.tokens() as usize;
        let committed = (self.committed as usize).min(length);
        let asked = committed + tokens.len();
        if asked > length {
            return Err(self.beyond("tokens to commit", asked));
        }
        if let (Some(known), Some(cache)) = (&mut self.known, self.sequences.cache()) {
            known.check_all_announced(self.id, committed)?;
            known.announce_checked(cache, tokens);
        }
        self.commit_now(asked)?;
        self.truncate_now(asked)
    }

    fn beyond(&self, what: &'static str, asked: usize) -> SequenceError {
        SequenceError::invalid(self.id, what, asked, format_args!("at most its {} tokens", self.len()))
    }

    /// Removes all tokens after the first `length`, and releases the blocks no longer needed, in
    /// reverse order. Also removes tokens announced but not appended, and the [extra
    /// keys](Self::extra_key) of ranges that begin at `length` or later; a `length` equal to the
    /// sequence's has no effect.
    ///
    /// Intended for rejected drafts, but can also remove final tokens. The next append into a block
    /// of final tokens then reopens it, or copies it if it is shared, cached or promised to a
    /// batch. On a device, batches in flight that still read the removed tokens must precede that
    /// append in stream order.
    ///
    /// # Errors
    /// [`SequenceError::Invalid`] if the sequence has fewer tokens; [`SequenceError::BehindWindow`]
    /// if a token that is appended next to the last block would see tokens that were given up. The
    /// sequence is unchanged.
    pub fn truncate(&mut self, length: usize) -> Result<(), SequenceError> {
        let _call = call();
        self.catch_up();
        self.truncate_now(length)
    }

    pub(super) fn truncate_now(&mut self, length: usize) -> Result<(), SequenceError> {
        if length > self.list.tokens() as usize {
            return Err(self.beyond("tokens to keep", length));
        }
        self.check_continues(length)?;
        self.take_back(length, length);
        Ok(())
    }

    /// [Truncates](Self::truncate), but keeps the extra keys of ranges that begin before `keys_to`.
    pub(super) fn take_back(&mut self, length: usize, keys_to: usize) {
        let takes_back = length < self.list.tokens() as usize;
        self.look_for_uncached(self.list.len());
        self.cut(length as u32);
        if takes_back && let (Some(known), Some(cache)) = (&mut self.known, self.sequences.cache()) {
            known.truncate(cache, length, keys_to);
            self.writes.iter_mut().for_each(|write| write.announced = write.announced.min(length as u32));
        }
        self.settle();
    }

    #[inline(always)]
    pub(super) fn publish(&mut self, tokens: u32) {
        self.list.publish(tokens);
        if self.frames.len() != self.list.len() {
            self.frames.follow(self.list.ids(), &self.sequences.0.blocks);
        }
    }

    #[inline]
    pub(super) fn token_hashes(&self) -> Option<(&TokenHashes, &PrefixCache)> {
        Some((self.known.as_deref()?, self.sequences.cache()?))
    }

    pub(super) fn pool_blocks(&self) -> &Blocks {
        &self.sequences.0.blocks
    }

    /// Looks whether the first `written` blocks were uncached; returns the newest call compared.
    #[inline]
    pub(super) fn look_for_uncached(&mut self, written: usize) -> Option<u64> {
        let (known, cache) = self.known.as_mut().zip(self.sequences.cache())?;
        let newest = known.look_for_uncached(cache, written);
        // With several groups, blocks of others may be wrong: see `GroupedSequence::catch_up`.
        if self.sequences.kinds().len() == 1 {
            known.checked = newest;
        }
        Some(newest)
    }

    pub(super) fn writing(&self) -> Option<BatchRef> {
        self.pool_blocks().clock().state(&self.writers).awaited()
    }

    /// Returns the batches that wrote to its blocks and may be in flight.
    pub(crate) fn writers(&self) -> BatchSet {
        self.writers
    }

    /// Returns what this batch must do before it writes into a block with tokens.
    #[inline]
    pub(super) fn access(&self, place: u32, word: BlockWord, batch: Ticket) -> Access {
        if word.refs() != 1 || word.is_cached() {
            Access::Copy
        } else if place >= self.seals.settled() {
            if word.is_sealed() { Access::Reopen } else { Access::Open }
        } else if self.seals.is_promised_to(place, batch) {
            Access::Withdraw
        } else if word.is_sealed() {
            Access::Reopen
        } else {
            // A batch may end at any moment. Reached by `a_promised_block_is_copied`.
            Access::Copy
        }
    }

    pub(super) fn list_end(&self) -> ListEnd {
        let next = self.last_frame().map(|last| FrameId(last.0 + 1));
        // The next frame may be the first of a unit that another sequence reserves.
        let reserves = next.is_some() && self.reserved_for_growth.map(unit_of) == next.map(unit_of);
        let (is_short, tenant) = (self.sequences.is_short(self.group), self.tenant);
        ListEnd { next, reserves, is_short, run: 0, tenant }
    }

    #[inline]
    fn last_frame(&self) -> Option<FrameId> {
        match self.reserved.first() {
            // Not sealed, so it stays in its frame.
            Some(&last) => Some(self.pool_blocks().frame(last)),
            None => self.frames.last(),
        }
    }

    /// Reserves the unit of its last block for growth, after blocks were added.
    #[inline]
    pub(super) fn reserve_end(&mut self) {
        let last = self.last_frame();
        if self.reserved_for_growth.map(unit_of) != last.map(unit_of) {
            self.reserve_for_growth(last);
        }
    }

    /// Moves the reservation for growth to the unit of this frame.
    fn reserve_for_growth(&mut self, frame: Option<FrameId>) {
        if let Some(before) = self.reserved_for_growth.take() {
            self.pool_blocks().end_growth_unit(before);
        }
        let frame = frame.filter(|_| !self.sequences.is_short(self.group));
        self.reserved_for_growth = frame.filter(|&frame| self.pool_blocks().begin_growth_unit(frame));
    }

    pub(super) fn cut(&mut self, length: u32) {
        let gone = self.unlink(length);
        self.release_unlinked(&gone);
    }

    /// Unlinks the blocks after `length` tokens, and returns them, the last one first.
    pub(super) fn unlink(&mut self, length: u32) -> SmallVec<[BlockId; 64]> {
        let block_tokens = self.kind.block_tokens;
        let keep = length.div_ceil(block_tokens) as usize;
        let ids = &self.list.ids()[keep.min(self.list.len())..];
        let mut gone: SmallVec<[BlockId; 64]> = smallvec![BlockId(0); ids.len()];
        for (gone, id) in gone.iter_mut().zip(ids.iter().rev()) {
            *gone = BlockId(id.load(Relaxed));
        }
        if self.front as usize > keep {
            gone.retain(|id| !self.sequences.is_null(*id));
            self.front = keep as u32;
        }
        let partial = (!length.is_multiple_of(block_tokens)).then_some(length / block_tokens);
        self.publish(length);
        self.writes.retain(|write| write.from < length);
        self.committed = self.committed.min(length);
        self.known.iter_mut().for_each(|known| known.versions.truncate(length as usize));
        if let Some(place) = partial.filter(|&place| place < self.seals.settled()) {
            self.withdraw_note(place);
        }
        self.seals.truncate(keep as u32, length / block_tokens);
        if self.reserved_for_growth.is_some()
            && self.reserved_for_growth.map(unit_of) != self.last_frame().map(unit_of)
        {
            self.reserve_for_growth(None);
        }
        gone
    }

    /// Withdraws the note on a block that a batch may be about to register, but that loses tokens.
    #[cold]
    fn withdraw_note(&self, place: u32) {
        let id = self.list.id(place as usize);
        // A block shared by a fork keeps its tokens there; they were written before the fork.
        if let Some((_, cache)) = self.token_hashes()
            && self.pool_blocks().word(id).refs() == 1
        {
            cache.unnote(self.pool_blocks(), id);
        }
    }

    pub(super) fn release_unlinked(&self, gone: &[BlockId]) {
        self.release_of_chain(self.list.len() + gone.len(), gone);
    }

    /// Releases blocks of a chain of this length that are no longer in the list.
    pub(super) fn release_of_chain(&self, chain: usize, gone: &[BlockId]) {
        if !gone.is_empty() {
            // Pairs with the fence in `Clock::begin`: if a view's reader still found these blocks,
            // the release sees its batch.
            fence(SeqCst);
            match self.token_hashes() {
                Some((known, cache)) => {
                    let policy_info = PolicyInfo { chain: chain as u32, ..known.policy_info };
                    let pool = self.pool_blocks();
                    pool.release_cached(gone, |kept, tag| cache.keep(pool, kept, tag, policy_info));
                }
                None => self.pool_blocks().release_listed(gone),
            }
        }
    }
}

impl Drop for Sequence {
    fn drop(&mut self) {
        let _call = call();
        let start = self.sequences.0.sampler.is_due(Operation::Free).then(Instant::now);
        // The first list of a sequence is dropped last.
        if !self.is_closed {
            if self.group == 0 {
                self.sequences.unregister(self.id);
            }
            self.take_hints();
        }
        self.make_findable();
        self.release_reservation();
        self.reserve_for_growth(None);
        match self.registers_after() {
            Some(writer) => self.close_after(writer),
            None => self.close_now(),
        }
        // A batch's end that closes the sequence evicts by itself, if its thread may.
        (!self.is_closed).then(|| self.pool_blocks().reclaim_slice());
        start.into_iter().for_each(|start| self.pool_blocks().latencies().record(Operation::Free, start));
    }
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sequence")
            .field("id", &self.id)
            .field("len", &self.len())
            .field("committed", &self.committed)
            .field("blocks", &self.block_count())
            .field("seals", &self.seals)
            .finish()
    }
}
