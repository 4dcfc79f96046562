//! Ranges of heads in packed blocks: how ranks of one tensor-parallel split feed those of another.
//!
//! Each row of a packed block holds the heads of one rank in order, so a range of heads is one
//! piece of each row. When eight ranks feed four, a target's block takes the heads of two sources.
//! When four feed eight, a source's block gives half of its heads to each of two targets.

use std::ops::Range;

use crate::error::Invalid;
use crate::storage::KvLayout;

use super::form::{PackedForm, other_form};

/// The KV heads of a model that the blocks of one rank hold.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct HeadRange {
    first: u32,
    count: u32,
    total: u32,
}

impl HeadRange {
    /// Creates the range of `count` heads from `first` on, of a model with `total` KV heads.
    ///
    /// # Errors
    /// [`Invalid`] if it is empty or exceeds the model.
    pub fn new(first: u32, count: u32, total: u32) -> Result<Self, Invalid> {
        let range = Self { first, count, total };
        range.check(count).map(|()| range)
    }

    /// Returns the heads of a tensor-parallel rank, counted from 0, of a layout.
    ///
    /// # Errors
    /// [`Invalid`] if the layout has no such rank.
    pub fn of_rank(layout: &KvLayout, rank: usize) -> Result<Self, Invalid> {
        let (heads, total, ranks) =
            (layout.kv_heads() as u32, layout.kv_heads_total() as u32, layout.tensor_parallel());
        let first = if rank < ranks { (rank / layout.kv_head_replicas()) as u32 * heads } else { total };
        Self::new(first, heads, total)
    }

    /// Returns the heads, counted within the model.
    pub fn heads(&self) -> Range<u32> {
        self.first..self.first.saturating_add(self.count)
    }

    /// Returns the number of KV heads of the model.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Returns the heads that both ranges have.
    pub fn common(&self, other: &Self) -> Option<Self> {
        let (first, end) = (self.first.max(other.first), self.heads().end.min(other.heads().end));
        (first < end).then(|| Self { first, count: end - first, total: self.total })
    }

    /// Checks that a block of `heads` heads can hold the range.
    pub(super) fn check(&self, heads: u32) -> Result<(), Invalid> {
        let end = self.first.checked_add(self.count).filter(|&end| end <= self.total);
        if end.is_none() || self.count == 0 || self.count != heads {
            return Err(self.refused(heads));
        }
        Ok(())
    }

    pub(super) fn refused(&self, heads: u32) -> Invalid {
        let got = format_args!("{:?} of {}", self.heads(), self.total);
        Invalid::new("heads", got, format_args!("those of a block of {heads}"))
    }
}

/// Checks that blocks of one rank can give heads to those of another. Returns the shared heads.
pub(super) fn check_split(
    from: &PackedForm,
    from_heads: HeadRange,
    to: &PackedForm,
    to_heads: HeadRange,
) -> Result<Option<HeadRange>, Invalid> {
    if from_heads.total != to_heads.total {
        return Err(other_form("heads of the model", from_heads.total, to_heads.total));
    }
    let common = from_heads.common(&to_heads);
    let pairs = common.iter().flat_map(HeadRange::heads);
    from.check_fits(to, pairs.map(|head| (head - from_heads.first, head - to_heads.first)))?;
    Ok(common)
}

/// Copies the heads that two packed blocks share. `form` is that of the first, apart from its
/// heads.
pub(super) fn copy_shared(
    form: &PackedForm,
    (from, bytes): (HeadRange, &[u8]),
    (to, out): (HeadRange, &mut [u8]),
) {
    let Some(shared) = from.common(&to) else { return };
    let [read, written] = [from, to].map(|range| (shared.first - range.first) as usize);
    let [from, to, count] = [from, to, shared].map(|range| range.count as usize);
    let (mut source, mut target) = (bytes, out);
    for _ in 0..form.layers() {
        for unit in form.units() {
            for _ in 0..form.rows() {
                let row;
                (row, target) = std::mem::take(&mut target).split_at_mut(to * unit);
                row[written * unit..][..count * unit].copy_from_slice(&source[read * unit..][..count * unit]);
                source = &source[from * unit..];
            }
        }
    }
}
