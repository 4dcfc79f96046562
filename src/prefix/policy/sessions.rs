//! Evicts the blocks of the session that is expected to return last.
//!
//! The requests of an agent's session each continue the last one, after a think time. So the blocks
//! of a session return together, or never. The *wait* of a head is the expected time until then,
//! and the head with the longest wait is evicted:
//!
//! | blocks of | wait |
//! |---|---|
//! | a session that is over, by its hint | evicted first |
//! | a path that its session has left: the session has looked up another prompt since | evicted second |
//! | a session with a hint | the time until its return, or since then if it is late |
//! | a session without a hint | a usual think time of the session, and its age or what is left of that time, whichever is more |
//! | such a session that gave hints before | the same, six times: most of these are over |
//! | no session, or several sessions | its age |
//!
//! The age is the time since the release. That it predicts the wait is the rule of LRU: think times
//! have heavy tails. Blocks that were released just now are an exception: no session returns at
//! once. Without sessions, the order is exactly LRU's.
//!
//! # Queues
//!
//! | queue | blocks of | rank |
//! |---|---|---|
//! | 0 | no session, or several | order of release |
//! | 1 to 14 | a session; sessions take turns when they begin | order of release |
//! | 15 | a session that is over | order of release |
//!
//! Heads are compared by what is known of their sessions now, so no block has to change its place.
//! With more sessions than queues, those that were released earliest are compared.
//!
//! # State of a block
//!
//! | bits | meaning |
//! |---|---|
//! | 0..40 | time of its release in ms, modulo 2^40 |
//! | 40..62 | hash of its session |
//! | 62 | it was placed |
//! | 63 | common: it has belonged to several sessions, or to none |
//!
//! # Sessions
//!
//! A table of [`SLOTS`] sessions, by hash; a later session replaces an earlier one. A slot has
//! three words, each with the rest of the hash as a tag: the last lookup, the last release, and the
//! hint then. Updates race, and lose at most a think time or a hint.

use crate::ids::SessionId;
use crate::sync::{Ordering::Relaxed, StatisticU64};

use super::{Head, Lookup, Millis, Place, Policy, Released};

pub(super) const NAME: &str = "sessions";

const COMMON_QUEUE: usize = 0;
const SESSION_QUEUES: u64 = 14;
const OVER_QUEUE: usize = 1 + SESSION_QUEUES as usize;
const QUEUES: usize = OVER_QUEUE + 1;
/// A return this far ahead in ms, 19 hours, means that the session is over.
const NEVER: u64 = 1 << 26;
/// Factor of the wait of a session that gave hints, and none at its last release.
const HINTLESS: u64 = 6;

const TIME_BITS: u32 = 40;
const TIME_MASK: u64 = (1 << TIME_BITS) - 1;
const HASH_BITS: u32 = 22;
const PLACED: u64 = 1 << (TIME_BITS + HASH_BITS);
const COMMON: u64 = PLACED << 1;
const _: () = assert!(TIME_BITS + HASH_BITS + 2 == u64::BITS);

const SLOT_BITS: u32 = 13;
/// Number of sessions that are remembered.
const SLOTS: usize = 1 << SLOT_BITS;
const TAG_BITS: u32 = HASH_BITS - SLOT_BITS;

/// Returns the hash of a session's id.
const fn hash(session: SessionId) -> u64 {
    (session.0 ^ session.0 >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - HASH_BITS)
}

const fn time(at: Millis) -> u64 {
    at.0 & TIME_MASK
}

/// Returns the time from one moment to another, which is negative from the half of the range on.
const fn from_to(from: u64, to: u64) -> u64 {
    to.wrapping_sub(from) & TIME_MASK
}

const fn is_negative(duration: u64) -> bool {
    duration > TIME_MASK / 2
}

/// Returns the time since a moment, or zero before it.
const fn since(from: u64, now: u64) -> u64 {
    let duration = from_to(from, now);
    if is_negative(duration) { 0 } else { duration }
}

/// A word of a session: a time, its tag, and more in the word of releases.
///
/// | bits | meaning |
/// |---|---|
/// | 0..40 | time of the last lookup or release, or of the expected return |
/// | 40..49 | tag |
/// | 49 | it is of a session |
/// | 50 | no lookup since the release |
/// | 51 | a release had a hint |
/// | 50..54 | in the word of lookups instead: number of the queue, less one |
/// | 52..64 | mean binary logarithm of think times in ms, in 1/64; 0: none yet |
#[derive(Clone, Copy, PartialEq, Eq)]
struct Word(u64);

impl Word {
    const USED: u64 = 1 << (TIME_BITS + TAG_BITS);
    const IS_IDLE: u64 = Self::USED << 1;
    const GAVE_HINTS: u64 = Self::USED << 2;
    const QUEUE_SHIFT: u32 = TIME_BITS + TAG_BITS + 1;
    const THINK_SHIFT: u32 = TIME_BITS + TAG_BITS + 3;
    const THINK_UNIT: f64 = 64.0;

    const fn new(session: u64, at: u64) -> Self {
        Self(session >> SLOT_BITS << TIME_BITS | Self::USED | at)
    }

    const fn is_of(self, session: u64) -> bool {
        let mask = (Self::USED - 1) & !TIME_MASK | Self::USED;
        (self.0 ^ Self::new(session, 0).0) & mask == 0
    }

    const fn time(self) -> u64 {
        self.0 & TIME_MASK
    }

    const fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }

    /// Returns the number of the queue in a word of lookups, less one, whichever session's it is.
    const fn queue(self) -> u64 {
        (self.0 >> Self::QUEUE_SHIFT & 15) % SESSION_QUEUES
    }

    /// Returns a usual think time; 0 if there was none.
    fn think_ms(self) -> u64 {
        match self.0 >> Self::THINK_SHIFT {
            0 => 0,
            log => f64::exp2(log as f64 / Self::THINK_UNIT) as u64,
        }
    }

    /// The session looked up a prompt at this time: its think time counts once.
    fn looked_up(self, now: u64) -> Self {
        if !self.has(Self::IS_IDLE) {
            return self;
        }
        let think_ms = since(self.time(), now).max(2);
        let log = ((think_ms as f64).log2() * Self::THINK_UNIT) as u64;
        let mean = match self.0 >> Self::THINK_SHIFT {
            0 => log,
            mean => (2 * mean + log) / 3,
        };
        let rest = self.0 & ((1 << Self::THINK_SHIFT) - 1) & !Self::IS_IDLE;
        Self(mean << Self::THINK_SHIFT | rest)
    }

    /// The session released blocks at this time.
    fn released(self, session: u64, now: u64, has_hint: bool) -> Self {
        let hint = if has_hint { Self::GAVE_HINTS } else { 0 };
        let kept = if self.is_of(session) { self.0 & !(Self::USED - 1) } else { 0 };
        Self(Self::new(session, now).0 | Self::IS_IDLE | hint | kept)
    }
}

#[derive(Default)]
struct Slot {
    looked_up: StatisticU64,
    released: StatisticU64,
    /// Zero if the last release had no hint.
    returns: StatisticU64,
}

/// Evicts the blocks of the session that is expected to return last, by hints
/// ([`Sequence::expect_return`](crate::Sequence::expect_return)) or by the think times so far. A
/// hint far ahead says that the session is over. Without sessions it is [LRU](super::Lru).
pub struct Sessions {
    slots: Box<[Slot]>,
    /// Number of sessions that have begun.
    begun: StatisticU64,
}

impl Default for Sessions {
    fn default() -> Self {
        Self { slots: (0..SLOTS).map(|_| Slot::default()).collect(), begun: StatisticU64::new(0) }
    }
}

impl std::fmt::Debug for Sessions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sessions").finish_non_exhaustive()
    }
}

impl Sessions {
    fn slot(&self, session: u64) -> &Slot {
        &self.slots[session as usize % SLOTS]
    }

    /// Returns the expected time until the return of a block, in ms.
    fn wait(&self, queue: usize, head: Head, now: Millis) -> u64 {
        let (now, released) = (time(now), head.state & TIME_MASK);
        let age = since(released, now);
        if queue == OVER_QUEUE {
            return u64::MAX;
        }
        if queue == COMMON_QUEUE || head.state & COMMON != 0 {
            return age;
        }
        let session = head.state >> TIME_BITS & ((1 << HASH_BITS) - 1);
        let slot = self.slot(session);
        let looked_up = Word(slot.looked_up.load(Relaxed));
        if looked_up.is_of(session) && since(released, looked_up.time()) > 0 {
            return u64::MAX - 1;
        }
        let returns = Word(slot.returns.load(Relaxed));
        if returns.is_of(session) {
            let ahead = from_to(now, returns.time());
            return if is_negative(ahead) { from_to(ahead, 0) } else { ahead };
        }
        let word = Word(slot.released.load(Relaxed));
        if !word.is_of(session) {
            return age;
        }
        let think_ms = word.think_ms();
        let wait = think_ms + age.max(think_ms.saturating_sub(age));
        if word.has(Word::GAVE_HINTS) { wait * HINTLESS } else { wait }
    }
}

impl Policy for Sessions {
    fn name(&self) -> &'static str {
        NAME
    }

    fn queues(&self) -> usize {
        QUEUES
    }

    fn looked_up(&self, lookup: &mut Lookup<'_>, now: Millis) -> u64 {
        if let Some(session) = lookup.session.map(hash) {
            let (slot, now) = (self.slot(session), time(now));
            let last = Word(slot.looked_up.load(Relaxed));
            let queue = match last.is_of(session) {
                true => last.queue(),
                false => self.begun.fetch_add(1, Relaxed) % SESSION_QUEUES,
            };
            slot.looked_up.store(Word::new(session, now).0 | queue << Word::QUEUE_SHIFT, Relaxed);
            let word = Word(slot.released.load(Relaxed));
            if word.is_of(session) {
                slot.released.store(word.looked_up(now).0, Relaxed);
            }
        }
        0
    }

    fn place(&self, released: &Released, now: Millis) -> Place {
        let Released { order, state, returns_at, .. } = *released;
        let at = time(now) | PLACED;
        let before = state >> TIME_BITS & ((1 << HASH_BITS) - 1);
        let is_known = state & PLACED != 0;
        let own = released.session.map(hash).filter(|&session| !is_known || before == session);
        if let Some(session) = released.session.map(hash) {
            let slot = self.slot(session);
            let word = Word(slot.released.load(Relaxed));
            let next = word.released(session, time(now), returns_at.is_some());
            // Once per release, not per block.
            if next != word {
                let returns = returns_at.map_or(0, |returns_at| Word::new(session, time(returns_at)).0);
                slot.returns.store(returns, Relaxed);
                slot.released.store(next.0, Relaxed);
            }
        }
        let Some(session) = own.filter(|_| state & COMMON == 0) else {
            return Place { queue: COMMON_QUEUE as u8, rank: order, state: at | COMMON };
        };
        let is_over = returns_at.is_some_and(|returns_at| returns_at - now >= NEVER);
        let queue = match is_over {
            true => OVER_QUEUE as u64,
            false => 1 + Word(self.slot(session).looked_up.load(Relaxed)).queue(),
        };
        Place { queue: queue as u8, rank: order, state: at | session << TIME_BITS }
    }

    fn victim(&self, heads: &[Option<Head>], now: Millis) -> Option<usize> {
        let waits = (0..).zip(heads).filter_map(|(queue, head)| {
            let head = (*head)?;
            // Of equal waits, the block that was released first.
            Some((self.wait(queue, head, now), std::cmp::Reverse(head.state & TIME_MASK), queue))
        });
        waits.max().map(|(.., queue)| queue)
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
