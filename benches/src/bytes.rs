//! Blocks with bytes of their own, and plain memory to copy for comparison.

use std::time::{Duration, Instant};

use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, BlockId, Lease, Pool, Run};
use memmap2::{Advice, MmapMut};

/// Creates a pool with memory, of as many blocks of a well-known model as fit into a number of
/// bytes.
pub fn pool_of_bytes(model: &str, bytes: usize) -> Pool {
    let layout = KvLayout::named(model).expect("a known model");
    let blocks = bytes / layout.bytes_per_block();
    Pool::builder(layout).blocks(blocks).build().expect("memory for the pool")
}

/// Allocates blocks, and returns a lease for each.
pub fn singles(pool: &Pool, count: usize) -> Vec<Lease<'static>> {
    let mut rest = pool.allocate_owned(AllocRequest::new(count)).expect("enough blocks are free");
    let mut singles: Vec<_> = (1..count).rev().map(|at| rest.split_off(at)).collect();
    singles.push(rest);
    singles.reverse();
    singles
}

/// Allocates blocks, writes the bytes that [`check`] expects, and seals them.
pub fn write(pool: &Pool, count: usize) -> Vec<Lease<'static>> {
    let mut leases = singles(pool, count);
    let storage = pool.storage().expect("a pool with memory");
    let mut packed = vec![0; pool.layout().packed_bytes()];
    for lease in &mut leases {
        content(lease.blocks()[0], &mut packed);
        // SAFETY: the block belongs to this function alone until it is returned.
        unsafe { storage.unpack(&[place(lease)], &packed) }.expect("a frame of the pool");
        lease.seal(..);
    }
    leases
}

/// Checks that the blocks hold the bytes written by [`write()`], wherever they are now.
///
/// # Panics
///
/// If one does not.
pub fn check(pool: &Pool, leases: &[Lease<'_>]) {
    let storage = pool.storage().expect("a pool with memory");
    let mut packed = vec![0; pool.layout().packed_bytes()];
    let mut expected = packed.clone();
    for lease in leases {
        content(lease.blocks()[0], &mut expected);
        // SAFETY: the block is sealed, so no thread writes it, and no block is being moved.
        unsafe { storage.pack(&[place(lease)], &mut packed) }.expect("a frame of the pool");
        assert!(packed == expected, "{lease:?} has unexpected bytes");
    }
}

/// Returns the frame of a lease of one block.
pub fn place(lease: &Lease<'_>) -> Run {
    lease.runs().next().expect("one block")
}

fn content(block: BlockId, packed: &mut [u8]) {
    for (at, word) in (0_u64..).zip(packed.chunks_mut(8)) {
        let bytes = (u64::from(block.0) << 32 | at).to_le_bytes();
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
