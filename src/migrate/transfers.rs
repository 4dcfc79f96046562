//! The transfers of a pool and the blocks that they hold, for reports.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::block::Blocks;
use crate::ids::{BlockId, SequenceId};

/// Direction of a transfer, as seen from the pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum TransferDirection {
    /// Blocks of this pool are read.
    Export,
    /// Blocks of this pool are written.
    Import,
}

/// A transfer and the blocks on which it holds references.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct TransferOwner {
    /// Its direction.
    pub direction: TransferDirection,
    /// Its sequence; `None` for cached blocks.
    pub sequence: Option<SequenceId>,
    /// Its blocks, in the order of the manifest.
    pub blocks: Vec<BlockId>,
    /// Whether the transfer was aborted while a transport may still read or write its bytes.
    pub quarantined: bool,
    /// Time since the blocks were taken.
    pub held_for: Duration,
}

/// Numbers of blocks under transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct TransferCounts {
    /// Blocks of transfers that continue.
    pub(crate) in_transfer: usize,
    pub(crate) quarantined: usize,
}

/// The transfers of one pool. A clone refers to the same ones.
#[derive(Clone, Default)]
pub(crate) struct Transfers(Arc<Mutex<Open>>);

#[derive(Default)]
struct Open {
    next: u64,
    entries: BTreeMap<u64, Entry>,
}

impl Open {
    fn counts(&self) -> TransferCounts {
        let mut counts = TransferCounts::default();
        for entry in self.entries.values() {
            let TransferOwner { blocks, quarantined, .. } = &entry.owner;
            let count = if *quarantined { &mut counts.quarantined } else { &mut counts.in_transfer };
            *count += blocks.len();
        }
        counts
    }
}

struct Entry {
    /// Its time is computed when it is read.
    owner: TransferOwner,
    since: Instant,
}

impl Transfers {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the list, and reports the number of blocks in transfer to the pool.
    fn change<T>(&self, pool: &Blocks, change: impl FnOnce(&mut Open) -> T) -> T {
        let mut open = self.open();
        let changed = change(&mut open);
        // Under the lock, so that the last change is reported last.
        pool.set_in_transfer(open.counts().in_transfer);
        changed
    }

    pub(super) fn list(
        &self,
        pool: &Blocks,
        direction: TransferDirection,
        sequence: Option<SequenceId>,
        blocks: Vec<BlockId>,
    ) -> u64 {
        self.change(pool, |open| {
            let number = open.next;
            open.next += 1;
            let held_for = Duration::ZERO;
            let owner = TransferOwner { direction, sequence, blocks, quarantined: false, held_for };
            open.entries.insert(number, Entry { owner, since: Instant::now() });
            number
        })
    }

    pub(super) fn relist(&self, pool: &Blocks, number: u64, blocks: Vec<BlockId>) {
        self.change(pool, |open| open.entries.get_mut(&number).map(|entry| entry.owner.blocks = blocks));
    }

    pub(super) fn unlist(&self, pool: &Blocks, number: u64) {
        self.change(pool, |open| open.entries.remove(&number));
    }

    /// Records that only transports hold the blocks of a transfer.
    pub(super) fn quarantine(&self, pool: &Blocks, number: u64) {
        self.change(pool, |open| open.entries.get_mut(&number).map(|entry| entry.owner.quarantined = true));
    }

    pub(crate) fn owners(&self) -> Vec<TransferOwner> {
        let owner = |entry: &Entry| TransferOwner { held_for: entry.since.elapsed(), ..entry.owner.clone() };
        self.open().entries.values().map(owner).collect()
    }

    pub(crate) fn counts(&self) -> TransferCounts {
        self.open().counts()
    }
}
