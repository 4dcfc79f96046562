//! The versions of the weights with which a sequence's tokens were computed: see
//! [`prefix::weights`](crate::prefix).

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use crate::error::Invalid;
use crate::ids::WeightsVersion;
use crate::prefix::{PrefixCache, Weights, WeightsStamp};

/// Tokens of a sequence that were computed with the same versions of the weights: those of the
/// batches that appended them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct VersionRange {
    /// Position of the first of them. They end where the next range begins, or the sequence ends.
    pub from: usize,
    /// Version of the model.
    pub model: WeightsVersion,
    /// Version of the adapter, 0 without one. `None` if it changed after the batch had begun: the
    /// pool does not know which it was.
    pub adapter: Option<WeightsVersion>,
}

impl VersionRange {
    fn new(from: usize, Weights { model, adapter }: Weights) -> Self {
        Self { from, model, adapter: Some(adapter) }
    }

    fn is_as(&self, other: &Self) -> bool {
        (self.model, self.adapter) == (other.model, other.adapter)
    }
}

/// Versions of a sequence, as another pool continues it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub(crate) struct KnownVersions {
    adapter: Option<Box<[u8]>>,
    hashed: Weights,
    /// In ascending order; the first begins at 0.
    ranges: Vec<VersionRange>,
}

impl KnownVersions {
    /// Checks what came from another process, for a sequence of this length. `is_found`: blocks of
    /// it can be found by their hashes.
    pub(crate) fn check(&self, length: usize, is_found: bool) -> Result<(), Invalid> {
        let Self { adapter, hashed, ranges } = self;
        let invalid = |got, limit, place| Err(Invalid::new("versions", got, limit).at(place));
        if adapter.as_deref().is_some_and(<[u8]>::is_empty) {
            return Err(Invalid::new("adapter", "no bytes", "at least one; omit it instead"));
        }
        if ranges.first().is_none_or(|first| first.from != 0) {
            return invalid("another start", "one at token 0", 0);
        }
        let is_ordered = |pair: &[VersionRange]| pair[0].from < pair[1].from && !pair[0].is_as(&pair[1]);
        if let Some(place) = ranges.windows(2).position(|pair| !is_ordered(pair)) {
            return invalid("one out of order, or equal to the one before", "ascending positions", place + 1);
        }
        if ranges.len() > 1 && ranges.last().is_some_and(|last| last.from >= length) {
            return invalid("a start after the last token", "one within the sequence", ranges.len() - 1);
        }
        if is_found && (ranges.len() > 1 || !ranges[0].is_as(&VersionRange::new(0, *hashed))) {
            return invalid("others than those of the hashes", "stale hashes", 0);
        }
        Ok(())
    }
}

#[derive(Clone)]
pub(super) struct Versions {
    adapter: Option<Arc<[u8]>>,
    /// All ones with an adapter: changes of adapters matter.
    mask: u64,
    /// Of the batch that appended last, or of the hashes.
    stamp: WeightsStamp,
    /// In the root of its hashes.
    hashed: Weights,
    /// In ascending order, at least one; the first begins at 0.
    ranges: SmallVec<[VersionRange; 1]>,
}

impl Versions {
    pub(super) fn new(adapter: Option<&[u8]>, (hashed, stamp): (Weights, WeightsStamp)) -> Self {
        Self {
            adapter: adapter.map(Into::into),
            mask: if adapter.is_some() { u64::MAX } else { 0 },
            stamp,
            hashed,
            ranges: smallvec![VersionRange::new(0, hashed)],
        }
    }

    pub(super) fn arrived(known: KnownVersions) -> Self {
        let KnownVersions { adapter, hashed, ranges } = known;
        let mask = if adapter.is_some() { u64::MAX } else { 0 };
        let stamp = WeightsStamp { model: hashed.model, changes: 0 };
        let adapter = adapter.map(Arc::from);
        let mut arrived = Self { adapter, mask, stamp, hashed, ranges: ranges.into() };
        arrived.compare_next();
        arrived
    }

    /// Returns those of the first `length` tokens.
    pub(super) fn known(&self, length: usize) -> KnownVersions {
        let mut ranges: Vec<VersionRange> = self.of(length).collect();
        if ranges.is_empty() {
            ranges.push(VersionRange::new(0, self.hashed));
        }
        KnownVersions { adapter: self.adapter.as_deref().map(Box::from), hashed: self.hashed, ranges }
    }

    /// Returns the versions with which the sequence is hashed.
    pub(super) fn hashed(&self) -> Weights {
        self.hashed
    }

    /// Returns whether a batch with this stamp may compute with other versions than the last one.
    #[inline(always)]
    pub(super) fn differ(&self, stamp: WeightsStamp) -> bool {
        (self.stamp.model.0 ^ stamp.model.0) | ((self.stamp.changes ^ stamp.changes) & self.mask) != 0
    }

    /// Returns whether the sequence is hashed with the current versions.
    pub(super) fn are_current(&self, cache: &PrefixCache) -> bool {
        !self.differ(cache.weights_stamp()) || cache.weights_now(self.adapter.as_deref()).0 == self.hashed
    }

    /// Records that a batch with this stamp writes; `appended`: the tokens from this position on,
    /// which it appends. Returns whether it computes with other versions than those of the hashes.
    pub(super) fn write(
        &mut self,
        cache: &PrefixCache,
        stamp: WeightsStamp,
        appended: Option<usize>,
    ) -> bool {
        let weights = cache.weights_at(stamp, self.adapter.as_deref());
        if let Some(from) = appended {
            self.stamp = stamp;
            self.ranges.retain(|range| range.from < from);
            let adapter = weights.map(|weights| weights.adapter);
            let range = VersionRange { from, model: stamp.model, adapter };
            if self.ranges.last().is_none_or(|last| !last.is_as(&range)) {
                self.ranges.push(range);
            }
        }
        weights != Some(self.hashed)
    }

    /// Records that the tokens from a position on were removed.
    pub(super) fn truncate(&mut self, length: usize) {
        if self.ranges.len() > 1 && self.ranges.last().is_some_and(|last| last.from >= length) {
            self.ranges.retain(|range| range.from < length);
            if self.ranges.is_empty() {
                self.ranges.push(VersionRange::new(0, self.hashed));
            }
            self.compare_next();
        }
    }

    /// Has the next batch that appends compare its versions with those of the last tokens.
    fn compare_next(&mut self) {
        let model = self.ranges.last().map_or(self.hashed.model, |last| last.model);
        // No pool reaches this number of changes.
        self.stamp = WeightsStamp { model, changes: u64::MAX };
    }

    /// Returns the ranges of the first `length` tokens.
    pub(super) fn of(&self, length: usize) -> impl Iterator<Item = VersionRange> {
        self.ranges.iter().copied().take_while(move |range| range.from < length)
    }
}
