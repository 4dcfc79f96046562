use std::cmp::Reverse;
use std::collections::HashMap;

use kvpool::transfer::TransferDirection;
use kvpool::{Owners, PinOwner, Priority, Stats};
use serde::{Deserialize, Serialize};

/// Whether a node should get requests.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Readiness {
    /// Whether it should get requests.
    pub ready: bool,
    /// Why it should not; empty if it should.
    pub reasons: Vec<NotReady>,
    /// Name of the node.
    pub node: String,
}

/// Why a node should not get requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum NotReady {
    /// It is ending.
    Draining,
    /// The device of its pool is lost.
    DeviceLost,
    /// It has not tried yet to reach each of its peers.
    PeersNotTried,
}

/// Order to release what the pool keeps in stock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrimOrder {
    /// Cached blocks to keep; `None`: all of them.
    #[serde(default)]
    pub keep: Option<usize>,
}

/// What was released.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TrimOutcome {
    /// Free blocks returned from magazines and the depot, which join into runs again.
    pub flushed_blocks: usize,
    /// Freed blocks that waited for batches, and are reusable now.
    pub reclaimed_blocks: usize,
    /// Cached blocks that were evicted.
    pub evicted_blocks: usize,
    /// Cached blocks that are left.
    pub evictable: usize,
    /// Free blocks before.
    pub free_before: usize,
    /// Free blocks after.
    pub free_after: usize,
    /// Time in milliseconds.
    pub time_ms: f64,
}

impl TrimOutcome {
    pub(super) fn of(before: &Stats, after: &Stats, evicted: usize, time_ms: f64) -> Self {
        Self {
            flushed_blocks: before.in_magazines.saturating_sub(after.in_magazines),
            reclaimed_blocks: before.retired.saturating_sub(after.retired),
            evicted_blocks: evicted,
            evictable: after.evictable,
            free_before: before.free,
            free_after: after.free,
            time_ms,
        }
    }
}

/// Who holds the blocks of a pool.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OwnersReport {
    /// The owners with the most blocks first, up to the limit of the request.
    pub owners: Vec<OwnerRecord>,
    /// Number of owners, including those beyond the limit.
    pub total: usize,
    /// Distinct blocks that have an owner.
    pub blocks: usize,
    /// Pinned blocks, including cached ones, which are neither evicted nor moved.
    pub pinned_blocks: usize,
    /// Freed blocks that wait for batches in flight.
    pub retired_blocks: usize,
    /// Batches in flight.
    pub batches_in_flight: u64,
    /// Lower bound of the age of the oldest one in seconds, if any.
    pub oldest_batch_s: Option<f64>,
}

/// An owner of blocks.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OwnerRecord {
    /// Kind.
    pub kind: OwnerKind,
    /// Id of its sequence, or of the sequence that its requests named.
    pub sequence: Option<u64>,
    /// Its blocks, without reserved ones.
    pub blocks: usize,
    /// Blocks that it has reserved beyond its tokens.
    pub reserved_blocks: usize,
    /// Its blocks with other references, which stay allocated when it releases them.
    pub shared_blocks: usize,
    /// Its blocks that are pinned.
    pub pinned_blocks: usize,
    /// Tokens of a sequence.
    pub tokens: Option<usize>,
    /// Priority of its last request: normal, high or urgent.
    pub priority: Option<String>,
    /// Seconds since it got the first of them, if known: for leases in debug builds only.
    pub held_s: Option<f64>,
    /// Source location of their allocation, in debug builds only.
    pub allocated_at: Option<String>,
}

/// Kind of an owner.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OwnerKind {
    /// An open sequence.
    Sequence,
    /// Leases and pinned prefixes.
    Lease,
    /// The engine of a frame pool, by the sequence that its requests named.
    Engine,
    /// A transfer that reads the blocks.
    Export,
    /// A transfer that writes the blocks.
    Import,
    /// A cancelled transfer whose bytes a transport may still read or write.
    Quarantine,
    /// Closed sequences, whose blocks are cached and released once batches in flight finish.
    Closing,
    /// None: blocks with references that no owner will release, or the candidates. A fault of the
    /// pool, which an audit reports.
    Unaccounted,
}

impl OwnersReport {
    /// Returns a report of at most `limit` owners.
    pub fn of(found: &Owners, limit: usize) -> Self {
        let mut pins = HashMap::<Option<u64>, usize>::new();
        for pinned in &found.pinned {
            let sequence = if let PinOwner::Sequence(id) = pinned.owner { Some(id.0) } else { None };
            *pins.entry(sequence).or_default() += 1;
        }
        let mut owners: Vec<OwnerRecord> = Vec::new();
        owners.extend(found.sequences.iter().map(|sequence| OwnerRecord {
            reserved_blocks: sequence.reserved.len(),
            shared_blocks: sequence.shared_blocks,
            pinned_blocks: pins.get(&Some(sequence.id.0)).copied().unwrap_or(0),
            tokens: Some(sequence.tokens),
            priority: sequence.priority.map(word),
            held_s: Some(sequence.held_for.as_secs_f64()),
            ..OwnerRecord::new(OwnerKind::Sequence, Some(sequence.id.0), sequence.blocks.len())
        }));
        let pinned: std::collections::HashSet<_> = found.pinned.iter().map(|pinned| pinned.block).collect();
        owners.extend(found.leases.iter().map(|owner| OwnerRecord {
            shared_blocks: owner.shared_blocks,
            pinned_blocks: owner.blocks.iter().filter(|block| pinned.contains(block)).count(),
            priority: Some(word(owner.priority)),
            held_s: owner.held_for.map(|held| held.as_secs_f64()),
            allocated_at: owner.allocated_at.as_ref().map(ToString::to_string),
            ..OwnerRecord::new(OwnerKind::Lease, owner.sequence.map(|id| id.0), owner.blocks.len())
        }));
        owners.extend(found.transfers.iter().map(|transfer| {
            let kind = match transfer.direction {
                _ if transfer.quarantined => OwnerKind::Quarantine,
                TransferDirection::Export => OwnerKind::Export,
                TransferDirection::Import => OwnerKind::Import,
            };
            let held_s = Some(transfer.held_for.as_secs_f64());
            let sequence = transfer.sequence.map(|id| id.0);
            OwnerRecord { held_s, ..OwnerRecord::new(kind, sequence, transfer.blocks.len()) }
        }));
        if !found.closing.is_empty() {
            owners.push(OwnerRecord::new(OwnerKind::Closing, None, found.closing.len()));
        }
        owners.extend(found.unaccounted.as_ref().map(|lost| {
            let blocks = if lost.blocks.is_empty() { lost.candidates.len() } else { lost.blocks.len() };
            OwnerRecord::new(OwnerKind::Unaccounted, None, blocks)
        }));
        owners
            .sort_by_key(|owner| (Reverse(owner.blocks + owner.reserved_blocks), owner.kind, owner.sequence));
        let total = owners.len();
        owners.truncate(limit);
        Self {
            owners,
            total,
            blocks: found.blocks(),
            pinned_blocks: found.pinned.len(),
            retired_blocks: found.retired_blocks,
            batches_in_flight: found.batches_in_flight,
            oldest_batch_s: found.oldest_batch.as_ref().map(|batch| batch.age().as_secs_f64()),
        }
    }
}

impl OwnerRecord {
    fn new(kind: OwnerKind, sequence: Option<u64>, blocks: usize) -> Self {
        Self {
            kind,
            sequence,
            blocks,
            reserved_blocks: 0,
            shared_blocks: 0,
            pinned_blocks: 0,
            tokens: None,
            priority: None,
            held_s: None,
            allocated_at: None,
        }
    }
}

fn word(priority: Priority) -> String {
    priority.to_string()
}

#[cfg(test)]
mod tests {
    use kvpool::{KvLayout, Pool, PrefixConfig, SequenceId};

    use super::*;

    #[test]
    fn blocks_of_closed_sequences_have_an_owner_until_their_batch_ends() {
        let layout = KvLayout::named("tiny").unwrap();
        let tokens = layout.block_tokens() * 2;
        let pool = Pool::builder(layout).blocks(9).prefix_cache(PrefixConfig::new()).build().unwrap();
        let mut sequence = pool.sequence(SequenceId(1)).tokens(&vec![7; tokens]).unwrap();
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, tokens).unwrap();
        drop(sequence);
        let kinds = || {
            let report = OwnersReport::of(&pool.owners(), 9);
            report.owners.into_iter().map(|owner| (owner.kind, owner.blocks)).collect::<Vec<_>>()
        };
        assert_eq!(kinds(), [(OwnerKind::Closing, 2)]);
        batch.finish();
        assert_eq!(kinds(), []);
    }
}
