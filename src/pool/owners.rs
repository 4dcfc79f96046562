use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use crate::block::{Accounts, AuditError, Core, Noted, Priority, SourcePlace, Unaccounted};
use crate::error::OldestBatch;
use crate::ids::{BlockId, SequenceId, Ticket};
use crate::migrate::TransferOwner;

use super::Pool;

/// Owners of a pool's blocks. Exact while no thread is inside a call; otherwise each block is
/// reported as it was at some moment during the call.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Owners {
    /// Open sequences, by id. Each sequence lists the blocks that it shares with others.
    pub sequences: Vec<SequenceOwner>,
    /// Blocks of leases and [pinned prefixes](super::Pool::pinned_prefixes), and those that an
    /// append has yet to list.
    pub leases: Vec<BlockOwner>,
    /// Transfers to and from other pools and nodes, oldest first. Sequences list their blocks too.
    pub transfers: Vec<TransferOwner>,
    /// Pinned blocks, ascending.
    pub pinned: Vec<PinnedBlock>,
    /// Number of batches in flight.
    pub batches_in_flight: u64,
    /// Oldest batch in flight.
    pub oldest_batch: Option<OldestBatch>,
    /// Freed blocks that are not reused before batches in flight end.
    pub retired_blocks: usize,
    /// Blocks of closed sequences, per reference: released once batches that write them finish.
    #[cfg_attr(feature = "serde", serde(default))]
    pub closing: Vec<BlockId>,
    /// References without an owner: a bug in the pool, which an [audit](Pool::audit) reports. Its
    /// [blocks](Unaccounted::blocks) are not listed with leases; its candidates are. Reported only
    /// if found twice in a row, since other threads may be transferring ownership.
    #[cfg_attr(feature = "serde", serde(default))]
    pub unaccounted: Option<Unaccounted>,
}

/// An open sequence and its blocks.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct SequenceOwner {
    /// Id of the sequence.
    pub id: SequenceId,
    /// Number of its tokens, including drafted ones.
    pub tokens: usize,
    /// Its blocks, in order.
    pub blocks: Vec<BlockId>,
    /// Blocks that it has reserved beyond its tokens, including those of leases that name it.
    pub reserved: Vec<BlockId>,
    /// Number of its blocks that other sequences or a copy in progress reference. The others become
    /// free or evictable when the sequence is closed.
    pub shared_blocks: usize,
    /// Priority for which its last block was allocated; `None` without blocks.
    pub priority: Option<Priority>,
    /// Time since it was opened.
    pub held_for: Duration,
}

/// Blocks of leases that one place in the program allocated for one purpose. Release builds do not
/// record the place and the time, and group blocks by sequence and priority alone.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct BlockOwner {
    /// The blocks, ascending.
    pub blocks: Vec<BlockId>,
    /// Number of them with further references, which stay allocated when the owner frees them.
    #[cfg_attr(feature = "serde", serde(default))]
    pub shared_blocks: usize,
    /// Sequence that the request [named](super::AllocRequest::sequence).
    pub sequence: Option<SequenceId>,
    /// Priority of the request.
    pub priority: Priority,
    /// Place in the program that allocated them. Debug builds only.
    pub allocated_at: Option<SourcePlace>,
    /// Time since the first of them was allocated. Debug builds only.
    pub held_for: Option<Duration>,
    /// Newest batch when the least recently accessed of the blocks was accessed.
    pub last_access: Ticket,
}

/// Owner of a pinned block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum PinOwner {
    /// An open sequence; the one with the smallest id, if several share the block.
    Sequence(SequenceId),
    /// A lease.
    Lease,
    /// A transfer to or from another pool or node.
    Transfer,
    /// None: the block is cached.
    Cache,
}

/// A block that is pinned, and hence neither evicted nor moved.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PinnedBlock {
    /// The block.
    pub block: BlockId,
    /// Number of pins.
    pub pins: u32,
    /// Owner of the block.
    pub owner: PinOwner,
    /// Place in the program of the last pin, except by an allocation. Debug builds only.
    pub pinned_at: Option<SourcePlace>,
    /// Time since the last pin. Debug builds only.
    pub pinned_for: Option<Duration>,
}

impl Owners {
    /// Returns the number of distinct blocks that have an owner.
    pub fn blocks(&self) -> usize {
        let listed =
            self.sequences.iter().flat_map(|sequence| sequence.blocks.iter().chain(&sequence.reserved));
        let others = self.leases.iter().flat_map(|owner| &owner.blocks);
        let transfers = self.transfers.iter().flat_map(|transfer| &transfer.blocks);
        listed.chain(others).chain(transfers).chain(&self.closing).collect::<HashSet<_>>().len()
    }
}

type Group = (Option<SourcePlace>, Option<SequenceId>, Priority);

impl Pool {
    pub(super) fn accounts(&self) -> Accounts {
        let mut accounts = self.0.sequences.accounts();
        accounts.listed.extend(self.0.transfers.owners().into_iter().flat_map(|transfer| transfer.blocks));
        accounts
    }

    /// Returns the owners of all blocks, how long they have held them, and the pinned blocks. Walks
    /// all open sequences and blocks: for diagnosis, not for every step. Takes no lock of an
    /// allocation.
    pub fn owners(&self) -> Owners {
        let blocks = &self.0.blocks;
        let mut listed = Listed { transfers: self.0.transfers.owners(), ..Listed::default() };
        for view in self.0.sequences.views() {
            let ids = view.blocks();
            for &id in &ids {
                listed.by_block.entry(id).or_insert(view.id());
            }
            if view.reserved_blocks() > 0 {
                listed.reserving.insert(view.id(), listed.sequences.len());
            }
            listed.sequences.push(SequenceOwner {
                id: view.id(),
                tokens: view.len(),
                shared_blocks: ids.iter().filter(|&&id| blocks.word(id).refs() > 1).count(),
                priority: ids.last().map(|&id| blocks.info_of(id, blocks.word(id)).priority),
                held_for: view.age(),
                blocks: ids,
                reserved: Vec::new(),
            });
        }
        Owners::of(blocks, listed, || self.accounts(), || self.0.sequences.closing_blocks())
    }
}

/// Owners that list their blocks. The others are found by visiting all blocks.
#[derive(Default)]
pub(super) struct Listed {
    sequences: Vec<SequenceOwner>,
    by_block: BTreeMap<BlockId, SequenceId>,
    /// Sequences with reserved blocks, by their place in the list.
    reserving: HashMap<SequenceId, usize>,
    transfers: Vec<TransferOwner>,
}

impl Owners {
    pub(super) fn of(
        blocks: &Core,
        listed: Listed,
        accounts: impl Fn() -> Accounts,
        closing: impl FnOnce() -> Vec<BlockId>,
    ) -> Self {
        let Listed { mut sequences, by_block, reserving, transfers } = listed;
        let in_transfer: HashSet<BlockId> =
            transfers.iter().flat_map(|transfer| transfer.blocks.iter().copied()).collect();
        let audit = || match blocks.audit_owners(&accounts) {
            Err(AuditError::Unaccounted(lost)) => Some(lost),
            _ => None,
        };
        // Twice: other threads may be between taking a reference and listing it.
        let unaccounted = audit().filter(|lost| audit().as_ref() == Some(lost));
        let closing = closing();
        let lost = unaccounted.as_ref().map_or(&[][..], |lost| &lost.blocks);
        let (mut groups, mut pinned) = (BTreeMap::<Group, BlockOwner>::new(), Vec::new());
        for id in (0..blocks.rows() as u32).map(BlockId) {
            let word = blocks.word(id);
            if word.pins() > 0 && (word.is_owned() || word.is_cached()) {
                let owner = match by_block.get(&id) {
                    Some(&sequence) => PinOwner::Sequence(sequence),
                    None if !word.is_owned() => PinOwner::Cache,
                    None if in_transfer.contains(&id) => PinOwner::Transfer,
                    None => PinOwner::Lease,
                };
                let (pinned_at, pinned_for) = blocks.site(Noted::Pinned, id).unzip();
                pinned.push(PinnedBlock { block: id, pins: word.pins(), owner, pinned_at, pinned_for });
            }
            let is_named = by_block.contains_key(&id) || in_transfer.contains(&id) || lost.contains(&id);
            let is_named = is_named || closing.contains(&id);
            if !word.is_owned() || is_named || blocks.null_block() == Some(id) {
                continue;
            }
            let (info, note) = (blocks.info_of(id, word), blocks.site(Noted::Allocated, id));
            let reserving = info.sequence.and_then(|id| reserving.get(&id));
            if let Some(&place) = reserving {
                sequences[place].reserved.push(id);
                continue;
            }
            let (allocated_at, held_for) = note.unzip();
            let group = (allocated_at.clone(), info.sequence, info.priority);
            let owner = groups.entry(group).or_insert(BlockOwner {
                blocks: Vec::new(),
                shared_blocks: 0,
                sequence: info.sequence,
                priority: info.priority,
                allocated_at,
                held_for,
                last_access: info.last_access,
            });
            owner.blocks.push(id);
            owner.shared_blocks += usize::from(word.refs() > 1);
            owner.held_for = owner.held_for.max(held_for);
            owner.last_access = owner.last_access.min(info.last_access);
        }
        Owners {
            sequences,
            leases: groups.into_values().collect(),
            transfers,
            pinned,
            batches_in_flight: blocks.clock().in_flight(),
            oldest_batch: blocks.oldest_batch(),
            retired_blocks: blocks.counts().retired,
            closing,
            unaccounted,
        }
    }
}
