//! Tenants of a pool: their limits, and what they hold.

use kvpool::TenantId;
use kvpool::tenants::TenantLimits;
use pyo3::prelude::*;
use pyo3::types::PyMapping;

use crate::args::{Bytes, Tenant, shown};
use crate::error::{Failure, Outcome, fields, raise};
use crate::pool::PyPool;
use crate::record::record;

record! {
    /// What a tenant of a pool holds, and its limits. Counters are since the pool was built.
    TenantInfo {
        /// Its number.
        id: u64,
        /// Bytes that it may hold.
        quota_bytes: Option<u64>,
        /// Bytes below which no eviction for others takes it.
        floor_bytes: u64,
        /// Bytes that it holds, owned and cached.
        held_bytes: u64,
        /// Bytes of its blocks that have owners, perhaps of other tenants.
        owned_bytes: u64,
        /// Bytes of its cached blocks without owners.
        cached_bytes: u64,
        /// Bytes of its blocks that hints retain or pin, in a pool with `tenant_bytes` in `hints=`.
        kept_bytes: u64,
        /// Full blocks of its prompts that were looked up.
        lookup_blocks: u64,
        /// Those of them that were cached.
        hit_blocks: u64,
        /// Tokens of these blocks.
        hit_tokens: u64,
        /// Its blocks that were evicted, for itself or for others.
        evicted_blocks: u64,
        /// Evictions that passed over its cached blocks because of its floor.
        protected_evictions: u64,
        /// Requests that were refused because of its quota.
        refused_requests: u64,
    }
}

impl From<kvpool::tenants::TenantInfo> for TenantInfo {
    fn from(tenant: kvpool::tenants::TenantInfo) -> Self {
        Self {
            id: tenant.id.0,
            quota_bytes: tenant.quota_bytes,
            floor_bytes: tenant.floor_bytes,
            held_bytes: tenant.held_bytes,
            owned_bytes: tenant.owned_bytes,
            cached_bytes: tenant.cached_bytes,
            kept_bytes: tenant.kept_bytes,
            lookup_blocks: tenant.lookup_blocks,
            hit_blocks: tenant.hit_blocks,
            hit_tokens: tenant.hit_tokens,
            evicted_blocks: tenant.evicted_blocks,
            protected_evictions: tenant.protected_evictions,
            refused_requests: tenant.refused_requests,
        }
    }
}

fn refused(message: String) -> Failure {
    raise("BuildError", message, fields![kind: "Tenants", argument: "tenants"])
}

fn mapping<'a, 'py>(given: &'a Bound<'py, PyAny>, what: &str) -> Outcome<&'a Bound<'py, PyMapping>> {
    given.cast().map_err(|_| refused(format!("{what} are a mapping, not {}", shown(given))))
}

/// Reads the argument `tenants` of a pool's constructor.
pub fn tenant_limits(tenants: Option<&Bound<'_, PyAny>>) -> Outcome<Option<Vec<(TenantId, TenantLimits)>>> {
    let Some(tenants) = tenants else { return Ok(None) };
    let mut all = Vec::new();
    for item in mapping(tenants, "tenants")?.items()?.iter() {
        let (id, given) = item.extract::<(Tenant, Bound<'_, PyAny>)>()?;
        let mut limits = TenantLimits::new();
        for item in mapping(&given, "limits of a tenant")?.items()?.iter() {
            let (key, value) = item.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>()?;
            limits = match key.extract::<String>().as_deref() {
                Ok("quota") => limits.quota(value.extract::<Bytes>()?.0),
                Ok("floor") => limits.floor(value.extract::<Bytes>()?.0),
                _ => {
                    let known = "there are quota and floor";
                    return Err(refused(format!("tenants have no limit {}; {known}", shown(&key))));
                }
            };
        }
        all.push((TenantId(id.0), limits));
    }
    Ok(Some(all))
}

#[pymethods]
impl PyPool {
    /// Sets the limits of a tenant in bytes, and adds it if the pool does not know it: up to 64.
    /// A quota below what the tenant holds evicts nothing by itself.
    ///
    /// Raises InvalidArgument if the pool was built without `tenants`, for a quota below the floor,
    /// and for floors that exceed the pool together.
    #[pyo3(signature = (tenant, *, quota=None, floor=Bytes(0)), text_signature = "($self, tenant, *, quota=None, floor=0)")]
    fn set_tenant(&self, tenant: Tenant, quota: Option<Bytes>, floor: Bytes) -> Outcome<()> {
        let limits = TenantLimits::new().floor(floor.0);
        let limits = quota.map_or(limits, |quota| limits.quota(quota.0));
        Ok(self.get()?.set_tenant(TenantId(tenant.0), limits)?)
    }

    /// Returns what the tenants of the pool hold, in the order in which they were added.
    fn tenants(&self) -> Outcome<Vec<TenantInfo>> {
        Ok(self.get()?.tenants().into_iter().map(TenantInfo::from).collect())
    }
}

/// Adds the classes to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<TenantInfo>()
}
