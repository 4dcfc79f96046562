//! Tenants: owners of requests that share a pool, each with a quota and a floor.
//!
//! A pool with [`PoolBuilder::tenants`](crate::PoolBuilder::tenants) counts for each tenant the
//! blocks that it *holds*: those that its sequences allocated, until they are free again. A block
//! of a prefix that others share counts for the tenant that computed it, also while only others own
//! it, and in the cache. Blocks of leases, of sequences without a tenant, and cached blocks that come
//! from another pool count for none. A sequence that goes to another pool keeps its tenant; a pool
//! with tenants refuses it if it does not have this one, and one without keeps the name.
//!
//! - *Quota*: a request that would take its tenant beyond it first evicts the tenant's own cached
//!   blocks. If these are too few, it is refused with
//!   [`AllocError::OverQuota`](crate::AllocError::OverQuota), also if it would wait otherwise: it
//!   would keep others waiting for a limit that is not theirs.
//! - *Floor*: while a tenant holds no more than its floor, no request of others evicts its cached
//!   blocks, not for a moment. The tenant itself may evict them.
//!
//! A floor is memory for a tenant's cache, not a reservation of free blocks: other tenants may own
//! the whole pool before the tenant has used it.
//!
//! ```
//! use kvpool::tenants::TenantLimits;
//! use kvpool::{AdmitRequest, KvLayout, Pool, PrefixConfig, SequenceId, TenantId, Tokens};
//!
//! let (chat, batch_jobs, tiny) = (TenantId(1), TenantId(2), KvLayout::named("tiny")?);
//! let block = tiny.bytes_per_block() as u64;
//! let pool = Pool::builder(tiny)
//!     .blocks(100)
//!     .prefix_cache(PrefixConfig::new())
//!     .tenants([
//!         (chat, TenantLimits::new().floor(40 * block)),
//!         (batch_jobs, TenantLimits::new().quota(80 * block)),
//!     ])
//!     .build()?;
//! let prompt: Vec<u32> = (0..100).collect();
//! let mut sequence = pool.admit(&AdmitRequest::new(SequenceId(1), &prompt).tenant(chat))?;
//! let mut step = pool.begin_batch();
//! step.append(&mut sequence, Tokens::Announced(prompt.len()))?;
//! step.finish();
//! drop(sequence);
//! let chat = pool.tenants().swap_remove(0);
//! assert_eq!((chat.held_bytes, chat.cached_bytes), (25 * block, 25 * block));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use crate::ids::TenantId;

pub use crate::block::TENANTS_MAX;

/// Limits of a tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use]
pub struct TenantLimits {
    pub(crate) quota: Option<u64>,
    pub(crate) floor: u64,
}

impl TenantLimits {
    /// Returns no quota, and a floor of zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how many bytes the tenant may hold, in whole blocks. Default: no limit.
    pub fn quota(mut self, bytes: u64) -> Self {
        self.quota = Some(bytes);
        self
    }

    /// Sets below how many bytes no eviction for others takes it, rounded up to whole blocks.
    pub fn floor(mut self, bytes: u64) -> Self {
        self.floor = bytes;
        self
    }
}

/// What a tenant holds, and its limits. Counters are since the pool was built.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct TenantInfo {
    /// Its id.
    pub id: TenantId,
    /// Bytes that it may hold.
    pub quota_bytes: Option<u64>,
    /// Bytes below which no eviction for others takes it.
    pub floor_bytes: u64,
    /// Bytes that it holds: [`owned_bytes`](Self::owned_bytes) and
    /// [`cached_bytes`](Self::cached_bytes).
    pub held_bytes: u64,
    /// Bytes of its blocks that have owners, perhaps of other tenants.
    pub owned_bytes: u64,
    /// Bytes of its cached blocks without owners.
    pub cached_bytes: u64,
    /// Bytes of its blocks that hints retain or pin, in a pool with
    /// [`HintLimits::tenant_bytes`](crate::hints::HintLimits::tenant_bytes); otherwise zero.
    pub kept_bytes: u64,
    /// Full blocks of its prompts that were looked up.
    pub lookup_blocks: u64,
    /// Those of them that were cached.
    pub hit_blocks: u64,
    /// Tokens of these blocks.
    pub hit_tokens: u64,
    /// Its blocks that were evicted, for itself or for others.
    pub evicted_blocks: u64,
    /// Evictions that passed over its cached blocks because of its floor.
    pub protected_evictions: u64,
    /// Requests that were refused because of its quota.
    pub refused_requests: u64,
}
