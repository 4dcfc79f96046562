//! Blocks of an engine that brings its own hashes: the cache of a frame pool.
//!
//! ```text
//! name       a block gets its first hash (row; registered as a sequence's block is), or a further one (names)
//! unname     a hash is taken away; with the last one the block is uncached, or evicted if it has no references
//! uncache    all hashes of a block are taken away
//! rename     the hashes of a block go to another one
//! ```
//!
//! The lock of the [names](super::super::names) serializes these calls and
//! [`keep_nameless`](PrefixCache::keep_nameless). Only they make a block cached, so one thread at a
//! time writes a row, and never while its block is cached; hits rely on this. The row alone
//! determines the era of a block, so a clear covers its further hashes too.
//!
//! The cache compares 192 bits that [`PrefixHasher::foreign`] derives from the engine's hash and
//! group, by BLAKE3 with the cache's key. Different inputs agree in all with probability 2^-192
//! (2^-128 in the key alone). Equal hashes of different contents are not detected: two of `n`
//! contents share a hash of `b` bits with probability about `n^2 / 2^(b + 1)`. For 2^20 blocks that
//! is 2^-25 with 64 bits, and 2^-89 with 128.

use std::cell::Cell;
use std::ops::ControlFlow;

use crate::block::{Blocks, Core};
use crate::error::{FrameError, PrefixError};
use crate::ids::{BlockId, FrameId};
use crate::sync::fence_after_rmw;

use super::super::eviction_list::Classed;
use super::{BlockHash, Index, KvEvent, Names, PolicyInfo, PrefixCache, PrefixConfig, Since, key_of};

/// Factor by which the index is larger than for one hash per block; some blocks have two.
const ENTRIES_PER_BLOCK: usize = 2;

/// In the row of a block that is [kept](PrefixCache::keep_nameless) without a hash. No lookup has
/// it, and no index entry: it equals a derived hash with probability 2^-192.
pub(super) const NAMELESS: BlockHash = BlockHash::new(0, 0);

#[derive(Default)]
pub(super) struct Further {
    pub(super) hashes: Vec<(BlockId, BlockHash)>,
    /// Blocks that were no longer known by their row's hash.
    pub(super) without_first: Vec<BlockId>,
}

impl PrefixCache {
    /// Like [`new`](Self::new), for a frame pool; it evicts in the order of releases.
    pub(crate) fn foreign(rows: usize, rows_max: usize, config: PrefixConfig) -> Result<Self, PrefixError> {
        let cache = Self::new(rows, rows_max, 1, config.tolerance(0.0))?;
        let index = Index::new(rows * ENTRIES_PER_BLOCK);
        let cache = cache.with_evict_first(rows, rows_max);
        Ok(Self { index, names: Some(Names::new(rows)), ..cache })
    }

    pub(super) fn entries_per_block(&self) -> usize {
        if self.names.is_some() { ENTRIES_PER_BLOCK } else { 1 }
    }

    pub(super) fn take_further(&self, ids: &[BlockId]) -> Further {
        let mut further = Further::default();
        let Some(names) = &self.names else { return further };
        // Pairs with the fence in `add_further`: its thread sees the block uncached, or we see its
        // list. The caller has exchanged the word.
        fence_after_rmw();
        for &id in ids {
            let (is_first, hashes) = names.take(id);
            further.hashes.extend(hashes.into_iter().map(|hash| (id, hash)));
            further.without_first.extend((!is_first).then_some(id));
        }
        further
    }

    pub(super) fn tell_further(&self, further: &Further, era: u64) {
        for &(id, hash) in further.hashes.iter().filter(|(id, _)| self.row(*id).is_of(era)) {
            self.events.publish_in(era, || KvEvent::Removed { block: id, hash, group: 0 });
        }
    }

    /// Returns the frame of a block cached for `hash`, which may be evicted or moved at any time.
    pub(crate) fn peek(&self, core: &Core, hash: BlockHash) -> Option<FrameId> {
        let era = self.era();
        self.index.find(key_of(hash), |id| {
            loop {
                let word = core.word(id);
                if !word.is_cached() || !self.holds(id, hash, era) {
                    return ControlFlow::Continue(());
                }
                // Otherwise the word has changed, and the names may not belong to it.
                if core.word(id) == word {
                    return ControlFlow::Break(word.frame());
                }
            }
        })
    }

    /// Appends the frames of up to `most` evictable blocks after `cursor`, or of the first ones, in
    /// eviction order. The first call visits every block.
    pub(crate) fn evictable_after(
        &self,
        core: &Core,
        cursor: Option<BlockId>,
        most: usize,
        out: &mut Vec<u32>,
    ) {
        let all = || {
            let ids = (0..core.rows() as u32).map(BlockId).filter(|&id| core.word(id).is_evictable());
            let mut ids: Vec<(Classed, u64)> =
                ids.map(|id| (self.classed(id), self.row(id).place().1)).collect();
            ids.sort_unstable_by_key(|&((class, _), rank)| (class, rank));
            ids.into_iter().map(|(classed, _)| classed).collect()
        };
        let frame_of = |id| Some(core.word(id)).filter(|word| word.is_evictable()).map(|word| word.frame());
        self.list.read(cursor, most, all, frame_of, out);
    }

    pub(super) fn classed(&self, id: BlockId) -> Classed {
        let queue = self.row(id).queue();
        let class = if queue < self.queues.useless() { 2 } else { queue - self.queues.useless() };
        (class as u32, id)
    }

    /// Adds hashes to blocks on which the caller has references. `check` runs first, under the
    /// lock; if it fails, nothing has changed.
    pub(crate) fn name<E>(
        &self,
        core: &Core,
        blocks: &[(BlockId, BlockHash)],
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let _lock = self.names.as_ref().map(Names::lock);
        check()?;
        self.name_all(core, blocks);
        Ok(())
    }

    /// Drops one reference on each frame, and makes those cached that have no hash, for an engine
    /// that looks up hashes itself.
    pub(crate) fn keep_nameless(&self, blocks: &Blocks, frames: &[u32]) -> Result<(), FrameError> {
        let lock = self.names.as_ref().map(Names::lock);
        let (era, registered, noted) = (self.era(), Cell::new(0), Cell::new(None));
        let outcome = blocks.keep_frames(
            frames,
            lock,
            |id| self.row(id).prefetch(),
            |id| {
                self.note(id, NAMELESS, era, 0, 0);
                noted.set(Some(id));
                registered.update(|registered| registered + 1);
            },
            |id| {
                // Also one that was noted, and shared before it was cached.
                let is_counted = noted.get() == Some(id);
                let is_new = self.keep_one(blocks, id, era);
                registered.update(|registered| registered + usize::from(is_new) - usize::from(is_counted));
            },
            |kept, tag| self.keep(blocks, kept, tag, PolicyInfo::default()),
        );
        // Also after an error: the frames before and after the one that it names are cached.
        self.tallies.registered(registered.get());
        outcome
    }

    /// Returns whether the block was not cached before.
    fn keep_one(&self, core: &Core, id: BlockId, era: u64) -> bool {
        if core.word(id).is_cached() {
            if self.row(id).is_of(era) || !core.uncache(id) {
                return false;
            }
            // It was cached before a clear.
            self.forget_uncached(core, &[id]);
        }
        self.note(id, NAMELESS, era, 0, 0);
        core.seal_cached(core.handle(id))
    }

    fn name_all(&self, core: &Core, blocks: &[(BlockId, BlockHash)]) {
        let mut sorted: Vec<BlockId> = blocks.iter().map(|&(id, _)| id).collect();
        sorted.sort_unstable();
        if sorted.is_sorted_by(|a, b| a < b) {
            self.name_some(core, blocks);
        } else {
            // A block with several new hashes has the first when the second is added.
            blocks.iter().for_each(|block| self.name_some(core, std::slice::from_ref(block)));
        }
    }

    fn name_some(&self, core: &Core, blocks: &[(BlockId, BlockHash)]) {
        let era = self.era();
        let (mut first, mut further) = (Vec::with_capacity(blocks.len()), Vec::new());
        for &(id, hash) in blocks {
            if core.word(id).is_cached() && !self.row(id).is_of(era) && core.uncache(id) {
                // It was cached before a clear.
                self.forget_uncached(core, &[id]);
            }
            if core.word(id).is_cached() {
                further.push((id, hash));
            } else {
                self.note(id, hash, era, 0, 0);
                first.push((core.handle(id), None));
            }
        }
        self.register(core, Since::Written(self.uncached.newest()), first);
        further.retain(|&(id, hash)| !self.holds(id, hash, era) && self.add_further(core, id, hash, era));
        if !further.is_empty() {
            let entries = further.iter().map(|&(id, hash)| (key_of(hash), id));
            self.index.insert_all(entries, |id| self.registered(core, id), |_| ());
        }
    }

    /// Adds a hash to a cached block; returns whether to insert it into the index.
    fn add_further(&self, core: &Core, id: BlockId, hash: BlockHash, era: u64) -> bool {
        let Some(names) = &self.names else { return false };
        // Published before a lookup can hit the block by it.
        let before = self.events.subscriptions_now();
        let announced = self.events.publish_to(era, 0..=before, || self.stored(id, hash, 0));
        if !names.add(id, self.row(id).holds(&hash, era), hash) {
            return false;
        }
        // Pairs with the fence in `take_further`.
        fence_after_rmw();
        if !core.word(id).is_cached() {
            // Another thread released and evicted it: the caller had no reference.
            names.take(id);
            return false;
        }
        // A subscriber that began in between, or lost the event, may have listed the hashes before.
        let is_lost = announced.is_some_and(|position| self.events.may_be_lost(position));
        let (told, now) = (if is_lost { 0 } else { before }, self.events.subscriptions_now());
        if now != told {
            self.events.publish_to(era, told + 1..=now, || self.stored(id, hash, 0));
        }
        true
    }

    /// Removes all hashes of these blocks; returns how many had any. Unreferenced ones become free.
    pub(crate) fn uncache(&self, core: &Core, ids: impl IntoIterator<Item = BlockId>) -> usize {
        let _lock = self.names.as_ref().map(Names::lock);
        ids.into_iter().map(|id| usize::from(self.uncache_one(core, id))).sum()
    }

    fn uncache_one(&self, core: &Core, id: BlockId) -> bool {
        loop {
            if core.uncache(id) {
                self.forget_uncached(core, &[id]);
                return true;
            }
            let word = core.word(id);
            if !word.is_cached() {
                return false;
            }
            // A moving block is not evicted: a reference ends the move.
            if word.is_moving() && !word.is_owned() {
                if core.cell(id).hit_in_place(word).is_some() {
                    core.uncache(id);
                    self.forget_uncached(core, &[id]);
                    core.give_back_hit(id, true);
                    return true;
                }
            } else if core.evict_these([id]) > 0 {
                return true;
            }
        }
    }

    /// Returns the number of blocks that were known by the hash.
    pub(crate) fn unname(&self, core: &Core, hash: BlockHash) -> usize {
        let Some(names) = &self.names else { return 0 };
        let _lock = names.lock();
        let (era, mut known) = (self.era(), Vec::new());
        self.index.find(key_of(hash), |id| {
            if self.is_cached_for(core, id, hash, era) && !known.contains(&id) {
                known.push(id);
            }
            ControlFlow::<()>::Continue(())
        });
        known.retain(|&id| {
            let is_first = self.row(id).holds(&hash, era);
            if names.all(id, self.row(id).hash()).len() == 1 {
                return self.uncache_one(core, id);
            }
            if !names.remove(id, is_first, hash) {
                return false;
            }
            let entry = std::iter::once((key_of(hash), id));
            self.index.remove_all(entry, |id| self.registered(core, id));
            self.events.publish_in(era, || KvEvent::Removed { block: id, hash, group: 0 });
            true
        });
        known.len()
    }

    /// Returns the number of hashes. The caller has a reference on both blocks; `check` as in
    /// [`name`](Self::name).
    pub(crate) fn rename<E>(
        &self,
        core: &Core,
        from: BlockId,
        to: BlockId,
        check: impl FnOnce() -> Result<(), E>,
    ) -> Result<usize, E> {
        let _lock = self.names.as_ref().map(Names::lock);
        check()?;
        let hashes: Vec<(BlockId, BlockHash)> =
            self.hashes_of(core, from).into_iter().map(|hash| (to, hash)).collect();
        self.uncache_one(core, from);
        self.name_all(core, &hashes);
        Ok(hashes.len())
    }

    pub(crate) fn hashes_of(&self, core: &Core, id: BlockId) -> Vec<BlockHash> {
        loop {
            let word = core.word(id);
            if !word.is_cached() || !self.row(id).is_of(self.era()) {
                return Vec::new();
            }
            let first = self.row(id).hash();
            let mut hashes = self.names.as_ref().map_or_else(|| vec![first], |names| names.all(id, first));
            hashes.retain(|&hash| hash != NAMELESS);
            // The row and the names count only if the word did not change meanwhile.
            if core.word(id) == word {
                return hashes;
            }
        }
    }

    /// Returns an uncached block that has further hashes: an error. For audits of idle pools.
    pub(crate) fn stray(&self, core: &Core) -> Option<BlockId> {
        let names = self.names.as_ref()?;
        (0..core.rows() as u32)
            .map(BlockId)
            .find(|&id| !core.word(id).is_cached() && names.parts(id) != (true, Vec::new()))
    }
}
