//! Heap, resident memory and descriptors of this process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, AtomicUsize, Ordering::Relaxed};

/// Sizes that are counted together differ by less than this.
const STEP: usize = 16;

/// Numbers of sizes; the last one is that of all larger allocations.
const SIZES: usize = 129;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static BY_SIZE: [AtomicIsize; SIZES] = [const { AtomicIsize::new(0) }; SIZES];

/// The system's allocator, which counts live bytes, and live allocations by their size.
pub struct Counting;

fn by_size(bytes: usize) -> &'static AtomicIsize {
    &BY_SIZE[(bytes / STEP).min(SIZES - 1)]
}

/// Returns the number of live allocations by their least size. What grows all the time is a leak of
/// something of this size.
pub fn sizes() -> String {
    let count =
        |(place, count): (usize, &AtomicIsize)| format!("{}={}", place * STEP, count.load(Relaxed).max(0));
    BY_SIZE.iter().enumerate().map(count).collect::<Vec<_>>().join(" ")
}

// SAFETY: the system's allocator does all the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Relaxed);
        by_size(layout.size()).fetch_add(1, Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        by_size(layout.size()).fetch_sub(1, Relaxed);
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
