//! Other places in the eviction order for blocks that stay evictable: a duplicate's original, and
//! blocks that are demoted or retained.
//!
//! # Duplicates
//!
//! Several blocks may be cached for one hash. A released duplicate is useless while the *original*
//! is cached: the block of its hash with the smallest id. But its release says that the contents
//! were just used. So the original gets its place; otherwise the blocks behind it, which are not
//! duplicates, would outlive it, and no lookup would reach them.
//!
//! # A place without a reference
//!
//! ```text
//! release   place;  word: evictable;  enqueued: swap true, was false  =>  push
//! replace   word: evictable?  place;  enqueued: swap true, was false  =>  push
//! ```
//!
//! The block is not taken: a hit would make batches in flight count as its readers. So it may be
//! hit, evicted, or filled again at any moment, and a place that comes too late is that of other
//! contents: a hint. The theorem of the [queues](super::super::queues) is about the flag, which
//! each place is followed by: if it was set, the block is in an entry, whose taker sees that its
//! place has changed. Models: `demoted_against_hit`, `demoted_against_eviction`, `demoted_twice`,
//! `a_duplicate_is_released_against_eviction` in `loom-tests/tests/evictable.rs`.

use std::ops::ControlFlow;

use crate::block::Core;
use crate::ids::BlockId;

use super::super::policy::Millis;
use super::super::retention::Beside;
use super::retained::retention_of;
use super::{BlockHash, PolicyInfo, PrefixCache, key_of};

impl PrefixCache {
    /// Returns whether a released block has an original, which gets its place.
    #[cold]
    #[inline(never)]
    pub(super) fn renews_original(
        &self,
        core: &Core,
        id: BlockId,
        era: u64,
        (order, policy_info, now): (u64, &PolicyInfo, Millis),
    ) -> bool {
        let (hash, mut original) = (self.row(id).hash(), id);
        self.index.find(key_of(hash), |other| {
            if other < original && self.is_cached_for(core, other, hash, era) {
                original = other;
            }
            ControlFlow::<()>::Continue(())
        });
        if original != id && core.word(original).is_evictable() {
            let row = self.row(original);
            match retention_of(policy_info, now) {
                Some(retention) => {
                    self.placing(Some(Beside::Retained(retention))).place(row, original, order, order);
                }
                None => {
                    let (queue, place) = self.place(row, order, policy_info, now);
                    row.set_place(queue, place.rank, place.state);
                    self.enqueue([original]);
                }
            }
        }
        original != id
    }

    /// Marks all blocks cached for `hash`, except the one with the smallest id.
    #[cold]
    pub(super) fn mark_duplicates(&self, core: &Core, id: BlockId, hash: BlockHash, era: u64) {
        self.index.find(key_of(hash), |other| {
            if other != id && self.is_cached_for(core, other, hash, era) {
                self.row(id.max(other)).mark_duplicate();
            }
            ControlFlow::<()>::Continue(())
        });
    }

    pub(super) fn is_cached_for(&self, core: &Core, id: BlockId, hash: BlockHash, era: u64) -> bool {
        core.word(id).is_cached() && self.holds(id, hash, era)
    }

    /// Returns the number of hits of a cached block of this hash: a statistic.
    pub(crate) fn hits_of(&self, core: &Core, hash: BlockHash, era: u64) -> Option<u32> {
        let find = |id| match self.is_cached_for(core, id, hash, era) {
            true => ControlFlow::Break(self.row(id).hits()),
            false => ControlFlow::Continue(()),
        };
        self.index.find(key_of(hash), find)
    }
}
