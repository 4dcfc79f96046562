use thiserror::Error;

use super::Invalid;
use crate::ids::DeviceId;

/// Reason why a storage operation failed. No bytes were moved.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum StorageError {
    /// An argument, or the layout, is invalid.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The system provided no memory.
    #[error("could not reserve {bytes} bytes: {reason}")]
    Memory {
        /// Number of bytes requested.
        bytes: usize,
        /// Reason given by the system.
        reason: std::io::ErrorKind,
    },
    /// The device has too little free memory.
    #[error("{device} has {free} of {total} bytes free; {bytes} more are needed")]
    DeviceMemory {
        /// The device.
        device: DeviceId,
        /// Number of bytes requested.
        bytes: u64,
        /// Number of bytes free.
        free: u64,
        /// Number of bytes in total.
        total: u64,
    },
    /// The storage does not support the operation.
    #[error("the storage on {device} has no {what}")]
    Unsupported {
        /// Device of the storage.
        device: DeviceId,
        /// The operation.
        what: &'static str,
    },
    /// The packed blocks of two storages differ: layers, heads, sizes, dtype or scales.
    #[error("blocks of {from} cannot be copied to {to}: the packed formats differ")]
    OtherForm {
        /// Layout of the source.
        from: Box<str>,
        /// Layout of the destination.
        to: Box<str>,
    },
    /// The stream belongs to another device than the storage.
    #[error("a stream of {stream} was passed to storage on {storage}")]
    ForeignStream {
        /// Device of the stream.
        stream: DeviceId,
        /// Device of the storage.
        storage: DeviceId,
    },
    /// The stream is being captured into a graph, which cannot include this operation.
    #[error("{doing} is not possible on a stream of {device} that is being captured into a graph")]
    Capturing {
        /// The device.
        device: DeviceId,
        /// The operation.
        doing: &'static str,
    },
    /// An operation failed; the device remains usable.
    #[error("{device}: {doing} failed: {reason}")]
    Device {
        /// The device.
        device: DeviceId,
        /// The operation.
        doing: &'static str,
        /// Error of the driver.
        reason: Box<str>,
    },
    /// The device or its context failed: its contents are lost, and every later operation fails.
    #[error("{device} is lost: {reason}")]
    DeviceLost {
        /// The device.
        device: DeviceId,
        /// Error of the driver.
        reason: Box<str>,
    },
    /// The device was lost and may still be copying; the frames of both storages must not be
    /// reused.
    #[error("{device} is lost, and may still be copying: {reason}")]
    LostWhileCopying {
        /// The device.
        device: DeviceId,
        /// Why it is unknown whether the copy has ended.
        reason: Box<str>,
    },
}

impl StorageError {
    /// Returns whether the storage's contents are lost.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::DeviceLost { .. } | Self::LostWhileCopying { .. })
    }
}
