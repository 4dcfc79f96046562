//! Transfer of a sequence to another pool.

use std::time::Instant;

use crate::error::TransferError;
use crate::sequence::{Arrival, BlockRefs, Sequence, Sequences};

use super::carry::Pair;
use super::error::MigrateError;
use super::job;
use super::report::MigrationReport;
use super::route::Route;

/// Transfers of fewer bytes run in the calling thread: waking another would take longer.
const COPIED_AT_ONCE: usize = 256 << 10;

/// The references that both pools hold during a transfer.
struct Transfer {
    here: BlockRefs,
    there: Arrival,
}

impl Transfer {
    /// Returns the blocks to be copied: those not already present in the target.
    fn pairs(&self) -> Vec<Pair> {
        let pairs = self.here.blocks.iter().copied().zip(self.there.blocks().iter().copied());
        pairs.skip(self.there.shared()).collect()
    }
}

/// Creates a copy of a sequence in another pool.
///
/// It has the same id, tokens, committed length, priority and bytes.
///
/// The source is only read. Blocks cached in the target are shared. Blocks that can be found in the
/// source's cache can afterwards be found in the target's.
///
/// The future may be dropped at any time, without effect.
///
/// # Errors
///
/// [`TransferError`], without effect.
pub async fn replicate(
    from: &Sequences,
    sequence: &Sequence,
    to: &Sequences,
) -> Result<(Sequence, MigrationReport), TransferError> {
    let began = Instant::now();
    let route = Route::new(from, to)?;
    let here = sequence.depart(from)?;
    let there = Arrival::prepare(sequence, to)?;
    let (tokens, shared_blocks) = (sequence.len(), there.shared());
    let transfer = Transfer { here, there };
    let pairs = transfer.pairs();
    let is_short = route.is_on_host() && pairs.len() * route.block_bytes() < COPIED_AT_ONCE;
    let done = job::run(is_short, move |is_abandoned| {
        // SAFETY: a reference on each source block is held, and a sequence that a batch may still
        // write was refused; with that reference, later writes go to copies. The target's blocks
        // that are not shared were allocated for this sequence.
        let carried = unsafe { route.carry(&pairs, is_abandoned) }?;
        Ok((transfer, carried))
    });
    let (Transfer { here, there }, mut carried) = done.await?;
    // No await from here to the end: either the caller receives the new sequence, or nothing has
    // happened.
    let arrived = there.commit();
    drop(here);
    carried.took = began.elapsed();
    Ok((arrived, MigrationReport { tokens, shared_blocks, carried }))
}

/// Like [`replicate`], and closes the source sequence on success.
///
/// Dropping the future closes it too.
///
/// # Errors
///
/// [`MigrateError`], which returns the sequence unchanged.
pub async fn migrate(
    from: &Sequences,
    sequence: Sequence,
    to: &Sequences,
) -> Result<(Sequence, MigrationReport), MigrateError> {
    let outcome = replicate(from, &sequence, to).await;
    outcome.map_err(|error| MigrateError { error, sequence: Box::new(sequence) })
}
