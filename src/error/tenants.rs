use thiserror::Error;

use crate::ids::TenantId;

/// Reason why a tenant, or its limits, were refused. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum TenantError {
    /// The pool was built without tenants.
    #[error("tenant {tenant}: the pool was built without `PoolBuilder::tenants`")]
    Disabled {
        /// The tenant.
        tenant: TenantId,
    },
    /// The pool has no tenant with this id.
    #[error("the pool has no tenant {tenant}")]
    Unknown {
        /// The tenant.
        tenant: TenantId,
    },
    /// The pool has the maximum number of tenants.
    #[error("tenant {tenant} would be one more than {max}, the maximum")]
    TooMany {
        /// The tenant.
        tenant: TenantId,
        /// The maximum.
        max: usize,
    },
    /// The quota is below the floor.
    #[error("tenant {tenant}: a quota of {quota} bytes is below the floor of {floor}")]
    QuotaBelowFloor {
        /// The tenant.
        tenant: TenantId,
        /// The quota in bytes.
        quota: u64,
        /// The floor in bytes.
        floor: u64,
    },
    /// The floors together exceed the pool.
    #[error(
        "tenant {tenant}: a floor of {floor} blocks, with {others} of other tenants, exceeds {total} blocks"
    )]
    Floors {
        /// The tenant.
        tenant: TenantId,
        /// Its floor in blocks.
        floor: usize,
        /// Sum of the floors of the other tenants in blocks.
        others: usize,
        /// Number of blocks in the pool, without its reserve.
        total: usize,
    },
}
