//! Every block of a pool, and the threads that use them.

use std::ops::Deref;

use crate::batch::{Clock, Watch};
use crate::config::{FAN_LOG2, MAGAZINE_BLOCKS_MAX};
use crate::error::OldestBatch;
use crate::frame::{Census, Depot, FrameConfig, Frames, outside_of_runs};
use crate::ids::{BlockHandle, BlockId, DeviceId, FrameId, Order, PoolTag, Run, Ticket};
use crate::sync::{Arc, AtomicBool, AtomicUsize, CachePadded, Ordering::*, next_pool_tag};

use super::space::{FreeSpace, Reserve, Scrub, SharedLimbo};
use super::state::{BlockWord, MoveLog, Table, Waiters};
use super::thread_cache::ThreadCaches;

/// The shape of a pool, checked by the builder.
#[derive(Clone, Copy, Debug)]
pub struct BlocksConfig {
    /// Frames, the null block's among them.
    pub frames: usize,
    /// The most frames that the pool may grow to.
    pub frames_max: usize,
    /// Frames in a segment: a power of two of at least [`FAN`](crate::config::FAN).
    pub segment_frames: usize,
    /// Blocks in a full magazine, at most [`MAGAZINE_BLOCKS_MAX`](crate::config::MAGAZINE_BLOCKS_MAX); 0 bypasses
    /// the magazines.
    pub magazine_blocks: usize,
    /// Threads that are expected to allocate: their caches start in regions of their own.
    pub threads: usize,
    /// Whether block 0 is the null block: never handed out, its frame is what tables are padded with.
    pub has_null_block: bool,
    /// Blocks that are set aside for urgent requests: fewer than there are.
    pub reserve: usize,
    /// Where the memory is.
    pub device: DeviceId,
}

/// The blocks of a pool. Cloning gives another reference to the same blocks; see the [module](crate::block).
#[derive(Clone)]
pub struct Blocks(Arc<Core>);

impl Deref for Blocks {
    type Target = Core;

    #[inline]
    fn deref(&self) -> &Core {
        &self.0
    }
}

/// See [`custody`](super::space::Custody).
pub(in crate::block) type Custody<'a> = super::space::Custody<'a, Core>;

/// What all references to a pool's blocks share. Reached through [`Blocks`].
pub struct Core {
    pub(in crate::block) space: FreeSpace,
    watch: Watch,
    pub(in crate::block) thread_caches: ThreadCaches,
    /// Retired frames of threads that could not enter a thread cache of their own at that moment.
    ///
    /// Its own cache line, as everything that a mover writes: next to it stands what every allocation reads.
    pub(in crate::block) shared_limbo: CachePadded<SharedLimbo>,
    /// What moved lately.
    pub(in crate::block) moves: CachePadded<MoveLog>,
    pub(in crate::block) waiters: Waiters,
    pub(in crate::block) config: BlocksConfig,
    pub(in crate::block) tag: PoolTag,
    /// Frames of the pool, so that the common path need not look at the directory.
    pub(in crate::block) total: AtomicUsize,
    /// The most frames that there ever were. Ids are below it: a block outlives the frame of its number.
    pub(in crate::block) rows: AtomicUsize,
    /// Knows the cached blocks, if any are.
    pub(in crate::block) evictor: Option<Box<dyn Evictor>>,
    /// Blocks that are evictable.
    pub(in crate::block) evictable: CachePadded<AtomicUsize>,
    /// The pool is gone; threads forget it when they next look at their list.
    closed: AtomicBool,
}

impl Blocks {
    /// All blocks free. With `scrub`, every frame is passed to it once nobody owns it and no batch sees it.
    ///
    /// # Panics
    ///
    /// If the configuration makes no sense; the pool's builder checks it first.
    pub fn new(config: BlocksConfig, scrub: Option<Scrub>) -> Self {
        Self::with_evictor(config, scrub, None)
    }

    /// As [`new`](Self::new), with somebody who keeps cached blocks.
    ///
    /// # Panics
    ///
    /// As [`new`](Self::new).
    pub fn with_evictor(
        config: BlocksConfig,
        scrub: Option<Scrub>,
        evictor: Option<Box<dyn Evictor>>,
    ) -> Self {
        assert!(config.magazine_blocks <= MAGAZINE_BLOCKS_MAX, "{config:?}");
        let frames = Frames::new(FrameConfig {
            frames: config.frames,
            frames_max: config.frames_max,
            segment_frames: config.segment_frames,
        });
        if config.has_null_block {
            assert!(frames.claim(Run { start: FrameId(0), len: 1 }), "frame 0 of a fresh pool is free");
        }
        let (null, reserve) = (config.has_null_block as usize, Reserve::new(config.reserve));
        assert!(config.reserve < config.frames - null, "{config:?}");
        if config.reserve > 0 {
            // From the front, which is the last to go when a pool shrinks.
            let set_aside = Run { start: FrameId(null as u32), len: config.reserve as u32 };
            assert!(frames.claim(set_aside), "a fresh pool is free");
            reserve.fill(set_aside);
        }
        let depot = Depot::new(if config.magazine_blocks == 0 { 0 } else { 2 * config.threads });
        Self(Arc::new(Core {
            space: FreeSpace::new(Table::new(config.frames), frames, depot, reserve, scrub),
            watch: Watch::default(),
            thread_caches: ThreadCaches::default(),
            shared_limbo: CachePadded::new(SharedLimbo::default()),
            moves: CachePadded::new(MoveLog::new()),
            waiters: Waiters::default(),
            config,
            tag: next_pool_tag(),
            total: AtomicUsize::new(config.frames),
            rows: AtomicUsize::new(config.frames),
            evictor,
            evictable: CachePadded::new(AtomicUsize::new(0)),
            closed: AtomicBool::new(false),
        }))
    }

    pub(in crate::block) fn core_ptr(&self) -> *const Core {
        &raw const *self.0
    }
}

impl Core {
    /// Blocks that can be handed out: all but the null block.
    #[inline]
    pub fn total(&self) -> usize {
        self.total.load(Relaxed) - self.config.has_null_block as usize
    }

    /// Frames, the null block's among them.
    #[inline]
    pub fn total_frames(&self) -> usize {
        // Relaxed: a count, by which nothing is reached.
        self.total.load(Relaxed)
    }

    /// Rows of the table: every block's id is below this number, also that of a block whose number no frame has any
    /// more.
    #[inline]
    pub fn rows(&self) -> usize {
        // Acquire: pairs with the Release in `grow`: so many rows are there.
        self.rows.load(Acquire)
    }

    /// Blocks that are set aside for urgent requests, when none of them is in use.
    pub fn reserve(&self) -> usize {
        self.space.reserve.mark()
    }

    /// The shape that it was built with.
    pub fn config(&self) -> &BlocksConfig {
        &self.config
    }

    /// Tells this pool's handles from another's.
    pub fn tag(&self) -> PoolTag {
        self.tag
    }

    /// The block that tables are padded with, if there is one.
    #[inline]
    pub fn null_block(&self) -> Option<BlockId> {
        self.config.has_null_block.then_some(BlockId(0))
    }

    /// Returns the right to take free frames in hand; dropping it announces them.
    #[inline]
    pub(in crate::block) fn custody(&self) -> Custody<'_> {
        Custody::new(self)
    }

    /// Number of blocks that are held because their frames could not be wiped.
    pub fn unwiped(&self) -> usize {
        self.space.unwiped()
    }

    /// The order of batches.
    #[inline]
    pub fn clock(&self) -> &Clock {
        &self.space.clock
    }

    /// The batch that has been in flight the longest, as [far as looks tell](crate::batch::Watch).
    pub fn oldest_batch(&self) -> Option<OldestBatch> {
        let ticket = self.space.clock.oldest_in_flight()?;
        Some(OldestBatch::new(ticket, self.watch.age(ticket)))
    }

    /// A block's word at this moment.
    #[inline]
    pub fn word(&self, id: BlockId) -> BlockWord {
        // Acquire: pairs with the Release of whoever changed the word last, so that what belongs to this generation
        // of the block is seen with it.
        BlockWord::from_bits(self.space.table.word(id).load(Acquire))
    }

    /// Where a block's bytes are. It stays there for as long as the caller's batch is in flight.
    #[inline]
    pub fn frame(&self, id: BlockId) -> FrameId {
        self.word(id).frame()
    }

    /// The block in a frame.
    pub fn block_at(&self, frame: FrameId) -> BlockId {
        self.space.table.block_at(frame)
    }

    /// A handle of a block on which the caller holds a reference.
    pub fn handle(&self, id: BlockId) -> BlockHandle {
        let generation = self.space.table.info(id).generation(self.word(id));
        BlockHandle { id, pool: self.tag, generation }
    }

    /// Threads and handles that have a cache here. A thread leaves when its destructors run, which is after the end of
    /// a [scope](std::thread::scope) that it was spawned in, and, under loom, after it was joined: who audits then waits
    /// for this number to fall.
    pub fn thread_caches_in_use(&self) -> usize {
        self.thread_caches.taken()
    }

    /// What is free in the bitmaps and how contiguous it is.
    pub fn census(&self, order: Order) -> Census {
        self.space.frames.census(order)
    }

    /// The fragmentation rate, from 0 to 1: of the free aligned runs of `2^order` frames that there
    /// could be, if all blocks lay as well as they can, the share that there is not. Frames in
    /// magazines are free, and on no run. 0 where there could be none, as in a pool that is nearly
    /// full. A walk over the bitmaps.
    pub fn fragmentation(&self, order: Order) -> f64 {
        self.rate(&self.census(order))
    }

    /// As [`fragmentation`](Self::fragmentation), by a census that was taken before.
    pub fn rate(&self, census: &Census) -> f64 {
        let free = census.free + self.counts().in_magazines;
        let set_aside = self.config.has_null_block as usize + self.space.reserve.held();
        let runs = census.free_in_order.checked_shr(u32::from(census.order.0)).unwrap_or(0);
        outside_of_runs(runs, self.total_frames(), set_aside, free, census.order)
    }

    /// Changes of what is free in the bitmaps, modulo 2^32: while it is the same, the fragmentation
    /// is. O(1).
    pub fn changes(&self) -> u32 {
        self.space.frames.changes()
    }

    /// Calls `f` with every maximal free run in the bitmaps, ascending. Exact when nobody is allocating or freeing.
    pub fn for_each_free_run(&self, f: &mut dyn FnMut(Run)) {
        self.space.frames.for_each_free_run(f);
    }

    /// Bytes of metadata for each frame, roughly: the table, and two bitmap levels with their hints.
    pub fn metadata_bytes(&self) -> usize {
        self.space.table.bytes() + self.moves.bytes() + self.rows() / 2
    }

    /// The pool is gone: threads that still have a thread cache in it let go of it when they next open one elsewhere.
    pub fn close(&self) {
        self.closed.store(true, Relaxed);
    }

    /// Where the blocks' memory is.
    pub fn device(&self) -> DeviceId {
        self.config.device
    }

    pub(in crate::block) fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    /// Where the `index`th thread cache's allocations gather: threads start in regions of their own.
    pub(in crate::block) fn shard(&self, index: usize) -> FrameId {
        let threads = self.config.threads.max(1);
        let at = self.total_frames() / threads * (index % threads);
        FrameId((at >> FAN_LOG2 << FAN_LOG2) as u32)
    }
}

/// Who knows what evictable blocks hold, and which of them goes first.
///
/// Called from threads that release and allocate, with blocks in their hands: it must not wait, nor panic.
pub trait Evictor: Send + Sync {
    /// There will be blocks up to this number.
    fn grow(&self, core: &Core, rows: usize);

    /// These blocks became evictable, in this order; each may have been hit, released again, or evicted, since. `tag`: the
    /// newest batch that may have seen them before; 0 if none in flight has.
    fn keep(&self, core: &Core, kept: &[Evictable], tag: Ticket);

    /// Evicts up to `wanted` blocks by [`Core::evict`] and passes on the frames, all of which no batch in flight sees.
    /// `oldest`: the oldest batch in flight. Fewer does not mean that there are no more.
    fn evict(&self, core: &Core, oldest: Ticket, wanted: usize, freed: &mut dyn FnMut(FrameId));

    /// The newest batch that may have seen a block which is evictable, as far as it is known: `word` is the block's.
    fn tag(&self, id: BlockId, word: BlockWord) -> Option<Ticket>;

    /// Notes it.
    fn set_tag(&self, id: BlockId, word: BlockWord, tag: Ticket);

    /// The block is not cached any more: it was evicted, and its frame is the caller's until this returns; or the caller has
    /// the only reference.
    fn forget(&self, core: &Core, id: BlockId);
}

/// Shared with who asks it for more.
impl<T: Evictor> Evictor for Arc<T> {
    fn grow(&self, core: &Core, rows: usize) {
        (**self).grow(core, rows);
    }

    fn keep(&self, core: &Core, kept: &[Evictable], tag: Ticket) {
        (**self).keep(core, kept, tag);
    }

    fn evict(&self, core: &Core, oldest: Ticket, wanted: usize, freed: &mut dyn FnMut(FrameId)) {
        (**self).evict(core, oldest, wanted, freed);
    }

    fn tag(&self, id: BlockId, word: BlockWord) -> Option<Ticket> {
        (**self).tag(id, word)
    }

    fn set_tag(&self, id: BlockId, word: BlockWord, tag: Ticket) {
        (**self).set_tag(id, word, tag);
    }

    fn forget(&self, core: &Core, id: BlockId) {
        (**self).forget(core, id);
    }
}

/// A block that became evictable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Evictable {
    /// The block.
    pub id: BlockId,
    /// Its word as its last release left it: what is noted of the release is noted for this generation.
    pub word: BlockWord,
}

/// Why a block was not evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotEvicted {
    /// It is owned, or free.
    Owned,
    /// It is being moved.
    Moving,
    /// A batch in flight may see it.
    Seen,
}
