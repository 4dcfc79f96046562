//! Small, long-lived allocations of device memory: tables of pieces, scales, block tables.

use std::sync::Arc;

use cudarc::driver::sys;

use kvpool::{MovedEntry, StorageError};

use super::command_scope::CommandScope;
use super::context::Context;
use super::device::Device;
use super::params::{Move, Piece};
use super::stream::Stream;

/// An allocation of device memory.
#[derive(Debug)]
pub(super) struct Memory {
    context: Arc<Context>,
    address: u64,
}

impl Memory {
    /// Allocates uninitialised memory.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, StorageError> {
        let _pass = context.pass()?;
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: the pointer is valid and the context is current. The driver refuses allocations
        // of zero bytes.
        let made = unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) };
        context.check(made, "allocating memory")?;
        Ok(Self { context: context.clone(), address })
    }

    /// Allocates memory and fills it with these bytes before returning.
    pub(super) fn of(device: &Device, stream: &Stream, bytes: &[u8]) -> Result<Self, StorageError> {
        let memory = Self::new(&device.0.context, bytes.len())?;
        // SAFETY: the stream lives, and no one else has the memory.
        unsafe {
            let mut commands = CommandScope::on(device, stream.raw());
            commands.upload_to(memory.address, bytes)?;
            commands.wait()?;
        }
        Ok(memory)
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Leaked if the device is stuck.
        let Ok(_pass) = self.context.pass() else { return };
        let _entered = self.context.enter_even_if_lost();
        // SAFETY: allocated by `new`. The driver waits for work in progress.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Numbers, or structs of numbers in C layout without padding (asserted in `params`).
///
/// # Safety
/// Every byte of a value is initialised.
pub(super) unsafe trait Plain {}

macro_rules! plain {
    ($($name:ty),*) => { $(
        // SAFETY: as the trait says.
        unsafe impl Plain for $name {}
    )* };
}
plain!(i32, i64, u32, f32, Piece, Move, MovedEntry);

/// Returns the bytes of a list for the device.
pub(super) fn bytes_of<T: Plain>(list: &[T]) -> &[u8] {
    // SAFETY: the trait's promise.
    unsafe { std::slice::from_raw_parts(list.as_ptr().cast(), size_of_val(list)) }
}
