//! Evictable blocks on their way to another pool's cache.
//!
//! ```text
//! taken       out of the queues, coldest first, by a hit: nobody evicts it, whoever looks it up shares it
//! put back    released; goes where it stood before
//! given up    released; evicted at once if no batch may see it, else the first to go
//! ```
//!
//! Whoever looked a block up meanwhile has made it warm: put back or given up, it goes where the policy puts it then, or stays with
//! who has it. All of these are steps of the word that the [cache](super) makes anyway: a hit, a release, an eviction.

use crate::block::{Blocks, Core, Evictable};
use crate::ids::{BlockId, Ticket};
use crate::sync::Ordering::Relaxed;

use super::{BlockHash, Owner, PrefixCache};

/// A block that was evictable, and is held by a reference.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cold {
    /// The block.
    pub id: BlockId,
    /// What it holds.
    pub hash: BlockHash,
    /// Blocks before it in its chain.
    pub depth: u32,
    /// Times that it was reused before.
    hits: u32,
}

impl PrefixCache {
    /// A reference on each of up to `wanted` evictable blocks, those first that would be evicted first. What nobody would
    /// find is passed over.
    pub(crate) fn take_coldest(&self, core: &Core, wanted: usize) -> Vec<Cold> {
        let (mut cold, mut passed_over, era) = (Vec::new(), Vec::new(), self.era());
        while cold.len() < wanted {
            let Some((queue, id)) = self.queues.take(&self.rows, &*self.policy, 0, &self.now) else { break };
            let row = self.row(id);
            loop {
                let word = core.word(id);
                if !word.is_evictable() {
                    // Its release files it again.
                    break;
                }
                if queue == self.queues.useless() || !row.is_of(era) {
                    passed_over.push(id);
                    break;
                }
                // Of this very word, or the hit fails: then somebody else was faster.
                let taken = Cold { id, hash: row.hash(), depth: row.depth(), hits: row.hits() };
                if core.hit(id, word).is_some() {
                    cold.push(taken);
                    break;
                }
            }
        }
        core.count_hits(cold.len());
        self.queues.file(&self.rows, passed_over);
        cold
    }

    /// Gives the references back: each block waits for its eviction where it did before.
    pub(crate) fn put_back(&self, pool: &Blocks, cold: &[Cold]) {
        self.release_cold(pool, cold, |kept, _| {
            self.queues.file(&self.rows, kept.iter().map(|kept| kept.id));
        });
    }

    /// Gives the references back, of blocks that are of no use here any more. Returns how many were evicted at once, and how
    /// many are the first to go when no batch sees them any more. The others are in use.
    pub(crate) fn give_up(&self, pool: &Blocks, cold: &[Cold]) -> (usize, usize) {
        let mut given_up = (0, 0);
        self.release_cold(pool, cold, |kept, orders| {
            let mut stay = Vec::new();
            // Before they are evicted: afterwards their rows may be another's.
            kept.iter().zip(orders).for_each(|(kept, &order)| {
                self.row(kept.id).set_place(self.queues.useless(), order, 0);
            });
            given_up.0 = pool.evict_released(kept, &mut |id| stay.push(id));
            given_up.1 = stay.len();
            self.queues.file(&self.rows, stay);
        });
        given_up
    }

    /// Releases blocks. Those that nobody had meanwhile are passed on, tagged, with a number in the order of releases for
    /// each; the others go where the policy puts them.
    fn release_cold(&self, pool: &Blocks, cold: &[Cold], cool: impl FnOnce(&[Evictable], &[u64])) {
        let ids: Vec<BlockId> = cold.iter().map(|cold| cold.id).collect();
        pool.release_cached(&ids, |kept, tag: Ticket| {
            // Kept are some of them, in their order.
            let mut taken = cold.iter();
            let (mut warm, mut still_cold) = (Vec::new(), Vec::new());
            for &kept in kept {
                let before = taken.find(|cold| cold.id == kept.id);
                // A statistic that may have missed a hit: then a warm block goes early, as it may anyway.
                let was_hit = before.is_none_or(|cold| self.row(kept.id).hits() != cold.hits);
                if was_hit { warm.push(kept) } else { still_cold.push(kept) }
            }
            self.keep(pool, &warm, tag, Owner::default());
            // Relaxed: as in `keep`.
            let first = self.order.fetch_add(still_cold.len() as u64, Relaxed);
            let orders: Vec<u64> = (first..).take(still_cold.len()).collect();
            still_cold.iter().for_each(|kept| self.row(kept.id).set_tag(kept.word, tag));
            cool(&still_cold, &orders);
        });
    }
}
