//! Memory between the library and frames, registered with the library.
//!
//! ```text
//! free --[a session takes it]--> in use --[returned]--> free
//!                                   |
//!                                   +--[a call failed]--> set aside --[a minute]--> free
//! ```
//!
//! Invariant: no earlier call writes memory in use. A failed call may leave a transfer behind that
//! writes its memory later.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

/// Time after which a failed transfer is over: twice Mooncake's time limit of transfers.
const SET_ASIDE_FOR: Duration = Duration::from_secs(60);

/// Most memories that may be set aside.
pub(super) const SET_ASIDE_MAX: usize = 16;

const ALIGN: usize = 4096;

/// Zeroed, page-aligned memory.
pub(super) struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its bytes, and lends them only by references to itself.
unsafe impl Send for Memory {}
// SAFETY: one transfer has the memory exclusively and writes its bytes, which are only read after
// it.
unsafe impl Sync for Memory {}

impl Memory {
    /// Allocates memory of at least one byte; `None` on failure.
    pub(super) fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(1), ALIGN).ok()?;
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { start, layout })
    }

    pub(super) fn len(&self) -> usize {
        self.layout.size()
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the bytes of a part.
    ///
    /// # Safety
    /// No transfer writes them while the reference lives.
    pub(super) unsafe fn bytes(&self, at: usize, len: usize) -> &[u8] {
        assert!(at + len <= self.len(), "{at} + {len} of {}", self.len());
        // SAFETY: within the memory, which is initialised; the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start().add(at), len) }
    }

    /// Writes bytes into a part.
    ///
    /// # Safety
    /// No transfer reads or writes them.
    pub(super) unsafe fn write(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len(), "{at} + {} of {}", bytes.len(), self.len());
        // SAFETY: within the memory, which nothing else has; the caller's promise.
        unsafe { self.start().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start(), self.layout) };
    }
}

/// The registered memories of a client that no session uses.
#[derive(Default)]
pub(super) struct Spare {
    free: Vec<Memory>,
    set_aside: Vec<(Instant, Memory)>,
}

impl Spare {
    /// Takes memory of at least this many bytes.
    pub(super) fn take(&mut self, bytes: usize, now: Instant) -> Option<Memory> {
        let (over, rest) = std::mem::take(&mut self.set_aside)
            .into_iter()
            .partition(|(since, _)| now.saturating_duration_since(*since) >= SET_ASIDE_FOR);
        self.set_aside = rest;
        let over: Vec<(Instant, Memory)> = over;
        self.free.extend(over.into_iter().map(|(_, memory)| memory));
        let place = self.free.iter().position(|memory| memory.len() >= bytes)?;
        Some(self.free.swap_remove(place))
    }

    pub(super) fn has_room(&self) -> bool {
        self.set_aside.len() < SET_ASIDE_MAX
    }

    pub(super) fn give_back(&mut self, memory: Memory) {
        self.free.push(memory);
    }

    pub(super) fn into_parts(self) -> (Vec<Memory>, Vec<Memory>) {
        (self.free, self.set_aside.into_iter().map(|(_, memory)| memory).collect())
    }

    pub(super) fn set_aside(&mut self, memory: Memory, now: Instant) {
        self.set_aside.push((now, memory));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_failed_call_rests_for_a_minute() {
        let (now, mut spare) = (Instant::now(), Spare::default());
        let mut memory = Memory::new(100).unwrap();
        // SAFETY: no transfer.
        unsafe {
            memory.write(90, &[7; 10]);
            assert_eq!(memory.bytes(89, 2), [0, 7]);
        }
        spare.give_back(memory);
        assert!(spare.take(101, now).is_none());
        let memory = spare.take(100, now).unwrap();
        spare.set_aside(memory, now);
        assert!(spare.take(1, now + SET_ASIDE_FOR - Duration::from_millis(1)).is_none());
        assert!(spare.take(1, now + SET_ASIDE_FOR).is_some());
        for _ in 0..SET_ASIDE_MAX {
            assert!(spare.has_room());
            spare.set_aside(Memory::new(1).unwrap(), now);
        }
        assert!(!spare.has_room());
    }
}
