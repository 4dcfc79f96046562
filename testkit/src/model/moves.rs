//! Moving blocks: the model does not predict the destinations, but which blocks may move, which
//! frames that frees, and that nothing else changes.

use std::collections::BTreeSet;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use kvpool::compact::{Blocker, DefragError, DefragOptions, ResizeError, ResizeOptions};
use kvpool::{BlockId, Order, ShrinkError};

use super::drive::{Checked, Drive, same};

impl Drive {
    pub(super) fn defragment(&mut self, order: u8, blocks_max: Option<usize>, wave: usize) -> Checked {
        let block_bytes = self.pool.layout().bytes_per_block();
        let mut options = DefragOptions::new().order(Order(order)).wave_bytes(wave * block_bytes);
        options.budget_bytes = blocks_max.map(|blocks| (blocks * block_bytes) as u64);
        let open = self.open_blocks();
        let report = match run(self.pool.defragment_with(options)) {
            Ok(report) => report,
            Err(DefragError::Option { .. }) if order > 27 => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        let moved = self.learn(&open)?;
        if report.moved_blocks < moved || blocks_max.is_some_and(|most| report.moved_blocks > most) {
            return Err(format!("{moved} blocks have moved, at most {blocks_max:?} may: {report:?}"));
        }
        same("given up by one thread", &0, &report.given_up.total())?;
        let free_again = self.model.in_flight() == 0;
        if free_again && report.fragmentation_after > report.fragmentation_before + 1e-9 {
            return Err(format!("worse than before: {report:?}"));
        }
        self.audit()
    }

    pub(super) fn resize(&mut self, to: usize) -> Checked {
        let (total, open) = (self.model.total(), self.open_blocks());
        let got = run(self.pool.resize_with(to, ResizeOptions::new().patience(std::time::Duration::ZERO)));
        self.learn(&open)?;
        if to >= total {
            let expected = if to == total { Ok(()) } else { self.model.may_grow(to - total) };
            same("resize", &expected.map_err(ResizeError::Grow), &got.map(drop))?;
            if expected.is_ok() && to > total {
                self.model.grow(to - total);
            }
            return self.audit();
        }
        let fixed = |id: BlockId, pins: u32| pins > 0 || open.contains(&id);
        // Every movable block has moved by this point.
        let used = self.model.used();
        let stuck = self.model.owned_beyond(to).filter(|(id, owned)| fixed(*id, owned.pins)).count();
        match got {
            Err(ResizeError::Shrink(ShrinkError::TooFew { asked, .. })) => {
                same("too few", &(0, 0), &(asked, to))?
            }
            Err(ResizeError::NoRoom { asked, used: told }) => {
                same("no room", &(to, used), &(asked, told))?;
                same("used beyond", &true, &(used > to))?;
            }
            Err(ResizeError::Blocked { asked, blocks, retired }) => {
                same("asked", &to, &asked)?;
                let beyond: Vec<BlockId> = self.model.owned_beyond(to).map(|(id, _)| id).collect();
                same("in the way", &beyond, &blocks.iter().map(|(id, _)| *id).collect())?;
                same("retired", &self.model.retired_beyond(to), &retired)?;
                for (id, why) in blocks {
                    let pinned = self.model.owned(id).is_some_and(|owned| owned.pins > 0);
                    let expected = match (pinned, open.contains(&id)) {
                        (true, _) => Blocker::Pinned,
                        (false, true) => Blocker::Open,
                        (false, false) => Blocker::Busy,
                    };
                    same("blocker", &expected, &why)?;
                    if expected == Blocker::Busy && self.model.in_flight() == 0 {
                        return Err(format!("block {id} could have moved"));
                    }
                }
                if stuck == 0 && self.model.in_flight() == 0 {
                    return Err("blocked although no block is in the way".to_owned());
                }
            }
            Ok(report) => {
                same("sizes", &(total, to), &(report.from, report.to))?;
                same("in the way", &0, &self.model.in_the_way(to))?;
                self.model.shrink(to);
            }
            Err(error) => return Err(error.to_string()),
        }
        same("blocks", &self.model.total(), &self.pool.total_blocks())?;
        self.audit()
    }

    /// Blocks in use that are not sealed, and so cannot move.
    fn open_blocks(&self) -> BTreeSet<BlockId> {
        let words =
            (1..=self.model.ever() as u32).map(|id| (BlockId(id), self.pool.blocks().word(BlockId(id))));
        words.filter(|(_, word)| !word.is_free() && !word.is_sealed()).map(|(id, _)| id).collect()
    }

    /// Updates the model with the current frames of the blocks; returns the number of blocks in use
    /// that moved.
    fn learn(&mut self, open: &BTreeSet<BlockId>) -> Result<usize, String> {
        let blocks = self.pool.blocks();
        for &id in open {
            same("frame of an open block", &self.model.frame(id), &blocks.frame(id))?;
        }
        self.model.moved(|id| blocks.frame(id))
    }
}

/// Polls a future that needs no other thread.
fn run<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return output;
        }
    }
}
