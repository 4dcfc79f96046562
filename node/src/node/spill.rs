//! Automatic migration: blocks move to a peer while memory is short here.
//!
//! | moves | while fewer than [`Spill::below`] blocks are | because |
//! |---|---|---|
//! | cached blocks, in eviction order | free | the next allocations would evict them, and their bytes would be lost |
//! | sequences on offer | free or evictable | evictions alone cannot make room any more |
//!
//! A full prefix cache keeps the number of free blocks near zero. Then the blocks that would be evicted
//! next move to the peer at the rate of new allocations, and the peer becomes a second tier of the cache.
//! Sequences are not moved for that.

use std::sync::Arc;
use std::time::Duration;

use kvpool::{Pool, Sequence, SequenceId, Target};

/// Time between two looks at the pool.
const INTERVAL: Duration = Duration::from_millis(50);

/// Longest pause behind a failure.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Most cached blocks of one transfer: while it lasts they cannot be evicted.
const BLOCKS_MAX: usize = 512;

/// Sequences that an engine gives away.
///
/// The engine's scheduler implements it. Both methods may be called on any thread, and must not wait.
pub trait Offers: Send + Sync + 'static {
    /// Returns a sequence that may leave so that about `blocks` blocks become free; none if all must
    /// stay.
    fn offer(&self, blocks: usize) -> Option<Sequence>;

    /// Returns the sequence with this id, which an operator wants to move. `None` if it does not
    /// exist, or must stay.
    fn release(&self, id: SequenceId) -> Option<Sequence>;

    /// Takes a sequence back that could not move.
    fn take_back(&self, sequence: Sequence);
}

/// When and where blocks move by themselves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Spill {
    /// Cached blocks move while fewer than this number are free, and sequences while fewer are free or
    /// evictable.
    pub below: usize,
    /// Name of the peer.
    pub to: String,
}

/// Moves blocks while memory is short. Never returns.
pub(super) async fn spill(pool: Pool, spill: Spill, offers: Option<Arc<dyn Offers>>) {
    let mut pause = INTERVAL;
    loop {
        tokio::time::sleep(pause).await;
        let free = pool.free_blocks();
        if free >= spill.below {
            pause = INTERVAL;
            continue;
        }
        let mut is_moved = cached(&pool, &spill, spill.below - free).await;
        let available = pool.available_blocks();
        if available < spill.below {
            is_moved |= sequence(&pool, &spill, spill.below - available, offers.as_deref()).await;
        }
        // After a success the next look comes soon: more may have to go.
        pause = if is_moved { Duration::from_millis(1) } else { (pause * 2).min(PAUSE_MAX) };
    }
}

async fn cached(pool: &Pool, spill: &Spill, blocks: usize) -> bool {
    if pool.stats().evictable == 0 {
        return false;
    }
    match pool.offload(Target::node(&spill.to), blocks.min(BLOCKS_MAX)).await {
        Ok(report) => report.evicted_blocks + report.leaving_blocks > 0,
        Err(error) => {
            tracing::debug!(to = spill.to, %error, "cached blocks stay");
            false
        }
    }
}

async fn sequence(pool: &Pool, spill: &Spill, blocks: usize, offers: Option<&dyn Offers>) -> bool {
    let Some((offers, sequence)) = offers.and_then(|offers| Some((offers, offers.offer(blocks)?))) else {
        return false;
    };
    match pool.migrate(sequence, Target::node(&spill.to)).await {
        Ok(_) => true,
        Err(error) => {
            tracing::debug!(to = spill.to, %error, "a sequence stays");
            offers.take_back(*error.sequence);
            false
        }
    }
}
