//! Residents: how a thread, or a task with an explicit handle, comes to its home.
//!
//! A thread finds its home through a thread-local; a task carries one with it ([`Resident`]).
//!
//! # Lifetimes
//!
//! ```text
//! Lease ── Arc<Anchor> ── Blocks ── homes           thread-local ── Resident ── Arc<Anchor>
//! ```
//!
//! An owned lease keeps the blocks' metadata alive through its thread's [`Anchor`], whose count only that thread's
//! leases touch: cloning one `Arc` of the whole pool for each lease would put a line on the hot path that all threads
//! write. A thread-local keeps metadata alive too, never the storage; it lets go when the thread ends, or opens a home
//! in another pool after this one was closed.

use std::cell::{Cell, RefCell};
use std::ptr;

use crate::error::{AllocError, HandleError};
use crate::ids::{BlockHandle, BlockId};
use crate::sync::{Arc, thread_local, thread_local_const};

use super::blocks::Core;
use super::home::{Home, Seat};
use super::{AllocRequest, Blocks, FEW};

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
        unsafe { Seat::new(&*self.home) }
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

    /// Gives everything that is free back to the bitmaps.
    pub(crate) fn flush(&self) {
        let core: &Core = &self.anchor.0;
        // A visitor that has the contents just now empties them itself.
        self.seat().enter(|local| local.surrender(core));
        // A search looks into the bitmaps first and visits the home then: between the two all of it can go from here to there.
        if !cfg!(kvpool_mutant = "silent_resident") {
            core.announce();
        }
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.flush();
        self.seat().leave();
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
            unsafe { Seat::new(&*home) }
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
        (pool == self.core_ptr()).then(|| unsafe { Seat::new(&*home) })
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
