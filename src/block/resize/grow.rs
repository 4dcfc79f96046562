//! Growth: first the frames that a shrink removed come back, then new ones are added.

use crate::error::GrowError;
use crate::ids::Run;
use crate::sync::Ordering::*;

use crate::block::core::Core;
use crate::block::state::BlockWord;

impl Core {
    /// Adds `blocks` blocks, first those that a [shrink](crate::block::Shrinking) removed.
    /// `prepare` makes memory ready, also for frames that are not added then.
    pub fn grow(
        &self,
        blocks: usize,
        prepare: &mut dyn FnMut(Run) -> Result<(), GrowError>,
    ) -> Result<(), GrowError> {
        let null = self.config.has_null_block as usize;
        self.space
            .frames
            .grow(blocks, &mut |run| {
                self.space.table.grow(run.end() as usize);
                self.sites.grow(run.end() as usize);
                if let Some(evictor) = &self.evictor {
                    evictor.grow(self, run.end() as usize);
                }
                prepare(run)?;
                self.bring_back(run);
                // Before any can be handed out, so that no handle from the pool is refused.
                self.count_grown(run);
                Ok(())
            })
            .map_err(|error| match error {
                GrowError::TooLarge { asked, total, max } => {
                    GrowError::TooLarge { asked, total: total - null, max: max - null }
                }
                other => other,
            })?;
        self.announce();
        Ok(())
    }

    fn count_grown(&self, run: Run) {
        // Release: pairs with the Acquire in `Core::rows`.
        self.rows.fetch_max(run.end() as usize, Release);
        self.total.fetch_add(run.len as usize, Relaxed);
    }

    pub(in crate::block) fn bring_back(&self, run: Run) {
        // Relaxed: growers exclude each other, and the lock orders them after the shrink.
        let rows = self.rows.load(Relaxed) as u32;
        for frame in run.frames().take_while(|frame| frame.0 < rows) {
            self.space.set_held(frame, BlockWord::unhold);
        }
    }
}
