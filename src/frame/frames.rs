//! The bitmap of a pool.

use std::ops::{ControlFlow, DerefMut};
use std::sync::PoisonError;

use super::bits::{ALL, ones, runs};
use super::census::Census;
use super::claim::CLAIM_PASSAGES;
use super::directory::Directory;
use super::hints::Hints;
#[cfg(test)]
use super::map::Level;
use super::map::{LevelHints, Map};
use super::scan::Attempt;
use super::segment::Shape;
use super::tally::{Snapshot, Tally};
use crate::config::{FAN, FAN_LOG2};
use crate::error::GrowError;
use crate::ids::{FRAMES_MAX, FrameId, Order, Run};
use crate::sync::epoch::{self, Owned};
use crate::sync::{AtomicUsize, CachePadded, Mutex, Ordering};

/// Size of the bitmap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameConfig {
    /// Initial number.
    pub frames: usize,
    /// Maximum number.
    pub frames_max: usize,
    /// Number of frames per segment: a power of two, at least [`FAN`].
    pub segment_frames: usize,
}

/// A set of frames of one leaf word: bit `i` of `bits` is frame `base + i`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FrameMask {
    /// First frame of the word, a multiple of [`FAN`].
    pub base: FrameId,
    /// Bits of the frames in the set.
    pub bits: u64,
}

impl FrameMask {
    /// Returns the number of frames.
    #[inline]
    pub const fn len(self) -> u32 {
        self.bits.count_ones()
    }

    /// Returns whether the set is empty.
    #[inline]
    pub const fn is_empty(self) -> bool {
        self.bits == 0
    }

    /// Returns the set of one frame.
    #[inline]
    pub fn of(frame: FrameId) -> Self {
        let pos = frame.0 & (FAN as u32 - 1);
        Self { base: FrameId(frame.0 - pos), bits: 1 << pos }
    }

    /// Returns its maximal runs, ascending.
    pub fn runs(self) -> impl Iterator<Item = Run> {
        runs(self.bits).map(move |(pos, len)| Run { start: FrameId(self.base.0 + pos), len })
    }

    /// Returns every frame, ascending.
    #[inline]
    pub fn frames(self) -> impl Iterator<Item = FrameId> {
        let mut bits = self.bits;
        std::iter::from_fn(move || {
            let pos = (bits != 0).then(|| bits.trailing_zeros())?;
            bits &= bits - 1;
            Some(FrameId(self.base.0 + pos))
        })
    }
}

/// The free frames of a pool, without locks. An allocated frame belongs to the caller until it
/// frees it. Freeing a free frame panics if the bitmap detects it: it does not for a wholly free
/// unit, which the reference counts of blocks guard.
pub struct Frames {
    directory: epoch::Atomic<Directory>,
    hints: LevelHints,
    shape: Shape,
    pub(super) tally: Tally,
    pub(super) growth_units: CachePadded<AtomicUsize>,
    frames_max: usize,
    /// The pool was built at its maximum size: the directory is never replaced, and needs no pin.
    is_fixed: bool,
    /// Held while the pool grows, and briefly when a shrink begins and ends.
    growth: Mutex<Growth>,
}

pub(super) struct Growth {
    pub(super) is_shrinking: bool,
}

impl Frames {
    /// Creates the bitmap with all frames free. Panics on an invalid configuration.
    pub fn new(config: FrameConfig) -> Self {
        let FrameConfig { frames, frames_max, segment_frames } = config;
        assert!(frames > 0 && frames <= frames_max && frames_max <= FRAMES_MAX, "{config:?}");
        let shape = Shape::new(segment_frames);
        let segments_max = frames_max.div_ceil(segment_frames);
        let frames_new = Self {
            directory: epoch::Atomic::new(Directory::extend(shape, None, frames)),
            hints: LevelHints {
                leaf: Hints::new(segments_max * shape.leaves_in_segment()),
                unit: Hints::new(segments_max * shape.groups_in_segment()),
            },
            shape,
            tally: Tally::default(),
            growth_units: CachePadded::new(AtomicUsize::new(0)),
            frames_max,
            is_fixed: frames == frames_max,
            growth: Mutex::new(Growth { is_shrinking: false }),
        };
        frames_new.free_run(Run { start: FrameId(0), len: frames as u32 });
        frames_new
    }

    #[inline]
    pub(super) fn with<R>(&self, f: impl FnOnce(Map<'_>) -> R) -> R {
        let pinned;
        let guard = if self.is_fixed {
            // SAFETY: it protects a load of a pointer that is not replaced while `self` lives.
            unsafe { epoch::unprotected() }
        } else {
            pinned = epoch::pin();
            &pinned
        };
        // Acquire: pairs with the swap in `grow`, which publishes the segments.
        let directory = self.directory.load(Ordering::Acquire, guard);
        // SAFETY: the directory is never null; one that is replaced is destroyed through the epoch
        // collector, which waits for `guard`, and only a pool that is not fixed replaces it.
        let directory = unsafe { directory.deref() };
        f(Map { directory, hints: &self.hints, reserves: true })
    }

    pub(super) fn growth(&self) -> impl DerefMut<Target = Growth> {
        // A `prepare` that panicked changed nothing.
        self.growth.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of frames of the pool, free or not.
    pub fn total(&self) -> usize {
        self.with(|map| map.directory.frames())
    }

    /// Claims a run of `2^order` frames at a multiple of its length, close to `near` if possible.
    #[inline]
    pub fn allocate_aligned(&self, order: Order, near: FrameId) -> Option<Run> {
        self.with(|map| map.allocate_aligned(order, near)).inspect(|run| self.count_taken(*run))
    }

    /// Claims a run of exactly `len` frames at any position, also across words and segments.
    #[inline]
    pub fn allocate_run(&self, len: u32, near: FrameId) -> Option<Run> {
        self.with(|map| map.allocate_run(len, near)).inspect(|run| self.count_taken(*run))
    }

    /// Claims `count` frames in as few runs as possible, fewer only if no more are free. Passes
    /// each run to `take`, in the order in which to use them, and returns the number of frames.
    pub fn allocate_many(&self, count: u32, near: FrameId, take: &mut dyn FnMut(Run)) -> u32 {
        if self.is_empty() {
            return 0;
        }
        let taken = self.with(|map| map.allocate_many(count, near, take));
        self.count_many(near, taken)
    }

    /// As [`allocate_many`](Self::allocate_many), without a walk: may miss frames being freed.
    pub fn allocate_some(&self, count: u32, near: FrameId, take: &mut dyn FnMut(Run)) -> u32 {
        let taken = self.with(|map| map.allocate_hinted(count, near, take));
        self.count_many(near, taken)
    }

    #[inline]
    pub(super) fn count_taken(&self, run: Run) {
        self.tally.took(run.start, run.len as usize);
    }

    #[inline]
    pub(super) fn count_many(&self, near: FrameId, taken: u32) -> u32 {
        if taken > 0 {
            self.tally.took(near, taken as usize);
        }
        taken
    }

    /// Claims exactly the frames of `run`, closed or not. False: one is taken, or outside the pool.
    pub fn claim(&self, run: Run) -> bool {
        let is_claimed = self.with(|map| {
            let is_inside = u64::from(run.start.0) + u64::from(run.len) <= map.directory.frames() as u64;
            // The first attempt usually succeeds. Only a failure needs the traffic of all groups.
            is_inside
                && (matches!(map.claim_run(run), Attempt::Found(()))
                    || map.settle(CLAIM_PASSAGES, || map.claim_run(run)).is_some())
        });
        if is_claimed {
            self.count_taken(run);
        }
        is_claimed
    }

    /// Claims up to `want` frames of one leaf word in one read-modify-write, from holes first.
    #[inline]
    pub fn refill(&self, want: u32, near: FrameId) -> Option<FrameMask> {
        let hinted = self.refill_some(want, near);
        if hinted.is_some() || self.is_empty() {
            return hinted;
        }
        self.with(|map| map.refill(want, near, true)).inspect(|mask| self.count_mask(*mask))
    }

    /// As [`refill`](Self::refill), without a walk.
    #[inline]
    pub fn refill_some(&self, want: u32, near: FrameId) -> Option<FrameMask> {
        self.with(|map| map.refill(want, near, false)).inspect(|mask| self.count_mask(*mask))
    }

    #[inline]
    fn count_mask(&self, mask: FrameMask) {
        self.tally.took(mask.base, mask.len() as usize);
    }

    /// Frees a run. Panics if one of its frames is free, or beyond the pool.
    #[inline]
    pub fn free_run(&self, run: Run) {
        self.tally.freed(run.start, run.len as usize, || self.with(|map| map.free_run(run)));
    }

    /// Frees frames of one leaf word. Panics as [`free_run`](Self::free_run).
    #[inline]
    pub fn free_mask(&self, mask: FrameMask) {
        if mask.bits != 0 {
            let leaf = mask.base.index() >> FAN_LOG2;
            let free = || self.with(|map| map.free_mask(leaf, mask.bits));
            self.tally.freed(mask.base, mask.len() as usize, free);
        }
    }

    /// Frees each non-empty mask that `f` passes on. Panics as [`free_run`](Self::free_run).
    pub(super) fn free_masks(&self, f: impl FnOnce(&mut dyn FnMut(FrameMask))) {
        self.with(|map| {
            f(&mut |mask| {
                let free = || map.free_mask(mask.base.index() >> FAN_LOG2, mask.bits);
                self.tally.freed(mask.base, mask.len() as usize, free);
            });
        });
    }

    /// Adds `frames` frames at the end and returns them. Calls `prepare` once with the new frames,
    /// before any can be allocated; if it fails, nothing changes. Concurrent calls are serialized.
    /// Returns [`GrowError::Busy`] while a shrink is open.
    pub fn grow(
        &self,
        frames: usize,
        prepare: &mut dyn FnMut(Run) -> Result<(), GrowError>,
    ) -> Result<Run, GrowError> {
        let growth = self.growth();
        if growth.is_shrinking {
            return Err(GrowError::Busy);
        }
        let total = self.total();
        if frames == 0 {
            return Err(GrowError::Zero);
        }
        if frames > self.frames_max - total {
            return Err(GrowError::TooLarge { asked: frames, total, max: self.frames_max });
        }
        let added = Run { start: FrameId(total as u32), len: frames as u32 };
        // No pin is held during this call, which may be long.
        prepare(added)?;
        let has_words = self.with(|map| {
            let has_words = total + frames <= map.directory.capacity();
            if has_words {
                // Relaxed: this thread holds the lock and no shrink is open: no other one stores.
                map.directory.frames.store(total + frames, Ordering::Relaxed);
            }
            has_words
        });
        if !has_words {
            self.replace_directory(total + frames);
        }
        self.free_run(added);
        Ok(added)
    }

    /// Called only by the holder of `growth`.
    fn replace_directory(&self, frames: usize) {
        let guard = epoch::pin();
        let larger = self.with(|map| Directory::extend(self.shape, Some(map.directory), frames));
        // Release: pairs with `with`. Acquire: the old directory is dropped after all its uses.
        let old = self.directory.swap(Owned::new(larger), Ordering::AcqRel, &guard);
        // SAFETY: `old` is no longer reachable, and only the holder of `growth` replaces a
        // directory, so that it is destroyed once.
        unsafe { guard.defer_destroy(old) };
    }

    /// Returns the number of free frames, including closed ones; exact without concurrent changes.
    pub fn free_frames(&self) -> usize {
        if self.is_empty() { 0 } else { self.with(|map| map.free_count()) }
    }

    /// Returns whether no frame was free at some moment during the call, in O(1).
    pub fn is_empty(&self) -> bool {
        self.snapshot().is_some_and(|snapshot| snapshot.free() == 0)
    }

    /// Returns the number of free frames at one moment, in O(1). `None` if it kept changing.
    pub fn snapshot(&self) -> Option<Snapshot> {
        self.tally.snapshot()
    }

    /// Returns the number of free frames in O(1), including those of frees and claims in progress.
    pub fn free_counted(&self) -> usize {
        self.tally.free()
    }

    /// Returns the number of changes to the set of free frames, modulo 2^32, in O(1).
    pub fn changes(&self) -> u32 {
        self.tally.changes()
    }

    /// Counts the free frames and their contiguity at `order`; exact without concurrent changes.
    pub fn census(&self, order: Order) -> Census {
        self.with(|map| map.census(order))
    }

    /// Visits every maximal free run, ascending. Exact without concurrent changes.
    pub fn for_each_free_run(&self, f: &mut dyn FnMut(Run)) {
        self.with(|map| {
            map.walk(false, 1, FrameId(0), |run| {
                f(run);
                ControlFlow::Continue(())
            });
        });
    }

    /// Visits the free runs of open units, ascending from the unit of `from` on, until `visit`
    /// breaks. The first run may have begun before.
    pub fn visit_open_runs(&self, from: FrameId, visit: &mut dyn FnMut(Run) -> ControlFlow<()>) {
        self.with(|map| map.walk(true, 1, from, visit));
    }

    /// Checks the invariants of a quiescent point, and names the first violated one: every frame is
    /// represented once and merged, none is in transit, no hint is missing, and the tally is right.
    pub fn audit(&self) -> Result<(), &'static str> {
        self.with(|map| {
            let mut end = 0;
            map.walk(false, 1, FrameId(0), |run| {
                end = run.end() as usize;
                ControlFlow::Continue(())
            });
            if end > map.directory.frames() || !map.is_empty_beyond() {
                Err("a frame beyond the end of the pool is free")
            } else if !map.is_exclusive() {
                Err("a unit is wholly free in its leaf")
            } else if !map.traffic().is_still() {
                Err("frames are in transit")
            } else if map.stranded() > 0 {
                Err("a free run has no hint")
            } else if map.free_count() != self.tally.free() {
                Err("the tally of free frames is wrong")
            } else {
                let is_right = map.growth_units_ever() == self.growth_units();
                if is_right { Ok(()) } else { Err("the count of units reserved for growth is wrong") }
            }
        })
    }
}

#[cfg(test)]
impl Frames {
    pub(super) fn hinted(&self, from: usize) -> usize {
        self.with(|map| {
            let has = |level: Level, word: &usize| {
                (0..level.classes()).any(|class| map.hints(level).is_set(*word, class))
            };
            let units = map.directory.shape.units_in_group();
            let (leaves, groups) = (map.directory.capacity() >> FAN_LOG2, map.directory.groups_ever());
            (from..leaves).filter(|leaf| has(Level::Leaf, leaf)).count()
                + (from.div_ceil(units)..groups).filter(|group| has(Level::Unit, group)).count()
        })
    }
}

impl Map<'_> {
    pub(super) fn for_each_group(self, region: Run, mut visit: impl FnMut(usize, u64)) {
        let (start, end) = (region.start.index(), region.end() as usize);
        assert!(start % FAN == 0, "{region} does not begin at a unit boundary");
        let end = end.min(self.directory.frames());
        let units = self.directory.shape.units_in_group();
        let (mut unit, last) = (start >> FAN_LOG2, end.div_ceil(FAN));
        while unit < last {
            let (group, bit) = self.directory.shape.unit_place(unit);
            let here = (last - unit).min(units - bit as usize);
            visit(group, ones(bit, here as u32) & ALL);
            unit += here;
        }
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        let directory = std::mem::replace(&mut self.directory, epoch::Atomic::null());
        // SAFETY: `&mut self`: no other thread can reach the directory, which is never null before.
        drop(unsafe { directory.into_owned() });
    }
}

const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Frames>();
};
