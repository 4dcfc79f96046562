//! The prefix cache: maps token prefixes to blocks, for many threads at once.
//!
//! # Life of a cached block
//!
//! ```text
//! noted      its sequence knows its hash: the block is full of final tokens                    row
//! registered the batch that filled it has ended: sealed, cached; lookups find it               word, index, event
//! hit        another sequence's lookup takes a reference: the block is shared                  word
//! kept       its last reference was released: evictable, in the queue that the policy chose    word, row, queue
//! evicted    its frame is needed: its index entry is removed                                   word, index, event
//! ```
//!
//! # Truth and hints
//!
//! The word says whether a block is cached; the row holds its hash. Index and queues hold hints,
//! which are checked against the word. A stale hint is skipped. A missing hint costs a hit, or a
//! walk over all words at the end of the allocation ladder, but never loses a block.
//!
//! # Duplicates
//!
//! Sequences that compute the same tokens concurrently register several blocks under one hash. All
//! stay, because block lists are append-only, and a lookup returns any. Once released, only the
//! cached one with the smallest id is kept; the others are evicted first. Blocks whose index
//! entries are in different buckets are not recognized as [duplicates].
//!
//! # Clearing
//!
//! A block is noted together with the cache's *era*. [`PrefixCache::clear`] only begins a new era,
//! in which no earlier block is found: it fails no request and waits for no thread. Blocks of
//! earlier eras stay evictable, but their index entries may be overwritten. They precede others in
//! the order of releases; of several queues, one whose front is of an earlier era is served first.
//! Owned blocks are evicted before all others once released. [Rows](super::row) document era
//! numbers, [events](super::events) the events of an era.
//!
//! # Parts
//!
//! - `by_hash` uncaches blocks with wrong contents, which their owners keep. A sequence that holds
//!   one continues in no era: no block that it registers is found.
//! - `duplicates` gives evictable blocks other places, and `retained` ones that last until a time;
//!   `id_run`: which block probably follows.
//! - `cold_blocks` references evictable blocks in eviction order, to copy them to another pool.
//! - `window`: hits that need only the last blocks before a boundary.
//! - `foreign`: the engine of a frame pool computes the hashes, possibly several per block
//!   (`names`). Its blocks are evicted in the order of its frees, after evict-first ones
//!   (`evict_first`); duplicates are not evicted early. Hits pin their blocks.
//! - `by_tenant`: queues by tenant, and evictions that respect floors.
//!
//! Models: `loom-tests/tests/evictable.rs`, `prefix_index.rs`, `eviction_queue.rs`.

use std::ops::{ControlFlow, RangeFrom};

use crate::block::{BlockWord, Core, Evictable, Evictor, GrowTable, Tenant, WordCell};
use crate::error::PrefixError;
use crate::ids::{BlockId, FrameId, SessionId, Ticket};
use crate::sync::{AtomicU64, CachePadded, Ordering::*};

use super::config::{CacheParts, Now, PrefixConfig};
use super::events::{EventQueue, KvEvent};
use super::eviction_list::EvictionList;
use super::hash::{BlockHash, PrefixHasher};
use super::index::{Index, Key};
use super::names::Names;
use super::origin::{self, OriginTable};
use super::policy::{CachePriority, Lookup, Millis, Place, Policy, asked};
use super::queues::{Entry, Queues, row};
use super::retention::{Beside, DEMOTED, QUEUE};
use super::row::{Row, RowPart};
use super::stats::{EvictionCounts, PrefixStats, Tallies};
use super::weights::CurrentWeights;

mod by_hash;
mod by_tenant;
mod cold_blocks;
mod duplicates;
mod eviction;
mod foreign;
mod hashers;
mod id_run;
mod origins;
mod registration;
mod retained;
mod versions;
mod window;

pub(crate) use by_hash::Since;
pub use by_hash::UncachedBlocks;
use by_hash::UncachedHashes;
use by_tenant::ByTenant;
pub(crate) use cold_blocks::ColdBlock;
use foreign::NAMELESS;
use id_run::IdRun;
use retained::retention_of;
pub(crate) use window::WindowBlocks;

/// Distance, in blocks, at which a release prefetches rows.
const KEPT_AHEAD: usize = 16;

/// Distance, in blocks, at which a lookup prefetches index lines.
const AHEAD: usize = 8;

/// Attributes of the releasing sequence for the policy: see [`Released`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct PolicyInfo {
    pub context: u64,
    pub chain: u32,
    pub priority: CachePriority,
    pub keep_until: Option<Millis>,
    pub session: Option<SessionId>,
    pub returns_at: Option<Millis>,
    /// Whether its blocks are evicted before all others, if the cache has a queue for them.
    pub is_evict_first: bool,
}

/// Cache of evictable and shared blocks, looked up by the chained hash of their tokens.
///
/// An unreferenced block stays evictable until its frame is needed; a [`Policy`] orders evictions.
/// Lookups and evictions take no locks; registrations do only after hashes were uncached.
pub struct PrefixCache {
    /// By list of a sequence.
    hashers: Box<[PrefixHasher]>,
    rows: GrowTable<RowPart>,
    index: Index,
    queues: Queues,
    by_tenant: Option<Box<ByTenant>>,
    policy: std::sync::Arc<dyn Policy>,
    by_order: bool,
    now: Now,
    events: EventQueue,
    tallies: Tallies,
    /// Number of the next release.
    order: CachePadded<AtomicU64>,
    /// [`PrefixConfig::tolerance`]; 0 for a policy that places blocks otherwise.
    tolerance: f64,
    /// Rank of the last eviction in order. Unused without a tolerance.
    reached: CachePadded<AtomicU64>,
    names: Option<Names>,
    uncached: UncachedHashes,
    /// Identifies this cache among those of all processes.
    number: u64,
    origins: OriginTable,
    weights: CurrentWeights,
    /// Only read in frame pools.
    list: EvictionList,
}

impl PrefixCache {
    /// Creates an empty cache for a pool of `rows` blocks that may grow to `rows_max`. Fails for
    /// invalid parameters, and without a source of randomness.
    pub fn new(
        rows: usize,
        rows_max: usize,
        block_tokens: usize,
        config: PrefixConfig,
    ) -> Result<Self, PrefixError> {
        let CacheParts { policy, queues, tolerance, hasher, now, events } = config.parts(block_tokens)?;
        let by_order = asked(|| policy.places_by_order()).unwrap_or(false) && queues == 1;
        Ok(Self {
            hashers: Box::new([hasher]),
            rows: GrowTable::new(rows),
            index: Index::new(rows),
            queues: Queues::new(queues, rows_max, asked(&now).unwrap_or_default()),
            by_tenant: None,
            by_order,
            policy,
            now,
            events: EventQueue::new(events),
            tallies: Tallies::default(),
            order: CachePadded::new(AtomicU64::new(1)),
            tolerance: if by_order { tolerance } else { 0.0 },
            reached: CachePadded::new(AtomicU64::new(0)),
            names: None,
            uncached: UncachedHashes::default(),
            number: origin::random()?,
            origins: OriginTable::default(),
            weights: CurrentWeights::new(1),
            list: EvictionList::default(),
        })
    }

    /// Adds a queue of evict-first blocks.
    pub(crate) fn with_evict_first(mut self, rows: usize, rows_max: usize) -> Self {
        let built = self.caught_now();
        self.queues = Queues::with_evict_first(self.queues.useless(), rows, rows_max, built);
        self
    }

    /// Returns the eviction policy.
    pub fn policy(&self) -> &std::sync::Arc<dyn Policy> {
        &self.policy
    }

    /// Returns the current time of the cache's clock.
    pub fn now(&self) -> Millis {
        (self.now)()
    }

    /// Returns the same; zero if the clock panics.
    pub(crate) fn caught_now(&self) -> Millis {
        asked(|| self.now()).unwrap_or_default()
    }

    /// Returns the queue of cache events.
    pub fn events(&self) -> &EventQueue {
        &self.events
    }

    /// Returns the current era, in which new chains are noted and looked up.
    pub fn era(&self) -> u64 {
        self.events.era()
    }

    /// Returns counts of lookups, hits, registrations and evictions.
    pub fn stats(&self) -> PrefixStats {
        self.tallies.read(self.index.forgotten())
    }

    /// Returns counts of evictions, without the `forgotten` blocks that their last owner freed.
    pub(crate) fn evictions(&self, forgotten: u64) -> EvictionCounts {
        self.tallies.evictions(self.queues.useless(), forgotten)
    }

    fn row(&self, id: BlockId) -> &Row {
        row(&self.rows, id)
    }

    #[inline]
    pub(crate) fn prefetch(&self, id: BlockId) {
        self.row(id).prefetch();
    }

    /// Takes the longest cached prefix: see [`take_prefix`](Self::take_prefix).
    fn take_prefix_in<const HAS_TENANTS: bool>(
        &self,
        core: &Core,
        hashes: &[BlockHash],
        era: u64,
        take: &mut dyn FnMut(BlockId),
    ) -> Option<BlockId> {
        let (mut evictable, mut full, mut run, mut at) = (0, None, IdRun::new(core), 0);
        while at < hashes.len() {
            let (taken, unowned) = self.hit_run::<HAS_TENANTS>(core, &mut run, &hashes[at..], era, take);
            (at, evictable) = (at + taken, evictable + unowned);
            let Some(&hash) = hashes.get(at) else { break };
            if let Some(&later) = hashes.get(at + AHEAD) {
                self.index.prefetch(key_of(later));
            }
            match self.find(core, hash, era) {
                Ok((id, was_evictable)) => {
                    if HAS_TENANTS && was_evictable {
                        core.took_cached(id);
                    }
                    take(id);
                    run.found(id);
                    evictable += usize::from(was_evictable);
                    at += 1;
                }
                Err(found) => {
                    full = found;
                    break;
                }
            }
        }
        core.count_not_evictable(evictable);
        full
    }

    /// Returns the numbers of cached and of evictable blocks in the longest cached prefix.
    pub(crate) fn count_prefix(&self, core: &Core, hashes: &[BlockHash], era: u64) -> (usize, usize) {
        let (mut blocks, mut evictable, mut run) = (0, 0, IdRun::new(core));
        for (i, &hash) in hashes.iter().enumerate() {
            self.prefetch_ahead(core, run, hashes.get(i + AHEAD));
            let look = |id| {
                let word = core.word(id);
                if word.hit().is_some() && self.holds(id, hash, era) {
                    ControlFlow::Break((id, word.is_evictable()))
                } else {
                    ControlFlow::Continue(())
                }
            };
            let near = run.next.and_then(|id| look(id).break_value());
            let found = near.or_else(|| self.index.find(key_of(hash), look));
            let Some((id, is_evictable)) = found else { break };
            run.found(id);
            blocks += 1;
            evictable += usize::from(is_evictable);
        }
        (blocks, evictable)
    }

    pub(crate) fn count_lookup(&self, blocks: usize, hits: usize, comes_back: bool) {
        self.tallies.looked_up(blocks, hits, comes_back);
    }

    /// Reports a lookup to the policy: the hashes of all full blocks of the prompt, the number of
    /// hits, and the last hit block. Returns the context for the releases of these blocks.
    pub(crate) fn looked_up(
        &self,
        whole: &[BlockHash],
        blocks: usize,
        last: Option<BlockId>,
        session: Option<SessionId>,
    ) -> u64 {
        let state = last.map_or(0, |id| self.row(id).policy_state());
        let context = asked(|| {
            if !self.policy.learns() {
                return 0;
            }
            let mut bits = whole.iter().map(|&hash| bits_of(hash));
            let (all, hits) = (whole.len() as u32, blocks as u32);
            let mut lookup = Lookup { blocks: all, hits, state, hashes: &mut bits, session };
            self.policy.looked_up(&mut lookup, self.now())
        });
        context.unwrap_or(0)
    }

    pub(crate) fn take(&self, core: &Core, hash: BlockHash, era: u64) -> Option<BlockId> {
        let (id, was_evictable) = self.find(core, hash, era).ok()?;
        if was_evictable {
            core.took_cached(id);
            core.count_not_evictable(1);
        }
        Some(id)
    }

    /// As [`take`](Self::take), for a transfer: no request has hit the block.
    pub(crate) fn take_to_carry(&self, core: &Core, hash: BlockHash, era: u64) -> Option<BlockId> {
        self.take(core, hash, era).inspect(|&id| self.row(id).uncount_hit())
    }

    /// Takes a reference on a block that holds `hash`; also returns whether it was evictable. The
    /// error is a block that holds it but has the maximum of references.
    #[inline]
    fn find(&self, core: &Core, hash: BlockHash, era: u64) -> Result<(BlockId, bool), Option<BlockId>> {
        let mut full = None;
        let found = self.index.find(key_of(hash), |id| match self.try_hit(core, id, &hash, era) {
            Ok(was_evictable) => ControlFlow::Break((id, was_evictable)),
            Err(is_full) => {
                full = if is_full { Some(id) } else { full };
                ControlFlow::Continue(())
            }
        });
        if found.is_none() && full.is_some() {
            self.tallies.full();
        }
        found.ok_or(full)
    }

    /// Takes a reference on a block if it holds `hash`; returns whether it was evictable. The error
    /// is whether it holds it but has the maximum of references.
    // Not inlined: the loop over the slots of a bucket keeps its state in registers.
    #[inline(never)]
    fn try_hit(&self, core: &Core, id: BlockId, hash: &BlockHash, era: u64) -> Result<bool, bool> {
        let (row, cell) = (self.row(id), core.cell(id));
        // Retry if another thread hit or released the block after the word was read.
        loop {
            let word = cell.read();
            if word.hit().is_none() {
                return Err(word.is_cached() && self.holds_in(row, id, hash, era));
            }
            if !self.holds_in(row, id, hash, era) {
                return Err(false);
            }
            if let Some(was_evictable) = self.hit(core, (id, row, cell), word, hash, era) {
                row.count_hit();
                return Ok(was_evictable);
            }
        }
    }

    /// Takes a reference on a block that held `hash` under `word`; returns whether it was
    /// evictable. Returns `None`, with no effect, if the word or the contents have changed.
    #[inline(always)]
    fn hit(
        &self,
        core: &Core,
        (id, row, cell): (BlockId, &Row, WordCell<'_>),
        word: BlockWord,
        hash: &BlockHash,
        era: u64,
    ) -> Option<bool> {
        let was_evictable = if self.names.is_some() { cell.hit_in_place(word)? } else { cell.hit(word)? };
        // A word has only the low bits of a generation, so it recurs after 65,536 releases, with
        // other contents. The reference keeps the noted contents from changing.
        if self.holds_in(row, id, hash, era) {
            return Some(was_evictable);
        }
        core.give_back_hit(id, was_evictable);
        None
    }

    #[inline]
    fn holds(&self, id: BlockId, hash: BlockHash, era: u64) -> bool {
        self.holds_in(self.row(id), id, &hash, era)
    }

    #[inline(always)]
    fn holds_in(&self, row: &Row, id: BlockId, hash: &BlockHash, era: u64) -> bool {
        let is_first = row.holds(hash, era);
        match &self.names {
            None => is_first,
            Some(names) => is_named(names, (id, row), is_first, hash, era),
        }
    }

    /// Returns the keys of a block; none in an earlier era, so that its entries may be overwritten.
    fn registered(&self, core: &Core, id: BlockId) -> impl Iterator<Item = Key> {
        // The caller has read an index entry of the block, or has fenced and sees its word, so this
        // era is no older than the one in which the block was registered.
        let is_findable = core.word(id).is_cached() && self.row(id).is_of(self.era());
        let first = is_findable.then(|| self.row(id).hash());
        let (is_first, further) = match (&self.names, first) {
            (Some(names), Some(_)) => names.parts(id),
            _ => (true, Vec::new()),
        };
        first.filter(|&hash| is_first && hash != NAMELESS).into_iter().chain(further).map(key_of)
    }

    /// Returns the numbers of this many releases.
    fn orders(&self, releases: usize) -> RangeFrom<u64> {
        // Release: pairs with the Acquire in `releases`. The order itself needs only Relaxed.
        self.order.fetch_add(releases as u64, Release)..
    }

    /// Enqueues blocks of one tenant that became evictable, in the queues that the policy chooses.
    #[inline]
    fn keep_in(
        &self,
        queues: &Queues,
        core: &Core,
        kept: &[Evictable],
        tag: Ticket,
        policy_info: PolicyInfo,
    ) {
        let era = self.era();
        let orders = self.orders(kept.len());
        let uses_time = policy_info.keep_until.is_some() || self.policy.learns();
        let now = asked(|| if uses_time { self.now() } else { Millis(0) }).unwrap_or_default();
        let retention = retention_of(&policy_info, now);
        let mut placing = self.placing(retention.map(Beside::Retained));
        let evict_first = self.queues.evict_first().filter(|_| policy_info.is_evict_first);
        let mut filing = queues.filing(&self.rows);
        kept.iter().take(KEPT_AHEAD).for_each(|block| self.row(block.id).prefetch());
        for (i, (&Evictable { id, word }, order)) in kept.iter().zip(orders).enumerate() {
            if let Some(next) = kept.get(i + KEPT_AHEAD) {
                self.row(next.id).prefetch();
            }
            let (part, at) = self.rows.locate(id.index());
            let (row, links) = (&part.rows[at], &part.links[at]);
            // For the word of this release: the block may have been hit and released since.
            row.set_tag(word, tag);
            let is_useless = !row.is_of(era)
                || (row.is_duplicate() && self.renews_original(core, id, era, (order, &policy_info, now)));
            let place = if is_useless {
                (self.queues.useless(), Place { queue: 0, rank: order, state: 0 })
            } else if let Some(evict_first) = evict_first {
                (evict_first, Place { queue: 0, rank: order, state: 0 })
            } else if placing.is_beside() {
                placing.place(row, id, order, order);
                continue;
            } else if self.by_order {
                (0, Place { queue: 0, rank: order, state: 0 })
            } else {
                self.place(row, order, &policy_info, now)
            };
            row.set_place(place.0, place.1.rank, place.1.state);
            filing.add_placed(id, row, links, (place.0, place.1.rank));
        }
        // Evictions find them from here on.
        drop((filing, placing));
        // `add_placed` swaps a flag of the last block after its place is set.
        if self.list.is_read() {
            self.list.add(kept.iter().map(|kept| self.classed(kept.id)));
        }
    }

    /// Takes the entry of a tenant that is evicted next, from a queue without a bit in
    /// `skipped_queues`.
    #[inline]
    fn take_next_of(&self, queues: &Queues, skipped_queues: u32) -> Option<Entry> {
        queues.take(&self.rows, &*self.policy, skipped_queues, self.era(), &self.now)
    }

    /// Like [`forget_uncached`](Self::forget_uncached), and counts evictions from `queue` or out of
    /// order.
    fn forget_all(&self, core: &Core, queue: Option<usize>, ids: &[BlockId]) {
        self.forget_uncached(core, ids);
        self.tallies.evicted(queue, ids.len());
    }

    /// Removes blocks from the index, and publishes their removal.
    fn forget_uncached(&self, core: &Core, ids: &[BlockId]) {
        let further = self.take_further(ids);
        let named = ids.iter().map(|&id| (id, self.row(id).hash())).filter(|&(_, hash)| hash != NAMELESS);
        let entries = named.clone().map(|(id, hash)| (key_of(hash), id));
        let entries = entries.chain(further.hashes.iter().map(|&(id, hash)| (key_of(hash), id)));
        self.index.remove_all(entries, |id| self.registered(core, id));
        let era = self.era();
        for (id, hash) in named {
            let row = self.row(id);
            // The `Cleared` event covers the removal of a block of an earlier era.
            if row.is_of(era) && !further.without_first.contains(&id) {
                let group = row.group();
                self.events.publish_in(row.era(), || KvEvent::Removed { block: id, hash, group });
            }
        }
        self.tell_further(&further, era);
    }

    /// Begins a new era: no block cached so far is found again.
    pub(crate) fn clear(&self) {
        self.events.clear();
    }
}

#[inline(never)]
fn is_named(names: &Names, (id, row): (BlockId, &Row), is_first: bool, hash: &BlockHash, era: u64) -> bool {
    row.is_of(era) && names.has(id, is_first, *hash)
}

#[inline]
fn key_of(hash: BlockHash) -> Key {
    let [low, high] = hash.words();
    Key(low, high)
}

#[inline]
fn bits_of(hash: BlockHash) -> u64 {
    hash.words()[0]
}

impl Evictor for PrefixCache {
    fn grow(&self, core: &Core, rows: usize) {
        self.rows.grow(rows);
        self.queues.grow(rows);
        self.grow_tenants(rows);
        self.names.iter().for_each(|names| names.grow(rows));
        self.index.grow(rows * self.entries_per_block(), |insert| {
            for id in (0..core.rows() as u32).map(BlockId) {
                self.registered(core, id).for_each(|key| insert(key, id));
            }
        });
    }

    fn became_evictable(&self, core: &Core, kept: &[Evictable], tag: Ticket) {
        self.keep(core, kept, tag, PolicyInfo::default());
    }

    fn evict(&self, core: &Core, oldest: Ticket, wanted: (usize, Tenant), freed: &mut dyn FnMut(&[FrameId])) {
        self.evict_by(core, oldest, wanted, freed);
    }

    fn evict_own(
        &self,
        core: &Core,
        oldest: Ticket,
        wanted: (usize, Tenant),
        freed: &mut dyn FnMut(&[FrameId]),
    ) {
        self.evict_of_tenant(core, oldest, wanted, freed);
    }

    fn evicts_early(&self, blocks: &[BlockId], tolerance: u32) -> bool {
        // Relaxed: a choice among blocks that may all be evicted.
        let (reached, newest) = (self.reached.load(Relaxed), self.order.load(Relaxed));
        let limit =
            reached + (newest.saturating_sub(reached) as f64 * self.tolerance * f64::from(tolerance)) as u64;
        let era = self.era();
        let is_early = |&id: &BlockId| {
            let row = self.row(id);
            let (queue, rank) = row.place();
            let is_in_order = queue < self.queues.useless() || queue > QUEUE + DEMOTED;
            !is_in_order || queue < QUEUE && rank <= limit || !row.is_of(era)
        };
        self.tolerance > 0.0 && blocks.iter().all(is_early)
    }

    fn releases(&self) -> u64 {
        // Acquire: a thread that sees a release counted sees its blocks evictable, and counted.
        self.order.load(Acquire)
    }

    fn noted_tag(&self, id: BlockId, word: BlockWord) -> Option<Ticket> {
        self.row(id).noted_tag(word)
    }

    fn tag(&self, id: BlockId, word: BlockWord) -> Option<Ticket> {
        self.row(id).tag(word)
    }

    fn assume_tag(&self, id: BlockId, word: BlockWord, tag: Ticket) {
        self.row(id).assume_tag(word, tag);
    }

    fn forget(&self, core: &Core, id: BlockId) {
        self.forget_all(core, None, &[id]);
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
