//! Views of blocks' memory, counted where they matter: at the lease or sequence that owns the block,
//! which refuses to let go of it, and at the pool, where writable ones keep the block from becoming
//! final.
//!
//! A batch makes the blocks that it filled final when it ends, whichever sequences they are in. It
//! holds the pool's list meanwhile, so that no view begins between its look and its end. Nothing
//! that holds the list runs Python code: a thread that waits for it may have the GIL.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use kvpool::{BlockHandle, BlockId, HandleError, Pool};

use crate::error::{Failure, Outcome, fields, raise};

/// The writable views of a pool's blocks.
#[derive(Default)]
pub struct PoolViews(RwLock<Writable>);

#[derive(Default)]
struct Writable {
    /// Number of writable views, by block.
    blocks: HashMap<BlockId, usize>,
    /// Blocks that become final when a device's stream gets there.
    ending: HashSet<BlockHandle>,
}

impl Writable {
    fn first(&self, blocks: impl Iterator<Item = BlockId>) -> Option<Viewed> {
        if self.blocks.is_empty() {
            return None;
        }
        let mut viewed =
            blocks.filter_map(|block| self.blocks.get(&block).map(|&views| Viewed { block, views }));
        viewed.next()
    }
}

/// No writable view begins while it exists.
pub struct Held<'a> {
    _writable: RwLockReadGuard<'a, Writable>,
}

/// A block with writable views.
pub struct Viewed {
    block: BlockId,
    views: usize,
}

impl Viewed {
    /// Makes the exception of a call that would make the block final.
    pub fn refuse(self, what: &str) -> Failure {
        let Self { block, views } = self;
        let message = format!(
            "cannot {what}: block {block} would become final, and {views} writable views of it exist; delete them first"
        );
        raise("Busy", message, fields![kind: "Viewed", block: block.0, views: views])
    }
}

impl PoolViews {
    fn held(&self) -> Held<'_> {
        Held { _writable: self.0.read().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Keeps views from beginning, unless one of these blocks has a writable view.
    pub fn hold(&self, blocks: impl Iterator<Item = BlockId>) -> Result<Held<'_>, Viewed> {
        let held = self.held();
        held._writable.first(blocks).map_or(Ok(held), Err)
    }

    /// As [`hold`](Self::hold), for blocks that become final later, with a stream of the pool's
    /// device: views of them are read-only from now on.
    pub fn hold_until_final(
        &self,
        blocks: impl Iterator<Item = BlockHandle> + Clone,
        pool: &Pool,
    ) -> Result<(), Viewed> {
        let mut writable = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(viewed) = writable.first(blocks.clone().map(|handle| handle.id)) {
            return Err(viewed);
        }
        writable.ending.retain(|&handle| pool.info(handle).is_ok_and(|info| !info.sealed));
        writable.ending.extend(blocks);
        Ok(())
    }
}

/// The views of the blocks of one sequence, or of one lease and those that share its blocks.
#[derive(Default)]
pub struct Views {
    all: AtomicUsize,
    /// Set by the first view.
    of: OnceLock<Arc<PoolViews>>,
}

impl Views {
    /// Counts a view until the result is dropped. `may_write`: the bytes are not final and have no
    /// other owner; no batch makes them final while the view exists.
    pub fn begin(
        self: &Arc<Self>,
        of: &Arc<PoolViews>,
        handle: BlockHandle,
        may_write: impl FnOnce() -> Result<bool, HandleError>,
    ) -> Result<ViewGuard, HandleError> {
        let of = self.of.get_or_init(|| Arc::clone(of));
        let mut writable = of.0.write().unwrap_or_else(PoisonError::into_inner);
        let is_writable = may_write()? && !writable.ending.contains(&handle);
        if is_writable {
            *writable.blocks.entry(handle.id).or_default() += 1;
        }
        // Relaxed: the object's lock orders it with its own calls. Calls of a lease that shares the
        // blocks may miss it: they take no block from under the view, which has a reference of its
        // own.
        self.all.fetch_add(1, Relaxed);
        Ok(ViewGuard { views: Arc::clone(self), block: handle.id, is_writable })
    }

    /// Refuses a call that would take blocks from under a view.
    pub fn check(&self, what: &str) -> Outcome<()> {
        // Acquire: pairs with the Release of the end of a view.
        let views = self.all.load(Acquire);
        if views == 0 {
            return Ok(());
        }
        let message = format!("cannot {what}: {views} views of its blocks exist; delete them first");
        Err(raise("Busy", message, fields![kind: "Viewed", views: views]))
    }

    /// Whether no view exists.
    pub fn are_none(&self) -> bool {
        // Acquire: as above.
        self.all.load(Acquire) == 0
    }

    /// Refuses a call of the owner that makes blocks final which a view can write. None begins
    /// meanwhile: the owner is in use, and a block with another owner has no writable view.
    pub fn check_writable(&self, blocks: impl Iterator<Item = BlockId>, what: &str) -> Outcome<()> {
        let viewed = self.of.get().and_then(|of| of.held()._writable.first(blocks));
        viewed.map_or(Ok(()), |viewed| Err(viewed.refuse(what)))
    }
}

/// Counts one view.
pub struct ViewGuard {
    views: Arc<Views>,
    block: BlockId,
    is_writable: bool,
}

impl ViewGuard {
    /// Whether the view may write.
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }
}

impl Drop for ViewGuard {
    fn drop(&mut self) {
        if let Some(of) = self.views.of.get().filter(|_| self.is_writable) {
            let mut writable = of.0.write().unwrap_or_else(PoisonError::into_inner);
            if let Some(views) = writable.blocks.get_mut(&self.block) {
                *views -= 1;
                if *views == 0 {
                    writable.blocks.remove(&self.block);
                }
            }
        }
        // Release: pairs with the Acquire of the checks; the accesses through the view precede it.
        self.views.all.fetch_sub(1, Release);
    }
}
