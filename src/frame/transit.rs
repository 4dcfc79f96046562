//! Frames in transit: distinguishes "none is free" from "some were moving during the walk".
//!
//! A thread that splits a unit, merges one, or rolls a claim back *enters* this word before it
//! takes frames that no other thread can see, and *leaves* once all are visible again: a *passage*.
//! A walk that found nothing is conclusive if no passage was open at its start and none has begun.
//!
//! | bits | meaning |
//! |---|---|
//! | 0..16 | threads inside now |
//! | 16..64 | number of passages begun, to detect one that began and ended during a walk |

use crate::sync::{AtomicU64, Ordering};

const INSIDE_BITS: u32 = 16;
const BEGUN: u64 = 1 << INSIDE_BITS;
const _: () =
    assert!(INSIDE_BITS < u64::BITS - 40, "at a billion passages per second, 40 bits last 18 minutes");

pub(super) struct Transit(AtomicU64);

/// Sum over all groups.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Traffic {
    inside: u64,
    begun: u64,
}

impl Traffic {
    pub(super) fn is_still(self) -> bool {
        self.inside == 0
    }

    /// Returns the expected value after `passages` passages of the reader and no others.
    pub(super) fn after(mut self, passages: u64) -> Self {
        self.begun = self.begun.wrapping_add(passages);
        self
    }
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.inside += other.inside;
        // Wrapping: values are only tested for equality.
        self.begun = self.begun.wrapping_add(other.begun);
    }
}

impl Transit {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    #[inline]
    pub(super) fn enter(&self) -> Passage<'_> {
        // Relaxed: the AcqRel operation that takes the frames publishes this to an Acquire load.
        self.0.fetch_add(BEGUN + 1, Ordering::Relaxed);
        Passage(self)
    }

    /// Acquire: pairs with [`Passage::drop`]: a walk that sees a passage ended sees its frames.
    pub(super) fn read(&self) -> Traffic {
        let word = self.0.load(Ordering::Acquire);
        Traffic { inside: word & (BEGUN - 1), begun: word >> INSIDE_BITS }
    }
}

#[must_use]
pub(super) struct Passage<'a>(&'a Transit);

impl Drop for Passage<'_> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `Transit::read`.
        self.0.0.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_passage_is_seen_during_and_after() {
        let transit = Transit::new();
        let before = transit.read();
        assert!(before.is_still());
        let passage = transit.enter();
        assert!(!transit.read().is_still());
        drop(passage);
        assert!(transit.read().is_still());
        assert!(transit.read() != before);
        assert!(transit.read() == before.after(1));
    }
}
