//! Storages for a single test: host memory with a few methods replaced.

/// In an `impl Storage`, forwards methods to the [`HostStorage`](kvpool::storage::HostStorage) in
/// this field. The test writes `device`, and overrides default methods as needed; with `but store
/// and load`, or `but store, load and copy`, after the field, it writes these as well. Tiles are
/// not forwarded, so that such a storage can have streams.
///
/// ```
/// # use kvpool::{DeviceId, storage::{HostStorage, Storage}};
/// #[derive(Debug)]
/// struct Elsewhere(HostStorage);
///
/// impl Storage for Elsewhere {
///     kvpool_testkit::as_on_the_host!(0);
///
///     fn device(&self) -> DeviceId {
///         DeviceId::Cuda(3)
///     }
/// }
/// ```
#[macro_export]
macro_rules! as_on_the_host {
    ($field:tt) => {
        $crate::as_on_the_host!($field, but store and load);

        unsafe fn store(
            &self,
            layer: usize,
            k: ::kvpool::storage::Elements<'_>,
            v: ::kvpool::storage::Elements<'_>,
            slots: &[i64],
        ) -> Result<(), ::kvpool::StorageError> {
            // SAFETY: see above.
            unsafe { self.$field.store(layer, k, v, slots) }
        }

        unsafe fn load(
            &self,
            layer: usize,
            slots: &[i64],
            k: ::kvpool::storage::ElementsMut<'_>,
            v: ::kvpool::storage::ElementsMut<'_>,
        ) -> Result<(), ::kvpool::StorageError> {
            // SAFETY: see above.
            unsafe { self.$field.load(layer, slots, k, v) }
        }
    };
    ($field:tt, but store and load) => {
        $crate::as_on_the_host!($field, but store, load and copy);

        unsafe fn copy(
            &self,
            moves: &[::kvpool::storage::FrameMove],
        ) -> Result<(), ::kvpool::StorageError> {
            // SAFETY: the caller upholds the frame rule.
            unsafe { self.$field.copy(moves) }
        }
    };
    ($field:tt, but store, load and copy) => {
        fn as_any(&self) -> &dyn ::std::any::Any {
            self
        }

        fn layout(&self) -> &::kvpool::storage::KvLayout {
            self.$field.layout()
        }

        fn frames(&self) -> usize {
            self.$field.frames()
        }

        fn frames_max(&self) -> usize {
            self.$field.frames_max()
        }

        fn planes(&self) -> Result<::kvpool::storage::StoragePlanes, ::kvpool::StorageError> {
            self.$field.planes()
        }

        fn grow(&self, total: usize) -> Result<(), ::kvpool::GrowError> {
            self.$field.grow(total)
        }

        unsafe fn shrink(&self, total: usize) {
            // SAFETY: the caller upholds the frame rule, here and below.
            unsafe { self.$field.shrink(total) }
        }

        unsafe fn pack(
            &self,
            runs: &[::kvpool::Run],
            out: &mut [u8],
        ) -> Result<(), ::kvpool::StorageError> {
            // SAFETY: see above.
            unsafe { self.$field.pack(runs, out) }
        }

        unsafe fn unpack(
            &self,
            runs: &[::kvpool::Run],
            bytes: &[u8],
        ) -> Result<(), ::kvpool::StorageError> {
            // SAFETY: see above.
            unsafe { self.$field.unpack(runs, bytes) }
        }

        unsafe fn zero(&self, runs: &[::kvpool::Run]) -> Result<(), ::kvpool::StorageError> {
            // SAFETY: see above.
            unsafe { self.$field.zero(runs) }
        }
    };
}

use std::any::Any;
use std::fmt;

use kvpool::storage::{
    Elements, ElementsMut, FrameMove, HostStorage, HostTile, KvLayout, Storage, StoragePlanes,
};
use kvpool::{DeviceId, FrameId, GrowError, Run, StorageError};

/// Calls of a pool to a [`Hooked`] storage.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Call {
    /// Growth.
    Grow,
    /// Shrinking.
    Shrink,
    /// Number of frames copied.
    Copy,
    /// Number of frames wiped.
    Zero,
}

type Hook = Box<dyn Fn(Call) -> Result<(), StorageError> + Send + Sync>;

/// Host memory behind a hook that is called first: the hook may block, panic, or refuse.
pub struct Hooked {
    host: HostStorage,
    hook: Hook,
}

impl Hooked {
    /// Creates frames of this layout.
    ///
    /// # Panics
    ///
    /// If there is no memory for them.
    pub fn new(
        layout: KvLayout,
        frames: usize,
        frames_max: usize,
        hook: impl Fn(Call) -> Result<(), StorageError> + Send + Sync + 'static,
    ) -> Self {
        let host = HostStorage::new(layout, frames, frames_max).expect("a few frames fit into memory");
        Self { host, hook: Box::new(hook) }
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Hooked").field(&self.host).finish()
    }
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
        self.host.planes()
    }

    unsafe fn tile(&self, layer: usize, frame: FrameId) -> Result<HostTile, StorageError> {
        // SAFETY: the caller upholds the frame rule, here and below.
        unsafe { self.host.tile(layer, frame) }
    }

    fn grow(&self, total: usize) -> Result<(), GrowError> {
        (self.hook)(Call::Grow).map_err(|_| GrowError::Memory { asked: total, reason: "on purpose" })?;
        self.host.grow(total)
    }

    unsafe fn shrink(&self, total: usize) {
        let _ = (self.hook)(Call::Shrink);
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
        (self.hook)(Call::Copy)?;
        // SAFETY: see above.
        unsafe { self.host.copy(moves) }
    }

    unsafe fn pack(&self, runs: &[Run], out: &mut [u8]) -> Result<(), StorageError> {
        // SAFETY: see above.
        unsafe { self.host.pack(runs, out) }
    }

    unsafe fn unpack(&self, runs: &[Run], bytes: &[u8]) -> Result<(), StorageError> {
        // SAFETY: see above.
        unsafe { self.host.unpack(runs, bytes) }
    }

    unsafe fn zero(&self, runs: &[Run]) -> Result<(), StorageError> {
        (self.hook)(Call::Zero)?;
        // SAFETY: see above.
        unsafe { self.host.zero(runs) }
    }
}
