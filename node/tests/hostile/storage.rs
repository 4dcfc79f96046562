//! Host memory behind a hook, which looks like that of a device: blocks are packed on threads.

use std::any::Any;
use std::sync::Arc;

use kvpool::storage::{Elements, ElementsMut, FrameMove, HostStorage, KvLayout, Storage, StoragePlanes};
use kvpool::{DeviceId, GrowError, Pool, Run, StorageError};

use crate::kv;

/// Access of a transfer to the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    Pack,
    Unpack,
}

type Hook = Box<dyn Fn(Access) + Send + Sync>;

pub struct Hooked {
    host: HostStorage,
    hook: Hook,
}

impl std::fmt::Debug for Hooked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hooked")
    }
}

/// A pool whose storage calls a hook before bytes of blocks are packed or unpacked.
pub fn pool(layout: KvLayout, blocks: usize, hook: impl Fn(Access) + Send + Sync + 'static) -> Pool {
    let host = HostStorage::new(layout.clone(), blocks + 1, blocks + 1).unwrap();
    let storage = Arc::new(Hooked { host, hook: Box::new(hook) });
    kv::builder(layout, blocks).storage(storage).prefix_cache(kv::config()).build().unwrap()
}

impl Storage for Hooked {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn layout(&self) -> &KvLayout {
        self.host.layout()
    }

    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    fn frames(&self) -> usize {
        self.host.frames()
    }

    fn frames_max(&self) -> usize {
        self.host.frames_max()
    }

    fn planes(&self) -> Result<StoragePlanes, StorageError> {
        let doing = "planes of memory that the processor does not reach";
        Err(StorageError::Device { device: DeviceId::Cuda(3), doing, reason: "on purpose".into() })
    }

    fn grow(&self, total: usize) -> Result<(), GrowError> {
        self.host.grow(total)
    }

    unsafe fn shrink(&self, total: usize) {
        // SAFETY: the caller upholds the frame rule, here and below.
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
        (self.hook)(Access::Pack);
        // SAFETY: see above.
        unsafe { self.host.pack(runs, out) }
    }

    unsafe fn unpack(&self, runs: &[Run], bytes: &[u8]) -> Result<(), StorageError> {
        (self.hook)(Access::Unpack);
        // SAFETY: see above.
        unsafe { self.host.unpack(runs, bytes) }
    }

    unsafe fn zero(&self, runs: &[Run]) -> Result<(), StorageError> {
        // SAFETY: see above.
        unsafe { self.host.zero(runs) }
    }
}

/// A gate at which threads wait until it is open.
#[derive(Clone, Default)]
pub struct Gate(Arc<(std::sync::Mutex<bool>, std::sync::Condvar)>);

impl Gate {
    pub fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    pub fn pass(&self) {
        let open = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(open, |open| !*open).unwrap());
    }
}
