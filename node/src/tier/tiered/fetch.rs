//! Brings a prefix back from the tier.
//!
//! ```text
//! 1  references on what is cached here of the longest boundary: it stays
//! 2  look-ups of what a hit needs at the longest boundary that is not ruled out and that is not
//!    here: one, unless the tier lacks some of it in a window or a state
//! 3  one import per block: references on those here, and frames without another owner for the
//!    others                                             the first refusal is of a shorter prefix
//! 4  one batch of gets, into the frames
//! 5  what a hit needs, with the blocks that arrived, is committed;  the others go back, or into
//!    quarantine
//! ```
//!
//! All frames are reserved before the first byte is read: otherwise the allocation of a later block
//! could evict an earlier one.
//!
//! A prefetch for a hint does this for a few blocks at a time, one prefetch after the other, and
//! ends when a request waits for blocks or little of the pool would be left to allocate: what it
//! brings back is cached like other blocks, and what it holds meanwhile is bounded, whatever is
//! hinted.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use kvpool::hints::Rejection;
use kvpool::prefix::{BlockHash, Origin};
use kvpool::transfer::{Import, PromptBlock, PromptBlocks};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout_at;

use super::super::outcome::Outcome;
use super::super::read::TierRead;
use super::super::value::value_bytes;
use super::link::{FrameLanding, Link, PREFETCHES_MAX, TierReport};

/// Checkpoints that are looked up at once, beside what is needed at one boundary.
const CHECKPOINTS: usize = 1024;

/// Place among the reads and, once it has landed, where its block was computed.
type Read = (usize, Arc<OnceLock<Vec<Origin>>>);

/// Blocks that a prefetch brings back at a time.
const PIECE: usize = 64;

/// Share of the pool that stays available beside a prefetch, as a shift.
const LEFT_SHIFT: u32 = 2;

impl Link {
    pub(in super::super) async fn bring_back(&self, blocks: &PromptBlocks, deadline: Instant) -> TierReport {
        self.bring_some(blocks, self.settings.blocks_max, 0, deadline).await
    }

    pub(in super::super) fn place_in_line(&self) -> Result<OwnedSemaphorePermit, Rejection> {
        let busy = |_| Rejection::Busy { prefetches: PREFETCHES_MAX };
        self.line.clone().try_acquire_owned().map_err(busy)
    }

    /// Brings a prefix back for a hint, in turn, as far as it disturbs no request.
    pub(in super::super) async fn prefetch(
        &self,
        blocks: &PromptBlocks,
        deadline: Instant,
        _place: OwnedSemaphorePermit,
    ) {
        let Ok(_turn) = timeout_at(deadline.into(), self.turn.lock()).await else { return };
        let share = self.pool.total_blocks() >> LEFT_SHIFT;
        // Of several groups, a boundary with a window or a checkpoint needs many at once.
        let piece = if self.pool.cache_groups().len() > 1 { share } else { PIECE.min(share) };
        let piece = piece.min(self.settings.blocks_max).max(1);
        while self.pool.stats().waiting == 0 && Instant::now() < deadline {
            if self.bring_some(blocks, piece, piece + share, deadline).await.moved_blocks == 0 {
                break;
            }
        }
    }

    /// Brings up to `blocks_max` blocks back, if at least `leave` stay available beside those of
    /// the prefix that are cached.
    async fn bring_some(
        &self,
        blocks: &PromptBlocks,
        blocks_max: usize,
        leave: usize,
        deadline: Instant,
    ) -> TierReport {
        let (began, mut report) = (Instant::now(), TierReport::default());
        let here = self.boundary_here(blocks);
        let most = self.longest_with(blocks, here, blocks_max);
        if most > here {
            // Kept until the rest has arrived, and so is what is a hit already.
            let cached = |boundary| {
                let mut needed = hashes_of(&blocks.needed(boundary));
                needed.retain(|&hash| self.pool.is_cached(hash));
                self.pool.export_prefix(&needed)
            };
            let _here = (cached(here), cached(most));
            if leave == 0 || self.pool.available_blocks() >= leave {
                self.count(|counters| counters.asked += 1);
                self.fetch(blocks, (here, most), deadline, &mut report).await;
            }
        }
        let cached = self.boundary_here(blocks);
        // Released in the order of the prefix: its end is evicted first.
        drop(self.pool.export_prefix(&hashes_of(&blocks.needed(cached))));
        report.cached_blocks = cached / blocks.block_tokens();
        report.took = began.elapsed();
        report
    }

    /// Returns the tokens before the longest boundary for which at most `blocks_max` blocks are
    /// missing.
    fn longest_with(&self, blocks: &PromptBlocks, here: usize, blocks_max: usize) -> usize {
        let mut room = blocks.needed_blocks(here).saturating_add(blocks_max);
        loop {
            let most = blocks.longest(room);
            if most <= here {
                return most;
            }
            let needed = blocks.needed(most);
            let missing = needed.iter().filter(|block| !self.pool.is_cached(block.hash())).count();
            match missing.checked_sub(blocks_max) {
                None | Some(0) => return most,
                Some(more) => room = needed.len().saturating_sub(more),
            }
        }
    }

    fn boundary_here(&self, blocks: &PromptBlocks) -> usize {
        blocks.boundary(usize::MAX, &mut |hash| self.pool.is_cached(hash))
    }

    async fn fetch(
        &self,
        blocks: &PromptBlocks,
        (here, mut most): (usize, usize),
        deadline: Instant,
        report: &mut TierReport,
    ) {
        let mut answers = HashMap::new();
        let (needed, mut imports) = loop {
            let boundary = self.look_up(blocks, most, &mut answers, deadline, report).await;
            if boundary <= here {
                return;
            }
            let needed = blocks.needed(boundary);
            match self.reserve(&needed) {
                Ok(imports) => break (needed, imports),
                Err(shorter) => most = shorter,
            }
        };
        let (mut reads, mut read_of) = (Vec::new(), vec![None; imports.len()]);
        for (place, import) in imports.iter_mut().enumerate() {
            if import.missing().is_empty() {
                continue;
            }
            let Ok(piece) = import.piece(&[0]) else { continue };
            let origins = Arc::new(OnceLock::new());
            read_of[place] = Some((reads.len(), origins.clone()));
            let key = self.key(needed[place].hash());
            let (packed_bytes, storage, pool) = (self.packed_bytes, self.storage.clone(), self.pool.clone());
            let (runs, _hold) = (piece.runs, piece.hold);
            let memory = FrameLanding { key, packed_bytes, storage, runs, _hold, pool, origins };
            reads.push(TierRead { key, bytes: value_bytes(packed_bytes), memory: Box::new(memory) });
        }
        let outcomes = if reads.is_empty() { Vec::new() } else { self.tier.get(reads, deadline).await };
        report.note(&outcomes);
        let moved = self.commit(blocks, needed.into_iter().zip(imports).zip(read_of), &outcomes);
        report.moved_blocks = moved;
        report.bytes = (moved * self.packed_bytes) as u64;
        self.count(|counters| counters.fetched_blocks += moved as u64);
    }

    /// Returns the longest boundary of at most `most` tokens for which what a hit needs is here, or
    /// in the tier, as its answers say.
    async fn look_up(
        &self,
        blocks: &PromptBlocks,
        most: usize,
        answers: &mut HashMap<BlockHash, bool>,
        deadline: Instant,
        report: &mut TierReport,
    ) -> usize {
        loop {
            let (mut unknown, mut asked) = (HashSet::new(), Vec::new());
            let is_there =
                |hash| self.pool.is_cached(hash) || answers.get(&hash).is_some_and(|&is_hit| is_hit);
            let boundary = blocks.boundary(most, &mut |hash| {
                let is_unknown = !answers.contains_key(&hash) && !self.pool.is_cached(hash);
                if is_unknown && unknown.insert(hash) {
                    asked.push(hash);
                }
                is_unknown || is_there(hash)
            });
            if asked.is_empty() || boundary == 0 {
                return boundary;
            }
            let mut further: Vec<_> = blocks.checkpoints(boundary).collect();
            further.retain(|&hash| !answers.contains_key(&hash) && unknown.insert(hash));
            asked.extend(further.into_iter().take(CHECKPOINTS));
            let claimed = self.tier.exists(self.keys(&asked), deadline).await;
            report.note(&claimed);
            answers.extend(asked.into_iter().zip(claimed.iter().map(|claimed| *claimed == Outcome::Hit)));
        }
    }

    /// Returns an import of each block; or if one is refused, the tokens that need it not.
    fn reserve(&self, needed: &[PromptBlock]) -> Result<Vec<Import>, usize> {
        let import = |block: &PromptBlock| {
            self.pool.import_needed(std::slice::from_ref(block)).map_err(|_| block.without())
        };
        needed.iter().map(import).collect()
    }

    /// Commits what a hit needs, if all of it arrived or is here. Returns the number of blocks that
    /// moved. The others are dropped: they could not be found. A frame in which a value is just
    /// landing is quarantined.
    fn commit(
        &self,
        blocks: &PromptBlocks,
        imports: impl Iterator<Item = ((PromptBlock, Import), Option<Read>)>,
        outcomes: &[Outcome],
    ) -> usize {
        let mut arrived = HashMap::new();
        for ((block, mut import), read) in imports {
            let has_moved = read.is_some();
            let is_here = read.is_none() && import.missing().is_empty();
            let is_there = is_here
                || read.is_some_and(|(read, origins)| {
                    let origins = origins.get().filter(|_| outcomes.get(read) == Some(&Outcome::Hit));
                    let is_known = origins.is_some_and(|origins| import.set_origins(0, origins).is_ok());
                    is_known && import.arrived(0).is_ok()
                });
            if is_there {
                arrived.insert(block.hash(), (import, has_moved));
            }
        }
        let is_there = &mut |hash| arrived.contains_key(&hash) || self.pool.is_cached(hash);
        let boundary = blocks.boundary(usize::MAX, is_there);
        let mut moved = 0;
        for block in blocks.needed(boundary) {
            let Some((import, has_moved)) = arrived.remove(&block.hash()) else { continue };
            match import.commit() {
                Ok(_) => moved += usize::from(has_moved),
                Err(error) => tracing::debug!(%error, "a block that came from the tier is dropped"),
            }
        }
        moved
    }
}

fn hashes_of(needed: &[PromptBlock]) -> Vec<BlockHash> {
    needed.iter().map(PromptBlock::hash).collect()
}
