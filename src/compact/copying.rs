use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use futures_channel::oneshot;

use crate::block::{Blocks, Wave};
use crate::error::StorageError;
use crate::ids::FrameId;

use super::copies::UnderWay;
use super::report::{GivenUp, MoveCounts};
use super::{DefragError, DefragReport, Move, OverdueCopy};

pub(super) struct Flight {
    pub(super) told: oneshot::Receiver<Copied>,
    pub(super) deadline: Option<Instant>,
    /// The frames that the wave vacates, sorted.
    pub(super) sources: Vec<FrameId>,
}

impl Flight {
    pub(super) fn vacates(&self, moves: &[Move]) -> bool {
        moves.iter().any(|moved| self.sources.binary_search(&moved.to).is_ok())
    }
}

pub(super) enum Failure {
    Copy(StorageError),
    Dropped,
    Overdue(OverdueCopy),
}

impl Failure {
    pub(super) fn told(self, report: DefragReport) -> DefragError {
        let report = Box::new(report);
        match self {
            Self::Copy(error) => DefragError::Copy { error, report },
            Self::Dropped => DefragError::CopyDropped { report },
            Self::Overdue(copy) => DefragError::CopyOverdue { copy, report },
        }
    }
}

pub(super) struct Copying {
    pub(super) blocks: Blocks,
    pub(super) wave: Option<Wave>,
    pub(super) block_bytes: usize,
    pub(super) counts: Arc<Mutex<MoveCounts>>,
    /// Holds the copy's share of its run's turn; declared so that it drops after the wave.
    pub(super) _under_way: UnderWay,
    pub(super) tell: Option<oneshot::Sender<Copied>>,
}

pub(super) struct Copied {
    pub(super) moved: usize,
    pub(super) given_up: GivenUp,
    pub(super) failed: Option<StorageError>,
}

impl Copying {
    pub(super) fn end(mut self, outcome: Result<(), StorageError>) {
        let Some(wave) = self.wave.take() else { return };
        let mut copied = Copied { moved: 0, given_up: GivenUp::default(), failed: None };
        match outcome {
            // SAFETY: the copier reports that the copy is complete.
            Ok(()) => copied.moved = unsafe { wave.publish(&mut |_, why| copied.given_up.count(why)) },
            Err(error) => {
                copied.given_up.copy_failed = wave.len();
                // Poison before the destinations are freed, so that no allocation gets one.
                if error.is_lost() {
                    self.blocks.poison();
                }
                drop(wave);
                copied.failed = Some(error);
            }
        }
        count(&self.counts, |counts| {
            counts.waves += 1;
            counts.moved_blocks += copied.moved as u64;
            counts.moved_bytes += (copied.moved * self.block_bytes) as u64;
            counts.given_up.add(&copied.given_up);
        });
        // The run's future may have been dropped.
        let _ = self.tell.take().map(|tell| tell.send(copied));
    }
}

pub(super) fn count(counts: &Mutex<MoveCounts>, change: impl FnOnce(&mut MoveCounts)) {
    change(&mut counts.lock().unwrap_or_else(PoisonError::into_inner));
}
