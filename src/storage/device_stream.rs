use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use crate::ids::DeviceId;

/// A device's work queue, owned by an engine or created by the backend: work enqueued on it runs in
/// order, and concurrently with other streams. Clones are the same stream.
#[derive(Clone)]
pub struct DeviceStream {
    device: DeviceId,
    raw: *mut c_void,
    /// Keeps the stream alive.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: a stream's handle may be used by any thread, and its owner is `Send` and `Sync`.
unsafe impl Send for DeviceStream {}
// SAFETY: as above.
unsafe impl Sync for DeviceStream {}

impl DeviceStream {
    /// Wraps an engine's stream. `owner` is kept until the last clone is dropped: the stream
    /// itself, a reference to it, or `()` if something else keeps the stream alive.
    ///
    /// # Safety
    /// Until `owner` is dropped, `raw` must be a stream of that device (on CUDA, a `CUstream` of
    /// its primary context; null is the default stream).
    pub unsafe fn from_raw(device: DeviceId, raw: *mut c_void, owner: impl Send + Sync + 'static) -> Self {
        Self { device, raw, _owner: Arc::new(owner) }
    }

    /// Returns the device.
    #[inline]
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Returns the handle for the device's driver.
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
