//! Copying the bytes of a wave.

use std::sync::Arc;

use crate::ids::DeviceId;
use crate::storage::{CopyDone, FrameMove, Storage, WAVE_BYTES};
use crate::sync::runtime::run_blocking;

/// Copies frames for a pool that was built without storage, in the engine's own memory.
///
/// No destination of its moves is also a source. During the copy, the sources are not written, and
/// no one else accesses the destinations. It may complete on any thread, and reports the end
/// through [`CopyDone`], after which it must not touch these frames.
pub type FrameCopier = Arc<dyn Fn(&[FrameMove], CopyDone) + Send + Sync>;

/// Smaller copies are done by the calling thread, because waking another one would take longer.
const COPIED_AT_ONCE: usize = 256 << 10;

/// Location of a pool's bytes, as far as moves need to know.
#[derive(Clone)]
pub enum Bytes {
    /// In the pool's storage.
    Storage(Arc<dyn Storage>),
    /// In the engine's memory.
    Engine(FrameCopier),
    /// Unknown, so that no block can move.
    Unknown,
}

impl Bytes {
    /// Returns true if blocks can move.
    pub(super) fn are_known(&self) -> bool {
        !matches!(self, Self::Unknown)
    }

    /// Returns the bytes of a wave.
    pub(super) fn wave_bytes(&self) -> usize {
        match self {
            Self::Storage(storage) => storage.wave_bytes(),
            Self::Engine(_) | Self::Unknown => WAVE_BYTES,
        }
    }

    /// Returns the maximum number of waves in flight.
    pub(super) fn waves_in_flight(&self) -> usize {
        match self {
            Self::Storage(storage) => storage.waves_in_flight(),
            Self::Engine(_) | Self::Unknown => 1,
        }
    }

    /// Starts copying frames, `bytes` bytes in total.
    ///
    /// A copy in host memory takes processor time: on a tokio runtime a blocking-pool thread does
    /// it, elsewhere, or if it is short, the caller.
    ///
    /// # Safety
    ///
    /// [The frame rule](Storage#the-frame-rule), until `done` is called or dropped.
    pub(super) unsafe fn copy_then(&self, moves: Vec<FrameMove>, bytes: usize, done: CopyDone) {
        match self {
            Self::Storage(storage) if storage.device() == DeviceId::Host => {
                let storage = storage.clone();
                let copy = move || {
                    // SAFETY: the caller's promise lasts until `done` is called.
                    unsafe { storage.copy_then(&moves, done) };
                };
                if bytes >= COPIED_AT_ONCE { run_blocking(copy) } else { copy() }
            }
            // SAFETY: the caller's promise.
            Self::Storage(storage) => unsafe { storage.copy_then(&moves, done) },
            Self::Engine(copier) => copier(&moves, done),
            Self::Unknown => drop(done),
        }
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Storage(storage) => f.debug_tuple("Storage").field(storage).finish(),
            Self::Engine(_) => f.write_str("Engine"),
            Self::Unknown => f.write_str("Unknown"),
        }
    }
}
