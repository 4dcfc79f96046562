//! One level of the rank queue: its slots, and two tiers of hints to the nonempty ones. See *Hints*
//! in the [parent module](super).
//!
//! ```text
//! summary   bit w: words[w] is not 0
//! words     bit i of word w: slot 64 w + i is not empty
//! ```

use super::head::Stack;
use crate::sync::{AtomicU64, Ordering::*};

const WORD: usize = u64::BITS as usize;

pub(super) struct Level {
    summary: AtomicU64,
    words: Box<[AtomicU64]>,
    stacks: Box<[Stack]>,
}

impl Level {
    /// `slots`: a power of two, at most 64 * 64.
    pub(super) fn new(slots: usize) -> Self {
        assert!(slots.is_power_of_two() && slots <= WORD * WORD);
        Self {
            summary: AtomicU64::new(0),
            words: (0..slots.div_ceil(WORD)).map(|_| AtomicU64::new(0)).collect(),
            stacks: (0..slots).map(|_| Stack::default()).collect(),
        }
    }

    #[inline]
    pub(super) fn stack(&self, index: usize) -> &Stack {
        &self.stacks[index]
    }

    #[inline]
    pub(super) fn is_marked(&self, index: usize) -> bool {
        self.words[index / WORD].load(Relaxed) & 1 << (index % WORD) != 0
    }

    #[inline]
    pub(super) fn mark(&self, index: usize) {
        let (word, bit) = (index / WORD, 1 << (index % WORD));
        // Relaxed: the push made the clearing visible. The thread that sets a bit sets the summary.
        if self.words[word].load(Relaxed) & bit == 0 {
            // Acquire: pairs with the Release in `clear`: a mark after it sees the summary cleared.
            self.words[word].fetch_or(bit, Acquire);
        }
        // Relaxed, here and above: a reader that acts on a hint checks it.
        if self.summary.load(Relaxed) & 1 << word == 0 {
            self.summary.fetch_or(1 << word, Relaxed);
        }
    }

    /// Clears the hints of a slot found empty, unless it has filled. Model: `emptied_and_filled`.
    pub(super) fn clear(&self, index: usize) {
        let (word, bit) = (index / WORD, 1 << (index % WORD));
        let left = self.words[word].fetch_and(!bit, Relaxed) & !bit;
        if !self.stacks[index].touch().is_empty() {
            return self.mark(index);
        }
        if left == 0 {
            self.summary.fetch_and(!(1 << word), Relaxed);
            // Release: pairs with the Acquire in `mark`, and orders this against each mark, as with
            // a head. Model: `the_summary_of_an_emptied_word`.
            if self.words[word].fetch_or(0, Release) != 0 {
                self.summary.fetch_or(1 << word, Relaxed);
            }
        }
    }

    /// Reads every head and sets the missing hints. Returns whether any slot is nonempty.
    pub(super) fn mark_all(&self) -> bool {
        let mut found = false;
        for (index, stack) in self.stacks.iter().enumerate() {
            if !stack.head().is_empty() {
                self.mark(index);
                found = true;
            }
        }
        found
    }

    /// Returns the distance to the first hint in the `len` slots from `from` on, cyclically.
    #[inline]
    pub(super) fn find(&self, from: usize, len: usize) -> Option<usize> {
        let summary = self.summary.load(Relaxed);
        if summary == 0 || len == 0 {
            return None;
        }
        let at = self.find_from(summary, from).or_else(|| self.find_from(summary, 0))?;
        let distance = at.wrapping_sub(from) & (self.stacks.len() - 1);
        (distance < len).then_some(distance)
    }

    #[inline]
    fn find_from(&self, summary: u64, from: usize) -> Option<usize> {
        let mut words = summary & !0 << (from / WORD);
        while words != 0 {
            let word = words.trailing_zeros() as usize;
            let mut bits = self.words[word].load(Relaxed);
            if word == from / WORD {
                bits &= !0 << (from % WORD);
            }
            if bits != 0 {
                return Some(word * WORD + bits.trailing_zeros() as usize);
            }
            words &= words - 1;
        }
        None
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_is_found_around_the_end() {
        for slots in [2, 64, 256, 4096] {
            let level = Level::new(slots);
            assert_eq!(level.find(0, slots), None);
            let mut random = fastrand::Rng::with_seed(3);
            let mut set: Vec<usize> = (0..slots).filter(|_| random.u32(..20) == 0).collect();
            set.push(slots - 1);
            set.iter().for_each(|&index| level.mark(index));
            for _ in 0..2000 {
                let (from, len) = (random.usize(..slots), random.usize(..=slots));
                let away = set.iter().map(|&at| at.wrapping_sub(from) & (slots - 1)).min().unwrap();
                assert_eq!(level.find(from, len), Some(away).filter(|&away| away < len), "{from} {len}");
            }
            // Nothing was pushed: every hint is a false positive.
            assert!(!level.mark_all());
            set.into_iter().for_each(|index| level.clear(index));
            assert_eq!(level.find(0, slots), None);
            assert_eq!(level.summary.load(Relaxed), 0);
        }
    }
}
