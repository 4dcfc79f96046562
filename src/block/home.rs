//! Homes: a thread's magazines and its limbo, in a cell that others may visit when the thread is idle or dead.
//!
//! A thread finds its home through a thread-local, or a task carries one with it ([`Resident`]). Homes stand in a list
//! that only grows; the home of a thread that has ended is taken over by the next new thread.
//!
//! # Lifetimes
//!
//! ```text
//! Lease ── Arc<Anchor> ── Blocks ── homes           thread-local ── Resident ── Arc<Anchor>
//! ```
//!
//! A lease keeps the blocks' metadata alive through its thread's [`Anchor`], whose count only that thread's leases
//! touch: cloning one `Arc` of the whole pool for each lease would put a line on the hot path that all threads write.
//! A thread-local keeps metadata alive too, never the storage; it lets go when the thread ends, or opens a home in
//! another pool after this one was closed.

use std::cell::{Cell, RefCell};
use std::ptr;

use crate::batch::Limbo;
use crate::error::{AllocError, HandleError};
use crate::frame::{Cache, OwnerCell};
use crate::ids::{BlockHandle, BlockId, FrameId, Run, Ticket};
use crate::sync::{
    Arc, AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, CachePadded, Ordering::*, thread_local,
    thread_local_const,
};

use super::blocks::Core;
use super::release::Returning;
use super::{AllocRequest, Blocks, FEW};

/// Retired frames between two looks at which batches have ended.
const RECLAIM_EVERY: usize = if cfg!(kvpool_loom) { 1 } else { 64 };

/// What is in a home's cell.
pub(super) struct Local {
    pub(super) cache: Cache,
    pub(super) limbo: Limbo,
    newest_tag: Ticket,
    reclaim_at: usize,
}

impl Local {
    fn new(capacity: usize, near: FrameId) -> Self {
        let limbo = Limbo::default();
        Self { cache: Cache::new(capacity, near), limbo, newest_tag: Ticket(0), reclaim_at: RECLAIM_EVERY }
    }

    /// Puts a run aside, and now and then gives back those that no batch sees any more.
    pub(super) fn retire(&mut self, core: &Core, run: Run, tag: Ticket) {
        self.limbo.retire(run, tag);
        self.newest_tag = self.newest_tag.max(tag);
        if self.limbo.len() >= self.reclaim_at {
            self.reclaim(core);
        }
    }

    /// Gives back what no batch sees any more: long runs to the bitmaps, single frames to the magazines.
    pub(super) fn reclaim(&mut self, core: &Core) {
        if self.limbo.is_empty() {
            return;
        }
        let Self { cache, limbo, .. } = self;
        let mut returning = Returning::new(core);
        limbo.reclaim(core.clock.oldest(), |run| returning.run(run));
        returning.finish(cache);
        self.reclaim_at = self.limbo.len() + RECLAIM_EVERY;
    }

    /// Gives everything that is free back to the bitmaps, where others find it.
    pub(super) fn surrender(&mut self, core: &Core) {
        self.limbo.reclaim(core.clock.oldest(), |run| core.free_run(run));
        self.reclaim_at = self.limbo.len() + RECLAIM_EVERY;
        self.cache.flush(&core.frames);
    }
}

/// A place for one thread at a time.
pub(super) struct Home {
    cell: OwnerCell<Local>,
    taken: AtomicBool,
    /// Mirrors of the cell's contents, for those who count.
    cached: AtomicU32,
    retired: AtomicU32,
    newest_tag: AtomicU64,
    next: *const CachePadded<Home>,
}

// SAFETY: `next` is written before the home is published and points to a home of the same list, which lives as long.
unsafe impl Sync for Home {}
// SAFETY: as above.
unsafe impl Send for Home {}

impl Home {
    /// Runs `f` on the contents unless the owner is inside. Any thread.
    pub(super) fn visit<R>(&self, f: impl FnOnce(&mut Local) -> R) -> Option<R> {
        self.cell.visit(|local| self.mirrored(local, f))
    }

    /// Frames in magazines, frames retired, and the newest tag of these.
    pub(super) fn mirror(&self) -> (usize, usize, Ticket) {
        // Relaxed: statistics.
        let tag = Ticket(self.newest_tag.load(Relaxed));
        (self.cached.load(Relaxed) as usize, self.retired.load(Relaxed) as usize, tag)
    }

    #[inline]
    fn mirrored<R>(&self, local: &mut Local, f: impl FnOnce(&mut Local) -> R) -> R {
        let result = f(local);
        self.cached.store(local.cache.len() as u32, Relaxed);
        if !local.limbo.is_empty() || self.retired.load(Relaxed) != 0 {
            self.retired.store(local.limbo.len() as u32, Relaxed);
            self.newest_tag.store(local.newest_tag.0, Relaxed);
        }
        result
    }
}

/// A home that the current thread owns for the moment.
#[derive(Clone, Copy)]
pub(super) struct Seat<'a>(&'a Home);

impl Seat<'_> {
    /// Runs `f` on the contents, unless a visitor has them: then the caller goes without.
    #[inline]
    pub(super) fn enter<R>(self, f: impl FnOnce(&mut Local) -> R) -> Option<R> {
        // SAFETY: a seat is made only for the home's owner (`Resident::seat`, `with_seat`), and is not `Send`.
        unsafe { self.0.cell.enter(|local| self.0.mirrored(local, f)) }
    }

    /// As [`enter`](Self::enter), for what touches the magazines alone.
    #[inline]
    pub(super) fn enter_cache<R>(self, f: impl FnOnce(&mut Cache) -> R) -> Option<R> {
        let section = |local: &mut Local| {
            let result = f(&mut local.cache);
            self.0.cached.store(local.cache.len() as u32, Relaxed);
            result
        };
        // SAFETY: as in `enter`.
        unsafe { self.0.cell.enter(section) }
    }
}

/// All homes of a pool: a list that only grows.
#[derive(Default)]
pub(super) struct Homes {
    head: AtomicPtr<CachePadded<Home>>,
    count: AtomicUsize,
}

impl Homes {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Home> {
        // SAFETY: published homes live as long as the list. Acquire: pairs with the Release in `take`.
        let mut next = unsafe { self.head.load(Acquire).as_ref() };
        std::iter::from_fn(move || {
            let home: &Home = next?;
            // SAFETY: as above; `next` was written before the home was published.
            next = unsafe { home.next.as_ref() };
            Some(home)
        })
    }

    /// Homes that somebody lives in.
    pub(super) fn taken(&self) -> usize {
        // Acquire: pairs with the Release of those that left, so that what they left behind is seen.
        self.iter().filter(|home| home.taken.load(Acquire)).count()
    }

    /// A home for a new thread: one whose thread has left, or a new one.
    fn take(&self, core: &Core) -> &Home {
        // Acquire: pairs with the Release of the thread that left.
        let left = self.iter().find(|home| {
            !home.taken.load(Relaxed) && home.taken.compare_exchange(false, true, Acquire, Relaxed).is_ok()
        });
        if let Some(home) = left {
            return home;
        }
        let index = self.count.fetch_add(1, Relaxed);
        let mut home = Box::new(CachePadded::new(Home {
            cell: OwnerCell::new(Local::new(core.config.magazine_blocks, core.shard(index))),
            taken: AtomicBool::new(true),
            cached: AtomicU32::new(0),
            retired: AtomicU32::new(0),
            newest_tag: AtomicU64::new(0),
            next: ptr::null(),
        }));
        let mut head = self.head.load(Relaxed);
        loop {
            home.next = head;
            let fresh = Box::into_raw(home);
            // Release: publishes the home. Relaxed on failure: nothing of the other's home is read but its address.
            match self.head.compare_exchange(head, fresh, Release, Relaxed) {
                // SAFETY: published just now.
                Ok(_) => return unsafe { &*fresh },
                Err(now) => {
                    head = now;
                    // SAFETY: not published; ours.
                    home = unsafe { Box::from_raw(fresh) };
                }
            }
        }
    }
}

impl Drop for Homes {
    fn drop(&mut self) {
        let mut next = self.head.load(Relaxed).cast_const();
        while !next.is_null() {
            // SAFETY: nobody has the list any more; each home was made by `Box::into_raw` and is freed once.
            let home = unsafe { Box::from_raw(next.cast_mut()) };
            next = home.next;
        }
    }
}

/// Keeps a pool's blocks alive for the leases of one thread; see the [module](self).
pub struct Anchor(Blocks);

impl Anchor {
    /// The blocks.
    #[inline]
    pub fn blocks(&self) -> &Blocks {
        &self.0
    }
}

/// Somebody who lives in a home: a thread, or a task with an explicit handle.
pub(crate) struct Resident {
    anchor: Arc<Anchor>,
    home: *const Home,
}

// SAFETY: the home is owned by whoever has the resident, and lives as long as the anchor.
unsafe impl Send for Resident {}

impl Resident {
    pub(crate) fn new(blocks: &Blocks) -> Self {
        let anchor = Arc::new(Anchor(blocks.clone()));
        let home: *const Home = anchor.0.homes.take(&anchor.0);
        Self { anchor, home }
    }

    pub(crate) fn anchor(&self) -> &Arc<Anchor> {
        &self.anchor
    }

    /// The resident's seat. `Resident` is not `Sync`, so that one thread at a time has it.
    #[inline]
    pub(super) fn seat(&self) -> Seat<'_> {
        // SAFETY: the home lives as long as the blocks, which the anchor keeps.
        Seat(unsafe { &*self.home })
    }
}

/// Allocation from an explicit home: what [`Blocks`] does from the thread's own.
impl Resident {
    pub(crate) fn allocate(
        &self,
        request: &AllocRequest,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError> {
        self.anchor.0.allocate_at(Some(self.seat()), request, None, false, take)
    }

    #[inline]
    pub(crate) fn allocate_one(&self, request: &AllocRequest) -> Option<BlockId> {
        self.anchor.0.allocate_one_at(self.seat(), request)
    }

    #[inline]
    pub(crate) fn allocate_few(&self, request: &AllocRequest, out: &mut [BlockId; FEW]) -> bool {
        self.anchor.0.allocate_few_at(self.seat(), request, out)
    }

    pub(crate) fn free(&self, handles: &[BlockHandle]) -> Result<(), HandleError> {
        match handles {
            [handle] => self.anchor.0.free_one(Some(self.seat()), handle),
            _ => self.anchor.0.free_at(Some(self.seat()), handles),
        }
    }

    #[inline]
    pub(crate) fn release(&self, ids: &[BlockId]) {
        if let [id] = ids {
            self.anchor.0.release_one(Some(self.seat()), *id, false);
        } else if ids.len() <= FEW {
            self.anchor.0.release_few(Some(self.seat()), ids, false);
        } else {
            self.anchor.0.release_at(Some(self.seat()), ids, false);
        }
    }

    pub(crate) fn flush(&self) {
        self.seat().enter(|local| local.surrender(&self.anchor.0));
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        let core: &Core = &self.anchor.0;
        // A visitor that has the contents just now empties them itself.
        self.seat().enter(|local| local.surrender(core));
        // Release: pairs with the Acquire of the thread that moves in.
        self.seat().0.taken.store(false, Release);
    }
}

/// The pool that the thread used last: its address, the thread's home in it, and the anchor.
type Recent = (*const Core, *const Home, *const Anchor);
const NOWHERE: Recent = (ptr::null(), ptr::null(), ptr::null());

thread_local_const! {
    /// Has no destructor, so that reading it costs one load, also while the thread ends.
    static RECENT: Cell<Recent> = Cell::new(NOWHERE);
}

thread_local! {
    /// Every pool that the thread has a home in.
    static RESIDENCES: RefCell<Residences> = RefCell::new(Residences::default());
}

#[derive(Default)]
struct Residences(Vec<Resident>);

impl Drop for Residences {
    fn drop(&mut self) {
        // What the thread's other destructors free goes to the bitmaps directly.
        let _ = RECENT.try_with(|recent| recent.set(NOWHERE));
    }
}

impl Blocks {
    /// Calls `f` with the current thread's seat, or with none if the thread is past having one.
    #[inline]
    pub(super) fn with_seat<R>(&self, f: impl FnOnce(Option<Seat<'_>>) -> R) -> R {
        f(self.residence().map(|(_, home, _)| {
            // SAFETY: the thread's list keeps the home's pool alive, and the home is this thread's.
            Seat(unsafe { &*home })
        }))
    }

    /// The current thread's anchor, or a fresh one if the thread is past having one.
    #[inline]
    pub(crate) fn anchor(&self) -> Arc<Anchor> {
        match self.residence() {
            Some((_, _, anchor)) => {
                // SAFETY: the pointer came from `Arc::as_ptr`, and the thread's list holds a reference.
                unsafe {
                    Arc::increment_strong_count(anchor);
                    Arc::from_raw(anchor)
                }
            }
            None => Arc::new(Anchor(self.clone())),
        }
    }

    /// The current thread's seat, if this is the pool that it used last.
    #[inline]
    pub(super) fn recent_seat(&self) -> Option<Seat<'_>> {
        let (pool, home, _) = RECENT.try_with(Cell::get).ok()?;
        // SAFETY: as in `with_seat`.
        (pool == self.core_ptr()).then(|| Seat(unsafe { &*home }))
    }

    #[inline]
    fn residence(&self) -> Option<Recent> {
        let recent = RECENT.try_with(Cell::get).ok()?;
        if recent.0 == self.core_ptr() { Some(recent) } else { self.residence_slow() }
    }

    #[cold]
    #[inline(never)]
    fn residence_slow(&self) -> Option<Recent> {
        RESIDENCES
            .try_with(|residences| {
                let residences = &mut residences.try_borrow_mut().ok()?.0;
                // An address is not used again while the list holds the pool: no entry can be mistaken.
                let known = residences.iter().position(|at| at.anchor.0.core_ptr() == self.core_ptr());
                let at = known.unwrap_or_else(|| {
                    // The pool used last may be among those that go, and its address be used again before we are done.
                    RECENT.with(|recent| recent.set(NOWHERE));
                    residences.retain(|at| !at.anchor.0.is_closed());
                    residences.push(Resident::new(self));
                    residences.len() - 1
                });
                let at = &residences[at];
                let recent = (self.core_ptr(), at.home, Arc::as_ptr(&at.anchor));
                RECENT.with(|cell| cell.set(recent));
                Some(recent)
            })
            .ok()?
    }
}

/// Gives the thread's magazines back to the pools, so that nothing of it is stranded while it sleeps. Called by a
/// thread that is about to park for long; others can also take the magazines of an idle thread without this.
pub fn flush_thread() {
    let _ = RESIDENCES.try_with(|residences| {
        let Ok(residences) = residences.try_borrow() else { return };
        for at in residences.0.iter() {
            at.flush();
        }
    });
}
