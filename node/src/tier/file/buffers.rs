//! Aligned buffers for direct I/O, which are used again.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use parking_lot::Mutex;

/// Alignment of buffers, offsets and sizes, in bytes: a page, and a multiple of every drive's
/// logical block.
pub(super) const ALIGN: usize = 4096;

pub(super) struct Buffers {
    idle: Mutex<Vec<Vec<u8>>>,
    idle_max: usize,
}

impl Buffers {
    /// Creates a stock that keeps up to `idle_max` buffers.
    pub(super) fn new(idle_max: usize) -> Arc<Self> {
        Arc::new(Self { idle: Mutex::default(), idle_max })
    }

    /// Returns a buffer of `length` bytes, with any contents.
    pub(super) fn take(self: &Arc<Self>, length: usize) -> Buffer {
        let idle = self.idle.lock().pop().filter(|idle| idle.len() >= length + ALIGN);
        // Fresh pages of zeros: the system clears them when they are touched.
        let bytes = idle.unwrap_or_else(|| vec![0; length + ALIGN]);
        let start = bytes.as_ptr().align_offset(ALIGN);
        Buffer { bytes, start, length, home: self.clone() }
    }
}

pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
    home: Arc<Buffers>,
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..][..self.length]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut idle = self.home.idle.lock();
        if idle.len() < self.home.idle_max {
            idle.push(std::mem::take(&mut self.bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_aligned_and_used_again() {
        let home = Buffers::new(1);
        let mut first = home.take(2 * ALIGN);
        first.fill(7);
        assert_eq!((first.as_ptr() as usize % ALIGN, first.len()), (0, 2 * ALIGN));
        let at = first.as_ptr();
        drop(first);
        let smaller = home.take(ALIGN);
        assert_eq!((smaller.as_ptr(), smaller.len()), (at, ALIGN));
        drop(smaller);
        let larger = home.take(64 * ALIGN);
        assert_eq!((larger.as_ptr() as usize % ALIGN, larger.len()), (0, 64 * ALIGN));
    }
}
