//! Every block of a pool, and the threads that use them.

use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::batch::{Clock, Watch};
use crate::config::{FAN_LOG2, MAGAZINE_BLOCKS_MAX};
use crate::error::{GrowError, OldestBatch};
use crate::frame::{Census, Depot, FrameConfig, Frames, outside_of_runs};
use crate::ids::{BlockHandle, BlockId, DeviceId, FrameId, Order, PoolTag, Run};
use crate::sync::{Arc, AtomicBool, AtomicUsize, CachePadded, Ordering::*, next_pool_tag};

use super::BlockWord;
use super::evict::Evictor;
use super::log::MoveLog;
use super::reserve::Reserve;
use super::shared_limbo::SharedLimbo;
use super::table::Table;
use super::thread_cache::ThreadCaches;
use super::waiters::Waiters;

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

/// The blocks of a pool. Cloning gives another reference to the same blocks; see the [module](super).
#[derive(Clone)]
pub struct Blocks(Arc<Core>);

impl Deref for Blocks {
    type Target = Core;

    #[inline]
    fn deref(&self) -> &Core {
        &self.0
    }
}

/// Wipes the bytes of free frames. A panic says that it failed: those frames are never handed out again.
pub type Scrub = Box<dyn Fn(Run) + Send + Sync>;

/// What all references to a pool's blocks share. Reached through [`Blocks`].
pub struct Core {
    pub(super) table: Table,
    pub(super) frames: Frames,
    pub(super) depot: Depot,
    pub(super) clock: Clock,
    watch: Watch,
    pub(super) thread_caches: ThreadCaches,
    /// Retired frames of threads that could not enter a thread cache of their own at that moment.
    ///
    /// Its own cache line, as everything that a mover writes: next to it stands what every allocation reads.
    pub(super) shared_limbo: CachePadded<SharedLimbo>,
    /// What moved lately.
    pub(super) moves: CachePadded<MoveLog>,
    pub(super) reserve: Reserve,
    pub(super) waiters: Waiters,
    pub(super) config: BlocksConfig,
    pub(super) tag: PoolTag,
    /// Wipes frames that are given up, before anybody can own them again.
    scrub: Option<Scrub>,
    /// Frames of the pool, so that the common path need not look at the directory.
    pub(super) total: AtomicUsize,
    /// The most frames that there ever were. Ids are below it: a block outlives the frame of its number.
    pub(super) rows: AtomicUsize,
    /// Frames that are held: see [`hold_frame`](Self::hold_frame).
    pub(super) held: CachePadded<AtomicUsize>,
    /// Of these, those that could not be wiped.
    unwiped: AtomicUsize,
    /// Knows the cached blocks, if any are.
    pub(super) evictor: Option<Box<dyn Evictor>>,
    /// Blocks that are evictable.
    pub(super) evictable: CachePadded<AtomicUsize>,
    /// The pool is gone; threads forget it when they next look at their list.
    closed: AtomicBool,
}

/// Where a pool's blocks are, each counted where it is: see [`Core::counts`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Blocks that can be handed out, without the null block.
    pub total: usize,
    /// Free in the bitmaps.
    pub in_bitmap: usize,
    /// Free in threads' magazines and in the depot.
    pub in_magazines: usize,
    /// Free, but some batch in flight may still read them.
    pub retired: usize,
    /// Free, and kept from being handed out: the destinations of moves, and what a pool that shrinks has collected.
    pub held: usize,
    /// Free, and set aside for urgent requests.
    pub reserved: usize,
    /// Owned by nobody, and kept for their bytes until a frame is needed.
    pub evictable: usize,
}

impl Counts {
    /// Blocks that any allocation can get now without evicting: without those that are set aside for urgent requests.
    pub fn free(&self) -> usize {
        self.in_bitmap + self.in_magazines
    }

    /// Blocks that any allocation can get now, if need be by evicting: [`free`](Self::free) and
    /// evictable ones.
    pub fn available(&self) -> usize {
        self.free() + self.evictable
    }

    /// Blocks that somebody owns.
    pub fn used(&self) -> usize {
        self.total.saturating_sub(self.free() + self.retired + self.held + self.reserved + self.evictable)
    }
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
        Self(Arc::new(Core {
            table: Table::new(config.frames),
            frames,
            depot: Depot::new(if config.magazine_blocks == 0 { 0 } else { 2 * config.threads }),
            clock: Clock::default(),
            watch: Watch::default(),
            thread_caches: ThreadCaches::default(),
            shared_limbo: CachePadded::new(SharedLimbo::default()),
            moves: CachePadded::new(MoveLog::new()),
            reserve,
            waiters: Waiters::default(),
            config,
            tag: next_pool_tag(),
            scrub,
            total: AtomicUsize::new(config.frames),
            rows: AtomicUsize::new(config.frames),
            held: CachePadded::new(AtomicUsize::new(0)),
            unwiped: AtomicUsize::new(0),
            evictor,
            evictable: CachePadded::new(AtomicUsize::new(0)),
            closed: AtomicBool::new(false),
        }))
    }

    pub(super) fn core_ptr(&self) -> *const Core {
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
        self.reserve.mark()
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

    /// The order of batches.
    #[inline]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// The batch that has been in flight the longest, as [far as looks tell](crate::batch::Watch).
    pub fn oldest_batch(&self) -> Option<OldestBatch> {
        let ticket = self.clock.oldest_in_flight()?;
        Some(OldestBatch::new(ticket, self.watch.age(ticket)))
    }

    /// A block's word at this moment.
    #[inline]
    pub fn word(&self, id: BlockId) -> BlockWord {
        // Acquire: pairs with the Release of whoever changed the word last, so that what belongs to this generation
        // of the block is seen with it.
        BlockWord::from_bits(self.table.word(id).load(Acquire))
    }

    /// Where a block's bytes are. It stays there for as long as the caller's batch is in flight.
    #[inline]
    pub fn frame(&self, id: BlockId) -> FrameId {
        self.word(id).frame()
    }

    /// The block in a frame.
    pub fn block_at(&self, frame: FrameId) -> BlockId {
        self.table.block_at(frame)
    }

    /// A handle of a block on which the caller holds a reference.
    pub fn handle(&self, id: BlockId) -> BlockHandle {
        let generation = self.table.info(id).generation(self.word(id));
        BlockHandle { id, pool: self.tag, generation }
    }

    /// Adds `blocks` blocks: first those whose frames a [shrink](super::Shrinking) took away. `prepare` is called with the frames to come, and makes their memory ready; it may be
    /// called more than once, also for what then does not come.
    ///
    /// # Errors
    ///
    /// [`GrowError`]; the pool is unchanged.
    pub fn grow(
        &self,
        blocks: usize,
        prepare: &mut dyn FnMut(Run) -> Result<(), GrowError>,
    ) -> Result<(), GrowError> {
        let null = self.config.has_null_block as usize;
        let run = self
            .frames
            .grow(blocks, &mut |run| {
                if !cfg!(kvpool_mutant = "late_rows") {
                    self.table.grow(run.end() as usize);
                    if let Some(evictor) = &self.evictor {
                        evictor.grow(self, run.end() as usize);
                    }
                }
                prepare(run)?;
                self.bring_back(run);
                // Before any of them can be handed out, so that no handle is refused that the pool gave.
                if !cfg!(kvpool_mutant = "late_total") {
                    self.count_grown(run);
                }
                Ok(())
            })
            .map_err(|error| match error {
                // Told in blocks, as the caller counts them.
                GrowError::TooLarge { asked, total, max } => {
                    GrowError::TooLarge { asked, total: total - null, max: max - null }
                }
                other => other,
            })?;
        if cfg!(kvpool_mutant = "late_rows") {
            self.table.grow(run.end() as usize);
        }
        if cfg!(kvpool_mutant = "late_total") {
            self.count_grown(run);
        }
        self.announce();
        Ok(())
    }

    /// Growers come one after the other, and each adds its own.
    fn count_grown(&self, run: Run) {
        // Release: pairs with the Acquire of those who ask for a row of this number.
        self.rows.fetch_max(run.end() as usize, Release);
        self.total.fetch_add(run.len as usize, Relaxed);
    }

    /// Counts blocks by where they are, without a walk over the bitmaps: O(threads). Exact when
    /// nobody is allocating or freeing. Beside threads that do, each number is of about this
    /// moment, and they need not add up.
    pub fn counts(&self) -> Counts {
        self.counts_with(self.frames.free_counted())
    }

    /// As [`counts`](Self::counts), with a walk over the bitmaps, for decisions: a frame that is
    /// free there during the whole walk is counted.
    pub(crate) fn recount(&self) -> Counts {
        self.counts_with(self.frames.free_frames())
    }

    fn counts_with(&self, in_bitmap: usize) -> Counts {
        let oldest = self.clock.oldest();
        let (mut in_magazines, mut retired) = (self.depot.frames(), 0);
        for thread_cache in self.thread_caches.iter() {
            let (cached, waiting, newest_tag) = thread_cache.mirror();
            in_magazines += cached;
            // What no batch can see any more is got by the next allocation that needs it.
            if newest_tag < oldest { in_magazines += waiting } else { retired += waiting }
        }
        let (waiting, newest_tag) = self.shared_limbo.mirror();
        if newest_tag < oldest {
            in_magazines += waiting
        } else {
            retired += waiting
        }
        Counts {
            total: self.total(),
            in_bitmap,
            in_magazines,
            retired,
            // Whoever releases a block that is moving counts its frame in, perhaps after the mover counted it out.
            held: (self.held.load(Relaxed) as isize).max(0) as usize,
            reserved: self.reserve.held(),
            evictable: self.evictable(),
        }
    }

    /// Threads and handles that have a cache here. A thread leaves when its destructors run, which is after the end of
    /// a [scope](std::thread::scope) that it was spawned in, and, under loom, after it was joined: who audits then waits
    /// for this number to fall.
    pub fn thread_caches_in_use(&self) -> usize {
        self.thread_caches.taken()
    }

    /// What is free in the bitmaps and how contiguous it is.
    pub fn census(&self, order: Order) -> Census {
        self.frames.census(order)
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
        let set_aside = self.config.has_null_block as usize + self.reserve.held();
        let runs = census.free_in_order.checked_shr(u32::from(census.order.0)).unwrap_or(0);
        outside_of_runs(runs, self.total_frames(), set_aside, free, census.order)
    }

    /// Changes of what is free in the bitmaps, modulo 2^32: while it is the same, the fragmentation
    /// is. O(1).
    pub fn changes(&self) -> u32 {
        self.frames.changes()
    }

    /// Calls `f` with every maximal free run in the bitmaps, ascending. Exact when nobody is allocating or freeing.
    pub fn for_each_free_run(&self, f: &mut dyn FnMut(Run)) {
        self.frames.for_each_free_run(f);
    }

    /// Bytes of metadata for each frame, roughly: the table, and two bitmap levels with their hints.
    pub fn metadata_bytes(&self) -> usize {
        self.table.bytes() + self.moves.bytes() + self.rows() / 2
    }

    /// The pool is gone: threads that still have a thread cache in it let go of it when they next open one elsewhere.
    pub fn close(&self) {
        self.closed.store(true, Relaxed);
    }

    /// Marks a free block whose frame the caller has claimed out of the bitmaps, so that an audit can tell the frame
    /// from a lost one. It stays the caller's until [`release_held`](Self::release_held), or until a move gives it away.
    ///
    /// # Panics
    ///
    /// If the block is owned, or held already: the frame is not the caller's.
    pub(crate) fn hold_frame(&self, frame: FrameId) {
        self.set_held(frame, BlockWord::hold);
        // Relaxed, here and below: statistics.
        self.held.fetch_add(1, Relaxed);
    }

    /// Gives a frame that was [held](Self::hold_frame) back to the bitmaps.
    ///
    /// # Panics
    ///
    /// If it is not held.
    pub(crate) fn release_held(&self, frame: FrameId) {
        self.unhold_frame(frame);
        self.free_run(Run { start: frame, len: 1 });
    }

    /// The end of a hold; the frame is still the caller's.
    pub(super) fn unhold_frame(&self, frame: FrameId) {
        self.set_held(frame, BlockWord::unhold);
        self.held.fetch_sub(1, Relaxed);
    }

    /// A transition of the free block in a frame that is the caller's.
    pub(super) fn set_held(&self, frame: FrameId, transition: impl Fn(BlockWord) -> Option<BlockWord>) {
        let atomic = self.table.word(self.table.block_at(frame));
        // Relaxed: the frame came to us by an Acquire, and with it the word of whoever freed it.
        let word = BlockWord::from_bits(atomic.load(Relaxed));
        let Some(next) = transition(word).filter(|_| word.frame() == frame) else {
            panic!("frame {frame} held by who does not have it: {word:?}")
        };
        // A plain store: nobody else writes the word of a free block whose frame is ours. Release: a stale handle that
        // reads it must not be taken back behind the free.
        atomic.store(next.to_bits(), Release);
    }

    /// Puts frames that nobody owns, and no batch sees, into the reserve as far as it is short, else back into the bitmaps.
    pub(super) fn free_run(&self, mut run: Run) {
        if !self.wipe(run) {
            return;
        }
        if self.reserve.is_short() {
            run = self.reserve.fill(run);
        }
        if run.len > 0 {
            self.frames.free_run(run);
        }
    }

    #[inline]
    pub(super) fn wipes(&self) -> bool {
        self.scrub.is_some()
    }

    /// Wipes free frames that are the caller's, if the pool does that. False: it failed, and they are held for good, so that no
    /// other owner reads what is left in them. (The panic was reported where it happened, and goes no further: frames are
    /// freed in destructors, which have more of them in hand.) Reached by `storage_faults`.
    #[inline]
    #[must_use = "frames that were not wiped are not to be handed out"]
    pub(super) fn wipe(&self, run: Run) -> bool {
        match &self.scrub {
            None => true,
            Some(scrub) => self.wipe_with(scrub, run),
        }
    }

    #[inline(never)]
    fn wipe_with(&self, scrub: &Scrub, run: Run) -> bool {
        let wiped = catch_unwind(AssertUnwindSafe(|| scrub(run))).is_ok();
        if !wiped {
            run.frames().for_each(|frame| self.hold_frame(frame));
            // Relaxed: a statistic.
            self.unwiped.fetch_add(run.len as usize, Relaxed);
        }
        wiped
    }

    /// Blocks that are held because their frames could not be wiped.
    pub fn unwiped(&self) -> usize {
        self.unwiped.load(Relaxed)
    }

    /// Where the blocks' memory is.
    pub fn device(&self) -> DeviceId {
        self.config.device
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    /// Where the `index`th thread cache's allocations gather: threads start in regions of their own.
    pub(super) fn shard(&self, index: usize) -> FrameId {
        let threads = self.config.threads.max(1);
        let at = self.total_frames() / threads * (index % threads);
        FrameId((at >> FAN_LOG2 << FAN_LOG2) as u32)
    }
}
