//! The algorithms' view of the bitmap.

use super::bits::{CLASSES, LEAF_CLASSES, classes};
use super::directory::Directory;
use super::hints::Hints;
use super::transit::{Traffic, Transit};
use crate::sync::{AtomicU64, Ordering, fence};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Level {
    Leaf,
    Unit,
}

impl Level {
    #[inline]
    pub(super) fn classes(self) -> usize {
        match self {
            Self::Leaf => LEAF_CLASSES,
            Self::Unit => CLASSES,
        }
    }

    #[inline]
    pub(super) fn classes_of(self, word: u64) -> usize {
        classes(word).min(self.classes())
    }
}

pub(super) struct LevelHints {
    pub(super) leaf: Hints,
    pub(super) unit: Hints,
}

/// A bitmap word, with the fields of its group that concern it.
pub(super) struct Word<'a> {
    pub(super) bits: &'a AtomicU64,
    pub(super) transit: &'a Transit,
    pub(super) closed: u64,
}

impl Word<'_> {
    /// Returns the bits that an allocator may claim. Relaxed: the claim decides.
    #[inline]
    pub(super) fn open(&self) -> u64 {
        self.bits.load(Ordering::Relaxed) & !self.closed
    }
}

/// Valid while the directory's pin is held.
#[derive(Clone, Copy)]
pub(super) struct Map<'a> {
    pub(super) directory: &'a Directory,
    pub(super) hints: &'a LevelHints,
    /// Whether searches skip the leaves of units [reserved for growth](super::spare).
    pub(super) reserves: bool,
}

impl<'a> Map<'a> {
    #[inline]
    pub(super) fn with_reserved(self) -> Self {
        Self { reserves: false, ..self }
    }

    #[inline]
    pub(super) fn hints(self, level: Level) -> &'a Hints {
        match level {
            Level::Leaf => &self.hints.leaf,
            Level::Unit => &self.hints.unit,
        }
    }

    #[inline]
    pub(super) fn word(self, level: Level, index: usize) -> Option<Word<'a>> {
        match level {
            Level::Leaf => {
                let bits = self.directory.leaf(index)?;
                let (group, bit) = self.directory.shape.unit_place(index);
                let group = self.directory.group(group)?;
                let reserved_for_growth = self.reserves && group.is_reserved_for_growth(bit);
                let closed = if reserved_for_growth { !0 } else { group.closed_in_unit(bit, index) };
                Some(Word { bits, transit: &group.transit, closed })
            }
            Level::Unit => {
                let group = self.directory.group(index)?;
                // Relaxed: advisory; safety depends on the bits.
                let closed = group.closed.load(Ordering::Relaxed);
                Some(Word { bits: &group.units, transit: &group.transit, closed })
            }
        }
    }

    pub(super) fn classes(self, level: Level, index: usize) -> Option<usize> {
        // Relaxed: only hints depend on it.
        Some(level.classes_of(self.word(level, index)?.bits.load(Ordering::Relaxed)))
    }

    /// Sets the hints of classes that a word has gained, the first half of the pair with
    /// `withdraw`.
    ///
    /// ```text
    /// offer:     word.fetch_or     fence   hint.load  -> set it if it is clear
    /// withdraw:  hint.fetch_and    fence   word.load  -> set it again if the word has the class
    /// ```
    ///
    /// At least one side sees the other's change. A free that adds no class sets nothing: the
    /// thread that added the class does. Models: `hints`.
    #[inline]
    pub(super) fn offer(self, level: Level, index: usize, old: u64, new: u64) {
        let had = level.classes_of(old);
        if had < level.classes() {
            let has = level.classes_of(new);
            if had < has {
                hint_fence();
                self.hints(level).set(index, had..has);
            }
        }
    }

    /// Clears a false hint: the second half of the pair. Hints describe free bits, closed or not.
    #[cold]
    pub(super) fn withdraw(self, level: Level, index: usize, class: usize) {
        let hints = self.hints(level);
        hints.clear(index, class);
        hint_fence();
        if self.classes(level, index).is_some_and(|has| has > class) {
            // A concurrent free added the class. Reached by the models in `hints`.
            hints.set(index, class..class + 1);
        }
    }

    /// Sums the passages of all groups ever created: a concurrent shrink does not change the terms.
    pub(super) fn traffic(self) -> Traffic {
        let mut traffic = Traffic::default();
        for group in (0..self.directory.groups_ever()).filter_map(|group| self.directory.group(group)) {
            traffic += group.transit.read();
        }
        traffic
    }
}

/// SeqCst: the store-load order of the Dekker pair of [`Map::offer`] and [`Map::withdraw`].
#[inline]
pub(super) fn hint_fence() {
    fence(Ordering::SeqCst);
}
