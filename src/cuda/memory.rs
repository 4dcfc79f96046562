//! Memory of the device that something small and lasting is kept in: tables of pieces, scales, block tables.

use std::sync::Arc;

use cudarc::driver::DeviceRepr;
use cudarc::driver::sys;

use crate::error::StorageError;

use super::command_scope::CommandScope;
use super::context::Context;
use super::device::Device;
use super::staging::BYTES_MAX;
use super::stream::Stream;

/// An allocation.
#[derive(Debug)]
pub(super) struct Memory {
    context: Arc<Context>,
    address: u64,
}

impl Memory {
    /// So many bytes, of which nothing is known.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, StorageError> {
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: the place is valid and the context is current. Nothing is no allocation to the driver.
        let made = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) };
        context.check(made, "allocating memory")?;
        Ok(Self { context: context.clone(), address })
    }

    /// The same with these bytes, which are there when the call returns.
    pub(super) fn of(device: &Device, stream: &Stream, bytes: &[u8]) -> Result<Self, StorageError> {
        let memory = Self::new(&device.0.context, bytes.len())?;
        for (part, at) in bytes.chunks(BYTES_MAX).zip((memory.address..).step_by(BYTES_MAX)) {
            // SAFETY: the stream lives, and nobody else has the memory.
            unsafe {
                let mut commands = CommandScope::on(device, stream.raw());
                commands.upload_to(at, part)?;
                commands.wait()?;
            }
        }
        Ok(memory)
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _entered = self.context.enter_anyhow();
        // SAFETY: it was allocated so. The driver waits for what still runs.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// A list for the device as bytes.
pub(super) fn bytes_of<T: DeviceRepr>(list: &[T]) -> &[u8] {
    // SAFETY: what goes to the device here is numbers, and structs of them without padding (asserted in `params`).
    unsafe { std::slice::from_raw_parts(list.as_ptr().cast(), size_of_val(list)) }
}
