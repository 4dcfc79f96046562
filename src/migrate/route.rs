//! Two pools, and the conditions under which blocks can be transferred between them.

use crate::error::{AllocError, Invalid, StorageError, TransferError};
use crate::ids::DeviceId;
use crate::prefix::PrefixCache;
use crate::sequence::Sequences;
use crate::storage::{Storage, check_form};
use crate::sync::Arc;

use super::manifest::other_hashing;
use super::transfers::Transfers;

/// A pool as the end of a transfer.
#[derive(Clone)]
pub(crate) struct End {
    pub(super) sequences: Sequences,
    pub(super) storage: std::sync::Arc<dyn Storage>,
    pub(super) transfers: Transfers,
}

impl End {
    /// Fails with [`TransferError::NoStorage`].
    pub(crate) fn new(sequences: &Sequences, transfers: &Transfers) -> Result<Self, TransferError> {
        let pool = sequences.blocks().tag();
        let storage = sequences.storage().ok_or(TransferError::NoStorage { pool })?.clone();
        Ok(Self { sequences: sequences.clone(), storage, transfers: transfers.clone() })
    }

    pub(super) fn cache(&self) -> Result<&Arc<PrefixCache>, TransferError> {
        let pool = self.sequences.blocks().tag();
        self.sequences.cache().ok_or(TransferError::NoCache { pool })
    }

    /// Returns the era in which arriving blocks are noted from now on; 0 without a cache.
    pub(super) fn era(&self) -> u64 {
        self.sequences.cache().map_or(0, |cache| cache.era())
    }

    /// Checks that blocks can arrive, even if none will: a lost device has no cached blocks.
    pub(super) fn check_alive(&self) -> Result<(), TransferError> {
        if self.sequences.blocks().is_lost() {
            return Err(AllocError::DeviceLost { device: self.storage.device() }.into());
        }
        Ok(())
    }

    /// Poisons the pool of a lost device.
    pub(super) fn note_loss(&self, error: &StorageError) {
        let (StorageError::DeviceLost { device, .. } | StorageError::LostWhileCopying { device, .. }) = error
        else {
            return;
        };
        if *device == self.storage.device() {
            self.sequences.blocks().poison();
        }
    }
}

/// A source pool and a target pool whose blocks have the same layout.
#[derive(Clone)]
pub(crate) struct Route {
    pub(super) from: End,
    pub(super) to: End,
}

impl Route {
    /// Fails for one and the same pool, different forms, and a lost target device.
    pub(crate) fn new(from: End, to: End) -> Result<Self, TransferError> {
        if from.sequences.same(&to.sequences) {
            let got = format_args!("{}, the source", from.sequences.blocks().tag());
            return Err(Invalid::new("target", got, "another pool").into());
        }
        check_form(from.storage.layout(), to.storage.layout())?;
        to.check_alive()?;
        Ok(Self { from, to })
    }

    /// Checks that the pools find each other's cached blocks, of the same groups of layers.
    pub(super) fn check_caches(&self) -> Result<(), TransferError> {
        self.from.sequences.check_same_groups(&self.to.sequences)?;
        if self.from.cache()?.hasher().agrees_with(self.to.cache()?.hasher()) {
            return Ok(());
        }
        Err(other_hashing().into())
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.from.storage.layout().packed_bytes()
    }

    pub(super) fn is_on_host(&self) -> bool {
        [&self.from, &self.to].iter().all(|end| end.storage.device() == DeviceId::Host)
    }

    /// Poisons the pools of lost devices.
    pub(super) fn note_loss(&self, error: &StorageError) {
        [&self.from, &self.to].into_iter().for_each(|end| end.note_loss(error));
    }
}
