//! Two pools, and what both must have for blocks to go from one to the other.

use crate::error::{AllocError, StorageError, TransferError};
use crate::ids::DeviceId;
use crate::prefix::PrefixCache;
use crate::sequence::Sequences;
use crate::storage::{Storage, check_form};
use crate::sync::Arc;

/// One end of a route.
#[derive(Clone)]
pub(super) struct End {
    pub(super) sequences: Sequences,
    pub(super) storage: std::sync::Arc<dyn Storage>,
}

impl End {
    fn new(sequences: &Sequences) -> Result<Self, TransferError> {
        let pool = sequences.blocks().tag();
        let storage = sequences.storage().ok_or(TransferError::NoStorage { pool })?.clone();
        Ok(Self { sequences: sequences.clone(), storage })
    }

    pub(super) fn cache(&self) -> Result<&Arc<PrefixCache>, TransferError> {
        let pool = self.sequences.blocks().tag();
        self.sequences.cache().ok_or(TransferError::NoCache { pool })
    }
}

/// From a pool to another whose blocks have the same form.
#[derive(Clone)]
pub(super) struct Route {
    pub(super) from: End,
    pub(super) to: End,
}

impl Route {
    /// # Errors
    ///
    /// [`TransferError::SamePool`], [`TransferError::NoStorage`], [`StorageError::OtherForm`]; [`AllocError::DeviceLost`] of
    /// the device that is to receive.
    pub(super) fn new(from: &Sequences, to: &Sequences) -> Result<Self, TransferError> {
        if from.same(to) {
            return Err(TransferError::SamePool { pool: from.blocks().tag() });
        }
        let (from, to) = (End::new(from)?, End::new(to)?);
        check_form(from.storage.layout(), to.storage.layout())?;
        // Also if nothing is to be copied: what is cached there is lost.
        if to.sequences.blocks().is_lost() {
            return Err(AllocError::DeviceLost { device: to.storage.device() }.into());
        }
        Ok(Self { from, to })
    }

    /// As [`new`](Self::new), between pools that find each other's cached blocks.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); [`TransferError::NoCache`], [`TransferError::OtherHashing`].
    pub(super) fn between_caches(from: &Sequences, to: &Sequences) -> Result<Self, TransferError> {
        let route = Self::new(from, to)?;
        if !route.from.cache()?.hasher().agrees_with(route.to.cache()?.hasher()) {
            let [from, to] = [from, to].map(|end| end.blocks().tag());
            return Err(TransferError::OtherHashing { from, to });
        }
        Ok(route)
    }

    /// The bytes of a block on the way.
    pub(super) fn block_bytes(&self) -> usize {
        self.from.storage.layout().packed_bytes()
    }

    /// Whether both ends are in the host's memory.
    pub(super) fn is_on_host(&self) -> bool {
        [&self.from, &self.to].iter().all(|end| end.storage.device() == DeviceId::Host)
    }

    /// The pool of a device that is lost hands out no blocks any more.
    pub(super) fn note_loss(&self, error: &StorageError) {
        if let StorageError::DeviceLost { device, .. } = error {
            for end in [&self.from, &self.to] {
                if end.storage.device() == *device {
                    end.sequences.blocks().poison();
                }
            }
        }
    }
}
