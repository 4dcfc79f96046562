//! Refusals without a walk: when a [stored result](crate::block::state::Refused) holds.

use crate::ids::Order;

use crate::block::core::Core;
use crate::block::state::{Evictions, FreeRuns, TenantSet};
use crate::block::tenants::Tenant;

impl Core {
    pub(super) fn known_runs(&self) -> Option<FreeRuns> {
        let (at, runs) = self.refused.runs()?;
        (self.space.frames.snapshot() == Some(at)).then_some(runs)
    }

    pub(super) fn free_runs(&self) -> FreeRuns {
        if let Some(known) = self.known_runs() {
            return known;
        }
        let frames = &self.space.frames;
        let before = frames.snapshot();
        let census = frames.census(Order(0));
        let runs = FreeRuns { free: census.free, longest: census.longest_run };
        if let Some(before) = before
            && before.free() == runs.free
            && frames.snapshot() == Some(before)
        {
            self.refused.remember_runs(before, runs);
        }
        runs
    }

    pub(super) fn evictions(&self) -> Evictions {
        // First: the other two are no older.
        let releases = self.evictor.as_ref().map_or(0, |evictor| evictor.releases());
        Evictions { evictable: self.evictable(), releases, oldest: self.space.clock.oldest() }
    }

    pub(super) fn knows_no_eviction(&self, tenant: Tenant) -> bool {
        self.refused
            .no_eviction(self.evictable())
            .is_some_and(|(known, floored)| known == self.evictions() && self.protects(floored, tenant))
    }

    /// `kept`: number of blocks that batches see for certain, or that are protected.
    pub(super) fn remember_no_eviction(&self, state: Evictions, kept: usize, protected: TenantSet) {
        if kept == state.evictable && self.evictions() == state {
            self.refused.remember_no_eviction(state, protected);
        }
    }

    fn protects(&self, of: TenantSet, by: Tenant) -> bool {
        self.tenants().is_none_or(|tenants| tenants.protects(of, by))
    }

    /// Returns whether a walk found no window of this length, and nothing has changed since.
    pub(super) fn knows_no_window(&self, len: usize, tenant: Tenant) -> bool {
        self.refused.no_window().is_some_and(|((state, floored), at, least)| {
            len >= least
                && state == self.evictions()
                && self.space.frames.snapshot() == Some(at)
                && self.protects(floored, tenant)
        })
    }
}
