//! The transfers of a pool and the blocks that they hold, for reports.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::block::Blocks;
use crate::ids::{BlockId, SequenceId};

/// TransferDirection of a transfer, as seen from the pool.
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
    /// TransferDirection of the transfer.
    pub direction: TransferDirection,
    /// Its sequence; `None` for cached blocks.
    pub sequence: Option<SequenceId>,
    /// Its blocks, in the order of the manifest.
    pub blocks: Vec<BlockId>,
    /// Whether only a transport holds the blocks: the transfer was given up, and its bytes may
    /// still be read or written.
    pub quarantined: bool,
    /// Time since the blocks were taken.
    pub held_for: Duration,
}

/// Numbers of blocks under transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct TransferCounts {
    /// Blocks of transfers that go on.
    pub(crate) in_transfer: usize,
    /// Blocks that only transports hold.
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
            let count = if entry.quarantined { &mut counts.quarantined } else { &mut counts.in_transfer };
            *count += entry.blocks.len();
        }
        counts
    }
}

struct Entry {
    direction: TransferDirection,
    sequence: Option<SequenceId>,
    blocks: Vec<BlockId>,
    quarantined: bool,
    since: Instant,
}

impl Transfers {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the list, and tells the pool how many blocks are in transfer.
    fn change<T>(&self, pool: &Blocks, change: impl FnOnce(&mut Open) -> T) -> T {
        let mut open = self.open();
        let changed = change(&mut open);
        // Under the lock, so that the last change is told last.
        pool.set_in_transfer(open.counts().in_transfer);
        changed
    }

    /// Lists a transfer of a pool, and returns its number.
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
            let entry = Entry { direction, sequence, blocks, quarantined: false, since: Instant::now() };
            open.entries.insert(number, entry);
            number
        })
    }

    pub(super) fn relist(&self, pool: &Blocks, number: u64, blocks: Vec<BlockId>) {
        self.change(pool, |open| open.entries.get_mut(&number).map(|entry| entry.blocks = blocks));
    }

    pub(super) fn unlist(&self, pool: &Blocks, number: u64) {
        self.change(pool, |open| open.entries.remove(&number));
    }

    /// Records that only transports hold the blocks of a transfer.
    pub(super) fn quarantine(&self, pool: &Blocks, number: u64) {
        self.change(pool, |open| open.entries.get_mut(&number).map(|entry| entry.quarantined = true));
    }

    /// Returns the transfers, oldest first.
    pub(crate) fn owners(&self) -> Vec<TransferOwner> {
        let owner = |entry: &Entry| TransferOwner {
            direction: entry.direction,
            sequence: entry.sequence,
            blocks: entry.blocks.clone(),
            quarantined: entry.quarantined,
            held_for: entry.since.elapsed(),
        };
        self.open().entries.values().map(owner).collect()
    }

    /// Returns the numbers of blocks under transfer.
    pub(crate) fn counts(&self) -> TransferCounts {
        self.open().counts()
    }
}
