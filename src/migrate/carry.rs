//! Copies the blocks of an export into an import within the process: piece by piece, in few runs.

use crate::error::{StorageError, TransferError};
use crate::sequence::AnySequence;

use super::export::Export;
use super::import::Import;
use super::job::IsAbandoned;
use super::report::Carried;
use super::route::Route;

/// Bytes per piece. Source blocks are pinned for a piece, and an abandoned transfer stops after it.
const PIECE_BYTES: usize = 64 << 20;

/// Makes the import forget blocks if the source was cleared since the export; returns their number.
pub(super) fn forget_cleared<S: AnySequence>(export: &Export<S>, import: &mut Import) -> usize {
    if export.is_current() {
        return 0;
    }
    import.forget();
    import.missing().len()
}

impl Route {
    /// Copies the blocks that an import misses. Calls `is_abandoned` between pieces, and fails with
    /// [`TransferError::Dropped`] if it is. On an error the written bytes are meaningless.
    pub(super) fn carry<S: AnySequence>(
        &self,
        export: &Export<S>,
        import: &mut Import,
        is_abandoned: IsAbandoned<'_>,
    ) -> Result<Carried, TransferError> {
        let block_bytes = self.block_bytes();
        let mut carried = Carried::default();
        let missing = import.missing().to_vec();
        for places in missing.chunks((PIECE_BYTES / block_bytes.max(1)).max(1)) {
            if is_abandoned() {
                return Err(TransferError::Dropped);
            }
            carried.runs += self.copy(export, import, places)?;
            carried.blocks += places.len();
            carried.bytes += (places.len() * block_bytes) as u64;
        }
        Ok(carried)
    }

    /// Copies a piece, and returns the number of runs.
    fn copy<S: AnySequence>(
        &self,
        export: &Export<S>,
        import: &mut Import,
        places: &[u32],
    ) -> Result<usize, TransferError> {
        let (here, there) = (export.piece(places)?, import.piece(places)?);
        // SAFETY: while the holds live, no thread writes the frames of the source's piece, and no
        // other thread accesses those of the target's.
        let copied = unsafe { self.to.storage.receive(&*self.from.storage, &here.runs, &there.runs) };
        if let Err(error) = &copied {
            self.note_loss(error);
        }
        if matches!(copied, Err(StorageError::LostWhileCopying { .. })) {
            // The bytes may still be read and written: frames and storages are never released.
            std::mem::forget((here.hold, there.hold));
        }
        copied?;
        Ok(here.runs.len().max(there.runs.len()))
    }
}
