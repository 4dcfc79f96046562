//! A pool of blocks with cells that stand for their bytes: the counterpart of
//! [`Touched`](crate::Touched) for blocks.

use kvpool::block::{AllocRequest, Blocks, BlocksConfig, MoveCancelled, Wave};
use kvpool::testing::end_exploring;
use kvpool::{AllocError, BlockHandle, BlockId, DeviceId, FrameId, Run};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread::{JoinHandle, yield_now};

/// A pool of blocks, and a cell for each frame that stands for its bytes.
pub struct TouchedBlocks {
    /// The pool under test.
    pub blocks: Blocks,
    cells: Cells,
}

#[derive(Clone)]
struct Cells(std::sync::Arc<[UnsafeCell<u32>]>);

// SAFETY: a cell is written by the sole owner of its block and read by its sharers. The models
// check it.
unsafe impl Sync for Cells {}
// SAFETY: as above.
unsafe impl Send for Cells {}

impl std::ops::Deref for Cells {
    type Target = [UnsafeCell<u32>];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Cells {
    fn new(frames: usize) -> Self {
        Self((0..frames).map(|_| UnsafeCell::new(0)).collect())
    }
}

impl TouchedBlocks {
    /// Creates a pool of `blocks` blocks for two threads: all free, no null block, segments of 8.
    pub fn new(blocks: usize, magazine_blocks: usize) -> Arc<Self> {
        Self::growing(blocks, blocks, magazine_blocks)
    }

    /// Creates such a pool that can grow.
    pub fn growing(blocks: usize, blocks_max: usize, magazine_blocks: usize) -> Arc<Self> {
        Self::around(Blocks::new(Self::config(blocks, blocks_max, magazine_blocks), None))
    }

    /// Creates a pool without magazines, in which the freeing thread wipes a block's bytes.
    pub fn wiped(blocks: usize) -> Arc<Self> {
        let cells = Cells::new(blocks);
        let wiped = cells.clone();
        let wipe = move |run: Run| {
            for frame in run.frames() {
                // SAFETY: the frame belongs to the caller alone; the checker verifies it.
                wiped[frame.index()].with_mut(|bytes| unsafe { *bytes = 0 });
            }
        };
        let blocks = Blocks::new(Self::config(blocks, blocks, 0), Some(Box::new(wipe)));
        Arc::new(Self { blocks, cells })
    }

    fn config(frames: usize, frames_max: usize, magazine_blocks: usize) -> BlocksConfig {
        BlocksConfig {
            frames,
            frames_max,
            segment_frames: 8,
            magazine_blocks,
            threads: 2,
            has_null_block: false,
            reserve: 0,
            run_frames: 0,
            device: DeviceId::Host,
        }
    }

    /// Adds bytes to a pool of blocks, for the maximum number of its frames.
    pub fn around(blocks: Blocks) -> Arc<Self> {
        let cells = Cells::new(blocks.config().frames_max);
        Arc::new(Self { blocks, cells })
    }

    /// Writes a block's bytes, as its only owner.
    pub fn write(&self, id: BlockId) {
        // SAFETY: the caller is the only owner; the checker verifies it.
        self.cells[self.blocks.frame(id).index()].with_mut(|bytes| unsafe { *bytes += 1 });
    }

    /// Writes a frame's bytes, as the owner of the frame.
    pub fn write_frame(&self, frame: FrameId) {
        // SAFETY: the caller owns the frame; the checker verifies it.
        self.cells[frame.index()].with_mut(|bytes| unsafe { *bytes += 1 });
    }

    /// Reads a block's bytes, as one of its owners.
    pub fn read(&self, id: BlockId) -> u32 {
        // SAFETY: no thread writes a shared block; the checker verifies it.
        self.cells[self.blocks.frame(id).index()].with(|bytes| unsafe { *bytes })
    }

    /// Allocates blocks and writes them; returns `None` if too few are free.
    pub fn take(&self, blocks: usize) -> Option<Vec<BlockId>> {
        let mut ids = Vec::new();
        match self.blocks.allocate(&AllocRequest::new(blocks), &mut |id| ids.push(id)) {
            Ok(()) => {}
            Err(AllocError::Exhausted { .. }) => {
                assert!(ids.is_empty(), "a refused allocation returns no blocks");
                return None;
            }
            Err(other) => panic!("{other}"),
        }
        assert_eq!(ids.len(), blocks);
        ids.iter().for_each(|&id| self.write(id));
        Some(ids)
    }

    /// Writes blocks once more and releases them.
    pub fn put(&self, ids: &[BlockId]) {
        ids.iter().for_each(|&id| self.write(id));
        self.blocks.release(ids);
    }

    /// Allocates a block, writes it, and seals it, so that it may be moved.
    pub fn take_sealed(&self) -> BlockHandle {
        let id = self.take(1).expect("a block is free")[0];
        let handle = self.blocks.handle(id);
        self.blocks.seal(handle);
        handle
    }

    /// Reads a frame's bytes, as a thread with the right to.
    pub fn read_frame(&self, frame: FrameId) -> u32 {
        // SAFETY: the caller has that right; the checker verifies it.
        self.cells[frame.index()].with(|bytes| unsafe { *bytes })
    }

    /// Copies a wave's bytes.
    pub fn copy(&self, wave: &Wave) {
        for (from, to) in wave.moves() {
            let bytes = self.read_frame(from);
            // SAFETY: the destination belongs to the wave; the checker verifies it.
            self.cells[to.index()].with_mut(|copy| unsafe { *copy = bytes });
        }
    }

    /// Moves the block in one frame to another, if that is possible now.
    pub fn relocate(&self, from: u32, to: u32) -> Result<(), MoveCancelled> {
        let mut outcome = Ok(());
        let mut cancelled = |_, why| outcome = Err(why);
        let wave = self.blocks.begin_wave([(FrameId(from), FrameId(to))], &mut cancelled);
        self.copy(&wave);
        // SAFETY: the bytes have been copied above.
        let published = unsafe { wave.publish(&mut cancelled) };
        assert_eq!(published == 1, outcome.is_ok());
        outcome
    }

    /// Ends a model: each block is in one place, all are free, and all can be allocated at once.
    pub fn finish(&self) {
        conclude(&self.blocks);
        self.check_all_free();
    }

    /// Checks that each block is in one place, all are free, and all can be allocated at once.
    pub fn check_all_free(&self) {
        let report = self.blocks.audit().unwrap();
        assert_eq!(report.owned, 0, "leaked: {report:?}");
        assert_eq!(self.blocks.counts().free(), self.blocks.total(), "every free block is counted");
        let all =
            self.take(self.blocks.total()).expect("every free block can be allocated, wherever it is cached");
        self.put(&all);
    }
}

/// Waits until at most `own_caches` threads have a cache: loom's `join` returns before
/// a thread's destructors run.
pub fn settle(blocks: &Blocks, own_caches: usize) {
    while blocks.thread_caches_in_use() > own_caches {
        yield_now();
    }
}

/// Joins the last thread of a model, and [ends the explored part](end_exploring).
pub fn join_last<T>(thread: JoinHandle<T>) -> T {
    let result = thread.join().unwrap();
    end_exploring();
    result
}

/// [Ends the explored part](end_exploring) of a model, and waits until its other threads are gone.
pub fn conclude(blocks: &Blocks) {
    end_exploring();
    settle(blocks, 1);
}
