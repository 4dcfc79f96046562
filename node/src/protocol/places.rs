use std::fmt;

use serde::{Deserialize, Serialize};

use super::bounded::List;

/// Ranges of the longest list of places.
pub const RANGES_MAX: usize = 65_536;

/// Consecutive places.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Range {
    /// The first place.
    pub start: u32,
    /// Number of places, at least 1.
    pub len: u32,
}

impl Range {
    fn end(self) -> u64 {
        u64::from(self.start) + u64::from(self.len)
    }
}

/// Why ranges are not a valid list of places.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlacesError {
    /// A range is empty, or ends above the largest place.
    #[error("{len} places from {start} on are no range")]
    Range {
        /// Its first place.
        start: u32,
        /// Its length.
        len: u32,
    },
    /// Ranges overlap or are not in order.
    #[error("the range at {start} overlaps the one in front of it")]
    Order {
        /// Its first place.
        start: u32,
    },
    /// There are too many ranges.
    #[error("{0} ranges are more than {RANGES_MAX}")]
    Many(usize),
}

/// Places in ascending order, each at most once.
#[derive(Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "List<Range, RANGES_MAX>")]
pub struct Places(List<Range, RANGES_MAX>);

impl Places {
    /// Checks ranges of places.
    pub fn new(ranges: Vec<Range>) -> Result<Self, PlacesError> {
        let many = ranges.len();
        List::new(ranges).map_err(|_| PlacesError::Many(many))?.try_into()
    }

    /// Returns ascending places as ranges.
    ///
    /// # Errors
    /// [`PlacesError`] if they do not ascend.
    pub fn of(places: impl IntoIterator<Item = u32>) -> Result<Self, PlacesError> {
        let mut ranges: Vec<Range> = Vec::new();
        for place in places {
            match ranges.last_mut() {
                Some(last) if last.end() == u64::from(place) => last.len += 1,
                _ => ranges.push(Range { start: place, len: 1 }),
            }
        }
        Self::new(ranges)
    }

    /// Returns the ranges.
    pub fn ranges(&self) -> &[Range] {
        &self.0
    }

    /// Returns the places one by one.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().flat_map(|range| (u64::from(range.start)..range.end()).map(|place| place as u32))
    }

    /// Returns the number of places.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|range| u64::from(range.len)).sum()
    }

    /// Returns whether there is no place.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether each of `others` is one of these places.
    pub fn contains(&self, others: &Places) -> bool {
        let mut ranges = self.0.iter().peekable();
        others.0.iter().all(|other| {
            let mut next = u64::from(other.start);
            while next < other.end() {
                // Ranges may be adjacent: `other` may span several.
                while ranges.next_if(|range| range.end() <= next).is_some() {}
                match ranges.peek() {
                    Some(range) if u64::from(range.start) <= next => next = range.end(),
                    _ => return false,
                }
            }
            true
        })
    }
}

impl TryFrom<List<Range, RANGES_MAX>> for Places {
    type Error = PlacesError;

    fn try_from(ranges: List<Range, RANGES_MAX>) -> Result<Self, PlacesError> {
        let mut end = 0;
        for &range in ranges.iter() {
            let Range { start, len } = range;
            if len == 0 || range.end() > u64::from(u32::MAX) + 1 {
                return Err(PlacesError::Range { start, len });
            }
            if u64::from(start) < end {
                return Err(PlacesError::Order { start });
            }
            end = range.end();
        }
        Ok(Self(ranges))
    }
}

impl fmt::Debug for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|range| u64::from(range.start)..range.end())).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(ranges: &[(u32, u32)]) -> Result<Places, PlacesError> {
        Places::new(ranges.iter().map(|&(start, len)| Range { start, len }).collect())
    }

    #[test]
    fn ranges_ascend_and_are_not_empty() {
        assert_eq!(places(&[(1, 2), (3, 1)]).unwrap().iter().collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(places(&[(1, 0)]), Err(PlacesError::Range { start: 1, len: 0 }));
        assert_eq!(places(&[(1, u32::MAX)]).unwrap().count(), u64::from(u32::MAX));
        assert_eq!(places(&[(2, u32::MAX)]), Err(PlacesError::Range { start: 2, len: u32::MAX }));
        assert_eq!(places(&[(1, 2), (2, 1)]), Err(PlacesError::Order { start: 2 }));
        assert_eq!(Places::of([4, 5, 6, 9]).unwrap(), places(&[(4, 3), (9, 1)]).unwrap());
        assert_eq!(Places::of([4, 4]), Err(PlacesError::Order { start: 4 }));
        let wire = postcard::to_allocvec(&vec![(1_u32, 2_u32), (2, 1)]).unwrap();
        assert!(postcard::from_bytes::<Places>(&wire).is_err());
    }

    #[test]
    fn containment_agrees_with_a_walk() {
        for seed in 0..2_000 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut some = |one_in| Places::of((0..12).filter(|_| rng.u8(..one_in) > 0)).unwrap();
            let (all, part) = (some(5), some(2));
            let expected = part.iter().all(|place| all.iter().any(|other| other == place));
            assert_eq!(all.contains(&part), expected, "{all:?} {part:?}");
            assert!(all.contains(&all) && all.contains(&Places::default()));
        }
        assert!(places(&[(0, 2), (2, 2)]).unwrap().contains(&places(&[(1, 3)]).unwrap()));
    }
}
