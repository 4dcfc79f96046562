//! Heap, resident memory and descriptors of this process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static LIVE: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, which counts live bytes.
pub struct Counting;

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(start, layout) }
    }
}

/// Memory and descriptors of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Usage {
    /// Live bytes of the heap.
    pub heap: usize,
    /// Resident bytes.
    pub resident: usize,
    /// Open descriptors.
    pub descriptors: usize,
}

impl Usage {
    /// Measures this process.
    pub fn now() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kilobytes = resident.and_then(|text| text.split_whitespace().next()?.parse::<usize>().ok());
        Self {
            heap: LIVE.load(Relaxed),
            resident: kilobytes.expect("a resident size") << 10,
            descriptors: std::fs::read_dir("/proc/self/fd").expect("Linux").count(),
        }
    }
}
