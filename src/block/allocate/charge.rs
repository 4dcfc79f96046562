//! Allocation for a tenant, within its quota.

use crate::error::AllocError;
use crate::frame::RunList;
use crate::ids::{BlockId, FrameId, Ticket};

use super::grab::Grab;
use crate::block::core::{Blocks, Core};
use crate::block::request::AllocRequest;
use crate::block::space::FreedFrames;
use crate::block::tenants::{EvictedFor, Tenant, Tenants};

/// Attempts of a charge, between which other threads of the tenant may charge what was evicted.
const ATTEMPTS: usize = 3;

impl Blocks {
    /// Allocates blocks for a tenant, if any: charges them, and names the tenant in each. `is_waiting`:
    /// for a place in the wait queue, which waits on after an [`Exhausted`](AllocError::Exhausted).
    #[inline]
    pub(in crate::block) fn charged(
        &self,
        tenant: Tenant,
        (request, is_waiting): (&AllocRequest, bool),
        take: &mut dyn FnMut(BlockId),
        allocate: impl FnOnce(&mut dyn FnMut(BlockId)) -> Result<(), AllocError>,
    ) -> Result<(), AllocError> {
        match self.tenants() {
            Some(tenants) if tenant != Tenant::NONE => {
                self.allocate_charged(tenants, tenant, (request, is_waiting), take, allocate)
            }
            _ => allocate(take),
        }
    }

    #[inline(never)]
    fn allocate_charged(
        &self,
        tenants: &Tenants,
        tenant: Tenant,
        (request, is_waiting): (&AllocRequest, bool),
        take: &mut dyn FnMut(BlockId),
        allocate: impl FnOnce(&mut dyn FnMut(BlockId)) -> Result<(), AllocError>,
    ) -> Result<(), AllocError> {
        let blocks = request.blocks;
        self.charge(tenants, tenant, (request, is_waiting)).inspect_err(|error| {
            // A waiting request waits on.
            if !is_waiting || !matches!(error, AllocError::Exhausted { .. }) {
                self.count_refusal(error);
            }
        })?;
        let mut named = 0;
        let allocated = allocate(&mut |id| {
            tenants.name(id, tenant);
            named += 1;
            take(id);
        });
        debug_assert_eq!(named, if allocated.is_ok() { blocks } else { 0 }, "all blocks or none");
        match allocated {
            Ok(()) => {
                tenants.allocated(tenant, blocks);
                // Its cached blocks may be beyond its floor now, and a request may wait for them.
                self.announce();
            }
            Err(_) => tenants.uncharge(tenant, blocks),
        }
        allocated
    }

    fn charge(
        &self,
        tenants: &Tenants,
        tenant: Tenant,
        (request, is_waiting): (&AllocRequest, bool),
    ) -> Result<(), AllocError> {
        let blocks = request.blocks;
        for _ in 0..ATTEMPTS {
            let Err(excess) = tenants.charge_or_yield(tenant, blocks) else { return Ok(()) };
            // Without enough of its own, evictions would be wasted.
            if tenants.holding(tenant).cached < excess as u64 {
                break;
            }
            self.check_servable(request, tenant, is_waiting)?;
            if self.evict_own(tenants, tenant, excess) == 0 {
                break;
            }
        }
        tenants.charge(tenant, blocks).map_err(|_| tenants.refuse(tenant, blocks))
    }

    /// Refuses requests that the pool cannot satisfy, for which evictions would be wasted. After
    /// [`Exhausted`](AllocError::Exhausted), no frame was missed because an owner was inside its thread cache.
    fn check_servable(
        &self,
        request: &AllocRequest,
        tenant: Tenant,
        is_waiting: bool,
    ) -> Result<(), AllocError> {
        self.check_request(request)?;
        let is_short = || {
            let counts = self.recount();
            let available = counts.free() + counts.retired + self.reserved_for(request);
            available + self.evictable_for(tenant) < request.blocks
        };
        if !is_short() {
            return Ok(());
        }
        let (wake_guard, mut grab) = (self.wake_guard(), Grab::new());
        while is_short() && self.climb(&mut grab, &wake_guard) {}
        if is_waiting {
            wake_guard.leave_to_queue();
        }
        if grab.is_sure && is_short() {
            return Err(self.exhausted_with(request.blocks, 0, tenant));
        }
        Ok(())
    }

    /// Evicts cached blocks of a tenant; if too few of them are unseen, also those that a batch may
    /// see: its quota counts blocks, whether or not their frames can be used again.
    #[cold]
    fn evict_own(&self, tenants: &Tenants, tenant: Tenant, wanted: usize) -> usize {
        let (mut got, oldest) = (0, self.space.clock.oldest());
        let mut unseen = FreedFrames::new(&self.space);
        let evict = |oldest, wanted, freed: &mut dyn FnMut(&[FrameId])| {
            self.evictor.iter().for_each(|evictor| evictor.evict_own(self, oldest, (wanted, tenant), freed));
        };
        evict(oldest, wanted, &mut |frames| {
            got += frames.len();
            frames.iter().for_each(|&frame| unseen.push(frame));
        });
        let mut seen = RunList::new();
        if got < wanted {
            evict(Ticket(u64::MAX), wanted - got, &mut |frames| {
                got += frames.len();
                frames.iter().for_each(|&frame| seen.push(frame));
            });
        }
        if got == 0 {
            // In no queue of its own: a thread stopped, or others were evicted out of order.
            let by = EvictedFor::Tenant(tenant);
            for id in (0..self.rows() as u32).map(BlockId).filter(|&id| tenants.of(id) == tenant) {
                if let Ok(frame) = self.evict_for(id, oldest, by) {
                    unseen.push(frame);
                } else if let Ok(frame) = self.evict_for(id, Ticket(u64::MAX), by) {
                    seen.push(frame);
                } else {
                    continue;
                }
                got += 1;
                if got == wanted {
                    break;
                }
            }
        }
        drop(unseen);
        self.free_or_retire(&seen);
        if got > 0 {
            self.announce();
        }
        got
    }
}

impl Core {
    /// Returns the tenants, if the pool has some.
    #[inline]
    pub fn tenants(&self) -> Option<&Tenants> {
        self.tenants.as_deref()
    }

    /// Returns the tenant of a block that cannot be freed or evicted meanwhile.
    #[inline]
    pub(in crate::block) fn tenant_of(&self, id: BlockId) -> Tenant {
        self.tenants().map_or(Tenant::NONE, |tenants| tenants.of(id))
    }

    /// Returns the number of evictable blocks that an allocation for a tenant may evict.
    #[inline]
    pub(in crate::block) fn evictable_for(&self, tenant: Tenant) -> usize {
        let evictable = self.evictable();
        match self.tenants() {
            Some(tenants) if evictable > 0 => {
                let (protected, others) = tenants.protected(tenant);
                // Never too low. Between the loads, a block may become evictable, and protected; the sum of the
                // accounts is right if others are taken meanwhile, and released again.
                let of_all = evictable.max(self.evictable()).saturating_sub(protected);
                of_all.max(others).min(evictable.max(self.evictable()))
            }
            _ => evictable,
        }
    }

    /// Returns whether a block may not be evicted for an allocation of a tenant.
    #[inline]
    pub(in crate::block) fn is_protected(&self, of: Tenant, by: Tenant) -> bool {
        self.tenants().is_some_and(|tenants| tenants.room(of, by) == 0)
    }

    /// Counts a block of this tenant that was freed; its frame is the caller's.
    #[inline]
    pub(in crate::block) fn count_freed(&self, id: BlockId, tenant: Tenant) {
        if tenant != Tenant::NONE
            && let Some(tenants) = self.tenants()
        {
            tenants.freed(id);
        }
    }

    /// Counts a block of this tenant that became evictable.
    #[inline]
    pub(in crate::block) fn count_kept(&self, tenant: Tenant) {
        if let Some(tenants) = self.tenants() {
            tenants.kept(tenant);
        }
    }

    /// Counts a hit of an evictable block.
    #[inline]
    pub(crate) fn took_cached(&self, id: BlockId) {
        if let Some(tenants) = self.tenants() {
            tenants.took_cached(id);
        }
    }
}
