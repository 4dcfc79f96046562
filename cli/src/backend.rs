//! The memory of a pool: of the host or a device.

use std::sync::Arc;

use indicatif::{BinaryBytes, HumanCount};
use kvpool::storage::{DeviceStream, HostStorage, KvLayout, Storage, host_free_bytes};
use kvpool::{DeviceId, StorageError};

/// Bytes of metadata per block: its row in the pool's table, whose number of rows is rounded up to
/// a power of two, its bits, and its place in the request for all blocks at the end of a replay.
const METADATA_BYTES: usize = 2 * 28 + 1 + 4;

/// Parses the name of a device, `host` or `cuda:N`.
pub(crate) fn device(name: &str) -> Result<DeviceId, String> {
    let ordinal = || name.strip_prefix("cuda:")?.parse().ok().map(DeviceId::Cuda);
    let host = (name == "host").then_some(DeviceId::Host);
    host.or_else(ordinal).ok_or_else(|| "neither host nor cuda:N".to_owned())
}

/// The memory of a pool.
#[derive(Clone, Debug)]
pub enum Backend {
    /// Host memory.
    Host,
    /// The memory of a device.
    #[cfg(feature = "cuda")]
    Cuda(kvpool_cuda::Device),
}

impl Backend {
    /// Opens a device, or returns why it cannot be used.
    pub(crate) fn open(device: DeviceId) -> Result<Self, String> {
        match device {
            DeviceId::Host => Ok(Self::Host),
            #[cfg(feature = "cuda")]
            DeviceId::Cuda(ordinal) => kvpool_cuda::Device::open(usize::from(ordinal))
                .map(Self::Cuda)
                .map_err(|error| error.to_string()),
            _ => Err(crate::output::not_built("cuda")),
        }
    }

    pub(crate) fn free_bytes(&self) -> Option<u64> {
        match self {
            Self::Host => host_free_bytes(),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => device.memory_bytes().ok().map(|(free, _)| free),
        }
    }

    /// Checks that a pool fits into the free memory; `size` is the option of its number of blocks.
    /// The system commits pages as they are written, so a pool that is too large would fail midway.
    pub(crate) fn check_room(&self, layout: &KvLayout, blocks: usize, size: &str) -> anyhow::Result<()> {
        let block_bytes = layout.bytes_per_block().saturating_add(METADATA_BYTES) as u64;
        match self.free_bytes() {
            Some(free) if block_bytes.saturating_mul(blocks as u64) > free => anyhow::bail!(
                "a pool of {} blocks of {} (metadata included) does not fit into the {} that are free ({size}, --layout)",
                HumanCount(blocks as u64),
                BinaryBytes(block_bytes),
                BinaryBytes(free)
            ),
            _ => Ok(()),
        }
    }

    pub(crate) fn storage(
        &self,
        layout: KvLayout,
        frames: usize,
        frames_max: usize,
    ) -> Result<Arc<dyn Storage>, StorageError> {
        Ok(match self {
            Self::Host => Arc::new(HostStorage::new(layout, frames, frames_max)?),
            #[cfg(feature = "cuda")]
            Self::Cuda(device) => {
                Arc::new(kvpool_cuda::CudaStorage::new(device, layout, frames, frames_max)?)
            }
        })
    }

    /// Creates `count` streams of the device; none on the host.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables))]
    pub(crate) fn streams(&self, count: usize) -> Result<Vec<DeviceStream>, StorageError> {
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
            assert_eq!(super::device(text), Ok(device));
            assert_eq!(device.to_string(), text);
        }
        for bad in ["", "cuda", "cuda:", "cuda:-1", "cuda:99999", "gpu:0", "HOST", "cuda:0 "] {
            assert!(super::device(bad).is_err(), "{bad:?}");
        }
    }
}
