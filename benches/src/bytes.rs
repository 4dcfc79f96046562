//! Blocks with bytes of their own, and plain memory to copy for comparison.

use std::time::{Duration, Instant};

use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, BlockHandle, Pool, Run};
use memmap2::{Advice, MmapMut};

/// Creates a pool with memory, of as many blocks of a well-known model as fit into a number of
/// bytes.
pub fn pool_of_bytes(model: &str, bytes: usize) -> Pool {
    let layout = KvLayout::named(model).expect("a known model");
    let blocks = bytes / layout.bytes_per_block();
    Pool::builder(layout).blocks(blocks).build().expect("memory for the pool")
}

/// Allocates blocks, writes the bytes that [`check`] expects, and seals them.
pub fn write(pool: &Pool, count: usize) -> Vec<BlockHandle> {
    let mut handles = Vec::new();
    pool.allocate_raw(AllocRequest::new(count), &mut handles).expect("enough blocks are free");
    let storage = pool.storage().expect("a pool with memory");
    let mut packed = vec![0; pool.layout().packed_bytes()];
    for &handle in &handles {
        content(handle, &mut packed);
        // SAFETY: the block belongs to this function alone until it is returned.
        unsafe { storage.unpack(&[place(pool, handle)], &packed) }.expect("a frame of the pool");
        pool.seal(handle).expect("an owned block");
    }
    handles
}

/// Checks that the blocks hold the bytes written by [`write()`], wherever they are now.
///
/// # Panics
///
/// If one does not.
pub fn check(pool: &Pool, handles: &[BlockHandle]) {
    let storage = pool.storage().expect("a pool with memory");
    let mut packed = vec![0; pool.layout().packed_bytes()];
    let mut expected = packed.clone();
    for &handle in handles {
        content(handle, &mut expected);
        // SAFETY: the block is sealed, so no thread writes it, and no block is being moved.
        unsafe { storage.pack(&[place(pool, handle)], &mut packed) }.expect("a frame of the pool");
        assert!(packed == expected, "{handle:?} has unexpected bytes");
    }
}

fn place(pool: &Pool, handle: BlockHandle) -> Run {
    let start = pool.info(handle).expect("an owned block").frame;
    Run { start, len: 1 }
}

fn content(handle: BlockHandle, packed: &mut [u8]) {
    for (at, word) in (0_u64..).zip(packed.chunks_mut(8)) {
        let bytes = (u64::from(handle.id.0) << 32 | at).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
}

/// Two pieces of plain memory on huge pages, as a pool's is: for `memcpy` from one to the other.
pub struct Plain {
    from: MmapMut,
    to: MmapMut,
}

impl Plain {
    /// Creates two pieces of `bytes` bytes, written once.
    pub fn new(bytes: usize) -> Self {
        let piece = || {
            let mut piece = MmapMut::map_anon(bytes).expect("memory");
            // Advice only.
            let _ = piece.advise(Advice::HugePage);
            piece.fill(1);
            piece
        };
        Self { from: piece(), to: piece() }
    }

    /// Copies the first `bytes` bytes, and returns the time.
    pub fn copy(&mut self, bytes: usize) -> Duration {
        let start = Instant::now();
        self.to[..bytes].copy_from_slice(&self.from[..bytes]);
        let time = start.elapsed();
        std::hint::black_box(&mut self.to);
        time
    }

    /// Copies the piece `at` of those of `bytes` bytes, wrapping around.
    pub fn copy_piece(&mut self, at: usize, bytes: usize) {
        let at = at % (self.from.len() / bytes) * bytes;
        self.to[at..at + bytes].copy_from_slice(&self.from[at..at + bytes]);
        std::hint::black_box(&mut self.to);
    }
}

/// Returns the resident memory of this process; `None` if the system does not report it.
pub fn resident_bytes() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? << 10)
}
