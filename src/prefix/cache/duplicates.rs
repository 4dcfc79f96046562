//! Duplicates: several blocks cached for one hash.
//!
//! A released duplicate is useless while an *original* is cached: the block of its hash with a smaller
//! id. But its release says that the contents were just used. So the original gets its place in the
//! eviction order; otherwise the blocks behind it, which are not duplicates, would outlive it, and no
//! lookup would reach them.
//!
//! ```text
//! release   duplicate: useless;  original, if evictable: hit by its exact word, placed, released
//! ```

use std::ops::ControlFlow;

use crate::block::{Blocks, Core, Evictable};
use crate::ids::BlockId;
use crate::sync::Ordering::Release;

use super::{BlockHash, PolicyInfo, PrefixCache, key_of};

/// Originals of released duplicates, each with the number of the release, ascending.
pub(super) type Originals = Vec<(BlockId, u64)>;

impl PrefixCache {
    /// Returns the original of a block that was registered as a duplicate.
    pub(super) fn original_of(&self, core: &Core, id: BlockId, hash: BlockHash, era: u64) -> Option<BlockId> {
        self.index.find(key_of(hash), |other| {
            if other < id && self.is_cached_for(core, other, hash, era) {
                ControlFlow::Break(other)
            } else {
                ControlFlow::Continue(())
            }
        })
    }

    pub(super) fn is_cached_for(&self, core: &Core, id: BlockId, hash: BlockHash, era: u64) -> bool {
        core.word(id).is_cached() && self.holds(id, hash, era)
    }

    /// Releases blocks of a chain, which [`keep`](Self::keep) enqueues, and the originals of
    /// duplicates among them.
    pub(crate) fn release_chain(&self, pool: &Blocks, ids: &[BlockId], policy_info: PolicyInfo) {
        let mut originals = Originals::new();
        pool.release_cached(ids, |kept, tag| {
            originals = self.keep_at(pool, kept, self.orders(kept), tag, policy_info);
        });
        if !originals.is_empty() {
            self.refresh(pool, &originals, policy_info);
        }
    }

    /// Gives evictable blocks the places of these releases.
    #[cold]
    fn refresh(&self, pool: &Blocks, originals: &[(BlockId, u64)], policy_info: PolicyInfo) {
        let is_taken = |&&(id, _): &&(BlockId, u64)| self.take_cold(pool, id).is_some();
        let taken: Originals = originals.iter().filter(is_taken).copied().collect();
        pool.count_not_evictable(taken.len());
        let ids: Vec<BlockId> = taken.iter().map(|&(id, _)| id).collect();
        pool.release_cached(&ids, |kept, tag| {
            // Counts the release. Release: as in `keep`.
            self.order.fetch_add(1, Release);
            let mut taken = taken.iter();
            let order = |kept: &Evictable| Some(taken.find(|&&(id, _)| id == kept.id)?.1);
            let orders: Vec<u64> = kept.iter().filter_map(order).collect();
            self.keep_at(pool, kept, orders.into_iter(), tag, policy_info);
        });
    }
}
