//! Wiping of freed frames through a pool's storage.

#[cfg(not(kvpool_loom))]
use std::sync::OnceLock;
use std::sync::{Arc, Weak};

#[cfg(not(kvpool_loom))]
use crate::block::WeakBlocks;
use crate::block::{Blocks, Scrub};
use crate::error::StorageError;
use crate::ids::Run;
use crate::storage::Storage;

/// Wipes freed frames of one pool.
///
/// A thread that reports the ends of device work only begins a wipe: if it waited for the device, it
/// would delay all other reports, among them that of the wipe.
pub(super) struct FrameScrub {
    /// Weak: thread caches keep the block metadata alive, and must not keep the bytes alive.
    storage: Weak<dyn Storage>,
    /// Told of the ends of deferred wipes.
    #[cfg(not(kvpool_loom))]
    blocks: OnceLock<WeakBlocks>,
}

/// A share of a pool's scrub, for its free space.
pub(super) struct SharedScrub(pub(super) Arc<FrameScrub>);

impl FrameScrub {
    pub(super) fn new(storage: &Arc<dyn Storage>) -> Arc<Self> {
        Arc::new(Self {
            storage: Arc::downgrade(storage),
            #[cfg(not(kvpool_loom))]
            blocks: OnceLock::new(),
        })
    }

    /// Sets the blocks whose frames are wiped; without them no wipe is deferred.
    pub(super) fn serve(&self, blocks: &Blocks) {
        #[cfg(not(kvpool_loom))]
        let _ = self.blocks.set(blocks.downgrade());
        #[cfg(kvpool_loom)]
        let _ = blocks;
    }
}

/// Returns true if the old contents of the frames cannot be read any more.
fn is_wiped(outcome: &Result<(), StorageError>) -> bool {
    // The contents of a lost device cannot be read any more, nor can later contents.
    outcome.as_ref().err().is_none_or(StorageError::is_lost)
}

impl Scrub for SharedScrub {
    fn wipe(&self, run: Run) {
        // The pool and its sequences are gone, so that no reader of the frames is left.
        let Some(storage) = self.0.storage.upgrade() else { return };
        // SAFETY: the block floor passes frames that are unowned and seen by no batch, before it
        // frees them.
        let outcome = unsafe { storage.zero(&[run]) };
        if !is_wiped(&outcome) {
            panic!("zeroing {run} of this pool failed: {outcome:?}");
        }
    }

    #[cfg(not(kvpool_loom))]
    fn is_deferred(&self) -> bool {
        let storage = self.0.storage.upgrade();
        self.0.blocks.get().is_some() && storage.is_some_and(|storage| storage.must_not_wait())
    }

    #[cfg(not(kvpool_loom))]
    fn begin_wipe(&self, run: Run) {
        let scrub = self.0.clone();
        let end = move |outcome| {
            if let Some(blocks) = scrub.blocks.get().and_then(WeakBlocks::upgrade) {
                blocks.wiped(run, is_wiped(&outcome));
            }
        };
        match self.0.storage.upgrade() {
            // SAFETY: as above; the frames are held until the end.
            Some(storage) => unsafe { storage.zero_then(&[run], Box::new(end)) },
            None => end(Ok(())),
        }
    }
}
