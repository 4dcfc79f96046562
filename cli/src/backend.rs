//! The memory of a pool: the host's, or a device's.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use kvpool::error::StorageError;
use kvpool::ids::DeviceId;
use kvpool::storage::{DeviceStream, HostStorage, KvLayout, Storage, host_free_bytes};

use crate::commands::CommandError;

/// A device by its name, `host` or `cuda:N`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceArg(pub DeviceId);

impl Default for DeviceArg {
    fn default() -> Self {
        Self(DeviceId::Host)
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "host" {
            return Ok(Self(DeviceId::Host));
        }
        let ordinal = text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
        ordinal
            .map(|ordinal| Self(DeviceId::Cuda(ordinal)))
            .ok_or_else(|| "neither host nor cuda:N".to_owned())
    }
}

/// The memory that a pool is built in.
#[derive(Clone, Debug)]
pub enum Backend {
    /// The memory of this machine.
    Host,
    /// The memory of a device.
    #[cfg(feature = "cuda")]
    Cuda(kvpool::cuda::Device),
}

impl Backend {
    /// Opens a device.
    ///
    /// # Errors
    ///
    /// [`CommandError::Device`]: it does not exist, or it cannot be used.
    pub fn open(device: DeviceArg) -> Result<Self, CommandError> {
        match device.0 {
            DeviceId::Host => Ok(Self::Host),
            #[cfg(feature = "cuda")]
            DeviceId::Cuda(ordinal) => kvpool::cuda::Device::open(usize::from(ordinal))
                .map(Self::Cuda)
                .map_err(|error| CommandError::Device { device, reason: error.to_string() }),
            _ => {
                let reason = "this program was built without the feature `cuda`".to_owned();
                Err(CommandError::Device { device, reason })
            }
        }
    }

    /// Returns the free bytes, if they can be known.
    pub fn free_bytes(&self) -> Option<u64> {
        match self {
            Self::Host => host_free_bytes(),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => device.memory_bytes().ok().map(|(free, _)| free),
        }
    }

    /// Creates the storage of a pool.
    ///
    /// # Errors
    ///
    /// There is too little memory.
    pub fn storage(
        &self,
        layout: KvLayout,
        frames: usize,
        frames_max: usize,
    ) -> Result<Arc<dyn Storage>, StorageError> {
        Ok(match self {
            Self::Host => Arc::new(HostStorage::new(layout, frames, frames_max)?),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => {
                Arc::new(kvpool::cuda::CudaStorage::new(device, layout, frames, frames_max)?)
            }
        })
    }

    /// Creates `count` streams of the device; none on the host.
    ///
    /// # Errors
    ///
    /// The device's.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub fn streams(&self, count: usize) -> Result<Vec<DeviceStream>, StorageError> {
        match self {
            Self::Host => Ok(Vec::new()),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => (0..count).map(|_| device.stream()).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names() {
        for (text, device) in
            [("host", DeviceId::Host), ("cuda:0", DeviceId::Cuda(0)), ("cuda:12", DeviceId::Cuda(12))]
        {
            assert_eq!(text.parse(), Ok(DeviceArg(device)));
            assert_eq!(DeviceArg(device).to_string(), text);
        }
        for bad in ["", "cuda", "cuda:", "cuda:-1", "cuda:99999", "gpu:0", "HOST", "cuda:0 "] {
            assert!(bad.parse::<DeviceArg>().is_err(), "{bad:?}");
        }
    }
}
