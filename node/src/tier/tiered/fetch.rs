//! Brings a prefix back from the tier.
//!
//! ```text
//! 1  references on the leading blocks that are cached here: they stay
//! 2  one look-up of all following blocks                              the first no ends the prefix
//! 3  one import per block: frames without another owner               the first refusal ends the prefix
//! 4  one batch of gets, into the frames
//! 5  the leading blocks that arrived are committed;  the others go back, or into quarantine
//! ```
//!
//! All frames are reserved before the first byte is read: otherwise the allocation of a later block
//! could evict an earlier one.
//!
//! A prefetch for a hint does this for a few blocks at a time, one prefetch after the other, and ends
//! when a request waits for blocks or little of the pool would be left to allocate: what it brings
//! back is cached like other blocks, and what it holds meanwhile is bounded, whatever is hinted.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use kvpool::hints::Rejection;
use kvpool::prefix::{BlockHash, Origin};
use kvpool::transfer::Import;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout_at;

use super::super::outcome::Outcome;
use super::super::read::TierRead;
use super::super::value::value_bytes;
use super::link::{FrameLanding, Link, TierReport};

/// Place of a read in the prefix and, once it has landed, where its block was computed.
type Read = (usize, Arc<OnceLock<Vec<Origin>>>);

/// Prefetches that may wait for their turn.
pub(super) const PREFETCHES_MAX: usize = 64;

/// Blocks that a prefetch brings back at a time.
const PIECE: usize = 64;

/// Share of the pool that stays available beside a prefetch, as a shift.
const LEFT_SHIFT: u32 = 2;

impl Link {
    pub(in super::super) async fn bring_back(&self, hashes: &[BlockHash], deadline: Instant) -> TierReport {
        self.bring_some(hashes, self.settings.blocks_max, 0, deadline).await
    }

    pub(in super::super) fn place_in_line(&self) -> Result<OwnedSemaphorePermit, Rejection> {
        let busy = |_| Rejection::Busy { prefetches: PREFETCHES_MAX };
        self.line.clone().try_acquire_owned().map_err(busy)
    }

    /// Brings a prefix back for a hint, in turn, as far as it disturbs no request.
    pub(in super::super) async fn prefetch(
        &self,
        hashes: &[BlockHash],
        deadline: Instant,
        _place: OwnedSemaphorePermit,
    ) {
        let Ok(_turn) = timeout_at(deadline.into(), self.turn.lock()).await else { return };
        let piece = PIECE.min(self.settings.blocks_max);
        while self.pool.stats().waiting == 0 && Instant::now() < deadline {
            let leave = piece + (self.pool.total_blocks() >> LEFT_SHIFT);
            if self.bring_some(hashes, piece, leave, deadline).await.moved_blocks < piece {
                break;
            }
        }
    }

    /// Brings up to `blocks_max` blocks back, if at least `leave` stay available beside those of the
    /// prefix that are cached.
    async fn bring_some(
        &self,
        hashes: &[BlockHash],
        blocks_max: usize,
        leave: usize,
        deadline: Instant,
    ) -> TierReport {
        let (began, mut report) = (Instant::now(), TierReport::default());
        // Kept until the rest has arrived.
        let Ok(here) = self.pool.export_prefix(0, hashes) else { return report };
        let first = here.len();
        let rest = &hashes[first..];
        let rest = &rest[..rest.len().min(blocks_max)];
        if !rest.is_empty() && (leave == 0 || self.pool.available_blocks() >= leave) {
            self.count(|counters| counters.asked += 1);
            self.fetch(first, rest, deadline, &mut report).await;
        }
        // Counts them, and releases them in the order of the prefix: its end is evicted first.
        if let Ok(all) = self.pool.export_prefix(0, hashes) {
            drop(here);
            report.cached_blocks = all.len();
        }
        report.took = began.elapsed();
        report
    }

    async fn fetch(&self, first: usize, hashes: &[BlockHash], deadline: Instant, report: &mut TierReport) {
        let claimed = self.tier.exists(self.keys(hashes), deadline).await;
        report.note(&claimed);
        let there = claimed.iter().take_while(|outcome| **outcome == Outcome::Hit).count();
        let mut imports = self.reserve(first, &hashes[..there]);
        let (mut reads, mut read_of) = (Vec::new(), vec![None; imports.len()]);
        for (place, import) in imports.iter_mut().enumerate() {
            if import.missing().is_empty() {
                continue;
            }
            let Ok(piece) = import.piece(&[0]) else { continue };
            let origins = Arc::new(OnceLock::new());
            read_of[place] = Some((reads.len(), origins.clone()));
            let key = self.key(hashes[place]);
            let (packed_bytes, storage, pool) = (self.packed_bytes, self.storage.clone(), self.pool.clone());
            let (runs, _hold) = (piece.runs, piece.hold);
            let memory = FrameLanding { key, packed_bytes, storage, runs, _hold, pool, origins };
            reads.push(TierRead { key, bytes: value_bytes(packed_bytes), memory: Box::new(memory) });
        }
        let outcomes = if reads.is_empty() { Vec::new() } else { self.tier.get(reads, deadline).await };
        report.note(&outcomes);
        let moved = commit(imports, &read_of, &outcomes);
        report.moved_blocks = moved;
        report.bytes = (moved * self.packed_bytes) as u64;
        self.count(|counters| counters.fetched_blocks += moved as u64);
    }

    fn reserve(&self, first: usize, hashes: &[BlockHash]) -> Vec<Import> {
        let depth = |place: usize| u32::try_from(first + place).unwrap_or(u32::MAX);
        let import = |(place, &hash)| self.pool.import_prefix(depth(place), &[hash]).ok();
        hashes.iter().enumerate().map_while(import).collect()
    }
}

/// Commits the leading blocks that arrived. Returns the number of those that moved. The others are
/// dropped, because blocks after a gap could not be found. A frame in which a value is just landing
/// is quarantined.
fn commit(imports: Vec<Import>, read_of: &[Option<Read>], outcomes: &[Outcome]) -> usize {
    let mut moved = 0;
    for (mut import, read) in imports.into_iter().zip(read_of) {
        if let Some((read, origins)) = read {
            let origins = origins.get().filter(|_| outcomes.get(*read) == Some(&Outcome::Hit));
            let arrived = origins.is_some_and(|origins| import.set_origins(0, origins).is_ok());
            if !arrived || import.arrived(0).is_err() {
                break;
            }
            moved += 1;
        }
        if let Err(error) = import.commit() {
            tracing::debug!(%error, "a block that came from the tier is dropped");
            break;
        }
    }
    moved
}
