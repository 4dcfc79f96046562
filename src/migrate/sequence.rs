//! Transfer of a sequence to another pool of the process.

use std::time::Instant;

use crate::error::TransferError;
use crate::sequence::Sequence;

use super::error::MigrateError;
use super::export::Export;
use super::import::{Import, Imported};
use super::job;
use super::report::MigrationReport;
use super::route::Route;

/// Transfers of fewer bytes run in the calling thread: waking another would take longer.
const COPIED_AT_ONCE: usize = 256 << 10;

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
pub(crate) async fn replicate(
    route: Result<Route, TransferError>,
    sequence: &Sequence,
) -> Result<(Sequence, MigrationReport), TransferError> {
    let began = Instant::now();
    let route = route?;
    // Read before the source's: what is cleared here first, and then there, is not found there.
    let era = route.to.era();
    let export = Export::copy_of(&route.from, sequence)?;
    let outline = export.outline_for(&route.to);
    let mut import = Import::sequence(&route.to, outline, era)?;
    let (tokens, shared_blocks) = (sequence.len(), import.shared_blocks());
    let is_short = route.is_on_host() && import.missing().len() * route.block_bytes() < COPIED_AT_ONCE;
    let done = job::run(is_short, move |is_abandoned| {
        let carried = route.carry(&export, &mut import, is_abandoned)?;
        Ok((export, import, carried))
    });
    let (export, mut import, mut carried) = done.await?;
    // No await from here to the end: either the caller receives the new sequence, or nothing has
    // happened.
    let Imported::Sequence(arrived) = import.commit_as(&|_, _| None)?.0 else {
        unreachable!("of the outline of a sequence")
    };
    drop(export);
    carried.took = began.elapsed();
    Ok((*arrived, MigrationReport { tokens, shared_blocks, carried }))
}

/// Like [`replicate`], and closes the source sequence on success.
///
/// Dropping the future closes it too.
///
/// # Errors
///
/// [`MigrateError`], which returns the sequence unchanged.
pub(crate) async fn migrate(
    route: Result<Route, TransferError>,
    sequence: Sequence,
) -> Result<(Sequence, MigrationReport), MigrateError> {
    let outcome = replicate(route, &sequence).await;
    outcome.map_err(|error| MigrateError { error, sequence: Box::new(sequence) })
}
