//! Ranges of heads in packed blocks: how ranks of one tensor-parallel split feed those of another.
//!
//! Each row of a packed block holds the heads of one rank, one after another. A range of heads is
//! therefore one piece of each row. Eight ranks feed four: a target's block takes the heads of two
//! sources. Four feed eight: a source's block gives half of its heads to each of two targets.

use std::ops::Range;

use crate::error::FormError;
use crate::storage::KvLayout;

use super::form::PackedForm;

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
    ///
    /// [`FormError::HeadRange`] if it is empty or exceeds the model.
    pub fn new(first: u32, count: u32, total: u32) -> Result<Self, FormError> {
        let range = Self { first, count, total };
        range.check(count).map(|()| range)
    }

    /// Returns the heads of a tensor-parallel rank, counted from 0, of a layout.
    ///
    /// # Errors
    ///
    /// [`FormError::HeadRange`] if the layout has no such rank.
    pub fn of_rank(layout: &KvLayout, rank: usize) -> Result<Self, FormError> {
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
    pub(super) fn check(&self, heads: u32) -> Result<(), FormError> {
        let end = self.first.checked_add(self.count).filter(|&end| end <= self.total);
        if end.is_none() || self.count == 0 || self.count != heads {
            let Self { first, total, .. } = *self;
            return Err(FormError::HeadRange { first, end: self.heads().end, total, heads });
        }
        Ok(())
    }

    /// Checks that a range lies within this one, and returns its first head counted from this
    /// range's.
    fn offset_of(&self, part: &Self) -> Result<usize, FormError> {
        if self.common(part) != Some(Self { total: self.total, ..*part }) || self.total != part.total {
            let Self { first, total, .. } = *part;
            return Err(FormError::HeadRange { first, end: part.heads().end, total, heads: self.count });
        }
        Ok((part.first - self.first) as usize)
    }
}

/// A packed block: its form, the heads that it holds, and its bytes.
#[derive(Clone, Copy, Debug)]
pub struct PackedBlock<'a> {
    /// Form of the block.
    pub form: &'a PackedForm,
    /// Heads of the block.
    pub heads: HeadRange,
    /// Bytes of the block.
    pub bytes: &'a [u8],
}

fn check(form: &PackedForm, heads: HeadRange, bytes: usize) -> Result<(), FormError> {
    form.check()?;
    heads.check(form.heads())?;
    match form.packed_bytes() {
        want if want == bytes => Ok(()),
        want => Err(FormError::Bytes { got: bytes, want }),
    }
}

/// Returns the packed block of some of a block's heads.
///
/// # Errors
///
/// [`FormError::HeadRange`] if the block does not hold them, [`FormError::Bytes`].
pub fn extract(block: PackedBlock<'_>, heads: HeadRange) -> Result<Vec<u8>, FormError> {
    check(block.form, block.heads, block.bytes.len())?;
    let first = block.heads.offset_of(&heads)?;
    let form = part(block.form, block.heads, heads)?;
    let mut out = vec![0; form.packed_bytes()];
    let pieces = Pieces { from: (block.form.heads() as usize, first), to: (heads.count as usize, 0) };
    pieces.copy(&form, heads.count as usize, block.bytes, &mut out);
    Ok(out)
}

/// Returns the form of the blocks that hold only some of a block's heads.
pub(super) fn part(form: &PackedForm, own: HeadRange, heads: HeadRange) -> Result<PackedForm, FormError> {
    Ok(form.with_heads(own.offset_of(&heads)? as u32, heads.count))
}

/// Copies the heads that two blocks share from the first into the second, and returns them.
///
/// `None`, without effect, if they share none.
///
/// # Errors
///
/// [`FormError`] if the forms differ in more than their heads, or the static scales of a shared
/// head differ; nothing was copied.
pub fn insert(
    block: PackedBlock<'_>,
    form: &PackedForm,
    heads: HeadRange,
    out: &mut [u8],
) -> Result<Option<HeadRange>, FormError> {
    check(block.form, block.heads, block.bytes.len())?;
    check(form, heads, out.len())?;
    let Some(common) = check_split(block.form, block.heads, form, heads)? else { return Ok(None) };
    let (from, to) = (block.heads.offset_of(&common)?, heads.offset_of(&common)?);
    let pieces = Pieces { from: (block.form.heads() as usize, from), to: (form.heads() as usize, to) };
    pieces.copy(form, common.count as usize, block.bytes, out);
    Ok(Some(common))
}

/// Checks that blocks of one rank can give heads to those of another. Returns the shared heads.
///
/// # Errors
///
/// [`FormError`], which names the difference.
pub(super) fn check_split(
    from: &PackedForm,
    from_heads: HeadRange,
    to: &PackedForm,
    to_heads: HeadRange,
) -> Result<Option<HeadRange>, FormError> {
    if from_heads.total != to_heads.total {
        return Err(FormError::HeadsTotal { from: from_heads.total, to: to_heads.total });
    }
    let common = from_heads.common(&to_heads);
    let pairs = common.iter().flat_map(HeadRange::heads);
    from.check_fits(to, pairs.map(|head| (head - from_heads.first, head - to_heads.first)))?;
    Ok(common)
}

/// Where a range of heads begins in the rows of two blocks: the heads of a row, and the first one.
struct Pieces {
    from: (usize, usize),
    to: (usize, usize),
}

impl Pieces {
    /// Copies `count` heads of each row. Both blocks have the form, apart from their heads.
    fn copy(&self, form: &PackedForm, count: usize, from: &[u8], to: &mut [u8]) {
        let (mut read, mut written) = (0, 0);
        for _ in 0..form.layers() {
            for unit in form.units() {
                for _ in 0..form.rows() {
                    let source = &from[read + self.from.1 * unit..][..count * unit];
                    to[written + self.to.1 * unit..][..count * unit].copy_from_slice(source);
                    (read, written) = (read + self.from.0 * unit, written + self.to.0 * unit);
                }
            }
        }
    }
}
