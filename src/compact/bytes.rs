use std::sync::Arc;

use crate::ids::DeviceId;
use crate::storage::{CopyDone, FrameMove, Storage, WAVE_BYTES};
use crate::sync::runtime::run_blocking;

/// Copies frames for a pool that was built without storage, in the engine's own memory.
///
/// No destination is also a source. During the copy, the sources are not written, and nothing else
/// accesses the destinations. The copier may complete on any thread and reports the end through
/// [`CopyDone`], after which it must not touch these frames.
pub type FrameCopier = Arc<dyn Fn(&[FrameMove], CopyDone) + Send + Sync>;

/// Smaller copies run on the calling thread: waking another one would take longer.
const COPIED_AT_ONCE: usize = 256 << 10;

/// Where a pool's bytes are.
#[derive(Clone)]
pub enum Bytes {
    /// In the pool's storage.
    Storage(Arc<dyn Storage>),
    /// In the engine's memory.
    Engine(FrameCopier),
    /// Unknown: no block can move.
    Unknown,
}

impl Bytes {
    pub(super) fn are_known(&self) -> bool {
        !matches!(self, Self::Unknown)
    }

    pub(super) fn wave_bytes(&self) -> usize {
        match self {
            Self::Storage(storage) => storage.wave_bytes(),
            Self::Engine(_) | Self::Unknown => WAVE_BYTES,
        }
    }

    pub(super) fn waves_in_flight(&self) -> usize {
        match self {
            Self::Storage(storage) => storage.waves_in_flight(),
            Self::Engine(_) | Self::Unknown => 1,
        }
    }

    /// Starts copying frames, `bytes` bytes in total. In host memory, a long copy runs on a
    /// blocking thread of the tokio runtime, if there is one, otherwise on the caller.
    ///
    /// # Safety
    /// [The frame rule](Storage#the-frame-rule), until `done` is called or dropped.
    pub(super) unsafe fn copy_then(&self, moves: Vec<FrameMove>, bytes: usize, done: CopyDone) {
        match self {
            Self::Storage(storage) if storage.device() == DeviceId::Host => {
                let storage = storage.clone();
                let copy = move || {
                    // SAFETY: the caller's guarantee lasts until `done` is called.
                    unsafe { storage.copy_then(&moves, done) };
                };
                if bytes >= COPIED_AT_ONCE { run_blocking(copy) } else { copy() }
            }
            // SAFETY: the caller's guarantee.
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
