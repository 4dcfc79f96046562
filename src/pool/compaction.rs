//! Compaction, and another size, through the pool's door.

use std::time::Instant;

use crate::compact::{
    Compactor, DefragConfig, DefragError, DefragOptions, DefragReport, Defragmenter, ResizeError,
    ResizeOptions, ResizeReport, Snapshot,
};

use crate::error::{GrowError, ShrinkError};

use super::Pool;

impl Pool {
    /// Moves blocks so that free frames come to lie in runs of the pool's order: as many as can be gained. Everything else
    /// goes on meanwhile; nobody waits for a move. Only [sealed](Self::seal), unpinned blocks move.
    ///
    /// Runs take turns: by hand, in the [background](Self::start_defragmenter), for a run that an allocation
    /// [waits for](Self::allocate_async), and for [another size](Self::resize). The future may be dropped at any time;
    /// the moves that are being copied then end by themselves.
    ///
    /// On a tokio runtime the bytes are copied by one of its threads for blocking work; elsewhere by whoever polls. A copy that
    /// is not over within the [deadline](DefragOptions::copy_deadline) ends the run with [`DefragError::CopyOverdue`]. Outside of
    /// a runtime, which has no timer, it ends the wait of a run that is polled later. A future that is kept and not polled
    /// keeps its turn: drop it.
    ///
    /// ```
    /// # use kvpool::{pool::{AllocRequest, Pool}, storage::KvLayout};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let pool = Pool::builder(KvLayout::named("tiny")?).blocks(1_000).build()?;
    /// let mut handles = Vec::new();
    /// pool.allocate_raw(AllocRequest::new(1_000), &mut handles)?;
    /// let (kept, gone): (Vec<_>, Vec<_>) = handles.iter().partition(|handle| handle.id.0 % 2 == 0);
    /// pool.free(&gone)?;
    /// for &handle in &kept {
    ///     pool.seal(handle)?;
    /// }
    /// let report = pool.defragment().await?;
    /// assert!(report.fragmentation_before > 0.9 && report.fragmentation_after < 0.05, "{report:?}");
    /// pool.audit()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`DefragError`]: what had moved before has moved, everything else is where it was.
    ///
    /// # Panics
    ///
    /// On a tokio runtime without a timer, if it has to wait for a copy or for its turn.
    pub async fn defragment(&self) -> Result<DefragReport, DefragError> {
        self.defragment_with(DefragOptions::default()).await
    }

    /// As [`defragment`](Self::defragment), for another order, or within a budget.
    ///
    /// # Errors
    ///
    /// As for [`defragment`](Self::defragment).
    ///
    /// # Panics
    ///
    /// As for [`defragment`](Self::defragment).
    pub async fn defragment_with(&self, options: DefragOptions) -> Result<DefragReport, DefragError> {
        self.0.compactor.defragment(options).await
    }

    /// Starts a task that compacts the pool whenever it is fragmented, on the current tokio runtime, until the result is
    /// [stopped](Defragmenter::stop) or dropped.
    ///
    /// # Errors
    ///
    /// [`DefragError::NoRuntime`], [`DefragError::NoBytes`], [`DefragError::Option`].
    pub fn start_defragmenter(&self, config: DefragConfig) -> Result<Defragmenter, DefragError> {
        Defragmenter::start(self.0.compactor.clone(), config)
    }

    /// Gives the pool so many blocks, the null block not counted, while it serves.
    ///
    /// Growing takes no time. Shrinking moves what is in use beyond the new end below it, and gives the memory back to the
    /// system. It waits a while for batches in flight and for open blocks, see [`ResizeOptions::patience`]; what cannot
    /// move is named in the error, and the pool is as large as it was. Allocations go on meanwhile, in what is to stay.
    ///
    /// The future may be dropped at any time: the pool is as large as it was then.
    ///
    /// # Errors
    ///
    /// [`ResizeError`]; the pool is as large as it was.
    ///
    /// # Panics
    ///
    /// A shrink that has to wait, outside of a tokio runtime that has a timer. If the storage does while it shrinks: then the
    /// pool has its new size, since the memory may be gone.
    pub async fn resize(&self, blocks: usize) -> Result<ResizeReport, ResizeError> {
        self.resize_with(blocks, ResizeOptions::default()).await
    }

    /// As [`resize`](Self::resize), with more or less patience.
    ///
    /// # Errors
    ///
    /// As for [`resize`](Self::resize).
    ///
    /// # Panics
    ///
    /// As for [`resize`](Self::resize).
    pub async fn resize_with(
        &self,
        blocks: usize,
        options: ResizeOptions,
    ) -> Result<ResizeReport, ResizeError> {
        let started = Instant::now();
        loop {
            let from = self.total_blocks();
            if blocks < from {
                match self.0.compactor.shrink(blocks, options).await {
                    // Somebody else shrank it meanwhile, as far or further.
                    Err(ResizeError::Shrink(ShrinkError::NotSmaller { .. })) => continue,
                    outcome => return outcome,
                }
            }
            if blocks == from || self.grow_from(from, blocks - from)? {
                let moved = DefragReport::default();
                return Ok(ResizeReport { from, to: blocks, moved, time: started.elapsed() });
            }
        }
    }

    /// Adds blocks to a pool of `from` blocks. False, and nothing was done, if it is of another size by now.
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

    /// What every frame holds now: for planners, pictures and questions. A walk over the whole pool.
    pub fn snapshot(&self) -> Snapshot {
        self.0.compactor.snapshot()
    }

    /// What moves this pool's blocks.
    pub fn compactor(&self) -> &Compactor {
        &self.0.compactor
    }
}
