//! Registration: blocks that a finished batch filled become cached, and are announced.
//!
//! A block is announced before it is cached, so that the event of its eviction follows. A
//! subscriber that lists the cached blocks meanwhile receives the event once more.

use smallvec::SmallVec;

use crate::block::Core;
use crate::ids::{BlockHandle, BlockId};
use crate::sync::{Ordering::SeqCst, fence, fence_after_rmw, heavy_fence};

use super::{BlockHash, KvEvent, PrefixCache, Since, key_of};

struct Registered {
    hash: BlockHash,
    group: u32,
    handle: BlockHandle,
    era: u64,
    /// The newest subscription to which the block was announced.
    told: u64,
}

impl PrefixCache {
    /// Notes the future contents, and mark of [provenance](Self::provenance), of an uncached block.
    pub(crate) fn note(&self, id: BlockId, hash: BlockHash, era: u64, depth: u32, mark: u32) {
        self.row(id).note(hash, era, depth, mark);
    }

    /// Notes the checksum of a [noted](Self::note) uncached block that arrived from another pool.
    pub(crate) fn note_sum(&self, id: BlockId, sum: u64) {
        let (part, at) = self.rows.locate(id.index());
        part.note_sum(at, sum);
    }

    /// Returns the checksum of a cached block that the caller references; `None`: computed here.
    pub(crate) fn sum(&self, id: BlockId) -> Option<u64> {
        let (part, at) = self.rows.locate(id.index());
        part.sum(at)
    }

    /// Takes back the note of the caller's block, which lost tokens before it was registered. If
    /// its batch ends at this moment on another thread, the block is registered, since the batch
    /// has computed its tokens; unless its hash was ever [uncached](Self::uncache_hashes), as that
    /// call, or the registration that saw it, may have read the row meanwhile.
    pub(crate) fn unnote(&self, core: &Core, id: BlockId) {
        if core.word(id).is_cached() {
            return;
        }
        let row = self.row(id);
        let chain = row.unnote();
        // The contents of a cached block do not change.
        if core.word(id).is_cached() {
            row.note_again(chain);
            // Pairs with the fence in `uncache_hashes`.
            fence(SeqCst);
            self.uncache_late(core, Since::Written(0), std::iter::once((id, row.hash(), row.era())));
        }
    }

    /// Registers noted blocks, whose bytes are final, except stale handles. `None` stands for an
    /// event without tokens. Blocks to which a call [since](Since) applies are not found.
    pub(crate) fn register(
        &self,
        core: &Core,
        since: Since,
        blocks: impl IntoIterator<Item = (BlockHandle, Option<Box<KvEvent>>)>,
    ) {
        let mut blocks = blocks.into_iter().peekable();
        if blocks.peek().is_none() {
            // Most batches fill no block, and need no fence.
            return;
        }
        let mut registered = SmallVec::<[Registered; 64]>::new();
        let (era, mut subscriptions) = (self.era(), self.events.subscriptions_now());
        for (handle, stored) in blocks {
            let (id, row) = (handle.id, self.row(handle.id));
            // The row cannot change until the block is cached; `seal_cached` checks the handle.
            let (hash, group, noted) = (row.hash(), row.group(), row.era());
            // Blocks noted before a clear are neither found nor announced. After a later clear, the
            // reader of the event can tell by its era.
            let is_found = row.is_of(self.era());
            // Before the events of blocks that follow them.
            self.tell_late(core, &mut registered, &mut subscriptions);
            // Published before the block can be evicted, which publishes its removal.
            let announce = || {
                let stored = || stored.map_or_else(|| self.stored(id, hash, group), |stored| *stored);
                self.events.publish_to(noted, 0..=subscriptions, stored)
            };
            let announced = is_found.then(announce).flatten();
            if core.seal_cached(handle) {
                let told = if is_found { subscriptions } else { u64::MAX };
                let mut block = Registered { hash, group, handle, era: noted, told };
                if announced.is_some_and(|position| self.events.may_be_lost(position)) {
                    // A subscriber that lost it may have listed the blocks before this one was
                    // cached. Reached by the model `followed_while_a_stored_block_is_lost`.
                    block.told = 0;
                    self.tell_late_of(core, &mut block, subscriptions);
                }
                registered.push(block);
            } else if announced.is_some() {
                self.events.publish_in(noted, || KvEvent::Removed { block: id, hash, group });
            }
        }
        self.tell_late(core, &mut registered, &mut subscriptions);
        self.tallies.registered(registered.len());
        // Pairs with the fence in `uncache_hashes`; `seal_cached` has exchanged the words.
        fence_after_rmw();
        let written = registered.iter().map(|block| (block.handle.id, block.hash, block.era));
        self.uncache_late(core, since, written);
        let entries = registered.iter().map(|block| (key_of(block.hash), block.handle.id));
        self.index.insert_all(
            entries,
            |id| self.registered(core, id),
            |place| {
                let Registered { hash, handle, .. } = registered[place];
                if self.names.is_none() {
                    self.mark_duplicates(core, handle.id, hash, era);
                }
            },
        );
    }

    /// Announces registered blocks to subscriptions that began after `subscriptions` were counted,
    /// which may have listed the cached blocks too early, and counts again.
    #[inline]
    fn tell_late(&self, core: &Core, registered: &mut [Registered], subscriptions: &mut u64) {
        let now = self.events.subscriptions_now();
        if now != *subscriptions {
            registered.iter_mut().for_each(|block| self.tell_late_of(core, block, now));
            *subscriptions = now;
        }
    }

    /// Announces a cached block to the subscriptions up to `now` that have not received its event.
    /// Reached by the models that subscribe during a registration, or lose its event.
    #[cold]
    fn tell_late_of(&self, core: &Core, block: &mut Registered, now: u64) {
        let (hash, handle, id, group) = (block.hash, block.handle, block.handle.id, block.group);
        if block.told >= now {
            return;
        }
        let before = std::mem::replace(&mut block.told, now);
        let stored = || self.stored(id, hash, group);
        if self.events.publish_to(block.era, before + 1..=now, stored).is_some() {
            // Its removal may have been published before. Pairs with the light fence of that
            // `publish`: it follows ours, or we see the word that the eviction left.
            let is_fenced = heavy_fence();
            let word = core.word(id);
            let is_there = is_fenced && word.is_cached() && word.is_of(handle.generation);
            if !is_there {
                let removed = || KvEvent::Removed { block: id, hash, group };
                self.events.publish_to(block.era, before + 1..=now, removed);
            }
        }
    }

    /// Returns an event without tokens, for a block filled before the subscription.
    #[cold]
    pub(super) fn stored(&self, block: BlockId, hash: BlockHash, group: u32) -> KvEvent {
        // A state has no hasher.
        let hasher = self.hashers.get(group as usize).unwrap_or(&self.hashers[0]);
        let (block_tokens, tokens) = (hasher.block_tokens() as u32, SmallVec::new());
        KvEvent::Stored { block, hash, parent: None, tokens, block_tokens, group, extra_keys: Box::default() }
    }
}
