//! Transfer buffers: pinned host memory, which the device accesses itself, and scratch memory on
//! the device.
//!
//! Sizes are powers of two. Buffers are kept, because allocating and freeing may each wait for the
//! device: some of each size are allocated when the device is opened, more when none is available.
//!
//! **A buffer used by an enqueued command is dropped only after the event behind that command was
//! seen complete.** A dropped buffer is handed out again, and the device would read the next
//! owner's bytes. On a lost device nothing reads any more.

use std::fmt;
use std::ops::RangeInclusive;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use crate::error::StorageError;

use super::context::Context;

/// Size of the largest pinned buffer; longer data is transferred in parts.
pub(super) const BYTES_MAX: usize = 8 << 20;

/// Size of the largest scratch memory. Buffers above [`BYTES_MAX`] are allocated when they are
/// needed.
pub(super) const SCRATCH_MAX: usize = 32 << 20;

const BYTES_MIN_LOG: u32 = 12;
const CLASSES: usize = (SCRATCH_MAX.trailing_zeros() - BYTES_MIN_LOG + 1) as usize;
/// Class of the largest pinned buffer.
const PINNED_MAX: usize = (BYTES_MAX.trailing_zeros() - BYTES_MIN_LOG) as usize;

/// Size classes and numbers of the buffers of each kind that are allocated when a device is opened:
/// lists and tables (4 to 64 KiB), and lots of packed frames.
const PREPARED: [(RangeInclusive<usize>, usize); 2] = [(0..=4, 8), (PINNED_MAX..=PINNED_MAX, 4)];

/// The buffers of one device.
pub(super) struct Staging {
    context: Arc<Context>,
    pinned: Shelf,
    scratch: Shelf,
}

/// Addresses of available buffers, by size class.
#[derive(Default)]
struct Shelf([Mutex<Vec<u64>>; CLASSES]);

/// Host memory that the device reads and writes at the same address.
#[derive(Debug)]
pub(super) struct Pinned {
    start: NonNull<u8>,
    class: usize,
    staging: Arc<Staging>,
}

/// Device memory.
#[derive(Debug)]
pub(super) struct Scratch {
    address: u64,
    class: usize,
    staging: Arc<Staging>,
}

// SAFETY: plain memory, with a single owner on the host.
unsafe impl Send for Pinned {}
// SAFETY: a shared reference only allows reads.
unsafe impl Sync for Pinned {}

impl Staging {
    pub(super) fn new(context: Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context, pinned: Shelf::default(), scratch: Shelf::default() })
    }

    /// Allocates the buffers that most operations use, so that none of them waits for the device
    /// later. An operation that needs more allocates them itself; so does one if this fails.
    pub(super) fn fill(&self) {
        for (classes, count) in PREPARED {
            for class in classes.flat_map(|class| std::iter::repeat_n(class, count)) {
                // Each on its shelf at once: if the other one is refused, it is given back all the same.
                let pinned = self.make_pinned(class).map(|address| self.pinned.put(class, address));
                let scratch = self.make_scratch(class).map(|address| self.scratch.put(class, address));
                if pinned.is_err() || scratch.is_err() {
                    return;
                }
            }
        }
    }

    /// Returns pinned memory of at least `bytes` bytes, up to [`BYTES_MAX`], with unspecified
    /// contents.
    pub(super) fn pinned(self: &Arc<Self>, bytes: usize) -> Result<Pinned, StorageError> {
        assert!(bytes <= BYTES_MAX, "{bytes} bytes exceed the largest pinned buffer");
        let class = class_of(bytes);
        let address = match self.pinned.take(class) {
            Some(address) => address,
            None => self.make_pinned(class)?,
        };
        let start = NonNull::new(address as *mut u8).expect("allocated memory has a non-null address");
        Ok(Pinned { start, class, staging: self.clone() })
    }

    /// Returns device memory of at least `bytes` bytes, up to [`SCRATCH_MAX`], with unspecified
    /// contents.
    pub(super) fn scratch(self: &Arc<Self>, bytes: usize) -> Result<Scratch, StorageError> {
        let class = class_of(bytes);
        let address = match self.scratch.take(class) {
            Some(address) => address,
            None => self.make_scratch(class)?,
        };
        Ok(Scratch { address, class, staging: self.clone() })
    }

    fn make_pinned(&self, class: usize) -> Result<u64, StorageError> {
        let _entered = self.context.enter()?;
        let (bytes, mut start) = (bytes_of(class), std::ptr::null_mut());
        // Portable, because the other device of a copy between two devices reads it, too. Not
        // write-combined, because the host reads it. SAFETY: the pointer is valid and the context
        // is current.
        let made = unsafe { sys::cuMemHostAlloc(&mut start, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        self.context.check(made, "allocating pinned memory")?;
        // SAFETY: this many bytes were allocated, and no one else has them.
        unsafe { start.cast::<u8>().write_bytes(0, bytes) };
        Ok(start as u64)
    }

    fn make_scratch(&self, class: usize) -> Result<u64, StorageError> {
        let _entered = self.context.enter()?;
        let mut address = 0;
        // SAFETY: the pointer is valid and the context is current.
        let made = unsafe { sys::cuMemAlloc_v2(&mut address, bytes_of(class)) };
        self.context.check(made, "allocating scratch memory")?;
        Ok(address)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.context.is_stuck() {
            return;
        }
        let _entered = self.context.enter_anyhow();
        for class in 0..CLASSES {
            while let Some(address) = self.pinned.take(class) {
                // SAFETY: allocated by `make_pinned`, and not in use.
                let _ = unsafe { sys::cuMemFreeHost(address as *mut _) };
            }
            while let Some(address) = self.scratch.take(class) {
                // SAFETY: allocated by `make_scratch`, and not in use.
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
    assert!(bytes <= SCRATCH_MAX, "{bytes} bytes exceed the largest buffer");
    (bytes.next_power_of_two().trailing_zeros().max(BYTES_MIN_LOG) - BYTES_MIN_LOG) as usize
}

const fn bytes_of(class: usize) -> usize {
    1 << (class as u32 + BYTES_MIN_LOG)
}

impl Pinned {
    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the bytes. The device must not be writing them.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: this many bytes were allocated and initialised, and only the owner has them.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), bytes_of(self.class)) }
    }

    /// Returns the bytes. The device must not be reading or writing them.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), bytes_of(self.class)) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.staging.pinned.put(self.class, self.start.as_ptr() as u64);
    }
}

impl Scratch {
    pub(super) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.staging.scratch.put(self.class, self.address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_holds_what_is_asked_for_and_not_twice_as_much() {
        assert_eq!((class_of(0), class_of(1), class_of(4096)), (0, 0, 0));
        assert_eq!((class_of(BYTES_MAX), class_of(SCRATCH_MAX)), (PINNED_MAX, CLASSES - 1));
        for bytes in [1, 4095, 4096, 4097, 8192, 1 << 20, (1 << 20) + 1, BYTES_MAX] {
            let has = bytes_of(class_of(bytes));
            assert!(has >= bytes && (has == 4096 || has < 2 * bytes), "{bytes}: {has}");
        }
    }

    #[test]
    #[should_panic(expected = "exceed the largest buffer")]
    fn what_is_longer_is_no_buffer() {
        class_of(SCRATCH_MAX + 1);
    }
}
