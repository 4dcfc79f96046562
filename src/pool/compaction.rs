//! `Pool` methods that compact and resize.

use std::time::Instant;

use crate::compact::{
    CompactionState, Compactor, DefragConfig, DefragError, DefragOptions, DefragReport, Defragmenter,
    ResizeError, ResizeOptions, ResizeReport, Snapshot,
};

use crate::block::Operation;
use crate::error::{GrowError, ShrinkError};

use super::Pool;

impl Pool {
    /// Moves blocks so that free and evictable frames form aligned runs of the pool's order.
    ///
    /// No thread waits for a move. Only sealed, unpinned blocks move: those that a finished batch
    /// filled, and those that their [lease](crate::Lease::seal) sealed. Evictable blocks stay,
    /// since allocations evict them; one at the destination of a move is evicted.
    ///
    /// Compactor runs take turns: explicit ones, the [background task](Self::start_defragmenter),
    /// runs for a [waiting contiguous request](Self::allocate_async), and [resizes](Self::resize).
    /// If the future is dropped, copies in progress still complete. If it is not polled for longer
    /// than the [patience](crate::pool::PoolBuilder::turn_patience) while it is not copying, it
    /// loses its turn; polled again, it takes another turn and continues. Copies of less than 256
    /// KiB in host memory, and all without a tokio runtime, run on the polling thread, others on a
    /// blocking-pool thread.
    ///
    /// ```
    /// # use kvpool::{AllocRequest, Pool, storage::KvLayout};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let pool = Pool::builder(KvLayout::named("tiny")?).blocks(1_000).build()?;
    /// let leases: Result<Vec<_>, _> = (0..1_000).map(|_| pool.allocate(AllocRequest::new(1))).collect();
    /// let mut kept: Vec<_> = leases?.into_iter().step_by(2).collect();
    /// kept.iter_mut().for_each(|lease| lease.seal(..));
    /// let report = pool.defragment().await?;
    /// assert!(report.fragmentation_before > 0.9, "{report:?}");
    /// assert!(report.fragmentation_after < 0.05, "{report:?}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`DefragError`], including a copy that exceeds its [deadline](DefragOptions::copy_deadline).
    /// Moves completed before it stay in effect.
    ///
    /// # Panics
    /// If it has to wait in a tokio runtime whose timer is disabled.
    pub async fn defragment(&self) -> Result<DefragReport, DefragError> {
        self.defragment_with(DefragOptions::default()).await
    }

    /// Compacts like [`defragment`](Self::defragment), with another order or within a budget.
    pub async fn defragment_with(&self, options: DefragOptions) -> Result<DefragReport, DefragError> {
        traced!("kvpool.defragment", self.0.compactor.defragment(options)).await
    }

    /// Starts a background task that compacts the pool whenever it is fragmented, and evicts ahead
    /// of need while no batch begins. It runs on the current tokio runtime (feature `tokio`) until
    /// the result is [stopped](Defragmenter::stop) or dropped. If nothing drives that runtime,
    /// others pass over its turn. Fails without runtime or bytes, and for invalid options.
    pub fn start_defragmenter(&self, config: DefragConfig) -> Result<Defragmenter, DefragError> {
        Defragmenter::start(self.0.compactor.clone(), config)
    }

    /// Returns what the background task does, or why it is idle; `None` without one. If there are
    /// several, describes the one that looked at the pool last.
    pub fn compaction_state(&self) -> Option<CompactionState> {
        self.0.compactor.state()
    }

    /// Changes the pool's size to `blocks`, without the null block, while it serves.
    ///
    /// Growth is immediate. A shrink moves the blocks beyond the new end below it, and returns the
    /// memory to the system. It waits for its turn to move blocks, then for batches in flight and
    /// unsealed blocks, each up to [`ResizeOptions::patience`]. Allocations continue in the
    /// remaining part: the free blocks beyond the new end are [held](super::Stats::held).
    ///
    /// If the future is dropped, the pool keeps its size. If it is not polled for longer than the
    /// [patience](crate::pool::PoolBuilder::turn_patience), requests and runs that wait for blocks
    /// that it holds undo the shrink; polled again, it starts over. So a `select!` may combine it
    /// with a branch that waits for blocks. [`Pool::allocate`] does not undo it.
    ///
    /// # Errors
    /// [`ResizeError`], which names the blocks that cannot move, or the task that had the turn for
    /// as long as the patience. The pool keeps its size.
    ///
    /// # Panics
    /// If a shrink has to wait in a tokio runtime whose timer is disabled. If the storage panics
    /// while it shrinks; the pool then has its new size, because the memory may be gone.
    pub async fn resize(&self, blocks: usize) -> Result<ResizeReport, ResizeError> {
        self.resize_with(blocks, ResizeOptions::default()).await
    }

    /// Resizes like [`resize`](Self::resize), with another patience.
    pub async fn resize_with(
        &self,
        blocks: usize,
        options: ResizeOptions,
    ) -> Result<ResizeReport, ResizeError> {
        traced!("kvpool.resize", self.resize_to(blocks, options)).await
    }

    async fn resize_to(&self, blocks: usize, options: ResizeOptions) -> Result<ResizeReport, ResizeError> {
        options.moves.check()?;
        let started = Instant::now();
        let _timing = self.0.blocks.latencies().time(Operation::Resize);
        loop {
            let from = self.total_blocks();
            if blocks < from {
                match self.0.compactor.shrink(blocks, options).await {
                    // Another thread shrank the pool to this size or below.
                    Err(ResizeError::Shrink(ShrinkError::NotSmaller { .. })) => continue,
                    outcome => return outcome,
                }
            }
            // The pool cannot grow while a shrink is open.
            self.0.compactor.look_after_turns();
            if blocks == from || self.grow_from(from, blocks - from)? {
                let moved = DefragReport::default();
                return Ok(ResizeReport { from, to: blocks, moved, time: started.elapsed() });
            }
        }
    }

    /// Adds blocks to a pool of `from` blocks. Returns false if the pool has another size.
    fn grow_from(&self, from: usize, blocks: usize) -> Result<bool, GrowError> {
        let first = from + self.blocks().config().has_null_block as usize;
        let mut is_other = false;
        let grown = self.grow_as(blocks, &mut |run| {
            is_other = run.start.index() != first;
            // Any error will do: it is not passed on.
            if is_other { Err(GrowError::Busy) } else { Ok(()) }
        });
        if is_other { Ok(false) } else { grown.map(|()| true) }
    }

    /// Returns the current content of every frame. Visits the whole pool.
    pub fn snapshot(&self) -> Snapshot {
        self.0.compactor.snapshot()
    }

    pub(super) fn compactor(&self) -> &Compactor {
        &self.0.compactor
    }
}
