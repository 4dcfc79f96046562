//! Results of failed searches, so that later requests are refused without a walk.
//!
//! A refusal must not overlook a frame, so it walks. The result of a failed walk holds while the
//! state in which it was found is the same:
//!
//! | walk | state | result |
//! |---|---|---|
//! | bitmaps | a [snapshot](crate::frame::Snapshot) of the count of free frames | the number of free frames, and their longest run |
//! | words | evictable blocks, releases, the oldest batch in flight | that no evictable block can be evicted, while these tenants are at their floors |
//! | both | both | a length for which no window can be evicted |
//!
//! # Theorem
//!
//! *Bitmaps.* Frames are counted before they are freed. The walk found as many free frames as equal
//! snapshots before and after it count, so it missed none; a later free changes the snapshot.
//!
//! *Words.* A block is counted before it becomes evictable, and the walk found as many as were
//! counted before and after it. Each that cannot be evicted has a final tag that is not below the
//! oldest batch, so it stays until that batch ends. A block that becomes evictable later changes
//! the count or, if a hit compensates it, the number of releases, before its tag is recorded.
//!
//! *Floors.* A block that the walk found protected is protected while its tenant is at its floor, from all
//! others: the set of these tenants is stored, and each refusal looks at their accounts.
//!
//! The state is compared under locks; if one is taken, the request walks. Counters repeat after
//! 2^32 operations between two refusals. Models: `loom-tests/tests/refused.rs`.

use crate::frame::Snapshot;
use crate::ids::Ticket;
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering::*};

/// Tenants by their numbers, which are at most 64.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::block) struct TenantSet(u128);

impl TenantSet {
    pub(in crate::block) fn add(&mut self, tenant: usize) {
        self.0 |= 1 << tenant;
    }

    pub(in crate::block) fn has(self, tenant: usize) -> bool {
        self.0 >> tenant & 1 == 1
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::block) struct FreeRuns {
    pub(in crate::block) free: usize,
    pub(in crate::block) longest: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::block) struct Evictions {
    pub(in crate::block) evictable: usize,
    pub(in crate::block) releases: u64,
    pub(in crate::block) oldest: Ticket,
}

pub(in crate::block) type NoWindow = ((Evictions, TenantSet), Snapshot, usize);

pub(in crate::block) struct Refused {
    runs: Mutex<Option<(Snapshot, FreeRuns)>>,
    evictions: Mutex<Option<(Evictions, TenantSet)>>,
    window: Mutex<Option<NoWindow>>,
    /// The count in `evictions`, so that the lock is rarely taken. 0: none.
    evictable: AtomicUsize,
    /// Number of searches that failed, and returned the frames that they had gathered.
    returned: AtomicU64,
}

impl Default for Refused {
    fn default() -> Self {
        let (runs, evictions, window) = (Mutex::new(None), Mutex::new(None), Mutex::new(None));
        Self { runs, evictions, window, evictable: AtomicUsize::new(0), returned: AtomicU64::new(0) }
    }
}

impl Refused {
    /// Returns the number of searches that returned their frames.
    #[inline]
    pub(in crate::block) fn returned(&self) -> u64 {
        // Acquire: a search from here on sees the frames of those that are counted.
        self.returned.load(Acquire)
    }

    /// Counts a search whose frames were returned. Returns the number of those before it.
    pub(in crate::block) fn count_returned(&self) -> u64 {
        // Acquire and Release: as in `returned`. In the order of the counts, the later one of two
        // searches sees the earlier one.
        self.returned.fetch_add(1, AcqRel)
    }

    pub(in crate::block) fn runs(&self) -> Option<(Snapshot, FreeRuns)> {
        *self.runs.try_lock().ok()?
    }

    pub(in crate::block) fn remember_runs(&self, at: Snapshot, runs: FreeRuns) {
        if let Ok(mut known) = self.runs.try_lock() {
            *known = Some((at, runs));
        }
    }

    /// Returns the state in which no block could be evicted, if as many were evictable as now.
    pub(in crate::block) fn no_eviction(&self, evictable: usize) -> Option<(Evictions, TenantSet)> {
        // Relaxed: a hint.
        if evictable == 0 || self.evictable.load(Relaxed) != evictable {
            return None;
        }
        *self.evictions.try_lock().ok()?
    }

    pub(in crate::block) fn remember_no_eviction(&self, at: Evictions, protected: TenantSet) {
        if let Ok(mut known) = self.evictions.try_lock() {
            *known = Some((at, protected));
            self.evictable.store(at.evictable, Relaxed);
        }
    }

    pub(in crate::block) fn no_window(&self) -> Option<NoWindow> {
        *self.window.try_lock().ok()?
    }

    pub(in crate::block) fn remember_no_window(&self, window: NoWindow) {
        if let Ok(mut known) = self.window.try_lock() {
            *known = Some(window);
        }
    }
}
