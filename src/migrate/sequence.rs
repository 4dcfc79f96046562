//! A sequence goes to another pool.

use std::time::Instant;

use crate::error::TransferError;
use crate::sequence::{Arrival, Held, Sequence, Sequences};

use super::carry::Pair;
use super::error::MigrateError;
use super::job;
use super::report::MigrationReport;
use super::route::Route;

/// Fewer bytes are copied at once: to wake another thread would take longer.
const COPIED_AT_ONCE: usize = 256 << 10;

/// What both pools hold of a sequence that is on its way.
struct Transit {
    here: Held,
    there: Arrival,
}

impl Transit {
    /// The blocks to be copied: those that are not there already.
    fn pairs(&self) -> Vec<Pair> {
        let pairs = self.here.blocks.iter().copied().zip(self.there.blocks().iter().copied());
        pairs.skip(self.there.shared()).collect()
    }
}

/// Makes the same sequence in another pool: the same id, tokens, committed length and priority, and its blocks' bytes. The one that
/// is here is only read. Blocks that are cached there are shared; what can be found here can be found there afterwards.
///
/// The future may be dropped at any time; then nothing has happened.
///
/// # Errors
///
/// [`TransferError`]; nothing has happened.
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
    let transit = Transit { here, there };
    let pairs = transit.pairs();
    let is_short = route.is_on_host() && pairs.len() * route.block_bytes() < COPIED_AT_ONCE;
    let done = job::done(is_short, move |is_abandoned| {
        // SAFETY: a reference on each block here is held, and they were refused if a batch may still write them; with that
        // reference, later writes go to copies. Those there that are not shared were allocated for this sequence.
        let carried = unsafe { route.carry(&pairs, is_abandoned) }?;
        Ok((transit, carried))
    });
    let (Transit { here, there }, mut carried) = done.await?;
    // From here to the end nothing is awaited: the new sequence is the caller's, or nothing has happened.
    let arrived = there.commit();
    drop(here);
    carried.took = began.elapsed();
    Ok((arrived, MigrationReport { tokens, shared_blocks, carried }))
}

/// As [`replicate`], and closes the sequence that was here, if it is another one afterwards.
///
/// A future that is dropped closes it too.
///
/// # Errors
///
/// [`MigrateError`], which has the sequence as it was.
pub async fn migrate(
    from: &Sequences,
    sequence: Sequence,
    to: &Sequences,
) -> Result<(Sequence, MigrationReport), MigrateError> {
    let outcome = replicate(from, &sequence, to).await;
    outcome.map_err(|error| MigrateError { error, sequence: Box::new(sequence) })
}
