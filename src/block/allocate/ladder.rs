//! The allocation ladder: from the thread's magazine to every free frame of the pool.
//!
//! 0. for the list of a sequence: the frames behind its end, and [whole units](super::growth);
//! 1. the thread's magazines, which refill from the depot and the bitmaps;
//! 2. larger and contiguous requests: the bitmaps directly, so that a prompt lies in few runs;
//! 3. frames reclaimed from elsewhere: other threads' magazines, the depot, retire lists;
//! 4. evicted blocks: as many as are missing, or one window for a contiguous request;
//! 5. urgent requests: the reserve;
//! 6. an error that states what was available.
//!
//! Two requests may each hold what the other lacks. A failed search returns its frames, is counted,
//! and is repeated if another one was counted since it began: of two that fail, the later one then
//! finds the frames of the earlier one. No model reaches it, because such searches are repeated for
//! frames in transit too; `one_of_two_appends_gets_the_blocks` does on real threads.
//!
//! Visiting another thread's cache is expensive for a few frames, so a pool full of evictable
//! blocks evicts first while thread caches hold little. No request is refused before both were
//! tried. No step waits for another thread.

use smallvec::SmallVec;

use crate::config::MAGAZINE_BLOCKS_MAX;
use crate::error::AllocError;
use crate::frame::Visits;
use crate::ids::{BlockId, FrameId, Run};
use crate::sync::{Ordering::Relaxed, yield_now};

use super::grab::Grab;
use super::growth::ListEnd;
use super::lists::{ListShare, lists_of, tenant_of};
use super::own::own_row;
use crate::block::core::{Blocks, Core, WakeGuard};
use crate::block::request::{AllocRequest, Priority};
use crate::block::tenants::Tenant;
use crate::block::thread_cache::{CountedRef, ThreadCache};

/// Maximum number of reclaim rounds before a refusal.
const ROUNDS: usize = if cfg!(kvpool_loom) { 3 } else { 32 };

/// Maximum share of the pool in thread caches for evicting before reclaiming, as a shift.
const LITTLE_SHIFT: u32 = 5;

/// Maximum share of the pool that a thread evicts for its next requests, as a shift.
const AHEAD_SHIFT: u32 = 9;

/// From this number of thread caches on, one sum serves several calls.
const FEW_CACHES: usize = 16;

/// Attempts of an allocation that is refused although enough frames are free, but in transit.
const ATTEMPTS: usize = 3;

impl Blocks {
    /// Allocates `request.blocks` blocks for a lease, each with one reference: all or nothing.
    pub fn allocate(&self, request: &AllocRequest, take: &mut dyn FnMut(BlockId)) -> Result<(), AllocError> {
        let mut grab = Grab::new();
        self.allocate_into(request, Aim::Any, &mut grab)?;
        self.hand_out(&grab, request, take);
        Ok(())
    }

    /// Like [`allocate`](Self::allocate), for a list or transfer; refused while a higher priority
    /// waits.
    pub fn allocate_listed(
        &self,
        request: &AllocRequest,
        list: Option<ListEnd>,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError> {
        if list.is_some() {
            self.check_turn(request)?;
        }
        let tenant = list.map_or(Tenant::NONE, |list| list.tenant);
        self.charged(tenant, (request, false), take, |take| {
            let mut grab = Grab::new();
            self.allocate_into(request, list.map_or(Aim::Any, Aim::List), &mut grab)?;
            self.count_further(-(request.blocks as isize));
            self.hand_out(&grab, request, take);
            Ok(())
        })
    }

    /// Like [`allocate_listed`](Self::allocate_listed), for several lists, all or nothing. `request`
    /// is for the sum. Passes on the index of the list and a block of it, in the list's order.
    pub fn allocate_for_lists(
        &self,
        request: &AllocRequest,
        shares: &[ListShare],
        take: &mut dyn FnMut(usize, BlockId),
    ) -> Result<(), AllocError> {
        self.check_turn(request)?;
        let mut grab = Grab::new();
        // Each share knows what it got once the first block is handed out.
        let mut lists = None;
        let mut take = |id| {
            let lists = lists.get_or_insert_with(|| lists_of(shares));
            take(lists.next().expect("a request gets as many blocks as it asked for"), id);
        };
        self.charged(tenant_of(shares), (request, false), &mut take, |take| {
            self.allocate_into(request, Aim::Lists(shares), &mut grab)?;
            self.count_further(-(request.blocks as isize));
            self.hand_out(&grab, request, take);
            Ok(())
        })
    }

    pub(super) fn allocate_into(
        &self,
        request: &AllocRequest,
        aim: Aim<'_>,
        grab: &mut Grab,
    ) -> Result<(), AllocError> {
        self.with_thread_cache(|cache| {
            // A waiting request may miss frames in transit while we split a unit or return frames.
            let wake_guard = self.wake_guard();
            let gathered = self.gather(cache, request, aim, grab, &wake_guard);
            drop(wake_guard);
            gathered.inspect_err(|error| self.counters.refused(error))?;
            match cache {
                Some(cache) => cache.counters().allocated(grab.frames),
                None => self.counters.allocated(grab.frames),
            }
            Ok(())
        })
    }
}

#[derive(Clone, Copy)]
pub(in crate::block) enum Aim<'a> {
    /// In the thread's magazines if they are few, else in the bitmaps.
    Any,
    /// For a list: behind its end, and in whole units.
    List(ListEnd),
    /// As [`List`](Self::List), for several lists that share the request.
    Lists(&'a [ListShare]),
    /// In the bitmaps: one run, then few runs.
    Runs,
}

impl Aim<'_> {
    #[inline]
    pub(in crate::block) fn tenant(self) -> Tenant {
        match self {
            Self::List(list) => list.tenant,
            Self::Lists(shares) => tenant_of(shares),
            Self::Any | Self::Runs => Tenant::NONE,
        }
    }
}

impl Core {
    #[inline]
    pub(in crate::block) fn hand_out(
        &self,
        grab: &Grab,
        request: &AllocRequest,
        mut take: impl FnMut(BlockId),
    ) {
        let (table, now) = (self.space.table.view(), self.space.clock.newest());
        for &run in grab.runs.iter() {
            table.visit_run(run, |frame, id, row| {
                own_row(row, frame, request, now);
                take(id);
                true
            });
        }
    }

    /// Refuses requests that can never be satisfied: invalid ones, and those that exceed the pool.
    pub(crate) fn check_request(&self, request: &AllocRequest) -> Result<(), AllocError> {
        if self.is_lost() {
            return Err(AllocError::DeviceLost { device: self.config.device });
        }
        if let Some(asked) = request.device
            && asked != self.config.device
        {
            return Err(AllocError::WrongDevice { asked, device: self.config.device });
        }
        let asked = request.blocks;
        if asked == 0 {
            return Err(AllocError::Zero);
        }
        let (total, reserve) = (self.total(), self.space.reserve.mark());
        if asked > total {
            return Err(AllocError::TooLarge { asked, total });
        }
        let is_reserved = request.priority != Priority::Urgent || (request.contiguous && asked > 1);
        if is_reserved && asked > total.saturating_sub(reserve) {
            return Err(AllocError::Reserved { asked, total, reserve });
        }
        Ok(())
    }

    pub(in crate::block) fn gather(
        &self,
        cache: Option<CountedRef<'_>>,
        request: &AllocRequest,
        aim: Aim<'_>,
        grab: &mut Grab,
        wake_guard: &WakeGuard<'_>,
    ) -> Result<(), AllocError> {
        if let Err(error) = self.check_request(request) {
            self.undo(grab);
            return Err(error);
        }
        let mut attempts = 1;
        loop {
            let seen = self.refused.returned();
            let Err(error) = self.gather_once(cache, request, aim, grab, wake_guard) else { return Ok(()) };
            let returned = grab.returned.take().unwrap_or_else(|| self.refused.returned());
            let is_in_transit = matches!(error, AllocError::Exhausted { free, .. }
                if free + self.reserved_for(request) >= request.blocks);
            let is_for_frames = matches!(error, AllocError::Exhausted { .. } | AllocError::NoRun { .. });
            if is_in_transit && attempts < ATTEMPTS {
                yield_now();
            } else if returned == seen || !is_for_frames || attempts >= ROUNDS {
                return Err(error);
            }
            attempts += 1;
        }
    }

    fn gather_once(
        &self,
        cache: Option<CountedRef<'_>>,
        request: &AllocRequest,
        aim: Aim<'_>,
        grab: &mut Grab,
        wake_guard: &WakeGuard<'_>,
    ) -> Result<(), AllocError> {
        let asked = request.blocks;
        if request.contiguous && asked > 1 {
            return self.gather_run(cache, (asked, 0), aim.tenant(), grab, wake_guard);
        }
        let mut end = None;
        match aim {
            Aim::List(list) => {
                if list.run > 0 {
                    self.gather_run(cache, (list.run, asked - list.run), list.tenant, grab, wake_guard)?;
                }
                end = list.next;
                self.gather_list(list, asked - list.run, request, grab);
            }
            Aim::Lists(shares) => self.gather_lists(shares, request, grab),
            Aim::Runs => self.gather_runs(cache, asked as u32, grab),
            Aim::Any => {}
        }
        let is_list = matches!(aim, Aim::List(_) | Aim::Lists(_));
        if !is_list && grab.frames < asked && asked <= self.config.magazine_blocks.div_ceil(4) {
            self.take_cached(cache, asked, grab);
        }
        (grab.rounds, grab.is_all) = (0, true);
        // With a prefix cache, a pool is always full: an eviction must not cost a walk.
        let mut is_thorough = self.evictable() == 0;
        let mut keeps_run = is_list && self.config.run_frames > 0 && !is_thorough;
        loop {
            let missing = (asked - grab.frames) as u32;
            if missing == 0 {
                return Ok(());
            }
            if std::mem::take(&mut keeps_run)
                && self.evict_into(cache, request, aim.tenant(), grab, Self::evict_some_for)
            {
                continue;
            }
            let near = grab.runs.last().map(|run| FrameId(run.end()));
            let near = near.or(end).unwrap_or_else(|| self.start(cache));
            let mut take = |run| grab.extend(Some(run));
            if is_thorough {
                self.space.frames.allocate_many(missing, near, &mut take);
            } else {
                self.space.frames.allocate_some(missing, near, &mut take);
            }
            if grab.frames < asked && self.evictable() > 0 {
                self.take_cached(cache, asked, grab);
            }
            if grab.frames == asked {
                return Ok(());
            }
            let missing = asked - grab.frames;
            let evicted = self.evicts_first(missing)
                && self.evict_into(cache, request, aim.tenant(), grab, Self::evict_some_for);
            if evicted {
                continue;
            }
            if !is_thorough {
                is_thorough = true;
                continue;
            }
            if !self.climb(grab, wake_guard)
                && !self.evict_into(cache, request, aim.tenant(), grab, Self::evict_any_for)
            {
                break;
            }
        }
        if request.priority == Priority::Urgent
            && let Some(taken) = self.space.take_reserved(asked - grab.frames, wake_guard)
        {
            taken.into_iter().for_each(|frame| grab.push(frame));
            return Ok(());
        }
        // Before its frames are returned: a walk for the count is not needed if no others are free.
        let error = self.exhausted_with(asked, grab.frames, aim.tenant());
        self.undo(grab);
        match error {
            // Enough was free, so `Exhausted` would be wrong. Reached by `fence_refused`.
            AllocError::Exhausted { free, .. }
                if grab.is_refused && free + self.reserved_for(request) >= asked =>
            {
                Err(AllocError::FenceRefused { asked, free })
            }
            _ => Err(error),
        }
    }

    /// Gathers a run of `asked` frames for a request of `more` frames beside it.
    fn gather_run(
        &self,
        cache: Option<CountedRef<'_>>,
        (asked, more): (usize, usize),
        tenant: Tenant,
        grab: &mut Grab,
        wake_guard: &WakeGuard<'_>,
    ) -> Result<(), AllocError> {
        (grab.rounds, grab.is_all) = (0, true);
        loop {
            let is_known = self.known_runs().is_some_and(|known| known.longest < asked);
            let frames = &self.space.frames;
            let allocate = || match self.config.run_frames {
                0 => frames.allocate_run(asked as u32, self.start(cache)),
                _ => frames.allocate_first(asked as u32),
            };
            if !is_known && let Some(run) = allocate() {
                grab.extend(Some(run));
                return Ok(());
            }
            if !self.climb(grab, wake_guard) {
                break;
            }
        }
        if more > 0 && self.recount().free() + self.evictable_for(tenant) < asked + more {
            // An eviction for the run would be wasted.
            return Err(self.exhausted_with(asked + more, 0, tenant));
        }
        self.evict_for_reserve();
        if let Some(run) = self.evict_run(asked, tenant, wake_guard) {
            grab.extend(Some(run));
            return Ok(());
        }
        let runs = self.free_runs();
        if grab.is_refused && self.recount().free() >= asked {
            // Unvisited thread caches may complete a run.
            return Err(AllocError::FenceRefused { asked, free: self.counts().free() });
        }
        if runs.free + self.evictable_for(tenant) >= asked
            && let Some(run) = self.run_through_reserve(asked as u32, FrameId(0), tenant, wake_guard)
        {
            grab.extend(Some(run));
            return Ok(());
        }
        let evictable = self.evictable_for(tenant);
        if runs.free + evictable >= asked + more {
            return Err(AllocError::NoRun { asked, longest_run: runs.longest, free: runs.free, evictable });
        }
        Err(self.exhausted_with(asked + more, 0, tenant))
    }

    fn gather_runs(&self, cache: Option<CountedRef<'_>>, wanted: u32, grab: &mut Grab) {
        let near = self.start(cache);
        match self.space.frames.allocate_run(wanted, near) {
            Some(run) => grab.extend(Some(run)),
            None => {
                self.space.frames.allocate_many(wanted, near, &mut |run| grab.extend(Some(run)));
            }
        }
    }

    fn take_cached(&self, cache: Option<CountedRef<'_>>, asked: usize, grab: &mut Grab) {
        let _ = cache.and_then(|cache| {
            cache.enter(|local| {
                while grab.frames < asked
                    && let Some(frame) = local.magazines.allocate(&self.space.frames, &self.space.depot)
                {
                    grab.push(frame);
                }
            })
        });
    }

    pub(super) fn evicts_first(&self, missing: usize) -> bool {
        if self.evictable() == 0 {
            return false;
        }
        let cached = self.about_in_thread_caches() + self.space.depot.frames();
        cached < missing.max(self.total() >> LITTLE_SHIFT)
    }

    /// Estimates the number of frames in all thread caches; reuses a sum over many for a few calls.
    fn about_in_thread_caches(&self) -> usize {
        // Relaxed, all: an estimate.
        let left = self.sum_serves.load(Relaxed);
        if left > 0 {
            self.sum_serves.store(left - 1, Relaxed);
            return self.in_thread_caches.load(Relaxed);
        }
        let in_thread_cache = |thread_cache: &ThreadCache| {
            let (cached, waiting, _) = thread_cache.mirror();
            cached + waiting
        };
        let (mut sum, mut caches) = (0, 0);
        for thread_cache in self.thread_caches.iter() {
            (sum, caches) = (sum + in_thread_cache(thread_cache), caches + 1);
        }
        if caches >= FEW_CACHES {
            self.in_thread_caches.store(sum, Relaxed);
            self.sum_serves.store(caches / FEW_CACHES, Relaxed);
        }
        sum
    }

    #[cold]
    fn evict_into(
        &self,
        cache: Option<CountedRef<'_>>,
        request: &AllocRequest,
        tenant: Tenant,
        grab: &mut Grab,
        evict: impl Fn(&Self, Tenant, usize, &mut dyn FnMut(&[FrameId])) -> usize,
    ) -> bool {
        let missing = request.blocks - grab.frames;
        if self.evictable_for(tenant) + self.reserved_for(request) < missing || self.knows_no_eviction(tenant)
        {
            // Reclaiming comes first; if that does not suffice, an eviction would be wasted.
            self.tenants().into_iter().for_each(|tenants| tenants.count_passed_over(tenant));
            return false;
        }
        // A thread that often needs one block would search everywhere for each.
        let ahead = (self.config.magazine_blocks / 2).min(self.total() >> AHEAD_SHIFT);
        let ahead = if cache.is_some() && !self.is_awaited() { ahead } else { 0 };
        let is_urgent = request.priority == Priority::Urgent;
        let mut spare = SmallVec::<[FrameId; MAGAZINE_BLOCKS_MAX]>::new();
        let evicted = evict(self, tenant, missing + ahead, &mut |frames| {
            for &frame in frames {
                match self.take_evicted(frame, is_urgent) {
                    Some(frame) if grab.frames < request.blocks => grab.push(frame),
                    Some(frame) => spare.push(frame),
                    None => {}
                }
            }
        });
        // In reverse, so that they are handed out in the order in which they were evicted.
        for frame in spare.into_iter().rev() {
            let put = cache.and_then(|cache| {
                cache.enter(|local| local.magazines.free(frame, &self.space.frames, &self.space.depot))
            });
            if put.is_none() {
                self.space.frames.free_run(Run { start: frame, len: 1 });
            }
        }
        evicted > 0
    }

    /// Reclaims the free frames of thread caches whose owner is outside into the bitmaps.
    pub fn trim(&self) {
        let wake_guard = self.wake_guard();
        self.take_back(true, &wake_guard);
    }

    /// Like [`trim`](Self::trim), without visits to thread caches that report no frames.
    pub(in crate::block) fn bring_in(&self, wake_guard: &WakeGuard<'_>) {
        self.take_back(false, wake_guard);
    }

    pub(super) fn start(&self, cache: Option<CountedRef<'_>>) -> FrameId {
        cache.and_then(|cache| cache.enter(|local| local.magazines.near())).unwrap_or(FrameId(0))
    }

    /// Reclaims frames from elsewhere. False if another search would find nothing new.
    #[cold]
    pub(super) fn climb(&self, grab: &mut Grab, wake_guard: &WakeGuard<'_>) -> bool {
        let was_all = grab.is_all;
        let found = self.take_back(was_all, wake_guard);
        // A refusal requires a round that visited every thread cache and found nothing.
        grab.is_all = found == Found::Nothing;
        grab.is_sure = was_all && found == Found::Nothing;
        grab.is_refused = found == Found::Refused;
        grab.rounds += 1;
        grab.rounds <= ROUNDS && !grab.is_refused && (found == Found::Something || !was_all)
    }

    /// Reclaims all free frames outside of the bitmaps; visits thread caches that report frames, or
    /// all, because an owner that is inside has not reported yet. The caller must be outside.
    fn take_back(&self, is_all: bool, wake_guard: &WakeGuard<'_>) -> Found {
        let has_frames = |thread_cache: &&ThreadCache| {
            let (cached, retired, _) = thread_cache.mirror();
            cached + retired > 0
        };
        let before = self.space.frames.snapshot();
        let mut moved = self.space.depot.flush(&self.space.frames) + self.reclaim_retired_with(wake_guard);
        let thread_caches = self.thread_caches.iter();
        let thread_caches = thread_caches.filter(|thread_cache| is_all || has_frames(thread_cache));
        let visits =
            ThreadCache::visit_all(thread_caches, |local| moved += local.surrender(&self.space, wake_guard));
        let is_still = match (before, self.space.frames.snapshot()) {
            (Some(before), Some(now)) => now.free() <= before.free(),
            _ => false,
        };
        if moved > 0 || !is_still {
            return Found::Something;
        }
        match visits {
            Visits::All => Found::Nothing,
            Visits::Some => {
                // An owner is inside for nanoseconds, unless its thread was stopped: let it run.
                yield_now();
                Found::Something
            }
            // The kernel will deny the next visit, too.
            Visits::Refused => Found::Refused,
        }
    }

    fn undo(&self, grab: &mut Grab) {
        if std::mem::take(&mut grab.frames) == 0 {
            return;
        }
        for run in grab.runs.drain() {
            self.space.frames.free_run(run);
        }
        grab.returned = Some(self.refused.count_returned());
    }

    pub(in crate::block) fn exhausted(&self, asked: usize) -> AllocError {
        self.exhausted_with(asked, 0, Tenant::NONE)
    }

    /// Like [`exhausted`](Self::exhausted), before `grabbed` frames are returned.
    pub(super) fn exhausted_with(&self, asked: usize, grabbed: usize, tenant: Tenant) -> AllocError {
        let counts = self.recount();
        AllocError::Exhausted {
            asked,
            free: counts.free() + grabbed,
            retired: counts.retired,
            evictable: self.evictable_for(tenant),
            held: counts.held,
            in_transfer: self.counters.in_transfer(),
            oldest_batch: self.oldest_batch().map(|batch| batch.ticket),
        }
    }
}

#[derive(PartialEq, Eq)]
enum Found {
    Something,
    Nothing,
    Refused,
}
