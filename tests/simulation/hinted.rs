//! Hints about sessions, hashes and tokens, in a pool that takes them, and time that passes.

use std::sync::atomic::Ordering::Relaxed;

use kvpool::hints::{Action, Hint, HintLimits, Outcome, Rejection, Target};
use kvpool::prefix::BlockHash;
use kvpool::prefix::policy::{CachePriority, Millis};
use kvpool::{SequenceId, SessionId};

use super::world::World;

/// Number of sessions that requests have.
const SESSIONS: u64 = 5;

/// Returns limits drawn from the seed, for a pool of this many blocks, and the most pinned ones.
pub fn some_limits(rng: &mut fastrand::Rng, blocks: usize, block_bytes: u64) -> (HintLimits, usize) {
    let most = rng.usize(..=blocks);
    let mut limits = HintLimits::new().pinned_bytes(most as u64 * block_bytes);
    if rng.bool() {
        limits = limits.session_bytes(rng.u64(..=blocks as u64) * block_bytes);
    }
    (limits, most)
}

impl World {
    pub fn now(&self) -> Millis {
        Millis(self.clock.load(Relaxed))
    }

    pub fn some_session(&mut self) -> Option<SessionId> {
        (self.rng.u8(..4) > 0).then(|| SessionId(self.rng.u64(..SESSIONS)))
    }

    pub fn pass_cache_time(&mut self) {
        let ms = self.rng.u64(..30);
        self.clock.fetch_add(ms, Relaxed);
        self.note(format_args!("{ms} ms later"));
    }

    pub fn hint(&mut self) {
        let target = match self.rng.u8(..3) {
            0 => Target::Session(SessionId(self.rng.u64(..=SESSIONS))),
            1 => Target::Hashes(self.some_hashes()),
            _ => {
                let open = self.pick(self.sequences.len()).map(|index| self.sequences[index].real.id());
                let start = self.rng.usize(..60 * self.scale);
                let end = if self.rng.bool() { usize::MAX } else { start + self.rng.usize(..60) };
                Target::Tokens(open.unwrap_or(SequenceId(u64::MAX)), start..end)
            }
        };
        let until = Millis((self.now().0 + self.rng.u64(..60)).saturating_sub(5));
        let action = match self.rng.u8(..8) {
            0 | 1 => Action::Retain { priority: CachePriority::ALL[self.rng.usize(..3)], until },
            2..5 => Action::Pin { until },
            5 => Action::Demote,
            6 => Action::Prefetch { deadline: until },
            _ => Action::Release,
        };
        if let Some(index) = self.pick(self.sequences.len()) {
            self.sequences[index].real.expect_return(until);
        }
        let outcome = self.pool.hint(&Hint::new(target.clone(), action));
        self.note(format_args!("{action:?} of {target:?}: {outcome:?}"));
        let has_ended = until <= self.now() && matches!(action, Action::Retain { .. } | Action::Pin { .. });
        match &outcome {
            Outcome::Rejected { reason: Rejection::Disabled } => return assert!(self.pinned_max.is_none()),
            Outcome::Rejected { reason: Rejection::NoTier } => {
                return assert!(matches!(action, Action::Prefetch { .. }));
            }
            Outcome::Rejected { reason: Rejection::Ended { .. } } => return assert!(has_ended),
            Outcome::Rejected { reason: Rejection::Pinned { pinned_bytes, limit, block_bytes } } => {
                assert!(matches!(action, Action::Pin { .. }) && pinned_bytes + block_bytes > *limit);
            }
            Outcome::Missing => {}
            _ => self.tally.hinted += 1,
        }
        let most = self.pinned_max.expect("a pool with hints");
        assert!(!has_ended, "{action:?} at {:?}", self.now());
        let sessions = self.pool.sessions();
        let pinned: u64 = sessions.iter().map(|session| session.pinned_bytes).sum();
        let block_bytes = self.pool.layout().bytes_per_block() as u64;
        assert!(pinned <= most as u64 * block_bytes, "{pinned} of {most} blocks: {sessions:?}");
        if let (Target::Session(id), Action::Release, Outcome::Accepted { .. }) = (&target, action, &outcome)
        {
            assert!(sessions.iter().all(|session| session.id != *id), "{id:?} is forgotten");
        }
    }

    /// Returns hashes of cached blocks in some order, and one that no block has.
    fn some_hashes(&mut self) -> Vec<BlockHash> {
        let mut cached: Vec<_> = self.pool.cached_blocks();
        cached.sort_unstable();
        let mut hashes: Vec<_> = cached.into_iter().map(|(_, hash)| hash).collect();
        self.rng.shuffle(&mut hashes);
        hashes.truncate(self.rng.usize(..20));
        if self.rng.u8(..4) == 0 {
            hashes.push(BlockHash::new(self.rng.u128(..), 5));
        }
        hashes
    }
}
