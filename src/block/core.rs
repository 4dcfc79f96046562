//! The state that all references to a pool's blocks share, and the trait of its evictor.

use std::ops::{ControlFlow, Deref};

use crate::clock::{Clock, Watch};
use crate::config::{FAN_LOG2, MAGAZINE_BLOCKS_MAX};
use crate::error::OldestBatch;
use crate::frame::{Census, Depot, FrameConfig, Frames, outside_of_runs};
use crate::ids::{BlockHandle, BlockId, DeviceId, FrameId, Order, PoolTag, Run, Ticket};
use crate::sync::{
    Arc, AtomicBool, AtomicU64, AtomicUsize, CachePadded, Ordering::*, next_pool_tag, prefetch,
};

use super::latency::Latencies;
use super::space::{FreeSpace, Reserve, Scrub, SharedRetireList};
#[cfg(debug_assertions)]
use super::state::Site;
use super::state::{BlockWord, MoveLog, Note, Noted, Refused, SharedCounters, Sites, Table, Waiters};
use super::tenants::{Tenant, Tenants};
use super::thread_cache::ThreadCaches;

/// Shape of a pool; the pool's builder validates it.
#[derive(Clone, Copy, Debug)]
pub struct BlocksConfig {
    /// Number of frames, including the null block's.
    pub frames: usize,
    /// Maximum number of frames that the pool may grow to.
    pub frames_max: usize,
    /// Frames per segment: a power of two, at least [`FAN`](crate::config::FAN).
    pub segment_frames: usize,
    /// Blocks per full magazine, at most [`MAGAZINE_BLOCKS_MAX`]; 0 bypasses the magazines.
    pub magazine_blocks: usize,
    /// Expected number of allocating threads: their caches start in separate regions.
    pub threads: usize,
    /// Whether block 0 is the null block: never handed out, its frame pads block tables.
    pub has_null_block: bool,
    /// Blocks that are set aside for urgent requests; must be less than the number of blocks.
    pub reserve: usize,
    /// Frames of the run that each sequence takes beside its lists; 0: none.
    pub run_frames: usize,
    /// Device that holds the memory.
    pub device: DeviceId,
}

/// The blocks of a pool, by reference.
#[derive(Clone)]
pub struct Blocks(Arc<Core>);

/// A reference to a pool's blocks that does not keep them alive.
#[cfg(not(kvpool_loom))]
pub struct WeakBlocks(std::sync::Weak<Core>);

#[cfg(not(kvpool_loom))]
impl WeakBlocks {
    /// Returns the blocks while they live.
    pub fn upgrade(&self) -> Option<Blocks> {
        self.0.upgrade().map(Blocks)
    }
}

impl Deref for Blocks {
    type Target = Core;

    #[inline]
    fn deref(&self) -> &Core {
        &self.0
    }
}

pub(in crate::block) type WakeGuard<'a> = super::space::WakeGuard<'a, Core>;

/// State that all references to a pool's blocks share. Reached through [`Blocks`].
pub struct Core {
    pub(in crate::block) space: FreeSpace,
    watch: Watch,
    pub(in crate::block) thread_caches: ThreadCaches,
    pub(in crate::block) shared_retire_list: CachePadded<SharedRetireList>,
    pub(in crate::block) moves: CachePadded<MoveLog>,
    pub(in crate::block) waiters: Waiters,
    pub(in crate::block) counters: CachePadded<SharedCounters>,
    latencies: std::sync::Arc<Latencies>,
    pub(in crate::block) sites: Sites,
    pub(in crate::block) config: BlocksConfig,
    pub(in crate::block) tag: PoolTag,
    /// Number of frames, so that the common path does not read the directory.
    pub(in crate::block) total: AtomicUsize,
    pub(in crate::block) rows: AtomicUsize,
    pub(in crate::block) evictor: Option<Box<dyn Evictor>>,
    /// Shared with the evictor.
    pub(in crate::block) tenants: Option<Arc<Tenants>>,
    pub(in crate::block) evictable: CachePadded<AtomicUsize>,
    /// Frames of whole units that lists took since the last [reclaim](super::allocate) slice.
    pub(in crate::block) reclaim_debt: CachePadded<AtomicUsize>,
    /// Ticket of the batch whose end the slices await, if it is still the oldest.
    pub(in crate::block) reclaim_awaits: CachePadded<AtomicU64>,
    /// Last sum of the frames in all thread caches, and for how many further calls it is used.
    pub(in crate::block) in_thread_caches: AtomicUsize,
    pub(in crate::block) sum_serves: AtomicUsize,
    pub(in crate::block) windows: AtomicUsize,
    pub(in crate::block) refused: CachePadded<Refused>,
    /// Threads drop their cache of a closed pool at their next slow lookup.
    closed: AtomicBool,
}

impl Blocks {
    /// Returns a reference that does not keep the blocks alive.
    #[cfg(not(kvpool_loom))]
    pub fn downgrade(&self) -> WeakBlocks {
        WeakBlocks(Arc::downgrade(&self.0))
    }

    /// Creates a pool with all blocks free. Panics if the configuration is invalid.
    pub fn new(config: BlocksConfig, scrub: Option<Box<dyn Scrub>>) -> Self {
        Self::with_evictor(config, scrub, None)
    }

    /// Like [`new`](Self::new), with an evictor for cached blocks.
    pub fn with_evictor(
        config: BlocksConfig,
        scrub: Option<Box<dyn Scrub>>,
        evictor: Option<Box<dyn Evictor>>,
    ) -> Self {
        Self::with_tenants(config, scrub, evictor, None)
    }

    /// Like [`with_evictor`](Self::with_evictor), with tenants, which the evictor knows too.
    pub fn with_tenants(
        config: BlocksConfig,
        scrub: Option<Box<dyn Scrub>>,
        evictor: Option<Box<dyn Evictor>>,
        tenants: Option<Arc<Tenants>>,
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
            // From the front: a shrink takes frames from the end.
            let set_aside = Run { start: FrameId(null as u32), len: config.reserve as u32 };
            assert!(frames.claim(set_aside), "a fresh pool is free");
            reserve.fill(set_aside);
        }
        let depot = Depot::new(if config.magazine_blocks == 0 { 0 } else { 2 * config.threads });
        Self(Arc::new(Core {
            space: FreeSpace::new(Table::new(config.frames), frames, depot, reserve, scrub),
            watch: Watch::default(),
            thread_caches: ThreadCaches::default(),
            shared_retire_list: CachePadded::new(SharedRetireList::default()),
            moves: CachePadded::new(MoveLog::new()),
            waiters: Waiters::default(),
            counters: CachePadded::default(),
            latencies: std::sync::Arc::default(),
            sites: Sites::new(config.frames),
            config,
            tag: next_pool_tag(),
            total: AtomicUsize::new(config.frames),
            rows: AtomicUsize::new(config.frames),
            evictor,
            tenants,
            evictable: CachePadded::new(AtomicUsize::new(0)),
            reclaim_debt: CachePadded::new(AtomicUsize::new(0)),
            reclaim_awaits: CachePadded::new(AtomicU64::new(0)),
            in_thread_caches: AtomicUsize::new(0),
            sum_serves: AtomicUsize::new(0),
            windows: AtomicUsize::new(0),
            refused: CachePadded::default(),
            closed: AtomicBool::new(false),
        }))
    }

    pub(in crate::block) fn core_ptr(&self) -> *const Core {
        &raw const *self.0
    }
}

impl Core {
    /// Returns the number of allocatable blocks: all but the null block.
    #[inline]
    pub fn total(&self) -> usize {
        self.total.load(Relaxed) - self.config.has_null_block as usize
    }

    /// Returns the number of frames, including the null block's.
    #[inline]
    pub fn total_frames(&self) -> usize {
        // Relaxed: a count; no memory is reached through it.
        self.total.load(Relaxed)
    }

    /// Returns the number of rows of the table. Every block's id is below it.
    #[inline]
    pub fn rows(&self) -> usize {
        // Acquire: pairs with the Release in `count_grown`, so that these rows exist.
        self.rows.load(Acquire)
    }

    /// Returns the number of blocks set aside for urgent requests.
    pub fn reserve(&self) -> usize {
        self.space.reserve.mark()
    }

    /// Returns the configuration.
    pub fn config(&self) -> &BlocksConfig {
        &self.config
    }

    /// Returns the tag that distinguishes this pool's handles from another pool's.
    pub fn tag(&self) -> PoolTag {
        self.tag
    }

    /// Returns the block that pads block tables, if the pool has one.
    #[inline]
    pub fn null_block(&self) -> Option<BlockId> {
        self.config.has_null_block.then_some(BlockId(0))
    }

    #[inline]
    pub(in crate::block) fn wake_guard(&self) -> WakeGuard<'_> {
        WakeGuard::new(self)
    }

    /// Returns the number of blocks whose frames could not be wiped.
    pub fn unwiped(&self) -> usize {
        self.space.unwiped()
    }

    /// Ends a deferred wipe of held frames: frees them, or holds them permanently if it failed.
    pub fn wiped(&self, run: Run, is_wiped: bool) {
        self.space.end_wipe(run, is_wiped);
        self.announce();
    }

    #[cfg(debug_assertions)]
    pub(crate) fn note_sites(&self, what: Noted, ids: impl IntoIterator<Item = BlockId>, site: Site) {
        ids.into_iter().for_each(|id| self.sites.note(what, id, self.handle(id).generation, site));
    }

    /// Returns the place that allocated or pinned an owned block; `None` in release builds.
    pub(crate) fn site(&self, what: Noted, id: BlockId) -> Option<Note> {
        self.sites.read(what, id, self.handle(id).generation)
    }

    pub(crate) fn latencies(&self) -> &std::sync::Arc<Latencies> {
        &self.latencies
    }

    /// Returns the clock that orders batches.
    #[inline]
    pub fn clock(&self) -> &Clock {
        &self.space.clock
    }

    /// Returns the oldest batch in flight, with its age [as observed](crate::clock::Watch).
    pub fn oldest_batch(&self) -> Option<OldestBatch> {
        let ticket = self.space.clock.oldest_in_flight()?;
        Some(OldestBatch::new(ticket, self.watch.age(ticket)))
    }

    /// Returns a block's current word.
    #[inline]
    pub fn word(&self, id: BlockId) -> BlockWord {
        // Acquire: pairs with the Release of the last change: this generation's data is visible.
        BlockWord::from_bits(self.space.table.word(id).load(Acquire))
    }

    #[inline]
    pub(crate) fn prefetch_word(&self, id: BlockId) {
        prefetch(self.space.table.word(id));
    }

    /// Returns the frame of a block. It remains valid while the caller's batch is in flight.
    #[inline]
    pub fn frame(&self, id: BlockId) -> FrameId {
        self.word(id).frame()
    }

    /// Returns the block in a frame.
    pub fn block_at(&self, frame: FrameId) -> BlockId {
        self.space.table.block_at(frame)
    }

    /// Returns a handle of a block on which the caller holds a reference.
    pub fn handle(&self, id: BlockId) -> BlockHandle {
        let generation = self.space.table.info(id).generation(self.word(id));
        BlockHandle { id, pool: self.tag, generation }
    }

    /// Returns the number of threads with a cache here. A thread leaves when its destructors run,
    /// after the end of a [scope](std::thread::scope).
    pub fn thread_caches_in_use(&self) -> usize {
        self.thread_caches.in_use()
    }

    /// Returns the free frames, for tests that withhold some.
    #[cfg(feature = "internals")]
    pub fn frames(&self) -> &Frames {
        &self.space.frames
    }

    /// Returns the number of free frames in the bitmaps and their contiguity.
    pub fn census(&self, order: Order) -> Census {
        self.space.frames.census(order)
    }

    /// Returns the share, from 0 to 1, of the aligned runs of `2^order` frames that would be free
    /// if all blocks were packed and are not. Frames in magazines are in no run. Walks the bitmaps.
    pub fn fragmentation(&self, order: Order) -> f64 {
        self.rate(&self.census(order))
    }

    /// Like [`fragmentation`](Self::fragmentation), from a census.
    pub fn rate(&self, census: &Census) -> f64 {
        self.rate_of(census.free, census.free_in_order, census.order)
    }

    /// Returns the part of [`available_fragmentation`](Self::available_fragmentation) that
    /// compaction can cure: 0 while holes are within their limit. Excludes units reserved for
    /// growth.
    pub fn curable_fragmentation(&self, order: Order) -> f64 {
        let census = self.census(order);
        let (available, in_order) = self.available_in_order(&census);
        let of_others = |all: usize, reserved_for_growth: usize| all.saturating_sub(reserved_for_growth);
        let available = of_others(available, census.reserved_for_growth);
        let rate = self.rate_of(available, of_others(in_order, census.growth_in_order), order);
        let in_holes = (available + self.counts().in_magazines) as f64 * rate;
        if in_holes > self.holes_max() as f64 { rate } else { 0.0 }
    }

    /// Returns [`fragmentation`](Self::fragmentation), with evictable blocks as free. O(blocks).
    pub fn available_fragmentation(&self, order: Order) -> f64 {
        self.available_runs(&self.census(order)).0
    }

    /// Like [`available_fragmentation`](Self::available_fragmentation), with the number of runs.
    pub fn available_runs(&self, census: &Census) -> (f64, usize) {
        let (available, in_order) = self.available_in_order(census);
        let runs = in_order.checked_shr(u32::from(census.order.0)).unwrap_or(0);
        (self.rate_of(available, in_order, census.order), runs)
    }

    fn available_in_order(&self, census: &Census) -> (usize, usize) {
        if self.evictable.load(Relaxed) == 0 {
            return (census.free, census.free_in_order);
        }
        let order = census.order;
        let mut available = vec![false; self.total_frames()];
        self.for_each_free_run(&mut |run| {
            available.get_mut(run.start.index()..run.end() as usize).unwrap_or_default().fill(true);
        });
        for block in (0..self.rows() as u32).map(BlockId) {
            let word = self.word(block);
            if word.is_evictable()
                && let Some(frame) = available.get_mut(word.frame().index())
            {
                *frame = true;
            }
        }
        let count = |frames: &[bool]| frames.iter().filter(|is_available| **is_available).count();
        let run_len = 1_usize.checked_shl(u32::from(order.0)).unwrap_or(usize::MAX);
        let runs = available.chunks_exact(run_len).filter(|run| count(run) == run_len).count();
        (count(&available), runs * run_len)
    }

    fn rate_of(&self, free: usize, in_order: usize, order: Order) -> f64 {
        let free = free + self.counts().in_magazines;
        let set_aside = self.config.has_null_block as usize + self.space.reserve.held();
        let runs = in_order.checked_shr(u32::from(order.0)).unwrap_or(0);
        outside_of_runs(runs, self.total_frames(), set_aside, free, order)
    }

    /// Calls `f` with each unit that a list reserves for growth, ascending.
    pub fn for_each_growth_unit(&self, f: &mut dyn FnMut(Run)) {
        self.space.frames.for_each_growth_unit(f);
    }

    /// Returns the number of changes to the bitmaps, modulo 2^32. O(1).
    pub fn changes(&self) -> u32 {
        self.space.frames.changes()
    }

    /// Calls `f` with each maximal free run in the bitmaps, ascending; exact if nothing changes.
    pub fn for_each_free_run(&self, f: &mut dyn FnMut(Run)) {
        self.space.frames.for_each_free_run(f);
    }

    /// Appends up to `most` free frames in open units of the bitmaps to `out`, ascending, from
    /// `first` on.
    pub(crate) fn free_frames_from(&self, first: FrameId, most: usize, out: &mut Vec<u32>) {
        let end = out.len().saturating_add(most);
        self.space.frames.visit_open_runs(first, &mut |run| {
            out.extend((run.start.0.max(first.0)..run.end()).take(end - out.len()));
            if out.len() < end { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
    }

    /// Returns the approximate metadata in bytes.
    pub fn metadata_bytes(&self) -> usize {
        self.space.table.bytes() + self.moves.bytes() + self.rows() / 2
    }

    /// Marks the pool as closed: a thread drops its cache here when it next opens one elsewhere.
    pub fn close(&self) {
        self.closed.store(true, Relaxed);
    }

    /// Returns the device that holds the blocks' memory.
    pub fn device(&self) -> DeviceId {
        self.config.device
    }

    pub(in crate::block) fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    pub(in crate::block) fn shard(&self, index: usize) -> FrameId {
        let threads = self.config.threads.max(1);
        let at = self.total_frames() / threads * (index % threads);
        FrameId((at >> FAN_LOG2 << FAN_LOG2) as u32)
    }
}

/// Finds and orders evictable blocks. Called inside releases and allocations: must not block or
/// panic.
pub trait Evictor: Send + Sync {
    /// Prepares for block ids below `rows`.
    fn grow(&self, core: &Core, rows: usize);

    /// Records blocks that became evictable, in this order; each may have changed since. `tag` is
    /// the newest batch that may have seen them, 0 if none in flight has.
    fn became_evictable(&self, core: &Core, blocks: &[Evictable], tag: Ticket);

    /// Evicts up to this number of blocks by `Core::evict`, for an allocation of a tenant, and passes
    /// their frames to `freed`, a few at a time. May return fewer although more are evictable.
    /// `oldest` is the oldest batch in flight.
    fn evict(&self, core: &Core, oldest: Ticket, wanted: (usize, Tenant), freed: &mut dyn FnMut(&[FrameId]));

    /// Like [`evict`](Self::evict), only blocks of the tenant, whatever its floor is.
    fn evict_own(&self, _: &Core, _oldest: Ticket, _: (usize, Tenant), _freed: &mut dyn FnMut(&[FrameId])) {}

    /// Returns whether all of these blocks (if empty: any block) may be evicted early to complete a
    /// unit of free frames, at a multiple of the usual tolerance.
    fn evicts_early(&self, blocks: &[BlockId], tolerance: u32) -> bool;

    /// Returns the number of releases, modulo 2^64. It changes before a block's tag is recorded.
    fn releases(&self) -> u64;

    /// Like [`tag`](Self::tag), only if recorded by [`became_evictable`](Self::became_evictable).
    fn noted_tag(&self, id: BlockId, word: BlockWord) -> Option<Ticket>;

    /// Returns the newest batch that may have seen an evictable block with this word, if known.
    fn tag(&self, id: BlockId, word: BlockWord) -> Option<Ticket>;

    /// Records a tag for an evictable block with this word that has no tag.
    fn assume_tag(&self, id: BlockId, word: BlockWord, tag: Ticket);

    /// Forgets a block that is no longer cached; the caller owns its frame or its only reference.
    fn forget(&self, core: &Core, id: BlockId);
}

impl<T: Evictor> Evictor for Arc<T> {
    fn grow(&self, core: &Core, rows: usize) {
        (**self).grow(core, rows);
    }

    fn became_evictable(&self, core: &Core, blocks: &[Evictable], tag: Ticket) {
        (**self).became_evictable(core, blocks, tag);
    }

    fn evict(&self, core: &Core, oldest: Ticket, wanted: (usize, Tenant), freed: &mut dyn FnMut(&[FrameId])) {
        (**self).evict(core, oldest, wanted, freed);
    }

    fn evict_own(
        &self,
        core: &Core,
        oldest: Ticket,
        wanted: (usize, Tenant),
        freed: &mut dyn FnMut(&[FrameId]),
    ) {
        (**self).evict_own(core, oldest, wanted, freed);
    }

    fn evicts_early(&self, blocks: &[BlockId], tolerance: u32) -> bool {
        (**self).evicts_early(blocks, tolerance)
    }

    fn releases(&self) -> u64 {
        (**self).releases()
    }

    fn noted_tag(&self, id: BlockId, word: BlockWord) -> Option<Ticket> {
        (**self).noted_tag(id, word)
    }

    fn tag(&self, id: BlockId, word: BlockWord) -> Option<Ticket> {
        (**self).tag(id, word)
    }

    fn assume_tag(&self, id: BlockId, word: BlockWord, tag: Ticket) {
        (**self).assume_tag(id, word, tag);
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
    /// Its word after its last release: what is recorded is valid for this generation only.
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
    /// Its tenant is at its floor.
    Protected,
}
