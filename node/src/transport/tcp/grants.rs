use std::collections::HashMap;
use std::sync::{Arc, Weak};

use kvpool::Run;
use kvpool::transport::{Grant, PeerId, Tag, TransferState, TransportError};
use parking_lot::Mutex;

use super::region::{Held, NAME, Over, Region, Signal};
use crate::wire::{ItemHead, ItemStatus, Limits};

pub(super) struct Granted {
    pub(super) held: Held,
    peer: PeerId,
    /// Disjoint, ascending, not adjacent.
    runs: Box<[Run]>,
    /// Runs being received, so that no two threads write one frame.
    busy: Mutex<Vec<Run>>,
}

#[derive(Default)]
pub(super) struct Grants {
    entries: HashMap<Tag, Entry>,
}

struct Entry {
    granted: Option<Arc<Granted>>,
    over: Arc<Over>,
    peer: PeerId,
    bytes: u64,
}

/// The right to receive a run of a grant.
pub(super) struct Claim {
    pub(super) granted: Weak<Granted>,
    pub(super) region: Arc<Region>,
    run: Run,
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(granted) = self.granted.upgrade() {
            granted.busy.lock().retain(|&busy| busy != self.run);
        }
    }
}

impl Grants {
    pub(super) fn add(
        &mut self,
        grant: Grant,
        region: Arc<Region>,
        limits: &Limits,
        signal: Arc<Signal>,
    ) -> Result<(), TransportError> {
        self.entries.retain(|_, entry| entry.granted.is_some() || !entry.over.is_set());
        if self.entries.contains_key(&grant.tag) {
            return Err(TransportError::Unsupported {
                name: NAME,
                what: format!("use tag {} twice", grant.tag.0),
            });
        }
        let frames = region.check(&grant.runs)?;
        let bytes = (frames * region.frame_bytes()) as u64;
        let of_peer = self.entries.values().filter(|entry| entry.peer == grant.peer);
        let (count, sum) = of_peer.fold((0, 0), |(count, sum), entry| (count + 1, sum + entry.bytes));
        let max = limits.grants_per_peer as u64;
        if count >= max {
            return Err(TransportError::Quota { what: "grants of the peer", asked: 1, used: count, max });
        }
        let max = limits.granted_bytes_per_peer;
        if sum.saturating_add(bytes) > max {
            let what = "bytes of grants of the peer";
            return Err(TransportError::Quota { what, asked: bytes, used: sum, max });
        }
        let over = Over::new(signal);
        let held = Held::new(region, grant.hold, over.clone());
        let (peer, runs) = (grant.peer, joined(grant.runs));
        let granted = Arc::new(Granted { held, peer, runs, busy: Mutex::default() });
        self.entries.insert(grant.tag, Entry { granted: Some(granted), over, peer, bytes });
        Ok(())
    }

    /// Revokes a grant. Outside of any lock, the caller drops the returned reference, absent if it
    /// was revoked before, and calls [`ended`](Self::ended).
    pub(super) fn revoke(&mut self, tag: Tag) -> Result<Option<Arc<Granted>>, TransportError> {
        let entry = self.entries.get_mut(&tag);
        Ok(entry.ok_or(TransportError::Unknown { what: "tag", number: tag.0 })?.granted.take())
    }

    pub(super) fn revoke_all(&mut self) -> Vec<Arc<Granted>> {
        self.entries.values_mut().filter_map(|entry| entry.granted.take()).collect()
    }

    /// Returns the state of a revoked grant, and forgets it if it is over.
    pub(super) fn ended(&mut self, tag: Tag) -> TransferState {
        match self.entries.get(&tag) {
            // Meanwhile another thread added a grant, which forgets those that are over.
            None => TransferState::Done,
            Some(entry) if entry.over.is_set() => {
                self.entries.remove(&tag);
                TransferState::Done
            }
            Some(_) => TransferState::Quarantined(TransportError::Cancelled),
        }
    }

    /// Claims the run of an item, of which `bytes` arrive.
    pub(super) fn claim(&self, peer: PeerId, head: &ItemHead) -> Result<Claim, ItemStatus> {
        let entry = self.entries.get(&head.tag).filter(|entry| entry.peer == peer);
        let granted = entry.and_then(|entry| entry.granted.as_ref()).ok_or(ItemStatus::UnknownGrant)?;
        granted.claim(head)?;
        let region = granted.held.region.clone();
        Ok(Claim { granted: Arc::downgrade(granted), region, run: head.run })
    }

    pub(super) fn has(&self, peer: PeerId) -> bool {
        self.entries
            .values()
            .any(|entry| entry.peer == peer && (entry.granted.is_some() || !entry.over.is_set()))
    }

    pub(super) fn live(&self) -> usize {
        self.entries.values().filter(|entry| entry.granted.is_some() || !entry.over.is_set()).count()
    }
}

impl Granted {
    fn claim(&self, head: &ItemHead) -> Result<(), ItemStatus> {
        let (start, end) = (head.run.start.0, head.run.end());
        let after = self.runs.partition_point(|run| run.start.0 <= start);
        let within = after.checked_sub(1).is_some_and(|index| end <= self.runs[index].end());
        if !within {
            return Err(ItemStatus::OutsideGrant);
        }
        if u64::from(head.bytes) != u64::from(head.run.len) * self.held.region.frame_bytes() as u64 {
            return Err(ItemStatus::OtherSize);
        }
        let mut busy = self.busy.lock();
        if busy.iter().any(|busy| busy.start.0 < end && start < busy.end()) {
            return Err(ItemStatus::Overlap);
        }
        busy.push(head.run);
        Ok(())
    }
}

impl std::fmt::Debug for Granted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Granted").field("peer", &self.peer).field("runs", &self.runs).finish_non_exhaustive()
    }
}

fn joined(mut runs: Vec<Run>) -> Box<[Run]> {
    runs.retain(|run| run.len > 0);
    runs.sort_unstable_by_key(|run| run.start);
    runs.dedup_by(|next, last| {
        let touches = next.start.0 <= last.end();
        if touches {
            last.len = last.end().max(next.end()) - last.start.0;
        }
        touches
    });
    runs.into()
}
