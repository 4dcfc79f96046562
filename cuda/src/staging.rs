//! Transfer buffers: pinned host memory, which the device accesses itself, and scratch memory on
//! the device.
//!
//! Sizes are powers of two. Buffers are kept, because allocating and freeing may each wait for the
//! device: some of each size are allocated when the device is opened, more when none is available.
//! If more than [`UNUSED_BYTES_MAX`] of a kind are unused, a thread frees the largest ones, since
//! neither the destructor of a buffer nor the thread that watches the device may wait for it.
//!
//! **A buffer used by an enqueued command is dropped only after the event behind that command was
//! seen complete.** A dropped buffer is handed out again, and the device would read the next
//! owner's bytes. On a lost device nothing reads any more.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use cudarc::driver::sys;

use kvpool::StorageError;

use super::context::Context;
use super::gate::Pass;

/// Size of the largest pinned buffer; longer data is transferred in parts.
pub(super) const BYTES_MAX: usize = 8 << 20;

/// Size of the largest scratch memory. Buffers above [`BYTES_MAX`] are allocated when they are
/// needed.
pub(super) const SCRATCH_MAX: usize = 32 << 20;

/// Maximum size of the unused buffers of each kind in bytes. More than a transfer of the longest lots
/// takes, which would otherwise allocate them anew each time.
pub(super) const UNUSED_BYTES_MAX: usize = 256 << 20;

const BYTES_MIN_LOG: u32 = 12;
const CLASSES: usize = (SCRATCH_MAX.trailing_zeros() - BYTES_MIN_LOG + 1) as usize;
/// Class of the largest pinned buffer.
const PINNED_MAX: usize = (BYTES_MAX.trailing_zeros() - BYTES_MIN_LOG) as usize;

/// Size classes and numbers of the buffers of each kind that are allocated when a device is opened:
/// lists and tables (4 to 64 KiB), and lots of packed frames.
const PREPARED: [(RangeInclusive<usize>, usize); 2] = [(0..=4, 8), (PINNED_MAX..=PINNED_MAX, 4)];

/// The buffers of one device.
#[derive(Debug)]
pub(super) struct Staging {
    context: Arc<Context>,
    /// By kind.
    shelves: [Shelf; 2],
}

/// Where a buffer is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Pinned,
    Scratch,
}

/// Unused buffers of one kind.
#[derive(Debug, Default)]
struct Shelf(Mutex<Unused>);

#[derive(Debug, Default)]
struct Unused {
    /// Addresses by size class.
    addresses: [Vec<u64>; CLASSES],
    bytes: usize,
    /// True while a thread frees buffers.
    is_trimmed: bool,
}

/// Buffers of a lot on its way between devices.
#[derive(Debug)]
pub(super) struct LotBuffers {
    /// The packed form.
    pub(super) packed: Scratch,
    /// The list of frames.
    pub(super) list: Scratch,
    /// The list, on the host.
    pub(super) pinned: Pinned,
}

/// A buffer of either kind, which goes back to its shelf when it is dropped.
#[derive(Debug)]
struct Buffer {
    kind: Kind,
    address: u64,
    class: usize,
    staging: Arc<Staging>,
}

/// Host memory that the device reads and writes at the same address.
#[derive(Debug)]
pub(super) struct Pinned(Buffer);

/// Device memory.
#[derive(Debug)]
pub(super) struct Scratch(Buffer);

impl Staging {
    pub(super) fn new(context: Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context, shelves: Default::default() })
    }

    fn shelf(&self, kind: Kind) -> &Shelf {
        &self.shelves[kind as usize]
    }

    /// Allocates the buffers that most operations use, so that none of them waits for the device
    /// later. An operation that needs more allocates them itself; so does one if this fails.
    pub(super) fn fill(&self) {
        for (classes, count) in PREPARED {
            for class in classes.flat_map(|class| std::iter::repeat_n(class, count)) {
                // Each on its shelf at once: if the other one is refused, it is given back all the same.
                for kind in [Kind::Pinned, Kind::Scratch] {
                    let Ok(address) = self.make(kind, class) else { return };
                    self.shelf(kind).put(class, address);
                }
            }
        }
    }

    /// Returns pinned memory of at least `bytes` bytes, up to [`BYTES_MAX`], with unspecified
    /// contents.
    pub(super) fn pinned(self: &Arc<Self>, bytes: usize) -> Result<Pinned, StorageError> {
        assert!(bytes <= BYTES_MAX, "{bytes} bytes exceed the largest pinned buffer");
        self.take(Kind::Pinned, bytes).map(Pinned)
    }

    /// Returns device memory of at least `bytes` bytes, up to [`SCRATCH_MAX`], with unspecified
    /// contents.
    pub(super) fn scratch(self: &Arc<Self>, bytes: usize) -> Result<Scratch, StorageError> {
        self.take(Kind::Scratch, bytes).map(Scratch)
    }

    fn take(self: &Arc<Self>, kind: Kind, bytes: usize) -> Result<Buffer, StorageError> {
        let class = class_of(bytes);
        let unused = self.shelf(kind).lock().take(class);
        let address = unused.map_or_else(|| self.make(kind, class), Ok)?;
        Ok(Buffer { kind, address, class, staging: self.clone() })
    }

    /// Returns buffers for a lot.
    pub(super) fn lot(self: &Arc<Self>, bytes: usize, list_bytes: usize) -> Result<LotBuffers, StorageError> {
        let (packed, list) = (self.scratch(bytes)?, self.scratch(list_bytes)?);
        Ok(LotBuffers { packed, list, pinned: self.pinned(list_bytes)? })
    }

    /// Passes the gates for calls that allocate or free such memory.
    fn pass(&self, kind: Kind) -> Result<Vec<Pass>, StorageError> {
        if kind == Kind::Pinned { self.context.pass_all() } else { Ok(vec![self.context.pass()?]) }
    }

    fn make(&self, kind: Kind, class: usize) -> Result<u64, StorageError> {
        let _passes = self.pass(kind)?;
        let _entered = self.context.enter()?;
        let bytes = bytes_of(class);
        if kind == Kind::Scratch {
            let mut address = 0;
            // SAFETY: the pointer is valid and the context is current.
            let made = unsafe { sys::cuMemAlloc_v2(&mut address, bytes) };
            self.context.check(made, "allocating scratch memory")?;
            return Ok(address);
        }
        let mut start = std::ptr::null_mut();
        // With unified addressing, such memory is accessible from all devices, whatever the flags. Not
        // write-combined, because the host reads it. SAFETY: the pointer is valid and the context
        // is current.
        let made = unsafe { sys::cuMemHostAlloc(&mut start, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        self.context.check(made, "allocating pinned memory")?;
        // SAFETY: this many bytes were allocated, and no one else has them.
        unsafe { start.cast::<u8>().write_bytes(0, bytes) };
        Ok(start as u64)
    }

    /// Frees an unused buffer. The gates are passed.
    fn free(&self, kind: Kind, address: u64) {
        let _entered = self.context.enter_even_if_lost();
        // SAFETY: allocated by `make`, and not in use.
        let _ = unsafe {
            match kind {
                Kind::Pinned => sys::cuMemFreeHost(address as *mut _),
                Kind::Scratch => sys::cuMemFree_v2(address),
            }
        };
    }

    /// Frees what exceeds the maximum of a kind, on a thread of its own, which may wait for the device.
    /// If there is none, the next buffer that is dropped tries again.
    #[cold]
    fn trim(self: &Arc<Self>, kind: Kind) {
        let staging = self.clone();
        let thread = thread::Builder::new().name(format!("kvpool-trim-{}", self.context.id));
        let trimmed = thread.spawn(move || {
            // One at a time: others may take the rest meanwhile.
            while let Ok(_passes) = staging.pass(kind) {
                let Some((_, address)) = staging.shelf(kind).lock().excess() else { return };
                staging.free(kind, address);
            }
            // They stay, as on a device that is lost.
            staging.shelf(kind).lock().is_trimmed = false;
        });
        if trimmed.is_err() {
            self.shelf(kind).lock().is_trimmed = false;
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        for kind in [Kind::Pinned, Kind::Scratch] {
            // Leaked if the gates do not open.
            let Ok(_passes) = self.pass(kind) else { continue };
            let unused = self.shelf(kind).lock().take_until(0);
            unused.into_iter().for_each(|(_, address)| self.free(kind, address));
        }
    }
}

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, Unused> {
        // No code panics while this lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a buffer back. Returns true if the caller must [trim](Staging::trim) the shelf.
    fn put(&self, class: usize, address: u64) -> bool {
        let mut unused = self.lock();
        unused.addresses[class].push(address);
        unused.bytes += bytes_of(class);
        let is_due = unused.bytes > UNUSED_BYTES_MAX && !unused.is_trimmed;
        unused.is_trimmed |= is_due;
        is_due
    }
}

impl Unused {
    fn take(&mut self, class: usize) -> Option<u64> {
        let address = self.addresses[class].pop()?;
        self.bytes -= bytes_of(class);
        Some(address)
    }

    /// Takes one of the largest buffers, with its class.
    fn take_largest(&mut self) -> Option<(usize, u64)> {
        (0..CLASSES).rev().find_map(|class| Some((class, self.take(class)?)))
    }

    /// Takes the largest buffers until at most `bytes` bytes are left.
    fn take_until(&mut self, bytes: usize) -> Vec<(usize, u64)> {
        std::iter::from_fn(|| (self.bytes > bytes).then(|| self.take_largest()).flatten()).collect()
    }

    /// Takes a buffer that exceeds the maximum, or ends the trimming.
    fn excess(&mut self) -> Option<(usize, u64)> {
        let excess = (self.bytes > UNUSED_BYTES_MAX).then(|| self.take_largest()).flatten();
        self.is_trimmed = excess.is_some();
        excess
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
        self.0.address as *mut u8
    }

    /// Returns the bytes. The device must not be reading or writing them.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: this many bytes were allocated and initialised, and only the owner has them.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), bytes_of(self.0.class)) }
    }
}

impl Scratch {
    pub(super) fn address(&self) -> u64 {
        self.0.address
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.staging.shelf(self.kind).put(self.class, self.address) {
            self.staging.trim(self.kind);
        }
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
    fn what_exceeds_the_maximum_is_taken_from_the_largest() {
        let shelf = Shelf::default();
        let longest = UNUSED_BYTES_MAX / SCRATCH_MAX;
        for address in 0..longest as u64 {
            assert!(!shelf.put(CLASSES - 1, address));
        }
        assert!(shelf.put(0, 100), "one thread trims");
        assert!(!shelf.put(0, 101), "and no other");
        let mut unused = shelf.lock();
        assert_eq!(unused.excess().map(|(class, _)| class), Some(CLASSES - 1));
        assert_eq!((unused.excess(), unused.is_trimmed), (None, false));
        assert_eq!(unused.bytes, UNUSED_BYTES_MAX - SCRATCH_MAX + 2 * bytes_of(0));
        assert_eq!((unused.take_until(0).len(), unused.bytes), (longest + 1, 0));
    }

    #[test]
    #[should_panic(expected = "exceed the largest buffer")]
    fn what_is_longer_is_no_buffer() {
        class_of(SCRATCH_MAX + 1);
    }
}
