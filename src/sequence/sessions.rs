//! Sessions: which checkpoints of a conversation are still worth their memory.
//!
//! A request continues its session behind the newest checkpoint that it shares, and mostly adds one.
//! Then the one before the last two is *dominated*: if a prompt still reaches it, it reaches a later
//! one too; or the conversation has left its path, and nothing reaches it. Dominance is an order of
//! eviction, not a rule: dominated checkpoints are evict-first, and a hit ends that.
//!
//! A checkpoint that other sessions hit too, behind a common prompt, is left to the policy: its hits
//! are more than those of its own session.
//!
//! A checkpoint is noted when its batch begins to write it. If that batch is abandoned, or two threads
//! work on a session at once, another checkpoint than the third last may be demoted, or none.
//!
//! All of this is a hint. An entry is changed under the lock of its shard of the map; checkpoints are
//! found by their hashes, like those of a hit.

use smallvec::SmallVec;

use crate::ids::SessionId;
use crate::prefix::BlockHash;
use crate::sync::Map;

use super::token_hashes::TokenHashes;

/// Number of checkpoints that a session keeps.
const KEPT: usize = 2;

/// Number of sessions that are remembered.
const SESSIONS_MAX: usize = 1 << 16;

/// A checkpoint, as its session remembers it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Checkpoint {
    /// Hash of the last block of tokens before it.
    behind: BlockHash,
    /// The salt of the newest uncache call, and the era, in which it was made.
    salt: u64,
    pub(super) era: u64,
    /// Number of hits by its session.
    pub(super) hits: u32,
}

impl Checkpoint {
    /// Returns the checkpoint behind this many blocks of tokens, all known.
    pub(super) fn new(known: &TokenHashes, blocks: usize, hits: u32) -> Option<Self> {
        let behind = blocks.checked_sub(1).and_then(|last| known.hash(last as u32))?;
        Some(Self { behind, salt: known.salt(), era: known.era(), hits })
    }

    /// Returns the hash of a block of a state in it.
    pub(super) fn hash(&self, state: usize, block: usize) -> BlockHash {
        self.behind.of_state(state, block, self.salt)
    }

    fn is_same(&self, other: &Self) -> bool {
        (self.behind, self.salt, self.era) == (other.behind, other.salt, other.era)
    }
}

#[derive(Clone, Default, Debug)]
struct Session {
    /// The newest last.
    kept: SmallVec<[Checkpoint; KEPT]>,
}

pub(super) struct Sessions(Map<SessionId, Session>);

impl Sessions {
    pub(super) fn new() -> Self {
        Self(Map::new())
    }

    /// Notes a hit at a checkpoint. If the session keeps it, it becomes the newest.
    pub(super) fn hit(&self, session: SessionId, at: Checkpoint) {
        // Only those that have checkpoints are remembered.
        if self.0.get(&session).is_none() {
            return;
        }
        self.0.update(session, |session| {
            if let Some(place) = session.kept.iter().position(|kept| kept.is_same(&at)) {
                session.kept[place..].rotate_left(1);
                session.kept.last_mut().expect("the one that was hit").hits += 1;
            }
        });
    }

    /// Returns the checkpoints that a session keeps.
    pub(super) fn kept(&self, session: SessionId) -> SmallVec<[Checkpoint; KEPT]> {
        self.0.get(&session).map(|session| session.kept).unwrap_or_default()
    }

    /// Returns the checkpoint that a new one dominates.
    pub(super) fn dominated_by(&self, session: SessionId, new: &Checkpoint) -> Option<Checkpoint> {
        let mut others = self.0.get(&session)?.kept;
        others.retain(|kept| !kept.is_same(new));
        others.first().copied().filter(|_| others.len() >= KEPT)
    }

    /// Notes a new checkpoint. If there are too many sessions, an eighth is forgotten: those without
    /// a cached checkpoint first.
    pub(super) fn add(&self, session: SessionId, new: Checkpoint, is_cached: impl Fn(&Checkpoint) -> bool) {
        if self.0.len() >= SESSIONS_MAX && self.0.get(&session).is_none() {
            self.forget(is_cached);
        }
        self.0.update(session, |session| {
            session.kept.retain(|kept| !kept.is_same(&new));
            session.kept.push(new);
            let more = session.kept.len().saturating_sub(KEPT);
            drop(session.kept.drain(..more));
        });
    }

    #[cold]
    fn forget(&self, is_cached: impl Fn(&Checkpoint) -> bool) {
        let mut entries = self.0.entries();
        entries.sort_by_cached_key(|(_, session)| session.kept.iter().any(&is_cached));
        entries.iter().take(SESSIONS_MAX / 8).for_each(|(id, _)| self.0.remove(id));
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    fn checkpoint(number: u64) -> Checkpoint {
        Checkpoint { behind: BlockHash::new(number.into(), number), salt: 0, era: 0, hits: 0 }
    }

    #[test]
    fn the_oldest_of_two_is_dominated_unless_it_was_hit() {
        let (sessions, [one, two, three]) = (Sessions::new(), [1, 2, 3].map(checkpoint));
        let (id, add) = (SessionId(1), |new| sessions.add(SessionId(1), new, |_| true));
        add(one);
        assert_eq!(sessions.dominated_by(id, &two), None);
        add(two);
        assert_eq!(sessions.dominated_by(id, &three), Some(one));
        assert_eq!(sessions.dominated_by(id, &two), None, "it is there already");
        sessions.hit(id, one);
        assert_eq!(sessions.dominated_by(id, &three), Some(two));
        add(three);
        assert_eq!(sessions.dominated_by(id, &two).map(|kept| kept.hits), Some(1));
    }

    #[test]
    fn sessions_are_bounded() {
        let sessions = Sessions::new();
        (0..100).for_each(|id| sessions.hit(SessionId(id), checkpoint(id)));
        assert_eq!(sessions.0.len(), 0, "they have no checkpoint");
        let most = SESSIONS_MAX as u64;
        for id in 0..most + 1_000 {
            sessions.add(SessionId(id), checkpoint(id), |kept| kept.behind.check() % 2 == 0);
        }
        assert!((SESSIONS_MAX / 2..=SESSIONS_MAX).contains(&sessions.0.len()));
        let is_there = |id: &u64| sessions.0.get(&SessionId(*id)).is_some();
        let stayed = |first: u64| (first..most).step_by(2).filter(is_there).count();
        assert_eq!(stayed(0), SESSIONS_MAX / 2, "those with a cached checkpoint");
        assert!(stayed(1) < SESSIONS_MAX / 2);
    }
}
