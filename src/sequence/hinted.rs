//! What a pool with [hints](crate::hints) knows of its sessions and open sequences, and what it
//! granted. Everything is under locks, which hints and the closes of hinted sequences take, and
//! allocations never.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use smallvec::SmallVec;

use crate::hints::{HintLimits, Rejection};
use crate::ids::{SequenceId, SessionId, TenantId};
use crate::prefix::policy::Millis;
use crate::prefix::{BlockHash, Retention};
use crate::sync::{AtomicUsize, Ordering::Relaxed};

use super::pins::Pins;

/// Number of sessions that are remembered.
const SESSIONS_MAX: usize = 1 << 16;

/// Hashes of sessions that are remembered, as a multiple of the pool's blocks.
const HASHES_MAX: usize = 4;

/// Hints on one open sequence that are remembered.
pub(super) const STANDING_MAX: usize = 16;

/// What is done to blocks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Lasting {
    Retain(Retention),
    Demote,
    Release,
}

impl Lasting {
    pub(super) fn retention(self) -> Option<Retention> {
        match self {
            Self::Retain(retention) => Some(retention),
            Self::Demote | Self::Release => None,
        }
    }

    pub(super) fn is_pin(self) -> bool {
        self.retention().is_some_and(|retention| retention.is_pinned)
    }
}

/// A hint for tokens of an open sequence.
#[derive(Clone, Debug)]
pub(super) struct Standing {
    pub tokens: Range<usize>,
    /// Numbers of blocks, by group of layers.
    pub blocks_max: SmallVec<[usize; 2]>,
    pub what: Lasting,
}

impl Standing {
    pub(super) fn is_within(&self, tokens: &Range<usize>) -> bool {
        self.tokens.start >= tokens.start && self.tokens.end <= tokens.end
    }
}

/// The hashes of a closed sequence in one group of layers.
#[derive(Clone, Debug, Default)]
pub(super) struct Hashes {
    pub hashes: Arc<[BlockHash]>,
    pub era: u64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Session {
    /// Of its last closed request, by group of layers.
    pub lists: SmallVec<[Hashes; 1]>,
    pub requests: u64,
    pub last_use: Millis,
    pub returns_at: Option<Millis>,
    /// For its later requests, and the number of blocks of each group, from the first one.
    pub granted: Option<(Lasting, usize)>,
}

impl Session {
    pub(super) fn hashes(&self) -> usize {
        self.lists.iter().map(|list| list.hashes.len()).sum()
    }

    fn is_retained(&self, now: Millis) -> bool {
        self.granted.and_then(|(what, _)| what.retention()).is_some_and(|retention| retention.until > now)
    }
}

#[derive(Default)]
struct Sessions {
    by_id: HashMap<SessionId, Session>,
    /// Number of hashes in all of them.
    hashes: usize,
}

pub(super) struct Hinted {
    limits: HintLimits,
    pub(super) block_bytes: u64,
    blocks: usize,
    sessions: Mutex<Sessions>,
    open: Mutex<HashMap<SequenceId, Vec<Standing>>>,
    /// Number of sequences with such hints, for closes without a lock.
    standing: AtomicUsize,
    /// Locked before the others.
    pins: Mutex<Pins>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hinted {
    pub(super) fn new(limits: HintLimits, block_bytes: u64, blocks: usize) -> Self {
        let block_bytes = block_bytes.max(1);
        let pinned_bytes = limits.pinned_bytes.unwrap_or(blocks as u64 * block_bytes / 4);
        let limits = limits.pinned_bytes(pinned_bytes);
        let in_blocks = |bytes: u64| usize::try_from(bytes / block_bytes).unwrap_or(usize::MAX);
        Self {
            limits,
            block_bytes,
            blocks,
            sessions: Mutex::default(),
            open: Mutex::default(),
            standing: AtomicUsize::new(0),
            pins: Mutex::new(Pins::new(in_blocks(pinned_bytes), limits.tenant_bytes.map(in_blocks))),
        }
    }

    /// Returns the time until which a hint may ask for retention now.
    pub(super) fn longest(&self, now: Millis) -> Millis {
        now + self.limits.longest.as_millis().min(u64::MAX.into()) as u64
    }

    /// Returns the number of blocks of one session that may be retained.
    pub(super) fn session_blocks(&self) -> usize {
        let of_bytes = |bytes: u64| usize::try_from(bytes / self.block_bytes).unwrap_or(usize::MAX);
        self.limits.session_bytes.map_or(usize::MAX, of_bytes)
    }

    /// Locks the pins: hints, and closes that carry one out, do so one at a time.
    pub(super) fn pins(&self) -> MutexGuard<'_, Pins> {
        lock(&self.pins)
    }

    /// Returns the number of blocks that are to be pinned when open sequences are closed, without the
    /// hints for which `skips` returns true.
    pub(super) fn reserved(&self, skips: impl Fn(SequenceId, &Standing) -> bool) -> usize {
        if self.standing.load(Relaxed) == 0 {
            return 0;
        }
        let open = lock(&self.open);
        let all = open.iter().flat_map(|(&id, all)| all.iter().map(move |standing| (id, standing)));
        let pins = all.filter(|&(id, standing)| standing.what.is_pin() && !skips(id, standing));
        pins.flat_map(|(_, standing)| &standing.blocks_max).sum()
    }

    /// Returns the error of a pin, when so many blocks are.
    pub(super) fn full(&self, pinned: usize) -> Rejection {
        let limit = self.limits.pinned_bytes.unwrap_or_default();
        let pinned_bytes = pinned as u64 * self.block_bytes;
        Rejection::Pinned { pinned_bytes, limit, block_bytes: self.block_bytes }
    }

    /// Returns the error of a hint, when so many blocks of the tenant are retained or pinned.
    pub(super) fn full_of(&self, tenant: TenantId, blocks: usize) -> Rejection {
        let limit = self.limits.tenant_bytes.unwrap_or_default();
        let kept_bytes = blocks as u64 * self.block_bytes;
        Rejection::Tenant { tenant, kept_bytes, limit, block_bytes: self.block_bytes }
    }

    pub(super) fn session(&self, id: SessionId) -> Option<Session> {
        lock(&self.sessions).by_id.get(&id).cloned()
    }

    pub(super) fn sessions(&self) -> Vec<(SessionId, Session)> {
        lock(&self.sessions).by_id.iter().map(|(&id, session)| (id, session.clone())).collect()
    }

    /// Sets what lasts for later requests of a session. Returns the session as it is then.
    pub(super) fn set_granted(&self, id: SessionId, granted: Option<(Lasting, usize)>) -> Option<Session> {
        let mut sessions = lock(&self.sessions);
        let session = sessions.by_id.get_mut(&id)?;
        session.granted = granted;
        Some(session.clone())
    }

    pub(super) fn forget(&self, id: SessionId) {
        let mut sessions = lock(&self.sessions);
        let gone = sessions.by_id.remove(&id);
        sessions.hashes -= gone.as_ref().map_or(0, Session::hashes);
        drop(sessions);
        drop(gone);
    }

    /// Notes the hashes of a closed request in a group of layers. Returns what the session was
    /// granted, and the hashes of the request before.
    pub(super) fn note(
        &self,
        id: SessionId,
        group: usize,
        list: Hashes,
        returns_at: Option<Millis>,
        now: Millis,
    ) -> (Option<(Lasting, usize)>, Hashes) {
        let more = list.hashes.len();
        let mut sessions = lock(&self.sessions);
        let session = sessions.by_id.entry(id).or_default();
        if session.lists.len() <= group {
            session.lists.resize(group + 1, Hashes::default());
        }
        let before = std::mem::replace(&mut session.lists[group], list);
        if group == 0 {
            (session.requests, session.last_use) = (session.requests + 1, now);
            session.returns_at = returns_at;
        }
        let granted = session.granted;
        if let (0, Some((Lasting::Demote | Lasting::Release, _))) = (group, granted) {
            // The request that had the blocks then.
            session.granted = None;
        }
        sessions.hashes = sessions.hashes + more - before.hashes.len();
        let gone = if sessions.hashes > HASHES_MAX * self.blocks.max(1 << 10)
            || sessions.by_id.len() > SESSIONS_MAX
        {
            sessions.forget_some(id, now)
        } else {
            Vec::new()
        };
        drop(sessions);
        // Their memory is freed outside the lock.
        drop(gone);
        (granted, before)
    }

    /// Notes a hint for tokens of an open sequence, in place of those for some of these tokens. Returns
    /// false if there are too many.
    pub(super) fn stand(&self, id: SequenceId, standing: Standing) -> bool {
        let mut open = lock(&self.open);
        let all = open.entry(id).or_default();
        all.retain(|old| !old.is_within(&standing.tokens));
        let has_room = all.len() < STANDING_MAX;
        if has_room {
            all.push(standing);
        }
        // Relaxed: a close that misses it finds the sequence closed, and so does the hint.
        self.standing.store(open.len(), Relaxed);
        has_room
    }

    /// Takes the hints on tokens of a sequence that is no longer open.
    pub(super) fn take_standing(&self, id: SequenceId) -> Vec<Standing> {
        if self.standing.load(Relaxed) == 0 {
            return Vec::new();
        }
        let mut open = lock(&self.open);
        let standing = open.remove(&id).unwrap_or_default();
        self.standing.store(open.len(), Relaxed);
        standing
    }

    /// Returns the hints on tokens of an open sequence.
    pub(super) fn standing(&self, id: SequenceId) -> Vec<Standing> {
        if self.standing.load(Relaxed) == 0 {
            return Vec::new();
        }
        lock(&self.open).get(&id).cloned().unwrap_or_default()
    }
}

impl Sessions {
    /// Forgets an eighth of the sessions, but not `kept`: those without retention, used longest
    /// ago, first.
    #[cold]
    fn forget_some(&mut self, kept: SessionId, now: Millis) -> Vec<Session> {
        let others = self.by_id.iter().filter(|&(&id, _)| id != kept);
        let mut others: Vec<_> =
            others.map(|(&id, session)| (session.is_retained(now), session.last_use, id)).collect();
        others.sort_unstable();
        others.truncate(others.len().div_ceil(8));
        let gone: Vec<_> = others.iter().filter_map(|(.., id)| self.by_id.remove(id)).collect();
        self.hashes -= gone.iter().map(Session::hashes).sum::<usize>();
        gone
    }
}
