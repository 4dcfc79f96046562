//! Carries the blocks of an export into an import within the process: in pieces, each in as few
//! runs as the frames allow.

use crate::error::{StorageError, TransferError};

use super::export::Export;
use super::import::Import;
use super::job::IsAbandoned;
use super::report::Carried;
use super::route::Route;
use super::transport::{
    Grant, Operation, SourceState, Submission, Tag, TransferState, Transport, TransportError,
};

/// Bytes per piece. Its source blocks are pinned while it is copied. An abandoned transfer stops
/// after the current piece.
const PIECE_BYTES: usize = 64 << 20;

/// Makes the import forget what arrived, if the cache of the source was cleared since the export
/// began. Returns the number of these blocks.
pub(super) fn forget_cleared(export: &Export, import: &mut Import) -> usize {
    if export.is_current() {
        return 0;
    }
    import.forget();
    import.missing().len()
}

impl Route {
    /// Copies the blocks that an import misses. Calls `is_abandoned` between pieces.
    ///
    /// # Errors
    ///
    /// [`TransferError::Storage`]; [`TransferError::Dropped`] once it is abandoned, or if a storage
    /// panicked. The written bytes are then meaningless.
    pub(super) fn carry(
        &self,
        export: &Export,
        import: &mut Import,
        is_abandoned: IsAbandoned<'_>,
    ) -> Result<Carried, TransferError> {
        let block_bytes = self.block_bytes();
        let mut carried = Carried::default();
        let missing = import.missing().to_vec();
        let pieces = missing.chunks((PIECE_BYTES / block_bytes.max(1)).max(1));
        for (piece, places) in (0..).zip(pieces) {
            if is_abandoned() {
                return Err(TransferError::Dropped);
            }
            let sent = self.send(export, import, piece, places);
            carried.runs += sent.inspect_err(|error| {
                if let TransferError::Storage(error) = error {
                    self.note_loss(error);
                }
            })?;
            carried.blocks += places.len();
            carried.bytes += (places.len() * block_bytes) as u64;
        }
        Ok(carried)
    }

    /// Copies a piece, and returns the number of runs.
    fn send(
        &self,
        export: &Export,
        import: &mut Import,
        piece: u64,
        places: &[u32],
    ) -> Result<usize, TransferError> {
        let (source, region) = self.from.transfers.process(&self.from.storage)?;
        let (target, into) = self.to.transfers.process(&self.to.storage)?;
        let (here, there) = (export.piece(places)?, import.piece(places)?);
        let runs = here.runs.len().max(there.runs.len());
        // Used once: by a piece of an import of this pool.
        let (tag, remote) = (Tag(import.number() << 32 | piece), there.runs.clone());
        let (peer, writer) = (source.connect(target), target.connect(source));
        let grant = Grant { tag, region: *into, runs: there.runs, peer: writer, hold: there.hold };
        // SAFETY: of a piece of an import; the region is that of its storage.
        unsafe { target.grant(grant) }?;
        let (operation, region, local, hold) = (Operation::Write, *region, here.runs, here.hold);
        let remote_region = *into;
        let submission = Submission { operation, region, peer, remote_region, local, remote, tag, hold };
        // SAFETY: of a piece of an export; the region is that of its storage.
        let sent = unsafe { source.submit(submission) };
        let state = sent.map(|transfer| source.poll(transfer, None));
        // This transport copies in `submit`: nothing is under way any more, except a copy whose end is
        // not known, which keeps its grant.
        let revoked = target.revoke(tag, SourceState::Over);
        let state = state?;
        debug_assert!(
            matches!(
                (&state, &revoked),
                (_, TransferState::Done)
                    | (
                        TransferState::Failed(TransportError::LocalStorage(
                            StorageError::LostWhileCopying { .. }
                        )),
                        TransferState::Quarantined(_)
                    )
            ),
            "{state:?}, {revoked:?}"
        );
        match state {
            TransferState::Done => Ok(runs),
            TransferState::Failed(error) => Err(error.into()),
            state => unreachable!("a copy within the process is over: {state:?}"),
        }
    }
}
