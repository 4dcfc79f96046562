//! The prefix cache and the tenants of a pool that is built.

use crate::block::{BlocksConfig, Tenants};
use crate::error::Invalid;
use crate::ids::TenantId;
use crate::prefix::{PrefixCache, PrefixConfig};
use crate::sequence::ListKind;
use crate::sync::Arc;
use crate::tenants::TenantLimits;

use super::build_error::BuildError;
use super::tenants::set_tenant;

/// Creates the prefix cache. Out of line, like the rest: loom models have small stacks.
#[inline(never)]
pub(super) fn shared_cache(
    config: &BlocksConfig,
    kinds: &[ListKind],
    prefix: PrefixConfig,
    tenants: Option<Arc<Tenants>>,
) -> Result<Arc<PrefixCache>, BuildError> {
    let (frames, frames_max) = (config.frames, config.frames_max);
    let tokens = kinds.iter().map(|kind| kind.block_tokens as usize);
    let first = tokens.clone().next().unwrap_or(0);
    let mut cache = PrefixCache::new(frames, frames_max, first, prefix)?;
    if kinds.len() > 1 {
        cache = cache.with_lists(tokens);
    }
    if let Some(tenants) = tenants {
        cache = cache.with_tenants(frames, frames_max, tenants);
    }
    Ok(Arc::new(cache))
}

/// Creates the tenants of a pool, if it is to have some.
#[inline(never)]
pub(super) fn shared_tenants(
    config: &BlocksConfig,
    limits: Option<&[(TenantId, TenantLimits)]>,
    block_bytes: usize,
) -> Result<Option<Arc<Tenants>>, BuildError> {
    let Some(limits) = limits else { return Ok(None) };
    let tenants = Tenants::new(config.frames);
    let blocks = config.frames - config.has_null_block as usize - config.reserve;
    for (at, &(id, limits)) in limits.iter().enumerate() {
        if tenants.find(id).is_some() {
            let limit = "each tenant once";
            return Err(Invalid::new("tenants", format_args!("tenant {id} again"), limit).at(at).into());
        }
        set_tenant(&tenants, id, limits, (blocks, block_bytes))?;
    }
    Ok(Some(Arc::new(tenants)))
}
