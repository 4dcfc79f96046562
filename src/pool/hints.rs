use crate::error::Invalid;
use crate::hints::{Hint, HintLimits, Outcome, SessionInfo};
use crate::ids::SessionId;
use crate::sequence::PromptBlocks;
use crate::sync::call;

use super::Pool;

impl Pool {
    /// Carries out a [hint](crate::hints) about the future use of cached blocks. Returns what
    /// became of it.
    ///
    /// The time is that of a lookup of its blocks. Allocations never wait for it: it gives blocks
    /// other places in the eviction order one by one, and takes locks that only hints and closes of
    /// hinted sequences take.
    pub fn hint(&self, hint: &Hint) -> Outcome {
        let _call = call();
        self.0.sequences.hint(hint)
    }

    /// Returns the blocks of the last closed request of a session, whether or not they are still
    /// cached: to fetch them from a tier. `None`: the session is not known.
    pub fn session_blocks(&self, session: SessionId) -> Option<PromptBlocks> {
        let _call = call();
        self.0.sequences.session_blocks(session)
    }

    /// Returns the sessions of a pool with [hints](crate::hints), those used last first. Up to
    /// 65,536 are remembered, with up to four hashes for each block of the pool. Looks all of their blocks up: for diagnosis, not for every step.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        let _call = call();
        self.0.sequences.session_infos()
    }
}

/// Checks the limits of a pool of `blocks` blocks.
pub(super) fn check_limits(
    limits: &HintLimits,
    (has_cache, has_tenants): (bool, bool),
    (blocks, block_bytes): (usize, usize),
) -> Result<(), Invalid> {
    if !has_cache {
        return Err(Invalid::new("hints", "a pool without a prefix cache", "a pool with `prefix_cache`"));
    }
    if limits.tenant_bytes.is_some() && !has_tenants {
        return Err(Invalid::new("tenant_bytes", "a pool without tenants", "a pool with `tenants`"));
    }
    let bytes = blocks as u64 * block_bytes as u64;
    for (what, given) in [
        ("pinned_bytes", limits.pinned_bytes),
        ("session_bytes", limits.session_bytes),
        ("tenant_bytes", limits.tenant_bytes),
    ] {
        if let Some(given) = given.filter(|&given| given > bytes) {
            return Err(Invalid::new(what, given, format_args!("at most the pool's {bytes} bytes")));
        }
    }
    if limits.longest.as_millis() == 0 {
        return Err(Invalid::new(
            "longest",
            format_args!("{:?}", limits.longest),
            "at least one millisecond",
        ));
    }
    Ok(())
}
