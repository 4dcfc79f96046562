//! Host memory behind a hook, which transports do not reach: blocks are packed on threads.

use std::any::Any;
use std::fmt;

use kvpool::storage::{Elements, ElementsMut, FrameMove, HostStorage, KvLayout, Storage};
use kvpool::{DeviceId, GrowError, Run, StorageError};

/// Access of a transfer to the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    Pack,
    Unpack,
}

type Hook = Box<dyn Fn(Access) -> Result<(), StorageError> + Send + Sync>;

pub struct Hooked {
    host: HostStorage,
    device: DeviceId,
    hook: Hook,
}

impl Hooked {
    /// Memory that is said to be of a device, and calls `hook` before blocks are packed or unpacked.
    pub fn new(
        layout: &KvLayout,
        frames: usize,
        device: DeviceId,
        hook: impl Fn(Access) -> Result<(), StorageError> + Send + Sync + 'static,
    ) -> Self {
        let host = HostStorage::new(layout.clone(), frames, frames).unwrap();
        Self { host, device, hook: Box::new(hook) }
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hooked")
    }
}

// SAFETY of all: the caller's promises are those of the inner storage.
impl Storage for Hooked {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn layout(&self) -> &KvLayout {
        self.host.layout()
    }

    fn device(&self) -> DeviceId {
        self.device
    }

    fn frames(&self) -> usize {
        self.host.frames()
    }

    fn frames_max(&self) -> usize {
        self.host.frames_max()
    }

    fn grow(&self, total: usize) -> Result<(), GrowError> {
        self.host.grow(total)
    }

    unsafe fn shrink(&self, total: usize) {
        // SAFETY: see above.
        unsafe { self.host.shrink(total) }
    }

    unsafe fn store(
        &self,
        layer: usize,
        k: Elements<'_>,
        v: Elements<'_>,
        slots: &[i64],
    ) -> Result<(), StorageError> {
        // SAFETY: see above.
        unsafe { self.host.store(layer, k, v, slots) }
    }

    unsafe fn load(
        &self,
        layer: usize,
        slots: &[i64],
        k: ElementsMut<'_>,
        v: ElementsMut<'_>,
    ) -> Result<(), StorageError> {
        // SAFETY: see above.
        unsafe { self.host.load(layer, slots, k, v) }
    }

    unsafe fn copy(&self, moves: &[FrameMove]) -> Result<(), StorageError> {
        // SAFETY: see above.
        unsafe { self.host.copy(moves) }
    }

    unsafe fn pack(&self, runs: &[Run], out: &mut [u8]) -> Result<(), StorageError> {
        (self.hook)(Access::Pack)?;
        // SAFETY: see above.
        unsafe { self.host.pack(runs, out) }
    }

    unsafe fn unpack(&self, runs: &[Run], bytes: &[u8]) -> Result<(), StorageError> {
        (self.hook)(Access::Unpack)?;
        // SAFETY: see above.
        unsafe { self.host.unpack(runs, bytes) }
    }

    unsafe fn zero(&self, runs: &[Run]) -> Result<(), StorageError> {
        // SAFETY: see above.
        unsafe { self.host.zero(runs) }
    }
}
