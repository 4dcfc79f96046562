//! Two pools, and the conditions under which blocks can be transferred between them.

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

/// A source pool and a target pool whose blocks have the same layout.
#[derive(Clone)]
pub(super) struct Route {
    pub(super) from: End,
    pub(super) to: End,
}

impl Route {
    /// Creates the route from one pool to another.
    ///
    /// # Errors
    ///
    /// [`TransferError::SamePool`], [`TransferError::NoStorage`], [`StorageError::OtherForm`];
    /// [`AllocError::DeviceLost`] of the target's device.
    pub(super) fn new(from: &Sequences, to: &Sequences) -> Result<Self, TransferError> {
        if from.same(to) {
            return Err(TransferError::SamePool { pool: from.blocks().tag() });
        }
        let (from, to) = (End::new(from)?, End::new(to)?);
        check_form(from.storage.layout(), to.storage.layout())?;
        // Even if nothing is to be copied: the target's cached blocks are lost.
        if to.sequences.blocks().is_lost() {
            return Err(AllocError::DeviceLost { device: to.storage.device() }.into());
        }
        Ok(Self { from, to })
    }

    /// Like [`new`](Self::new), for pools that find each other's cached blocks.
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

    /// Returns the packed bytes of a block.
    pub(super) fn block_bytes(&self) -> usize {
        self.from.storage.layout().packed_bytes()
    }

    /// Returns whether both ends are in host memory.
    pub(super) fn is_on_host(&self) -> bool {
        [&self.from, &self.to].iter().all(|end| end.storage.device() == DeviceId::Host)
    }

    /// Marks the pools of a lost device, so that they hand out no blocks any more.
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
