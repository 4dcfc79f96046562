//! A pool of blocks whose bytes are touched: what [`Touched`](crate::Touched) is to frames.

use kvpool::block::{AllocRequest, Blocks, BlocksConfig, GaveWay, Wave};
use kvpool::error::AllocError;
use kvpool::ids::{BlockHandle, BlockId, DeviceId, FrameId, Run};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread::yield_now;

/// Blocks, and a cell for each frame that stands for its bytes.
pub struct TouchedBlocks {
    /// The blocks.
    pub blocks: Blocks,
    cells: Cells,
}

#[derive(Clone)]
struct Cells(std::sync::Arc<[UnsafeCell<u32>]>);

// SAFETY: a cell is written by the one owner of its block and read by those who share it. The models check it.
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
    /// So many blocks, all free and none of them null, in segments of 8, shared by two threads.
    pub fn new(blocks: usize, magazine_blocks: usize) -> Arc<Self> {
        Self::growing(blocks, blocks, magazine_blocks)
    }

    /// The same, and more to come.
    pub fn growing(blocks: usize, blocks_max: usize, magazine_blocks: usize) -> Arc<Self> {
        Self::around(Blocks::new(Self::config(blocks, blocks_max, magazine_blocks), None))
    }

    /// So many blocks, without magazines, whose bytes are wiped by whoever frees them.
    pub fn wiped(blocks: usize) -> Arc<Self> {
        let cells = Cells::new(blocks);
        let wiped = cells.clone();
        let wipe = move |run: Run| {
            for frame in run.frames() {
                // SAFETY: the frame is nobody's but the caller's; the checker verifies it.
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
            device: DeviceId::Host,
        }
    }

    /// These blocks, with bytes for as many as there may be.
    pub fn around(blocks: Blocks) -> Arc<Self> {
        let cells = Cells::new(blocks.config().frames_max);
        Arc::new(Self { blocks, cells })
    }

    /// Writes a block's bytes, as its only owner.
    pub fn write(&self, id: BlockId) {
        // SAFETY: the caller is the only owner; the checker verifies it.
        self.cells[self.blocks.frame(id).index()].with_mut(|bytes| unsafe { *bytes += 1 });
    }

    /// Writes a frame's bytes, as who has the frame.
    pub fn write_frame(&self, frame: FrameId) {
        // SAFETY: the caller has it; the checker verifies it.
        self.cells[frame.index()].with_mut(|bytes| unsafe { *bytes += 1 });
    }

    /// Reads a block's bytes, as one of its owners.
    pub fn read(&self, id: BlockId) -> u32 {
        // SAFETY: nobody writes what is shared; the checker verifies it.
        self.cells[self.blocks.frame(id).index()].with(|bytes| unsafe { *bytes })
    }

    /// Takes so many blocks and writes them; `None` if there are not so many.
    pub fn take(&self, blocks: usize) -> Option<Vec<BlockId>> {
        let mut ids = Vec::new();
        match self.blocks.allocate(&AllocRequest::new(blocks), None, &mut |id| ids.push(id)) {
            Ok(()) => {}
            Err(AllocError::Exhausted { .. }) => {
                assert!(ids.is_empty(), "a refused allocation hands nothing out");
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

    /// Takes a block, writes it, and seals it, so that it may be moved.
    pub fn take_sealed(&self) -> BlockHandle {
        let id = self.take(1).expect("a block is free")[0];
        let handle = self.blocks.handle(id);
        self.blocks.seal(handle).expect("it is ours");
        handle
    }

    /// What is in a frame, as somebody who may read there.
    pub fn read_frame(&self, frame: FrameId) -> u32 {
        // SAFETY: the caller may; the checker verifies it.
        self.cells[frame.index()].with(|bytes| unsafe { *bytes })
    }

    /// Copies a wave's bytes.
    pub fn copy(&self, wave: &Wave) {
        for (from, to) in wave.moves() {
            let bytes = self.read_frame(from);
            // SAFETY: the destination is the wave's; the checker verifies it.
            self.cells[to.index()].with_mut(|copy| unsafe { *copy = bytes });
        }
    }

    /// Moves the block in one frame to another, if that can be done now.
    pub fn relocate(&self, from: u32, to: u32) -> Result<(), GaveWay> {
        let mut outcome = Ok(());
        let mut gave_way = |_, why| outcome = Err(why);
        let wave = self.blocks.begin_wave([(FrameId(from), FrameId(to))], &mut gave_way);
        self.copy(&wave);
        // SAFETY: copied just now.
        let published = unsafe { wave.publish(&mut gave_way) };
        assert_eq!(published == 1, outcome.is_ok());
        outcome
    }

    /// The end of every model: each block is in one place, all are free, and all can be had at once.
    pub fn finish(&self) {
        self.finish_beside(1);
    }

    /// The same, for a model whose main thread has no cache of its own (0), or one (1).
    pub fn finish_beside(&self, residents: usize) {
        settle(&self.blocks, residents);
        let report = self.blocks.audit().unwrap();
        assert_eq!(report.owned, 0, "leaked: {report:?}");
        assert_eq!(self.blocks.counts().free(), self.blocks.total(), "free blocks are all counted");
        let all = self.take(self.blocks.total()).expect("every free block can be had, wherever it is");
        self.put(&all);
    }
}

/// Waits until only so many threads and handles have a cache: loom's `join` returns before a thread's destructors run.
pub fn settle(blocks: &Blocks, residents: usize) {
    while blocks.thread_caches_in_use() > residents {
        yield_now();
    }
}
