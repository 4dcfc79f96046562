//! Automatic migration: blocks move to a peer while memory is short here.
//!
//! | moves | while fewer than [`OffloadBelow::below`] blocks are | because |
//! |---|---|---|
//! | cached blocks, in eviction order | free | the next allocations would evict them, and their bytes would be lost |
//! | sequences on offer | free or evictable | evictions alone cannot make room any more |
//!
//! A full prefix cache keeps the number of free blocks near zero. The blocks that would be evicted
//! next then move to the peer at the rate of new allocations, and the peer becomes a second tier of
//! the cache. That moves no sequences.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::{AnySequence, GroupedSequence, MigrateError, Pool, Sequence, SequenceId, TransferError};

/// Polling interval of the pool.
const INTERVAL: Duration = Duration::from_millis(50);

/// Interval while blocks move.
const SOON: Duration = Duration::from_millis(1);

/// Longest pause after a failure.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Pause while the peer's blocks have another layout, which only a restart of it can change.
const OTHER_LAYOUT_PAUSE: Duration = Duration::from_secs(60);

/// Most cached blocks of one transfer, during which they cannot be evicted.
const BLOCKS_MAX: usize = 512;

/// Sequences that an engine releases, implemented by its scheduler.
///
/// Both methods may be called on any thread, and must not block.
pub trait Offers<S: AnySequence = Sequence>: Send + Sync + 'static {
    /// Returns a sequence whose move frees about `blocks` blocks; `None` if all must stay.
    fn offer(&self, blocks: usize) -> Option<S>;

    /// Returns a sequence that an operator wants to move; `None` if it must stay or is unknown.
    fn release(&self, id: SequenceId) -> Option<S>;

    /// Takes back a sequence that could not move.
    fn take_back(&self, sequence: S);

    /// Takes a sequence that the peer may have: this node ended before the peer confirmed.
    ///
    /// It must not run here until it is certain that it does not run there. The default closes it.
    fn take_doubtful(&self, sequence: S, peer: &str) {
        tracing::warn!(sequence = sequence.id().0, peer, "closed: the peer may have it");
    }
}

/// What an engine offers, as sequences of any number of lists.
pub(super) type AnyOffers = dyn Offers<GroupedSequence>;

pub(super) struct OffersOf<S: AnySequence, O: ?Sized>(pub(super) Arc<O>, pub(super) PhantomData<fn(S) -> S>);

impl<S: AnySequence, O: Offers<S> + ?Sized> Offers<GroupedSequence> for OffersOf<S, O> {
    fn offer(&self, blocks: usize) -> Option<GroupedSequence> {
        self.0.offer(blocks).map(AnySequence::into_lists)
    }

    fn release(&self, id: SequenceId) -> Option<GroupedSequence> {
        self.0.release(id).map(AnySequence::into_lists)
    }

    fn take_back(&self, sequence: GroupedSequence) {
        self.0.take_back(S::of_lists(sequence));
    }

    fn take_doubtful(&self, sequence: GroupedSequence, peer: &str) {
        self.0.take_doubtful(S::of_lists(sequence), peer);
    }
}

pub(super) fn give_back(offers: &AnyOffers, failed: MigrateError<GroupedSequence>) {
    match failed.error {
        TransferError::InDoubt { node, .. } => offers.take_doubtful(*failed.sequence, &node),
        _ => offers.take_back(*failed.sequence),
    }
}

/// When and to which peer blocks move automatically.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OffloadBelow {
    /// Cached blocks move while fewer are free, and sequences while fewer are free or evictable.
    pub below: usize,
    /// Name of the peer.
    pub to: String,
}

/// When the next attempt is due: immediately after a success, with growing delay after failures.
struct Backoff {
    pause: Duration,
    due: Instant,
}

impl Backoff {
    fn new() -> Self {
        Self { pause: INTERVAL, due: Instant::now() }
    }

    fn is_due(&self) -> bool {
        Instant::now() >= self.due
    }

    /// Notes whether blocks moved, a failure, or nothing to move. Returns the time to the next
    /// look.
    fn note(&mut self, moved: Option<Result<bool, TransferError>>) -> Duration {
        match moved {
            // More may have to move.
            Some(Ok(true)) => {
                self.pause = INTERVAL;
                SOON
            }
            Some(Err(TransferError::OtherLayout { .. })) => {
                self.due = Instant::now() + OTHER_LAYOUT_PAUSE;
                INTERVAL
            }
            Some(Ok(false) | Err(_)) => {
                self.pause = (self.pause * 2).min(PAUSE_MAX);
                self.due = Instant::now() + self.pause;
                INTERVAL
            }
            None => INTERVAL,
        }
    }
}

/// Moves blocks while memory is short. Never returns.
pub(super) async fn keep_free(pool: Pool, offload: OffloadBelow, offers: Option<Arc<AnyOffers>>) {
    // Separate, so that refused cached blocks do not delay sequences.
    let (mut cached_next, mut sequence_next) = (Backoff::new(), Backoff::new());
    let mut pause = INTERVAL;
    loop {
        tokio::time::sleep(pause).await;
        pause = INTERVAL;
        let free = pool.free_blocks();
        if free < offload.below && cached_next.is_due() {
            let result = cached(&pool, &offload, offload.below - free).await;
            pause = cached_next.note(result).min(pause);
        }
        let available = pool.available_blocks();
        if available < offload.below && sequence_next.is_due() {
            let blocks = offload.below - available;
            let result = sequence(&pool, &offload, blocks, offers.as_ref()).await;
            pause = sequence_next.note(result).min(pause);
        }
    }
}

/// Returns whether cached blocks moved; `None` if there are none.
async fn cached(pool: &Pool, offload: &OffloadBelow, blocks: usize) -> Option<Result<bool, TransferError>> {
    if pool.stats().evictable == 0 {
        return None;
    }
    let moved = pool.offload_to_node(&offload.to, blocks.min(BLOCKS_MAX)).await;
    let moved = moved.inspect_err(|error| tracing::debug!(to = offload.to, %error, "cached blocks stay"));
    Some(moved.map(|report| report.evicted_blocks + report.leaving_blocks > 0))
}

async fn sequence(
    pool: &Pool,
    offload: &OffloadBelow,
    blocks: usize,
    offers: Option<&Arc<AnyOffers>>,
) -> Option<Result<bool, TransferError>> {
    let offers = offers?;
    let sequence = offers.offer(blocks)?;
    let (pool, to, offers) = (pool.clone(), offload.to.clone(), offers.clone());
    // A separate task, because this one ends with the node, and dropping the request would close
    // its sequence. The request also ends with the node, and returns the sequence to the engine.
    let moved = tokio::spawn(async move {
        let moved = pool.migrate_to_node(sequence, &to).await;
        moved.map(|_| true).map_err(|failed| {
            tracing::debug!(to, error = %failed, "a sequence stays");
            let error = failed.error.clone();
            give_back(&*offers, failed);
            error
        })
    });
    Some(moved.await.unwrap_or(Ok(false)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_wait_longer_each_time_up_to_a_limit_and_a_success_ends_that() {
        let mut next = Backoff::new();
        assert!(next.is_due());
        assert_eq!(next.note(Some(Ok(true))), SOON);
        assert!(next.is_due());
        assert_eq!(next.note(Some(Ok(false))), INTERVAL);
        assert!(!next.is_due());
        let first = next.pause;
        assert_eq!(next.note(None), INTERVAL);
        assert_eq!(next.pause, first, "nothing to move is no failure");
        for _ in 0..20 {
            next.note(Some(Ok(false)));
        }
        assert_eq!(next.pause, PAUSE_MAX);
        next.note(Some(Ok(true)));
        next.note(Some(Ok(false)));
        assert_eq!(next.pause, first);
        next.note(Some(Err(TransferError::OtherLayout { node: "b".into() })));
        assert!(next.due > Instant::now() + OTHER_LAYOUT_PAUSE / 2, "a layout does not change");
    }
}
