//! Evictable blocks that are copied to another pool's cache.
//!
//! ```text
//! taken       popped from the queues, coldest first; held by a hit, so not evicted, and shared by lookups
//! put back    released; returns to its former place in the queue
//! given up    released; evicted at once if no batch may see it, else before all others
//! ```
//!
//! A block with a hit in between is warm: the policy places it when its last reference is released.

use crate::block::{Blocks, Core, Evictable};
use crate::ids::{BlockId, Ticket};
use crate::sync::{Ordering::*, fence};

use super::super::queues::{Entry, Queues};
use super::{BlockHash, NAMELESS, PolicyInfo, PrefixCache};

/// Number of blocks of earlier eras that a search for cold blocks evicts at once.
const STALE_MAX: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ColdBlock {
    pub id: BlockId,
    pub hash: BlockHash,
    pub depth: u32,
    pub group: u32,
    hits: u32,
}

impl PrefixCache {
    /// Returns the cached blocks with their hashes and groups of layers.
    pub(crate) fn cached_blocks(&self, core: &Core) -> Vec<(BlockId, BlockHash, u32)> {
        let era = self.era();
        let cached = |id| {
            let word = core.word(id);
            let row = self.row(id);
            let (hash, group, is_of_era) = (row.hash(), row.group(), row.is_of(era));
            // The row counts only if the word did not change while the row was read.
            fence(Acquire);
            let now = core.word(id);
            (word.is_cached() && is_of_era && now == word && hash != NAMELESS).then_some((id, hash, group))
        };
        (0..core.rows() as u32).map(BlockId).filter_map(cached).collect()
    }

    /// Takes up to `wanted` blocks of all tenants, without duplicates, and without demoted and retained ones.
    /// Evicts blocks of earlier eras.
    pub(crate) fn take_coldest(&self, core: &Core, wanted: usize) -> Vec<ColdBlock> {
        let (mut cold, mut passed_over) = (Vec::new(), (Vec::new(), Vec::new()));
        let mut heads: Vec<(&Queues, Option<Entry>)> =
            self.all_queues().map(|(_, queues)| (queues, None)).collect();
        for (queues, _) in heads.iter().filter(|(queues, _)| queues.beside.is_used()) {
            self.end_retention(queues, core, wanted);
        }
        while cold.len() < wanted {
            let mut ranked = Vec::new();
            for (queues, head) in heads.iter_mut() {
                *head = head.or_else(|| self.take_next_of(queues, 0));
                let ranks = head.map(|entry| self.rank_of(queues, entry));
                ranked.extend(ranks.map(|rank| (if self.by_order { rank } else { 0 }, (*queues, head))));
            }
            // The first one of the same rank.
            let first = ranked.into_iter().min_by_key(|&(rank, _)| rank);
            let Some((_, (queues, head))) = first else { break };
            if let Some(entry) = head.take() {
                self.take_coldest_of((queues, entry), core, wanted, &mut cold, &mut passed_over);
            }
        }
        for (queues, head) in heads {
            head.into_iter().for_each(|entry| queues.put_back(&self.rows, entry));
        }
        // In this order, so that no evictable block seems to be protected in between.
        cold.iter().for_each(|cold| core.took_cached(cold.id));
        core.count_not_evictable(cold.len());
        let (mut passed_over, mut stale) = passed_over;
        self.evict_stale(core, &mut stale, &mut passed_over);
        self.enqueue(passed_over);
        cold
    }

    /// Adds the blocks of an entry to those that were taken, that were passed over, or are stale.
    fn take_coldest_of(
        &self,
        (queues, entry): (&Queues, Entry),
        core: &Core,
        wanted: usize,
        cold: &mut Vec<ColdBlock>,
        (passed_over, stale): &mut (Vec<BlockId>, Vec<BlockId>),
    ) {
        let era = self.era();
        let mut next = Some(entry.first);
        while let Some(id) = next {
            if cold.len() == wanted {
                queues.put_back(&self.rows, Entry { first: id, ..entry });
                break;
            }
            next = queues.below(&self.rows, entry.queue, id);
            let is_in_place = queues.enqueued(&self.rows, entry.queue, id).dequeue();
            // The next release of an owned block enqueues it again.
            if !core.word(id).is_evictable() {
                continue;
            }
            if !is_in_place {
                self.enqueue([id]);
            } else if !self.row(id).is_of(era) {
                stale.push(id);
            } else if entry.queue == queues.useless() {
                passed_over.push(id);
            } else {
                cold.extend(self.take_cold(core, id));
            }
        }
        if stale.len() >= STALE_MAX {
            self.evict_stale(core, stale, passed_over);
        }
    }

    /// Evicts blocks of earlier eras; adds those that are being moved to `left`.
    fn evict_stale(&self, core: &Core, stale: &mut Vec<BlockId>, left: &mut Vec<BlockId>) {
        core.evict_these(stale.iter().copied());
        left.extend(stale.drain(..).filter(|&id| core.word(id).is_evictable()));
    }

    fn take_cold(&self, core: &Core, id: BlockId) -> Option<ColdBlock> {
        let row = self.row(id);
        loop {
            let word = core.word(id);
            if !word.is_evictable() {
                return None;
            }
            // `hit` fails if this exact word has changed.
            let (hash, depth, group) = (row.hash(), row.depth(), row.group());
            let taken = ColdBlock { id, hash, depth, group, hits: row.hits() };
            if core.cell(id).hit(word).is_some() {
                return Some(taken);
            }
        }
    }

    pub(crate) fn put_back(&self, pool: &Blocks, cold: &[ColdBlock]) {
        self.release_cold(pool, cold, |kept, _| {
            self.enqueue_again(kept.iter().map(|kept| kept.id));
        });
    }

    /// Releases unused references of a [lookup](Self::take_prefix); the blocks return to their
    /// places. With `is_in_line`, the caller is in the wait queue, and notifies it when it leaves.
    pub(crate) fn untake(&self, pool: &Blocks, ids: &[BlockId], is_in_line: bool) {
        ids.iter().for_each(|&id| self.row(id).uncount_hit());
        // The end of a chain first, as in entries of the queues.
        let ids: Vec<BlockId> = ids.iter().rev().copied().collect();
        let is_evictable = pool.release_silently(&ids, |kept, tag| {
            // Counts the release. Release: as in `keep`.
            self.order.fetch_add(1, Release);
            kept.iter().for_each(|kept| self.row(kept.id).set_tag(kept.word, tag));
            self.enqueue_again(kept.iter().map(|kept| kept.id));
        });
        if is_evictable && !is_in_line {
            pool.announce();
        }
    }

    /// Returns how many were evicted at once, and how many later; the other blocks are in use.
    pub(crate) fn give_up(&self, pool: &Blocks, cold: &[ColdBlock]) -> (usize, usize) {
        let mut given_up = (0, 0);
        self.release_cold(pool, cold, |kept, orders| {
            let mut stay = Vec::new();
            // Before the eviction: afterwards, the rows may have other contents.
            kept.iter().zip(orders).for_each(|(kept, &order)| {
                self.row(kept.id).set_place(self.queues.useless(), order, 0);
            });
            given_up.0 = pool.evict_released(kept, &mut |id| stay.push(id));
            given_up.1 = stay.len();
            self.enqueue(stay);
        });
        given_up
    }

    /// Releases blocks. Passes those without a hit since they were taken, tagged, with release
    /// numbers, to `cool`; the policy places the others.
    fn release_cold(&self, pool: &Blocks, cold: &[ColdBlock], cool: impl FnOnce(&[Evictable], &[u64])) {
        let ids: Vec<BlockId> = cold.iter().map(|cold| cold.id).collect();
        pool.release_cached(&ids, |kept, tag: Ticket| {
            let mut taken = cold.iter();
            let (mut warm, mut still_cold) = (Vec::new(), Vec::new());
            for &kept in kept {
                let before = taken.find(|cold| cold.id == kept.id);
                // Hit counts are racy; a missed hit only evicts a warm block early.
                let was_hit = before.is_none_or(|cold| self.row(kept.id).hits() != cold.hits);
                if was_hit { warm.push(kept) } else { still_cold.push(kept) }
            }
            self.keep(pool, &warm, tag, PolicyInfo::default());
            // Release: as in `keep`.
            let first = self.order.fetch_add(still_cold.len() as u64, Release);
            let orders: Vec<u64> = (first..).take(still_cold.len()).collect();
            still_cold.iter().for_each(|kept| self.row(kept.id).set_tag(kept.word, tag));
            cool(&still_cold, &orders);
        });
    }
}
