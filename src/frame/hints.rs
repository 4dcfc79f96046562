//! Hints: which words may hold a run of a class, so that searches need not walk the bitmap.
//!
//! One bit per word and class, in groups of [`FAN`] words; above it one bit per group, and so on.
//! The classes of a group share a cache line. The tree is sized for the maximum size of the pool.
//! At every quiescent point (false positives are allowed): `classes(word) > k  =>  bit k of the
//! word is set  =>  every bit above it is set`.
//!
//! - A bit of the lowest level is set by the thread that adds the class to a word, and cleared only
//!   by a searcher that found none. Both check again after a fence (`Map::offer`, `Map::withdraw`).
//! - A bit of an upper level is set by the thread that makes the group below non-empty, and cleared
//!   by the one that empties it, which then reads the group again. All changes are
//!   read-modify-writes, so no fence is needed: if the setter's comes first, the clearer's reads
//!   from its release sequence and sees the group filled; if it comes second, the bit stays set. A
//!   setter that finds the group filled leaves the bit to the one that filled it. Models: `hints`.

use std::ops::Range;

use super::bits::CLASSES;
use crate::config::{FAN, FAN_LOG2};
use crate::sync::{AtomicU64, CachePadded, Ordering};

type Line = CachePadded<[AtomicU64; CLASSES]>;

pub(super) struct Hints {
    levels: Box<[Box<[Line]>]>,
}

impl Hints {
    pub(super) fn new(words: usize) -> Self {
        let mut levels = Vec::new();
        let mut groups = words;
        loop {
            groups = groups.div_ceil(FAN);
            levels.push(
                (0..groups).map(|_| CachePadded::new([const { 0 }; CLASSES].map(AtomicU64::new))).collect(),
            );
            if groups <= 1 {
                return Self { levels: levels.into_boxed_slice() };
            }
        }
    }

    #[inline]
    fn line(&self, level: usize, index: usize, class: usize) -> &AtomicU64 {
        &self.levels[level][index >> FAN_LOG2][class]
    }

    /// Relaxed: the search checks the word itself.
    #[inline]
    pub(super) fn group(&self, group: usize, class: usize) -> u64 {
        self.levels[0][group][class].load(Ordering::Relaxed)
    }

    pub(super) fn is_set(&self, word: usize, class: usize) -> bool {
        (0..self.levels.len()).all(|level| {
            let index = word >> (FAN_LOG2 as usize * level);
            self.line(level, index, class).load(Ordering::Relaxed) >> (index & (FAN - 1)) & 1 == 1
        })
    }

    /// Sets the clear hints of a word for these classes, after the caller's fence (`Map::offer`).
    #[inline]
    pub(super) fn set(&self, word: usize, classes: Range<usize>) {
        let bit = 1 << (word & (FAN - 1));
        for class in classes {
            if self.line(0, word, class).load(Ordering::Relaxed) & bit == 0 {
                self.raise(0, word, class);
            }
        }
    }

    fn raise(&self, mut level: usize, mut index: usize, class: usize) {
        loop {
            // Release: pairs with the Acquire in `clear`, for a clearer of the level above.
            let old = self.line(level, index, class).fetch_or(1 << (index & (FAN - 1)), Ordering::Release);
            level += 1;
            if old != 0 || level == self.levels.len() {
                return;
            }
            index >>= FAN_LOG2;
        }
    }

    /// Clears a hint, and the bits above it that have no other bit below.
    pub(super) fn clear(&self, word: usize, class: usize) {
        let (mut level, mut index) = (0, word);
        loop {
            let bit = 1 << (index & (FAN - 1));
            // Acquire: pairs with the Release in `raise`, for the load below, which is Relaxed.
            let left = self.line(level, index, class).fetch_and(!bit, Ordering::Acquire) & !bit;
            if level > 0 && self.line(level - 1, index << FAN_LOG2, class).load(Ordering::Relaxed) != 0 {
                // The group was filled while its bit was cleared. Reached by the model `hints`.
                self.raise(level, index, class);
                return;
            }
            level += 1;
            if left != 0 || level == self.levels.len() {
                return;
            }
            index >>= FAN_LOG2;
        }
    }

    pub(super) fn next_group(&self, class: usize, from: usize) -> Option<usize> {
        let (mut level, mut index) = (0, from << FAN_LOG2);
        loop {
            let group = index >> FAN_LOG2;
            let bits =
                self.levels[level].get(group)?[class].load(Ordering::Relaxed) & !0 << (index & (FAN - 1));
            if bits == 0 {
                (level, index) = (level + 1, group + 1);
                if level == self.levels.len() {
                    return None;
                }
            } else if level == 0 {
                return Some(group);
            } else {
                // Descend. If a group below has become empty, the search ascends past this bit.
                (level, index) =
                    (level - 1, (group << FAN_LOG2 | bits.trailing_zeros() as usize) << FAN_LOG2);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_and_clear_reach_every_level() {
        for words in [1, FAN, FAN + 1, FAN * FAN, 3 * FAN * FAN + 5] {
            let hints = Hints::new(words);
            assert_eq!(hints.next_group(0, 0), None);
            for word in [0, words / 2, words - 1] {
                hints.set(word, 0..2);
                assert!(hints.is_set(word, 0) && hints.is_set(word, 1));
                assert_eq!(hints.next_group(1, 0), Some(word >> FAN_LOG2));
                assert_eq!(hints.next_group(1, (word >> FAN_LOG2) + 1), None);
                hints.clear(word, 1);
                assert_eq!(hints.next_group(1, 0), None);
                assert!(hints.is_set(word, 0));
                hints.clear(word, 0);
                assert_eq!(hints.next_group(0, 0), None);
            }
        }
    }

    #[test]
    fn next_group_visits_every_hinted_group() {
        let groups = 2 * FAN + 7;
        let hints = Hints::new(groups * FAN);
        let hinted: Vec<usize> = (0..groups).filter(|group| group % 5 == 3).collect();
        for &group in &hinted {
            hints.set(group * FAN + group % FAN, 0..1);
        }
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(group) = hints.next_group(0, from) {
            found.push(group);
            from = group + 1;
        }
        assert_eq!(found, hinted);
    }
}
