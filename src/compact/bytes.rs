//! Who copies a wave's bytes.

use std::sync::Arc;

use tokio::runtime::Handle;

use crate::ids::DeviceId;
use crate::storage::{CopyDone, FrameMove, Storage};

/// Copies frames for a pool that was built without storage: an engine's own memory. It is called with moves no
/// destination of which is a source, and says through [`CopyDone`], from any thread, when they are done; by then it must
/// not touch these frames any more. Nobody writes the sources meanwhile, and nobody else touches the destinations.
pub type FrameCopier = Arc<dyn Fn(&[FrameMove], CopyDone) + Send + Sync>;

/// Fewer bytes are copied at once: to wake another thread would take longer.
const COPIED_AT_ONCE: usize = 256 << 10;

/// Where a pool's bytes are, for somebody who moves them.
#[derive(Clone)]
pub enum Bytes {
    /// In the pool's storage.
    Storage(Arc<dyn Storage>),
    /// With the engine.
    Engine(FrameCopier),
    /// Nobody knows: nothing can move.
    Unknown,
}

impl Bytes {
    /// Whether anything can move.
    pub(super) fn are_known(&self) -> bool {
        !matches!(self, Self::Unknown)
    }

    /// Begins to copy so many bytes. On host memory the copying is work for a processor: on a tokio runtime a thread for such work does
    /// it, elsewhere the caller.
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
                match Handle::try_current() {
                    Ok(runtime) if bytes >= COPIED_AT_ONCE => drop(runtime.spawn_blocking(copy)),
                    _ => copy(),
                }
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
