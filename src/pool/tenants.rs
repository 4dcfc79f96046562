use crate::block::{Tenant, Tenants};
use crate::error::TenantError;
use crate::ids::TenantId;
use crate::sync::call;
use crate::tenants::{TenantInfo, TenantLimits};

use super::Pool;

impl Pool {
    /// Sets the limits of a tenant, and adds it if the pool does not know it: up to
    /// [`TENANTS_MAX`](crate::tenants::TENANTS_MAX).
    ///
    /// Holds for requests that begin after the call. A quota below what the tenant holds evicts
    /// nothing by itself: the tenant's next request evicts its own cached blocks, or is refused.
    ///
    /// # Errors
    /// [`TenantError`]: the pool was built without
    /// [`tenants`](crate::PoolBuilder::tenants), there are too many, the quota is below the floor,
    /// or the floors together exceed the pool without its reserve. The limits are unchanged.
    pub fn set_tenant(&self, id: TenantId, limits: TenantLimits) -> Result<(), TenantError> {
        let _call = call();
        let blocks = &self.0.blocks;
        let tenants = blocks.tenants().ok_or(TenantError::Disabled { tenant: id })?;
        let most = blocks.total().saturating_sub(blocks.reserve());
        set_tenant(tenants, id, limits, (most, self.0.layout.bytes_per_block()))?;
        // With a lower floor, a waiting request may evict more.
        blocks.announce();
        Ok(())
    }

    /// Returns what the tenants of the pool hold, in the order in which they were added; none in a
    /// pool without [`tenants`](crate::PoolBuilder::tenants). Reads counters only, and where
    /// hints have budgets for tenants, waits for those that are being carried out. Exact while no
    /// thread is inside a call.
    pub fn tenants(&self) -> Vec<TenantInfo> {
        let _call = call();
        let Some(tenants) = self.0.blocks.tenants() else { return Vec::new() };
        let bytes = self.0.layout.bytes_per_block() as u64;
        let tokens = self.0.sequences.block_tokens() as u64;
        let kept = self.0.sequences.kept_blocks();
        let kept = |tenant: Tenant| kept.as_ref().map_or(0, |kept| kept[tenant.index()] as u64 * bytes);
        tenants.all().map(|tenant| info((tenants, tenant), kept(tenant), bytes, tokens)).collect()
    }
}

/// Sets the limits of a tenant of a pool of `blocks` blocks beside its reserve.
pub(super) fn set_tenant(
    tenants: &Tenants,
    id: TenantId,
    TenantLimits { quota, floor }: TenantLimits,
    (blocks, block_bytes): (usize, usize),
) -> Result<Tenant, TenantError> {
    if let Some(quota) = quota.filter(|&quota| quota < floor) {
        return Err(TenantError::QuotaBelowFloor { tenant: id, quota, floor });
    }
    // No pool has as many blocks as 32 bits can count.
    let in_blocks = |blocks: u64| blocks.min(u32::MAX.into()) as usize;
    let floor = in_blocks(floor.div_ceil(block_bytes as u64));
    // Not below the floor, which was rounded up.
    let quota = quota.map(|quota| in_blocks(quota / block_bytes as u64).max(floor));
    tenants.set(id, quota, floor, blocks)
}

fn info(
    (tenants, tenant): (&Tenants, Tenant),
    kept_bytes: u64,
    block_bytes: u64,
    block_tokens: u64,
) -> TenantInfo {
    let holding = tenants.holding(tenant);
    TenantInfo {
        id: tenants.id(tenant),
        quota_bytes: holding.quota.map(|quota| quota * block_bytes),
        floor_bytes: holding.floor * block_bytes,
        held_bytes: holding.held * block_bytes,
        owned_bytes: holding.held.saturating_sub(holding.cached) * block_bytes,
        cached_bytes: holding.cached * block_bytes,
        kept_bytes,
        lookup_blocks: holding.lookups,
        hit_blocks: holding.hits,
        hit_tokens: holding.hits * block_tokens,
        evicted_blocks: holding.evicted,
        protected_evictions: holding.protected,
        refused_requests: holding.refused,
    }
}
