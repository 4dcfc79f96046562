//! Contiguous runs of any length: kvpool and the one baseline that supports them.

use kvpool::frame::{FrameConfig, Frames};
use kvpool::{AllocRequest, FrameId, Lease, Pool, Run};
use offset_allocator::{Allocation, Allocator};
use parking_lot::Mutex;

/// An allocator of contiguous runs.
pub trait Contiguous: Sync + Sized {
    /// One owned run.
    type Run: Send;

    /// Name in reports.
    const NAME: &'static str;

    /// Creates `blocks` free blocks.
    fn new(blocks: usize) -> Self;

    /// Allocates a run of exactly `len` blocks, if there is one.
    fn allocate(&self, len: u32) -> Option<Self::Run>;

    /// Frees it.
    fn free(&self, run: Self::Run);

    /// Returns the first block of a run.
    fn start(run: &Self::Run) -> u32;

    /// Returns the number of free blocks.
    fn free_blocks(&self) -> usize;
}

/// kvpool, contiguous leases.
pub struct PoolRuns(Pool);

impl Contiguous for PoolRuns {
    type Run = Lease<'static>;

    const NAME: &'static str = "kvpool contiguous lease";

    fn new(blocks: usize) -> Self {
        Self(super::pool(blocks))
    }

    #[inline]
    fn allocate(&self, len: u32) -> Option<Lease<'static>> {
        self.0.allocate_owned(AllocRequest::new(len as usize).contiguous()).ok()
    }

    #[inline]
    fn free(&self, run: Lease<'static>) {
        drop(run);
    }

    fn start(run: &Lease<'static>) -> u32 {
        let blocks = run.blocks();
        assert!(blocks.windows(2).all(|pair| pair[1].get() == pair[0].get() + 1), "a run with a gap");
        blocks[0].get()
    }

    fn free_blocks(&self) -> usize {
        self.0.free_blocks()
    }
}

/// kvpool's bitmap alone, without words, references and handles: the counterpart of
/// `offset_allocator`.
pub struct Bitmap(Frames);

impl Contiguous for Bitmap {
    type Run = Run;

    const NAME: &'static str = "kvpool bitmap alone";

    fn new(blocks: usize) -> Self {
        Self(Frames::new(FrameConfig { frames: blocks, frames_max: blocks, segment_frames: 4096 }))
    }

    #[inline]
    fn allocate(&self, len: u32) -> Option<Run> {
        self.0.allocate_run(len, FrameId(0))
    }

    #[inline]
    fn free(&self, run: Run) {
        self.0.free_run(run);
    }

    fn start(run: &Run) -> u32 {
        run.start.get()
    }

    fn free_blocks(&self) -> usize {
        self.0.free_frames()
    }
}

/// `offset_allocator`: two-level segregated fit, constant time, behind a mutex since it is
/// single-threaded. It only hands out ranges: no references, no owners, no generations.
pub struct OffsetRuns(Mutex<Allocator<u32>>);

impl Contiguous for OffsetRuns {
    type Run = Allocation<u32>;

    const NAME: &'static str = "parking_lot Mutex<offset_allocator>";

    fn new(blocks: usize) -> Self {
        Self(Mutex::new(Allocator::new(blocks as u32)))
    }

    #[inline]
    fn allocate(&self, len: u32) -> Option<Allocation<u32>> {
        self.0.lock().allocate(len)
    }

    #[inline]
    fn free(&self, run: Allocation<u32>) {
        self.0.lock().free(run);
    }

    fn start(run: &Allocation<u32>) -> u32 {
        run.offset
    }

    fn free_blocks(&self) -> usize {
        self.0.lock().storage_report().total_free_space as usize
    }
}
