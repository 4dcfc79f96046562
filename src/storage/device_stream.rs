//! A device's queue of work, as an engine hands it over.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use crate::ids::DeviceId;

/// A stream of a device: work that is enqueued on it runs in order, and beside other streams. The engine's own, or one that
/// the device's backend made; clones are the same stream.
#[derive(Clone)]
pub struct DeviceStream {
    device: DeviceId,
    raw: *mut c_void,
    /// Whatever owns the stream.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: a stream's handle may be used by any thread, and its owner is `Send` and `Sync`.
unsafe impl Send for DeviceStream {}
// SAFETY: as above.
unsafe impl Sync for DeviceStream {}

impl DeviceStream {
    /// An engine's stream. `owner` is kept for as long as this stream or a clone of it lives: the stream, a reference to it, or
    /// `()` if something else sees to it that it stays.
    ///
    /// # Safety
    ///
    /// `raw` is a stream of that device (on CUDA a `CUstream` of its primary context; null is the default stream), until `owner` is dropped.
    pub unsafe fn from_raw(device: DeviceId, raw: *mut c_void, owner: impl Send + Sync + 'static) -> Self {
        Self { device, raw, _owner: Arc::new(owner) }
    }

    /// The device.
    #[inline]
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// The handle, as the device's driver knows it.
    #[inline]
    pub fn as_raw(&self) -> *mut c_void {
        self.raw
    }
}

impl fmt::Debug for DeviceStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {:p} of {}", self.raw, self.device)
    }
}
