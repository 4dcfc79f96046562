//! What a pool with hints tells of its sessions.

use std::sync::Arc;

use crate::hints::SessionInfo;
use crate::ids::SessionId;
use crate::prefix::BlockHash;

use super::hinted::Session;
use super::registry::Sequences;

impl Sequences {
    /// Returns the number of blocks of each tenant that hints retain or pin, if tenants have budgets.
    pub(crate) fn kept_blocks(&self) -> Option<Vec<usize>> {
        let pins = self.0.hinted.as_deref()?.pins();
        pins.has_tenants().then(|| pins.of_tenants().collect())
    }

    /// Returns the hashes of the last closed request of a session in each list.
    pub(super) fn session_lists(&self, id: SessionId) -> Option<Vec<Arc<[BlockHash]>>> {
        let session = self.0.hinted.as_deref().and_then(|hinted| hinted.session(id))?;
        Some(session.lists.iter().map(|list| list.hashes.clone()).collect())
    }

    /// Returns what is known of the sessions, those used last first. Looks all of their blocks up.
    pub(crate) fn session_infos(&self) -> Vec<SessionInfo> {
        let (Some(hinted), Some(cache)) = (self.0.hinted.as_deref(), self.cache()) else {
            return Vec::new();
        };
        let now = cache.caught_now();
        let pinned = hinted.pins().by_session(now);
        let info = |(id, session): (SessionId, Session)| {
            let cached = |hashes: &[BlockHash], era| cache.count_cached(&self.0.blocks, hashes, era);
            let of_lists = session.lists.iter().map(|list| cached(&list.hashes, list.era)).sum::<usize>();
            let of_states =
                self.checkpoints_of(id).iter().map(|(hashes, era)| cached(hashes, *era)).sum::<usize>();
            let cached_blocks = of_lists + of_states;
            let retained = session.granted.and_then(|(what, _)| what.retention());
            SessionInfo {
                id,
                requests: session.requests,
                cached_blocks,
                cached_bytes: cached_blocks as u64 * hinted.block_bytes,
                last_use: session.last_use,
                returns_at: session.returns_at,
                retained_until: retained.map(|retention| retention.until).filter(|&until| until > now),
                pinned_bytes: pinned.get(&id).map_or(0, |&blocks| blocks as u64 * hinted.block_bytes),
            }
        };
        let mut sessions: Vec<SessionInfo> = hinted.sessions().into_iter().map(info).collect();
        sessions.sort_by_key(|session| (std::cmp::Reverse(session.last_use), session.id));
        sessions
    }
}
