use std::sync::PoisonError;

use crate::block::{Accounts, AllocRequest, AuditError, AuditReport, Blocks, Counts};
use crate::clock::InFlight;
use crate::compact::MoveCounts;
use crate::error::{AllocError, FrameError};
use crate::ids::{FrameId, Order, PoolTag, Run, SequenceId, Ticket};
use crate::prefix::{PolicyInfo, PrefixCache, PrefixStats};
use crate::sync::{Arc, Mutex, call};

/// A pool whose ids are frames, for engines with ids, hashes and schedulers of their own.
///
/// Cloning is cheap, and all clones are the same pool. Any number of threads may call it at once.
/// Allocation, free, share and lookup take no locks.
///
/// A call that names frames is checked as a whole. An error names the position of the first wrong
/// entry, and changes neither the pool nor the caller's output list. Freeing a frame twice is an
/// error while the frame is free or cached; frame numbers have no generation, so the error goes
/// unnoticed once the frame has another owner. The number of a cached frame without references is
/// valid until the next call of any thread that allocates, uncaches or commits
/// [moves](Self::propose_moves).
///
/// # Eviction order
///
/// Free frames are allocated first. Then cached frames without references are evicted: first those
/// freed with [`free_evict_first`](Self::free_evict_first), then the others, each in the order in
/// which they were freed. Exceptions: contiguous requests and [claims](Self::claim) evict the
/// frames that they need, and a thread of a pool of 512 frames or more evicts up to 32 frames
/// ahead, unless [magazines](crate::FramePoolBuilder::magazine_frames) are disabled.
///
/// # Example
///
/// ```
/// use kvpool::{AllocRequest, FrameError, FrameGroup, FrameId, FramePool};
///
/// let pool = FramePool::builder(1_000).build()?;
/// let mut table = Vec::new();
/// pool.allocate(AllocRequest::new(3), &mut table)?;
///
/// // The engine's own hash of the first block, for its only group of layers.
/// let key = pool.key(FrameGroup(0), b"sha256 of tokens and parent")?;
/// pool.register(&[(table[0], key)])?;
/// pool.free(&table)?;
/// assert_eq!(pool.cached(key)?, Some(table[0]));
///
/// // Freed already: refused by name, and nothing is changed.
/// let again = pool.free(&table[1..]);
/// assert_eq!(again, Err(FrameError::Free { index: 0, frame: FrameId(table[1]) }));
///
/// let mut hits = Vec::new();
/// assert_eq!(pool.hit(&[key], &mut hits)?, 1);
/// assert_eq!(hits, [table[0]]);
/// pool.free(&hits)?;
/// pool.audit()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct FramePool(pub(super) Arc<Shared>);

pub(super) struct Shared {
    pub(super) blocks: Blocks,
    pub(super) cache: Arc<PrefixCache>,
    pub(super) order: Order,
    pub(super) moves: Mutex<MoveCounts>,
}

impl Shared {
    pub(super) fn move_counts(&self) -> MoveCounts {
        *self.moves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn count_moves(&self, count: impl FnOnce(&mut MoveCounts)) {
        count(&mut self.moves.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.blocks.close();
        self.cache.events().close();
    }
}

/// A snapshot of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct FrameInfo {
    /// The frame.
    pub frame: FrameId,
    /// Number of references.
    pub references: u32,
    /// Number of its hashes.
    pub hashes: usize,
    /// Whether its bytes are being copied to another frame; a reference cancels the move.
    pub moving: bool,
    /// Newest batch when it was allocated.
    pub last_access: Ticket,
    /// Sequence that it was allocated for.
    pub sequence: Option<SequenceId>,
}

/// A batch in flight: one step of the engine. Ends when dropped.
#[must_use = "dropping it ends the batch"]
pub struct FrameBatch {
    blocks: Blocks,
    in_flight: Option<InFlight>,
    ticket: Ticket,
}

impl FrameBatch {
    /// Returns the ticket.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }
}

impl Drop for FrameBatch {
    fn drop(&mut self) {
        let _call = call();
        if let Some(in_flight) = self.in_flight.take() {
            self.blocks.end_batch(in_flight);
        }
    }
}

impl FramePool {
    pub(super) fn new(blocks: Blocks, cache: Arc<PrefixCache>, order: Order) -> Self {
        Self(Arc::new(Shared { blocks, cache, order, moves: Mutex::default() }))
    }

    /// Returns the block metadata.
    #[cfg(feature = "internals")]
    pub fn blocks(&self) -> &Blocks {
        &self.0.blocks
    }

    /// Allocates frames with one reference each, and appends them to `out`. Never waits.
    pub fn allocate(&self, request: AllocRequest, out: &mut Vec<u32>) -> Result<(), AllocError> {
        let _call = call();
        // First, so that a failed memory allocation leaks no frame.
        out.reserve(request.blocks.min(self.frames()));
        self.0.blocks.allocate_frames(&request.pinned(), false, &mut |run| out.extend(run.start.0..run.end()))
    }

    /// Allocates frames with one reference each, as few runs, which it appends to `out`: one run if
    /// a free run is long enough. Evicts only for missing frames.
    pub fn allocate_runs(&self, request: AllocRequest, out: &mut Vec<Run>) -> Result<(), AllocError> {
        let _call = call();
        let before = out.len();
        out.reserve(request.blocks.min(self.frames()));
        self.0.blocks.allocate_frames(&request.pinned(), true, &mut |run| match out[before..].last_mut() {
            Some(last) if last.end() == run.start.0 => last.len += run.len,
            _ => out.push(run),
        })
    }

    /// Allocates the named frames, with one reference each. They must have no references. Cached
    /// frames are evicted; [`share`](Self::share) a frame to keep its contents. A free frame in the
    /// magazine of a thread that is inside a call is not found. If another thread concurrently
    /// takes a cached frame, others may have been evicted although the call fails.
    pub fn claim(&self, frames: &[u32]) -> Result<(), FrameError> {
        let _call = call();
        self.0.blocks.claim_frames(frames, &AllocRequest::new(frames.len()).pinned())
    }

    /// Drops one reference on each frame, in this order. A frame that is listed twice loses two.
    ///
    /// A frame that loses its last reference becomes free or, if it has hashes, cached: it is
    /// evicted after those freed before it. If another thread concurrently frees the last reference
    /// of a listed frame, that frame is reported, and the others are freed.
    pub fn free(&self, frames: &[u32]) -> Result<(), FrameError> {
        let _call = call();
        self.free_with(frames, PolicyInfo::default())
    }

    /// Frees like [`free`](Self::free), but the frames are evicted before all frames freed by
    /// `free`, in the order of these calls and of each list. A hit or share takes a frame out of
    /// the order.
    pub fn free_evict_first(&self, frames: &[u32]) -> Result<(), FrameError> {
        let _call = call();
        self.free_with(frames, PolicyInfo { is_evict_first: true, ..PolicyInfo::default() })
    }

    fn free_with(&self, frames: &[u32], policy_info: PolicyInfo) -> Result<(), FrameError> {
        let Shared { blocks, cache, .. } = &*self.0;
        blocks.free_frames(frames, |kept, tag| cache.keep(blocks, kept, tag, policy_info))
    }

    /// Adds one reference to each frame, which must be referenced or cached. If several threads use
    /// the pool, a frame number from [`cached`](Self::cached) may be outdated: use
    /// [`hit`](Self::hit).
    pub fn share(&self, frames: &[u32]) -> Result<(), FrameError> {
        let _call = call();
        let Shared { blocks, cache, .. } = &*self.0;
        blocks.share_frames(frames, |kept, tag| cache.keep(blocks, kept, tag, Default::default()))
    }

    /// Appends the number of references of each frame to `out`; 0 for free and cached frames.
    pub fn references(&self, frames: &[u32], out: &mut Vec<u32>) -> Result<(), FrameError> {
        let before = out.len();
        for (index, &frame) in frames.iter().enumerate() {
            let checked = self.0.blocks.block_in_place(index, frame).inspect_err(|_| out.truncate(before));
            let word = self.0.blocks.word(checked?);
            out.push(if word.frame().0 == frame { word.refs() } else { 0 });
        }
        Ok(())
    }

    /// Appends a snapshot of each frame to `out`. A free frame is an error.
    pub fn info(&self, frames: &[u32], out: &mut Vec<FrameInfo>) -> Result<(), FrameError> {
        let Shared { blocks, cache, .. } = &*self.0;
        let before = out.len();
        for (index, &frame) in frames.iter().enumerate() {
            let used = blocks.used_in_place(index, frame).inspect_err(|_| out.truncate(before));
            let (id, word) = used?;
            let block = blocks.info_of(id, word);
            out.push(FrameInfo {
                frame: FrameId(frame),
                references: word.refs(),
                hashes: cache.hashes_of(blocks, id).len(),
                moving: word.is_moving(),
                last_access: block.last_access,
                sequence: block.sequence,
            });
        }
        Ok(())
    }

    /// Returns whether the engine may write to a frame, which must not be free: it has one
    /// reference and no hash.
    pub fn is_writable(&self, frame: u32) -> Result<bool, FrameError> {
        let (_, word) = self.0.blocks.used_in_place(0, frame)?;
        Ok(word.refs() == 1 && !word.is_cached())
    }

    /// Returns the number of batches in flight.
    pub fn batches_in_flight(&self) -> u64 {
        self.0.blocks.clock().in_flight()
    }

    /// Begins a batch: frames that are freed while it is in flight are not reused before it ends.
    /// An engine that orders all work on one stream needs none. Panics if 65,536 batches are in
    /// flight.
    pub fn begin_batch(&self) -> FrameBatch {
        let _call = call();
        let blocks = self.0.blocks.clone();
        let in_flight = blocks.begin_batch();
        let ticket = in_flight.ticket();
        FrameBatch { blocks, in_flight: Some(in_flight), ticket }
    }

    /// Evicts up to `frames` cached frames without references, in the order of an allocation, and
    /// returns their number. An engine that evicts ahead of its requests allocates longer runs.
    ///
    /// ```
    /// # use kvpool::{AllocRequest, FrameGroup, FramePool};
    /// let pool = FramePool::builder(100).build()?;
    /// let mut table = Vec::new();
    /// pool.allocate(AllocRequest::new(100), &mut table)?;
    /// for &frame in &table {
    ///     pool.register(&[(frame, pool.key(FrameGroup(0), &frame.to_le_bytes())?)])?;
    /// }
    /// pool.free(&table)?;
    /// assert_eq!((pool.counts().free(), pool.counts().evictable), (0, 100));
    /// assert_eq!(pool.evict(30), 30);
    /// assert_eq!((pool.counts().free(), pool.counts().evictable), (30, 70));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn evict(&self, frames: usize) -> usize {
        let _call = call();
        self.0.blocks.evict_free(frames)
    }

    /// Appends up to `most` frames without references to `out`, in the order of
    /// [allocations](Self#eviction-order): free frames, ascending, then cached ones; those after
    /// `cursor`, or the first ones. To read on, pass the last frame as the cursor.
    ///
    /// The list is no reservation. Without concurrent calls it has each such frame once, except
    /// free frames in [magazines](crate::FramePoolBuilder::magazine_frames) and those that batches
    /// in flight may see. Otherwise, a frame whose state changes may be missing or appear twice. A
    /// cursor with references is an error.
    ///
    /// The first call visits every frame, and from then on each free of cached frames takes a lock.
    /// Later calls take time in proportion to the listed frames, and to the frames that were
    /// listed, freed or evicted since.
    ///
    /// ```
    /// # use kvpool::{AllocRequest, FrameGroup, FramePool};
    /// let pool = FramePool::builder(6).build()?;
    /// let mut table = Vec::new();
    /// pool.allocate(AllocRequest::new(6), &mut table)?;
    /// for &frame in &[5, 2, 4] {
    ///     pool.register(&[(frame, pool.key(FrameGroup(0), &frame.to_le_bytes())?)])?;
    /// }
    /// pool.free(&[5, 1, 2, 6, 4])?;
    /// let mut order = Vec::new();
    /// pool.available_after(None, 3, &mut order)?;
    /// assert_eq!(order, [1, 6, 5]);
    /// pool.available_after(Some(5), 10, &mut order)?;
    /// assert_eq!(order, [1, 6, 5, 2, 4]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn available_after(
        &self,
        cursor: Option<u32>,
        most: usize,
        out: &mut Vec<u32>,
    ) -> Result<(), FrameError> {
        let _call = call();
        let Shared { blocks, cache, .. } = &*self.0;
        let before = out.len();
        let mut block = None;
        if let Some(frame) = cursor {
            let id = blocks.block_in_place(0, frame)?;
            let word = blocks.word(id);
            if word.is_owned() && word.frame().0 == frame {
                return Err(FrameError::InUse { index: 0, frame: FrameId(frame), references: word.refs() });
            }
            block = (word.is_evictable() && word.frame().0 == frame).then_some(id);
        }
        if block.is_none() {
            let first = cursor.map_or(0, |frame| frame + 1);
            blocks.free_frames_from(FrameId(first), most, out);
        }
        let most = most - (out.len() - before);
        if most > 0 {
            cache.evictable_after(blocks, block, most, out);
        }
        Ok(())
    }

    /// Returns free frames in magazines to the bitmaps, where they merge into runs.
    pub fn trim(&self) {
        let _call = call();
        self.0.blocks.trim();
    }

    /// Returns the number of frames, including the null block's.
    pub fn frames(&self) -> usize {
        self.0.blocks.total_frames()
    }

    /// Returns the number of frames that are free, or cached without references. O(threads).
    pub fn available(&self) -> usize {
        let _call = call();
        self.0.blocks.counts().available()
    }

    /// Returns the number of frames in each state, exact without concurrent calls. O(threads).
    pub fn counts(&self) -> Counts {
        let _call = call();
        self.0.blocks.counts()
    }

    /// Returns counts of lookups, hits, registrations and evictions.
    pub fn cache_stats(&self) -> PrefixStats {
        self.0.cache.stats()
    }

    /// Returns the number that distinguishes this pool's keys from those of other pools.
    pub fn tag(&self) -> PoolTag {
        self.0.blocks.tag()
    }

    /// Returns the number of threads with a thread cache in this pool.
    pub fn thread_caches(&self) -> usize {
        self.0.blocks.thread_caches_in_use()
    }

    /// Recounts every frame and the references, and checks that frames with references are pinned
    /// and that only cached ones have hashes. No thread may use the pool; batches may be in flight.
    pub fn audit(&self) -> Result<AuditReport, AuditError> {
        let _call = call();
        let report = self.0.blocks.audit()?;
        self.0.blocks.audit_in_place()?;
        self.0.blocks.audit_owners(Accounts::default)?;
        match self.0.cache.stray(&self.0.blocks) {
            Some(block) => Err(AuditError::StrayHash { block }),
            None => Ok(report),
        }
    }
}

impl std::fmt::Debug for FramePool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FramePool").field("tag", &self.tag()).field("counts", &self.counts()).finish()
    }
}
