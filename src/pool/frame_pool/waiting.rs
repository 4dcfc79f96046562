//! Allocation that waits in the queue. The pool moves no blocks itself.

use crate::block::{AllocRequest, Class};
use crate::error::AllocError;
use crate::pool::wait::{CallUntil, Wait};
use crate::pool::waiting::in_line;

use super::frame_pool::FramePool;

/// Frames with one reference each, freed on drop, so that a cancelled task leaks none.
#[must_use = "dropping it frees the frames"]
pub struct FrameLease {
    pool: FramePool,
    frames: Vec<u32>,
}

impl FrameLease {
    /// Returns the frames.
    pub fn frames(&self) -> &[u32] {
        &self.frames
    }

    /// Returns the frames, and passes their references to the caller.
    pub fn into_frames(mut self) -> Vec<u32> {
        std::mem::take(&mut self.frames)
    }
}

impl Drop for FrameLease {
    fn drop(&mut self) {
        // `free` would refuse the whole list if the engine has freed one of the frames by number.
        let blocks = &self.pool.0.blocks;
        let is_owned = |&frame: &u32| blocks.used_in_place(0, frame).is_ok_and(|(_, word)| word.is_owned());
        self.frames.retain(is_owned);
        // An error means that another thread is freeing them by their numbers.
        let _ = self.pool.free(&self.frames);
    }
}

impl std::fmt::Debug for FrameLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("FrameLease").field(&self.frames).finish()
    }
}

impl FramePool {
    /// Allocates frames, and waits for them if necessary, in a queue like that of
    /// [`Pool::allocate_async`](crate::Pool::allocate_async), with the same errors. The future may
    /// be dropped at any time. A contiguous request waits until frees or [committed
    /// moves](crate::FrameMoves::commit) make a run.
    ///
    /// ```
    /// # use kvpool::{AllocRequest, FramePool};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let pool = FramePool::builder(100).build()?;
    /// let mut all = Vec::new();
    /// pool.allocate(AllocRequest::new(100), &mut all)?;
    /// let waiting = pool.allocate_async(AllocRequest::new(10));
    /// let (granted, freed) = tokio::join!(waiting, async { pool.free(&all[..20]) });
    /// freed?;
    /// let table: Vec<u32> = granted?.into_frames();
    /// assert_eq!((table.len(), pool.available()), (10, 10));
    /// # Ok(())
    /// # }
    /// ```
    pub fn allocate_async(
        &self,
        request: AllocRequest,
    ) -> Wait<impl CallUntil<Output = Result<FrameLease, AllocError>, Future: Send>> {
        Wait::new(move |deadline| async move {
            let (blocks, request) = (&self.0.blocks, request.pinned());
            let lease = |frames| FrameLease { pool: self.clone(), frames };
            blocks.check_request(&request).inspect_err(|error| blocks.count_refusal(error))?;
            if !blocks.is_awaited() {
                // No request waits, so there is no queue to join.
                let mut frames = Vec::new();
                match self.allocate(request, &mut frames) {
                    Err(AllocError::Exhausted { .. } | AllocError::NoRun { .. }) => {}
                    outcome => return outcome.map(|()| lease(frames)),
                }
            }
            let waiting = in_line((blocks, None), &request, Class::Admission, deadline, |place| {
                let mut frames = Vec::with_capacity(request.blocks);
                // A block with references stays in its frame.
                place.allocate(&request, None, &mut |id| frames.push(blocks.frame(id).0))?;
                Ok(lease(frames))
            });
            traced!("kvpool.wait", waiting).await
        })
    }
}

const _: () = {
    const fn sent<T: Send>() {}
    sent::<FrameLease>();
};
