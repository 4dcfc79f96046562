//! The cache: blocks by what they hold, from many threads at once.
//!
//! # What happens to a block
//!
//! ```text
//! noted      its sequence knows its hash, when the block is full of final tokens               row
//! registered the batch that filled it has ended: sealed, cached; from now on it is found       word, index, event
//! hit        another sequence's lookup takes a reference: at once shared                       word
//! kept       its last reference went: evictable, where the policy puts it                      word, row, queue
//! evicted    its frame is needed: the index forgets it                                         word, index, event
//! ```
//!
//! # Truth and hints
//!
//! The word says whether a block is cached, the row what it holds. Index and queues hold hints: each is checked under the
//! word. A hint that is stale is passed over; one that is missing costs a hit, or a walk at the end of the ladder, never a
//! block.
//!
//! # Duplicates
//!
//! Two sequences that compute the same tokens side by side register two blocks of one hash. Their tables are append-only, so
//! that both stay; whoever looks it up gets one of them. Of those that are cached for one hash, only
//! the one of the smallest number is of use when it is released; the others are the first to go.
//!
//! # Clearing
//!
//! What a block holds is noted together with the cache's *era*. [`PrefixCache::clear`] begins another one, in which nothing that was
//! noted before is found, and evicts what nobody owns. So a clear refuses nothing and waits for nobody: what is in use is
//! dropped when it is released. No era comes again: see the [rows](super::row). What is told of one
//! ends with its clear: see the [events](super::events).
//!
//! # Transit
//!
//! Evictable blocks can be [taken](PrefixCache::take_coldest) in the order in which they would be evicted, to be copied elsewhere. Each is
//! then held by a reference, and as safe as in a sequence: see `transit`.
//!
//! Models: `loom-tests/tests/evictable.rs`, `prefix_index.rs`, `eviction_queue.rs`.

use std::ops::ControlFlow;

use smallvec::SmallVec;

use crate::block::{BlockWord, Core, Evictable, Evictor, NotEvicted, Rows};
use crate::error::PrefixError;
use crate::ids::{BlockHandle, BlockId, FrameId, Ticket};
use crate::sync::{AtomicU64, CachePadded, Ordering::*, heavy_fence};

use super::config::{Parts, PrefixConfig};
use super::events::{EventQueue, KvEvent};
use super::hash::{BlockHash, PrefixHasher};
use super::index::{Index, Key};
use super::policy::{CachePriority, Lookup, Millis, Place, Policy, QUEUES_MAX, Released, asked};
use super::queues::{Queues, row};
use super::row::{Row, RowBucket};
use super::stats::{PrefixStats, Tallies};

mod transit;

pub(crate) use transit::Cold;

/// Blocks that an eviction passes over, because they are moving or seen by a batch, before it gives up.
const PASSED_OVER: usize = if cfg!(kvpool_loom) { 2 } else { 32 };
/// Of those, of one queue of a policy that has several: a queue of what was released just now must not use them up.
const PASSED_OVER_QUEUE: u8 = if cfg!(kvpool_loom) { 1 } else { (PASSED_OVER / QUEUES_MAX) as u8 };

/// How far ahead of a look-up the index is fetched.
const AHEAD: usize = 8;

/// The time, for policies and retention.
pub type Now = Box<dyn Fn() -> Millis + Send + Sync>;

/// Of a sequence that releases blocks: what the policy wants to know.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Owner {
    /// What [`Policy::looked_up`] gave for it.
    pub context: u64,
    /// Blocks of its chain.
    pub chain: u32,
    /// How much its prefix is worth keeping.
    pub priority: CachePriority,
    /// Until when to keep it, if others can go.
    pub keep_until: Option<Millis>,
}

/// What a lookup found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Hits {
    /// Leading blocks that were cached: a reference on each is the caller's.
    pub blocks: usize,
    /// What the policy wants to hear of when they are released.
    pub context: u64,
}

/// See the [module](self).
pub struct PrefixCache {
    hasher: PrefixHasher,
    rows: Rows<RowBucket>,
    index: Index,
    queues: Queues,
    policy: std::sync::Arc<dyn Policy>,
    now: Now,
    events: EventQueue,
    tallies: Tallies,
    /// The number of the next release.
    order: CachePadded<AtomicU64>,
}

impl PrefixCache {
    /// An empty cache of a pool with so many rows, which may grow to `rows_max`.
    ///
    /// # Errors
    ///
    /// [`PrefixError`] for a policy of no queues or too many, blocks of no tokens, or a system without randomness.
    pub fn new(
        rows: usize,
        rows_max: usize,
        block_tokens: usize,
        config: PrefixConfig,
    ) -> Result<Self, PrefixError> {
        let Parts { policy, queues, hasher, now, events } = config.parts(rows_max, block_tokens)?;
        Ok(Self {
            hasher,
            rows: Rows::new(rows),
            index: Index::new(rows),
            queues: Queues::new(queues, rows_max),
            policy,
            now,
            events: EventQueue::new(events),
            tallies: Tallies::default(),
            order: CachePadded::new(AtomicU64::new(1)),
        })
    }

    /// By what tokens are hashed.
    pub fn hasher(&self) -> &PrefixHasher {
        &self.hasher
    }

    /// The policy by which blocks are evicted.
    pub fn policy(&self) -> &std::sync::Arc<dyn Policy> {
        &self.policy
    }

    /// The time, by the cache's clock.
    pub fn now(&self) -> Millis {
        (self.now)()
    }

    /// What has happened to the cache.
    pub fn events(&self) -> &EventQueue {
        &self.events
    }

    /// The era in which a chain that begins now is noted and found.
    pub fn era(&self) -> u64 {
        // A chain that began a moment before a clear belongs to the era before it.
        self.events.era()
    }

    /// What lookups found, and what became of blocks.
    pub fn stats(&self) -> PrefixStats {
        self.tallies.read(self.index.forgotten())
    }

    /// Bytes that the cache takes beside the blocks' own table.
    pub fn metadata_bytes(&self) -> usize {
        self.rows.len() * size_of::<Row>() + self.index.bytes()
    }

    fn row(&self, id: BlockId) -> &Row {
        row(&self.rows, id)
    }

    /// Takes a reference, for a sequence's list, on each block of the longest cached prefix of a chain, and passes it on, the
    /// first first. `whole`: full blocks of the prompt, of which `hashes` may be fewer: those that may be a hit.
    pub(crate) fn look_up(
        &self,
        core: &Core,
        hashes: &[BlockHash],
        whole: &[BlockHash],
        era: u64,
        take: &mut dyn FnMut(BlockId),
    ) -> Hits {
        let (mut blocks, mut evictable, mut last) = (0, 0, None);
        for (i, &hash) in hashes.iter().enumerate() {
            if let Some(&next) = hashes.get(i + AHEAD) {
                self.index.prefetch(key_of(next));
            }
            let Some((id, was_evictable)) = self.find(core, hash, era) else { break };
            take(id);
            blocks += 1;
            evictable += usize::from(was_evictable);
            last = Some(id);
        }
        core.count_hits(evictable);
        self.tallies.looked_up(whole.len(), blocks);
        let state = last.map_or(0, |id| self.row(id).state.load(Relaxed));
        let context = asked(|| {
            if !self.policy.learns() {
                return 0;
            }
            let mut bits = whole.iter().map(|&hash| bits_of(hash));
            let mut lookup =
                Lookup { blocks: whole.len() as u32, hits: blocks as u32, state, hashes: &mut bits };
            self.policy.looked_up(&mut lookup, self.now())
        });
        Hits { blocks, context: context.unwrap_or(0) }
    }

    /// A reference for a sequence's list on one cached block that holds `hash`.
    pub(crate) fn take(&self, core: &Core, hash: BlockHash, era: u64) -> Option<BlockId> {
        let (id, was_evictable) = self.find(core, hash, era)?;
        core.count_hits(usize::from(was_evictable));
        Some(id)
    }

    /// A reference on one block that holds `hash`, and whether it was evictable.
    #[inline]
    fn find(&self, core: &Core, hash: BlockHash, era: u64) -> Option<(BlockId, bool)> {
        let mut found = None;
        self.index.find(key_of(hash), |id| {
            // Again, if the word changed between the look at the row and the step: somebody else hit it, or released it.
            loop {
                let word = core.word(id);
                if word.hit().is_none() || !self.row(id).holds(hash, era) {
                    return ControlFlow::Continue(());
                }
                if let Some(was_evictable) = self.hit(core, id, word, hash, era) {
                    self.row(id).count_hit();
                    found = Some((id, was_evictable));
                    return ControlFlow::Break(());
                }
            }
        });
        found
    }

    /// A reference on a block that held `hash` when its word was `word`, and whether it was evictable. `None`: the word is another
    /// by now, and nothing was done.
    #[inline]
    fn hit(&self, core: &Core, id: BlockId, word: BlockWord, hash: BlockHash, era: u64) -> Option<bool> {
        let was_evictable = core.hit(id, word)?;
        // The word has the low bits of its generation only: it is the same again after 65,536 releases, of other bytes. The
        // reference keeps what is noted from changing.
        if self.row(id).holds(hash, era) {
            return Some(was_evictable);
        }
        core.give_back_hit(id, was_evictable);
        None
    }

    /// Of the blocks that are cached for `hash`, all but the one of the smallest number are duplicates.
    fn mark_duplicates(&self, core: &Core, id: BlockId, hash: BlockHash, era: u64) {
        self.index.find(key_of(hash), |other| {
            if other != id && self.is_cached_for(core, other, hash, era) {
                self.row(id.max(other)).mark_duplicate();
            }
            ControlFlow::<()>::Continue(())
        });
    }

    /// Whether a block of a smaller number is cached for what `id` holds.
    fn is_duplicate(&self, core: &Core, id: BlockId, hash: BlockHash, era: u64) -> bool {
        let has = self.index.find(key_of(hash), |other| {
            if other < id && self.is_cached_for(core, other, hash, era) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        has.is_some()
    }

    fn is_cached_for(&self, core: &Core, id: BlockId, hash: BlockHash, era: u64) -> bool {
        core.word(id).is_cached() && self.row(id).holds(hash, era)
    }

    /// Notes what a block will hold when it is [registered](Self::register). It is in the caller's sequence, and not cached.
    pub(crate) fn note(&self, id: BlockId, hash: BlockHash, era: u64, depth: u32) {
        self.row(id).note(hash, era, depth);
    }

    /// Registers blocks that were noted: their bytes are final, and they can be hit. Nothing comes of a handle that is stale by
    /// now. What is `stored` is told to those who listen to events.
    pub(crate) fn register(
        &self,
        core: &Core,
        blocks: impl IntoIterator<Item = (BlockHandle, Option<Box<KvEvent>>)>,
    ) {
        let mut registered = SmallVec::<[(BlockHash, BlockId); 64]>::new();
        let era = self.era();
        for (handle, stored) in blocks {
            let (id, row) = (handle.id, self.row(handle.id));
            // Before it is cached, when it cannot change, unless the handle is stale; then nothing comes of it.
            let (hash, noted) = (row.hash(), row.era());
            // What was noted before a clear is not found, and not told. If the clear comes from
            // here on, the reader knows.
            let is_found = row.is_of(self.era());
            // Before it can be hit, released and evicted, which is told too.
            let told = is_found
                && self
                    .events
                    .publish_in(noted, || stored.map_or_else(|| self.stored(id, hash), |stored| *stored));
            if core.seal_cached(handle) {
                registered.push((hash, id));
                if is_found && !told && !cfg!(kvpool_mutant = "events_not_late") {
                    self.tell_late(core, handle, hash, noted);
                }
            } else if told {
                self.events.publish_in(noted, || KvEvent::Removed { block: id, hash });
            }
        }
        self.tallies.registered(registered.len());
        let entries = registered.iter().map(|&(hash, id)| (key_of(hash), id));
        self.index.insert_all(entries, |id| self.registered(core, id));
        for (hash, id) in registered {
            self.mark_duplicates(core, id, hash, era);
        }
    }

    /// Nobody listened before the block was cached. Whoever came in between has perhaps looked too early to see it, and is told now.
    #[inline]
    fn tell_late(&self, core: &Core, handle: BlockHandle, hash: BlockHash, noted: u64) {
        let id = handle.id;
        if self.events.publish_in(noted, || self.stored(id, hash)) {
            // It may have been evicted meanwhile, and that been told before. Pairs with the light fence of the evictor's
            // `publish`: that comes after ours, or we see the word that it left.
            let is_fenced = heavy_fence();
            let word = core.word(id);
            let is_there = is_fenced && word.is_cached() && word.is_of(handle.generation);
            if !is_there && !cfg!(kvpool_mutant = "events_late_unchecked") {
                self.events.publish_in(noted, || KvEvent::Removed { block: id, hash });
            }
        }
    }

    /// What is told of a block whose sequence began before anybody listened.
    #[cold]
    fn stored(&self, block: BlockId, hash: BlockHash) -> KvEvent {
        let block_tokens = self.hasher.block_tokens() as u32;
        KvEvent::Stored { block, hash, parent: None, tokens: SmallVec::new(), block_tokens }
    }

    /// Blocks that are cached, and what they hold: for who begins to follow the events, or lost some. A walk over all blocks.
    pub(crate) fn cached_blocks(&self, core: &Core) -> Vec<(BlockId, BlockHash)> {
        let era = self.era();
        let cached = |id| {
            let word: BlockWord = core.word(id);
            let (hash, is_of_era) = (self.row(id).hash(), self.row(id).is_of(era));
            // Of what is noted only what did not change while it was read: the word says so.
            let now = core.word(id);
            (word.is_cached() && is_of_era && now == word).then_some((id, hash))
        };
        (0..core.rows() as u32).map(BlockId).filter_map(cached).collect()
    }

    /// What a block is registered under, if it is.
    fn registered(&self, core: &Core, id: BlockId) -> Option<Key> {
        core.word(id).is_cached().then(|| key_of(self.row(id).hash()))
    }

    /// Blocks of a sequence's list became evictable: the policy places them.
    pub(crate) fn keep(&self, core: &Core, kept: &[Evictable], tag: Ticket, owner: Owner) {
        let era = self.era();
        // Relaxed: a number of its own for each, and in the order of releases as far as there is one.
        let order = self.order.fetch_add(kept.len() as u64, Relaxed);
        let now = asked(|| if self.policy.learns() { self.now() } else { Millis(0) }).unwrap_or_default();
        for (&Evictable { id, word }, order) in kept.iter().zip(order..) {
            let row = self.row(id);
            // By the word that the release made: by now the block may have been hit under a newer batch, and released again.
            row.set_tag(word, tag);
            let hash = row.hash();
            let is_useless =
                !row.is_of(era) || (row.is_duplicate() && self.is_duplicate(core, id, hash, era));
            if is_useless {
                row.set_place(self.queues.useless(), order, 0);
                continue;
            }
            let released = Released {
                order,
                hash: bits_of(hash),
                depth: row.depth(),
                chain: owner.chain.max(row.depth() + 1),
                hits: row.hits(),
                context: owner.context,
                state: row.state.load(Relaxed),
                priority: owner.priority,
                keep_until: owner.keep_until,
            };
            let place = asked(|| self.policy.place(&released, now));
            let place = place.unwrap_or(Place { queue: 0, rank: order, state: 0 });
            let queue = usize::from(place.queue).min(self.queues.useless() - 1);
            row.set_place(queue, place.rank, place.state);
        }
        self.queues.file(&self.rows, kept.iter().map(|kept| kept.id));
    }

    /// Nothing that was cached until now is found any more; what nobody owns is evicted at once, the rest when it is
    /// released. Returns how many blocks were evicted.
    pub(crate) fn clear(&self, core: &Core) -> usize {
        self.events.clear();
        core.evict_all()
    }
}

/// What the index finds a block by.
#[inline]
fn key_of(hash: BlockHash) -> Key {
    let [low, high] = hash.words();
    Key(low, high)
}

/// What a policy knows a block by.
#[inline]
fn bits_of(hash: BlockHash) -> u64 {
    hash.words()[0]
}

impl Evictor for PrefixCache {
    fn grow(&self, core: &Core, rows: usize) {
        self.rows.grow(rows);
        self.index.grow(rows, |insert| {
            for id in (0..core.rows() as u32).map(BlockId) {
                if let Some(key) = self.registered(core, id) {
                    insert(key, id);
                }
            }
        });
    }

    fn became_evictable(&self, core: &Core, kept: &[Evictable], tag: Ticket) {
        self.keep(core, kept, tag, Owner::default());
    }

    fn evict(&self, core: &Core, oldest: Ticket, wanted: usize, freed: &mut dyn FnMut(FrameId)) {
        let mut passed_over = SmallVec::<[BlockId; PASSED_OVER]>::new();
        // Passed over in a queue, a byte each; and queues that are left alone for this.
        let (mut in_queue, mut spared) = ([0u8; QUEUES_MAX], 0u32);
        let mut got = 0;
        let mut has_looked = false;
        while got < wanted && passed_over.len() < PASSED_OVER {
            let taken = self.queues.take(&self.rows, &*self.policy, spared, &self.now);
            let Some((queue, id)) = taken else {
                let is_odd = got == 0 && passed_over.is_empty() && core.evictable() > 0;
                if is_odd && !has_looked && self.queues.look() {
                    has_looked = true;
                    continue;
                }
                break;
            };
            match core.evict(id, oldest) {
                Ok(frame) => {
                    got += 1;
                    freed(frame);
                }
                // Its release files it again.
                Err(NotEvicted::Owned) => {}
                Err(NotEvicted::Seen | NotEvicted::Moving) => {
                    passed_over.push(id);
                    // What stands behind it was mostly released later, and is seen as well.
                    if let Some(passed) = in_queue.get_mut(queue) {
                        *passed += 1;
                        spared |= u32::from(*passed >= PASSED_OVER_QUEUE) << queue;
                    }
                }
            }
        }
        self.queues.file(&self.rows, passed_over);
    }

    fn tag(&self, id: BlockId, word: BlockWord) -> Option<Ticket> {
        self.row(id).tag(word)
    }

    fn set_tag(&self, id: BlockId, word: BlockWord, tag: Ticket) {
        self.row(id).set_tag(word, tag);
    }

    fn forget(&self, core: &Core, id: BlockId) {
        let (hash, noted) = (self.row(id).hash(), self.row(id).era());
        self.index.remove(key_of(hash), id, |id| self.registered(core, id));
        // Of an earlier era: its clear tells of it, or has done so.
        if self.row(id).is_of(self.era()) {
            self.events.publish_in(noted, || KvEvent::Removed { block: id, hash });
        }
        self.tallies.evicted();
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
