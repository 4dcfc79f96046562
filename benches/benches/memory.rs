//! Memory of a pool without the bytes of its blocks: what the pool asks of the allocator, per
//! block, when it is created, and after sequences have used every block twice. Then, with a prefix
//! cache, nearly every block is evictable.
//!
//! A counting allocator counts the bytes requested: not what the allocator adds to a request, but
//! also pages that were never touched. No sequence is open, so their own memory does not count.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use kvpool_benches::reuse::{Engine, Kvpool, KvpoolUncached, Locked, Radix, Worker};

/// Counts the bytes that are allocated and not freed.
struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        BYTES.fetch_add(size, Relaxed);
        BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

const BLOCK_TOKENS: usize = 16;

/// Blocks per sequence.
const SEQUENCE: usize = 62;

fn bytes<E: Engine>(blocks: usize, cache: &str) {
    let before = BYTES.load(Relaxed);
    let per_block = || (BYTES.load(Relaxed) - before) as f64 / blocks as f64;
    let engine = E::new(blocks, BLOCK_TOKENS);
    let created = per_block();
    let mut prompt = vec![7; SEQUENCE * BLOCK_TOKENS];
    let mut worker = engine.worker(0);
    // Each block is used more than once: lists and tables of the pool have grown.
    for _ in 0..2 * blocks / SEQUENCE {
        prompt[0] += 1;
        worker.begin();
        let mut request = worker.admit(&prompt);
        worker.finish(&mut request);
        worker.end(request);
    }
    drop((worker, prompt));
    let used = per_block();
    assert_eq!(engine.unowned(), blocks, "lost blocks");
    println!("{blocks:>9}  {cache:<5} {:<17} {created:>12.1} {used:>12.1}", E::NAME);
    // What a pool frees late would count for the next one.
    std::mem::forget(engine);
}

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("memory: to measure, run `cargo bench -p kvpool-benches --bench memory`");
        return;
    }
    println!("bytes per block");
    println!("{:>9}  {:<5} {:<17} {:>12} {:>12}", "blocks", "cache", "", "created", "used twice");
    for blocks in [65_536, 1_000_000] {
        bytes::<Kvpool>(blocks, "on");
        bytes::<Locked>(blocks, "on");
        bytes::<Radix>(blocks, "on");
        bytes::<KvpoolUncached>(blocks, "off");
    }
}
