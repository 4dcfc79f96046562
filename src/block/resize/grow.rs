//! A pool that grows: first the frames that a shrink took away come back, then new ones are added.

use crate::error::GrowError;
use crate::ids::Run;
use crate::sync::Ordering::*;

use crate::block::BlockWord;
use crate::block::core::Core;

impl Core {
    /// Adds `blocks` blocks: first those whose frames a [shrink](crate::block::Shrinking) took away. `prepare` is called with the frames to come, and makes their memory ready; it may be
    /// called more than once, also for what then does not come.
    ///
    /// # Errors
    ///
    /// [`GrowError`]; the pool is unchanged.
    pub fn grow(
        &self,
        blocks: usize,
        prepare: &mut dyn FnMut(Run) -> Result<(), GrowError>,
    ) -> Result<(), GrowError> {
        let null = self.config.has_null_block as usize;
        let run = self
            .space
            .frames
            .grow(blocks, &mut |run| {
                if !cfg!(kvpool_mutant = "late_rows") {
                    self.space.table.grow(run.end() as usize);
                    if let Some(evictor) = &self.evictor {
                        evictor.grow(self, run.end() as usize);
                    }
                }
                prepare(run)?;
                self.bring_back(run);
                // Before any of them can be handed out, so that no handle is refused that the pool gave.
                if !cfg!(kvpool_mutant = "late_total") {
                    self.count_grown(run);
                }
                Ok(())
            })
            .map_err(|error| match error {
                // Told in blocks, as the caller counts them.
                GrowError::TooLarge { asked, total, max } => {
                    GrowError::TooLarge { asked, total: total - null, max: max - null }
                }
                other => other,
            })?;
        if cfg!(kvpool_mutant = "late_rows") {
            self.space.table.grow(run.end() as usize);
        }
        if cfg!(kvpool_mutant = "late_total") {
            self.count_grown(run);
        }
        self.announce();
        Ok(())
    }

    /// Growers come one after the other, and each adds its own.
    fn count_grown(&self, run: Run) {
        // Release: pairs with the Acquire of those who ask for a row of this number.
        self.rows.fetch_max(run.end() as usize, Release);
        self.total.fetch_add(run.len as usize, Relaxed);
    }

    /// Frames that were gone are there again, and the caller's: their blocks are free as any other.
    pub(in crate::block) fn bring_back(&self, run: Run) {
        // Relaxed: whoever grows is alone, and the lock orders it behind the shrink.
        let rows = self.rows.load(Relaxed) as u32;
        for frame in run.frames().take_while(|frame| frame.0 < rows) {
            self.space.set_held(frame, BlockWord::unhold);
        }
    }
}
