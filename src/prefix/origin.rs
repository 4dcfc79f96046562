//! Where and when K and V were computed: in which caches, and in which of their eras.
//!
//! A cleared cache must not find blocks from before the clear. While a block stays in its pool, its
//! [row](super::row) has the era. Blocks and sequences that leave carry their *origins*: the caches
//! in which they, and what they were computed from, were computed, each with its era. A cache
//! rejects blocks that have an earlier era of this cache among their origins.
//!
//! # Mark of a block
//!
//! The row of a block has a *mark*, whose number is 0 if the block was computed here, from such
//! blocks alone.
//!
//! | bits | field | meaning |
//! |---|---|---|
//! | 0 | checksum | the block arrived from another pool with a checksum |
//! | 1 | computed | it was computed here, from blocks of other origins |
//! | 2..10 | group | the [group](super::KvEvent::Stored::group) of layers to which it belongs; not of origins |
//! | 10..32 | number | of a set of origins in the table of the cache; 0: none |
//!
//! ```text
//! origins of a block == its set in the table + (computed or number == 0: this cache, in the row's era)
//! ```
//!
//! The table is locked when blocks arrive or leave, and when a sequence is opened with a prefix of
//! such blocks. It keeps a set while a row, a sequence or an import has its number: when it has
//! doubled, all rows are read, and the other sets are removed. Blocks for whose set there is no
//! number left have an unknown origin, which every cache rejects.
//!
//! Origins record clears, not weights: blocks that another pool computes with old weights, after
//! the clear or without its own, are found here under the same hashes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::error::PrefixError;
use crate::sync::{Ordering::Acquire, fence};

/// Maximum number of origins of a block; other caches reject a block with more.
pub const ORIGINS_MAX: usize = 12;

/// A cache in which K and V were computed, and the era of that cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Origin {
    /// Number of the cache: random, neither 0 nor `u64::MAX`.
    pub cache: u64,
    /// Number of times that the cache had been cleared.
    pub era: u64,
}

impl Origin {
    /// Replaces too many origins: every cache rejects it.
    pub(crate) const UNKNOWN: Self = Self { cache: u64::MAX, era: u64::MAX };
}

/// A set of origins in order, at most one per cache.
pub(super) type Origins = Arc<[Origin]>;

pub(super) fn random() -> Result<u64, PrefixError> {
    let number = getrandom::u64().map_err(|error| PrefixError::NoRandomness { reason: error.to_string() })?;
    Ok(number.clamp(1, u64::MAX - 1))
}

/// Joins two sets. Of two eras of a cache, keeps the earlier one, which that cache rejects.
pub(crate) fn join(set: &mut Vec<Origin>, more: &[Origin]) {
    set.extend_from_slice(more);
    set.sort_unstable();
    set.dedup_by_key(|origin| origin.cache);
    if set.len() > ORIGINS_MAX || set.last() == Some(&Origin::UNKNOWN) {
        *set = vec![Origin::UNKNOWN];
    }
}

/// Returns whether the first set has an earlier era of a cache than the second.
pub(crate) fn is_older(one: &[Origin], other: &[Origin]) -> bool {
    one.iter().any(|a| other.iter().any(|b| a.cache == b.cache && a.era < b.era))
}

const COMPUTED: u32 = 2;
const GROUP_SHIFT: u32 = 2;
const NUMBER_SHIFT: u32 = 10;
/// Groups of a pool: its lists, and its states.
pub(crate) const CACHE_GROUPS_MAX: usize = 1 << (NUMBER_SHIFT - GROUP_SHIFT);
const GROUP_MASK: u32 = (1 << NUMBER_SHIFT) - (1 << GROUP_SHIFT);
/// Number of the unknown origin.
const UNKNOWN_NUMBER: u32 = u32::MAX >> NUMBER_SHIFT;

/// Returns a mark with this group of layers.
#[inline]
pub(crate) const fn in_group(mark: u32, group: u32) -> u32 {
    mark & !GROUP_MASK | group << GROUP_SHIFT & GROUP_MASK
}

#[inline]
pub(super) const fn group_of(mark: u32) -> u32 {
    (mark & GROUP_MASK) >> GROUP_SHIFT
}

/// The mark of the blocks of a sequence or an import, whose set it keeps. Default: computed here.
#[derive(Clone, Default)]
pub(crate) struct Provenance {
    pub(crate) mark: u32,
    set: Option<Origins>,
}

impl Provenance {
    /// Returns the mark of blocks that are computed here from blocks with this one.
    pub(crate) fn computing(&self) -> u32 {
        self.mark | if self.set.is_some() { COMPUTED } else { 0 }
    }

    pub(crate) fn origins(&self, own: Option<Origin>) -> Vec<Origin> {
        let mut origins = self.set.as_deref().unwrap_or_default().to_vec();
        join(&mut origins, own.as_slice());
        origins
    }

    pub(crate) fn is_own(&self) -> bool {
        self.mark >> NUMBER_SHIFT == 0 || self.mark & COMPUTED != 0
    }
}

/// The sets of origins to which the marks of a cache refer. Empty until blocks arrive.
#[derive(Default)]
pub(super) struct OriginTable(OnceLock<Mutex<Sets>>);

#[derive(Default)]
struct Sets {
    by_number: BTreeMap<u32, Origins>,
    numbers: HashMap<Origins, u32>,
    newest: u32,
    /// Number of sets after the last removal.
    kept: usize,
}

impl OriginTable {
    #[inline]
    pub(super) fn is_used(&self) -> bool {
        self.0.get().is_some()
    }

    pub(super) fn of(&self, mark: u32) -> Provenance {
        let mark = in_group(mark, 0);
        if mark >> NUMBER_SHIFT == UNKNOWN_NUMBER {
            return Provenance { mark, set: Some([Origin::UNKNOWN].into()) };
        }
        let sets = self.0.get().filter(|_| mark >> NUMBER_SHIFT != 0);
        let sets = sets.map(|sets| sets.lock().unwrap_or_else(PoisonError::into_inner));
        Provenance { mark, set: sets.and_then(|sets| sets.by_number.get(&(mark >> NUMBER_SHIFT)).cloned()) }
    }

    /// Returns the provenance of blocks with these origins. `marks` returns the marks of all rows.
    pub(super) fn provenance(&self, set: &[Origin], marks: impl FnOnce() -> HashSet<u32>) -> Provenance {
        let sets = self.0.get_or_init(Mutex::default);
        let Sets { by_number, numbers, newest, kept } =
            &mut *sets.lock().unwrap_or_else(PoisonError::into_inner);
        if !numbers.contains_key(set) {
            if by_number.len() > 2 * *kept + 64 {
                // The maps have two references. Without a third, no thread can mark a row, and the
                // rows that were marked are read afterwards.
                let held = by_number.iter().filter(|(_, set)| Arc::strong_count(set) > 2);
                let mut used: HashSet<u32> = held.map(|(&number, _)| number).collect();
                // Pairs with the Release of the drop of a provenance.
                fence(Acquire);
                used.extend(marks().into_iter().map(|mark| mark >> NUMBER_SHIFT));
                numbers.retain(|_, number| used.contains(number));
                by_number.retain(|number, _| used.contains(number));
                *kept = by_number.len();
            }
            if by_number.len() >= UNKNOWN_NUMBER as usize - 1 {
                return self.of(UNKNOWN_NUMBER << NUMBER_SHIFT);
            }
            while *newest == 0 || by_number.contains_key(newest) {
                *newest = (*newest + 1) % UNKNOWN_NUMBER;
            }
            by_number.insert(*newest, set.into());
            numbers.insert(by_number[newest].clone(), *newest);
        }
        let number = numbers[set];
        Provenance { mark: number << NUMBER_SHIFT, set: by_number.get(&number).cloned() }
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    fn set(origins: &[(u64, u64)]) -> Vec<Origin> {
        origins.iter().map(|&(cache, era)| Origin { cache, era }).collect()
    }

    #[test]
    fn the_earlier_era_of_a_cache_stays() {
        let mut joined = set(&[(1, 5), (3, 1)]);
        join(&mut joined, &set(&[(2, 9), (1, 4), (3, 2)]));
        assert_eq!(joined, set(&[(1, 4), (2, 9), (3, 1)]));
        assert!(is_older(&joined, &set(&[(1, 5)])) && !is_older(&set(&[(1, 5)]), &joined));
        assert!(!is_older(&joined, &set(&[(4, 100), (1, 4)])));
    }

    #[test]
    fn too_many_origins_are_unknown() {
        let mut joined = Vec::new();
        for cache in 1..=ORIGINS_MAX as u64 {
            join(&mut joined, &set(&[(cache, 0)]));
            assert_eq!(joined.len() as u64, cache);
        }
        join(&mut joined, &set(&[(1 << 40, 0)]));
        assert_eq!(joined, [Origin::UNKNOWN]);
        join(&mut joined, &set(&[(1, 0)]));
        assert_eq!(joined, [Origin::UNKNOWN], "once unknown, always unknown");
    }

    #[test]
    fn a_set_has_one_number_as_long_as_it_is_used() {
        let table = OriginTable::default();
        assert!(!table.is_used() && table.of(0).is_own());
        let none = || panic!("the table is small");
        let first = table.provenance(&set(&[(1, 0)]), none);
        assert_eq!(table.provenance(&set(&[(1, 0)]), none).mark, first.mark);
        let marked = table.provenance(&set(&[(1, 1)]), none).mark;
        assert_eq!(
            [0, 1, marked, marked | COMPUTED].map(|mark| table.of(mark).is_own()),
            [true, true, false, true]
        );
        let mut reads = 0;
        for era in 2..10_000 {
            let marks = || {
                reads += 1;
                HashSet::from([marked | COMPUTED | 1])
            };
            let brief = table.provenance(&set(&[(1, era)]), marks);
            assert_eq!(table.of(brief.mark).origins(None), set(&[(1, era)]));
        }
        assert!((100..200).contains(&reads), "{reads}");
        let sets = table.0.get().unwrap().lock().unwrap();
        assert!(sets.by_number.len() < 80 && sets.numbers.len() == sets.by_number.len());
        drop(sets);
        assert_eq!(table.of(first.mark).origins(None), set(&[(1, 0)]), "it is held");
        assert_eq!(table.of(marked).origins(None), set(&[(1, 1)]), "a row has it");
    }

    /// A row never gets another set, while threads mark rows with short-lived sets and remove sets.
    #[test]
    fn no_set_of_a_row_is_removed() {
        use crate::sync::{AtomicU32, Ordering::Relaxed};
        const THREADS: u64 = 4;
        const ROWS: usize = 40;
        let (table, rounds) = (OriginTable::default(), if cfg!(miri) { 100 } else { 20_000 });
        let rows: Vec<AtomicU32> = (0..THREADS as usize * ROWS).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (table, rows) = (&table, &rows);
                scope.spawn(move || {
                    let mut held = vec![Vec::new(); ROWS];
                    for round in 0..rounds {
                        let (at, origins) = (round as usize * 7 % ROWS, set(&[(thread % 2 + 1, round)]));
                        let row = &rows[thread as usize * ROWS + at];
                        assert_eq!(table.of(row.load(Relaxed)).origins(None), held[at]);
                        let marks = || rows.iter().map(|row| row.load(Relaxed)).collect();
                        let provenance = table.provenance(&origins, marks);
                        row.store(provenance.mark, Relaxed);
                        drop(provenance);
                        held[at] = origins;
                    }
                });
            }
        });
        let kept = table.0.get().unwrap().lock().unwrap().by_number.len();
        assert!(kept <= 2 * 2 * THREADS as usize * ROWS + 65, "{kept}");
    }
}
