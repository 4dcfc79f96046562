//! Buffers on the way: pinned ones, which the device reads and writes by itself, and scratch ones in its own memory.
//!
//! They come in powers of two, are made when there is none to be had, and kept: to allocate and to free would each wait for
//! the device. What is kept is what was in command scope at once at most.
//!
//! **A buffer that was named in an enqueued command is dropped only when the event behind that was seen complete.**
//! To drop it is to hand it out again, and the next owner's bytes would be what the device reads. On a device that is lost
//! nothing reads any more.

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use crate::error::StorageError;

use super::context::Context;

/// The largest buffer: what is longer goes in parts.
pub(super) const BYTES_MAX: usize = 8 << 20;

const BYTES_MIN_LOG: u32 = 12;
const CLASSES: usize = (BYTES_MAX.trailing_zeros() - BYTES_MIN_LOG + 1) as usize;

/// The buffers of one device.
pub(super) struct Staging {
    context: Arc<Context>,
    pinned: Shelf,
    scratch: Shelf,
}

/// Addresses of buffers that nobody has, by size.
#[derive(Default)]
struct Shelf([Mutex<Vec<u64>>; CLASSES]);

/// Memory of the host that the device reads and writes, at the same address.
#[derive(Debug)]
pub(super) struct Pinned {
    start: NonNull<u8>,
    class: usize,
    home: Arc<Staging>,
}

/// Memory of the device.
#[derive(Debug)]
pub(super) struct Scratch {
    address: u64,
    class: usize,
    home: Arc<Staging>,
}

// SAFETY: it is memory, of which this is the only owner on the host.
unsafe impl Send for Pinned {}
// SAFETY: shared, it can only be read.
unsafe impl Sync for Pinned {}

impl Staging {
    pub(super) fn new(context: Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context, pinned: Shelf::default(), scratch: Shelf::default() })
    }

    /// At least so many bytes of pinned memory, up to [`BYTES_MAX`]; what they are is unspecified.
    pub(super) fn pinned(self: &Arc<Self>, bytes: usize) -> Result<Pinned, StorageError> {
        let class = class_of(bytes);
        let address = match self.pinned.take(class) {
            Some(address) => address,
            None => self.make_pinned(class)?,
        };
        let start = NonNull::new(address as *mut u8).expect("the driver's memory has an address");
        Ok(Pinned { start, class, home: self.clone() })
    }

    /// At least so many bytes of the device's memory, up to [`BYTES_MAX`]; what they are is unspecified.
    pub(super) fn scratch(self: &Arc<Self>, bytes: usize) -> Result<Scratch, StorageError> {
        let class = class_of(bytes);
        let address = match self.scratch.take(class) {
            Some(address) => address,
            None => self.make_scratch(class)?,
        };
        Ok(Scratch { address, class, home: self.clone() })
    }

    fn make_pinned(&self, class: usize) -> Result<u64, StorageError> {
        let _entered = self.context.enter()?;
        let (bytes, mut start) = (bytes_of(class), std::ptr::null_mut());
        // Portable: the other device of a copy between two reads it, too. Not write-combined: it is read here.
        // SAFETY: the place is valid and the context is current.
        let made = unsafe { sys::cuMemHostAlloc(&mut start, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        self.context.check(made, "allocating pinned memory")?;
        // SAFETY: so many bytes were allocated, and are nobody else's.
        unsafe { start.cast::<u8>().write_bytes(0, bytes) };
        Ok(start as u64)
    }

    fn make_scratch(&self, class: usize) -> Result<u64, StorageError> {
        let _entered = self.context.enter()?;
        let mut address = 0;
        // SAFETY: the place is valid and the context is current.
        let made = unsafe { sys::cuMemAlloc_v2(&mut address, bytes_of(class)) };
        self.context.check(made, "allocating scratch memory")?;
        Ok(address)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _entered = self.context.enter_anyhow();
        for class in 0..CLASSES {
            while let Some(address) = self.pinned.take(class) {
                // SAFETY: it was allocated so, and nobody has it.
                let _ = unsafe { sys::cuMemFreeHost(address as *mut _) };
            }
            while let Some(address) = self.scratch.take(class) {
                // SAFETY: as above.
                let _ = unsafe { sys::cuMemFree_v2(address) };
            }
        }
    }
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staging").field("context", &self.context).finish_non_exhaustive()
    }
}

impl Shelf {
    fn take(&self, class: usize) -> Option<u64> {
        self.0[class].lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn put(&self, class: usize, address: u64) {
        self.0[class].lock().unwrap_or_else(PoisonError::into_inner).push(address);
    }
}

fn class_of(bytes: usize) -> usize {
    assert!(bytes <= BYTES_MAX, "{bytes} bytes in one buffer");
    (bytes.next_power_of_two().trailing_zeros().max(BYTES_MIN_LOG) - BYTES_MIN_LOG) as usize
}

const fn bytes_of(class: usize) -> usize {
    1 << (class as u32 + BYTES_MIN_LOG)
}

impl Pinned {
    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The bytes. Not while the device writes them.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: so many bytes were allocated and initialised; the owner alone has them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), bytes_of(self.class)) }
    }

    /// The bytes. Not while the device reads or writes them.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), bytes_of(self.class)) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.home.pinned.put(self.class, self.start.as_ptr() as u64);
    }
}

impl Scratch {
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.home.scratch.put(self.class, self.address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_holds_what_is_asked_for_and_not_twice_as_much() {
        assert_eq!((class_of(0), class_of(1), class_of(4096)), (0, 0, 0));
        assert_eq!(class_of(BYTES_MAX), CLASSES - 1);
        for bytes in [1, 4095, 4096, 4097, 8192, 1 << 20, (1 << 20) + 1, BYTES_MAX] {
            let has = bytes_of(class_of(bytes));
            assert!(has >= bytes && (has == 4096 || has < 2 * bytes), "{bytes}: {has}");
        }
    }

    #[test]
    #[should_panic(expected = "in one buffer")]
    fn what_is_longer_is_no_buffer() {
        class_of(BYTES_MAX + 1);
    }
}
