//! Inputs of kernels: block tables, slots and lengths, built in the caller's buffers.
//!
//! Outputs name frames, not blocks. Rows of a [`Sequence`] are copied from its frames unless blocks
//! have moved since its last append; otherwise, and for a [`SequenceView`], ids are translated
//! through the block words. Buffers keep their capacity: a steady state allocates nothing.
//!
//! Sequences are passed as an iterator over references, for tables one that is `Clone`: `[&a, &b]`,
//! `running.iter().map(|request| &request.sequence)`.

use std::ops::Range;

use crate::block::{Core, MoveCount};
use crate::error::SequenceError;
use crate::ids::SequenceId;
use crate::sync::AtomicU32;

use super::batch::Batch;
use super::frames::frame;
use super::plan::pieces;
use super::registry::{SequenceView, Sequences};
use super::sequence::Sequence;

/// Padding in a pool without a null block.
const NOTHING: i32 = -1;

/// A padded block table: `[sequences][width]` frames, row-major, as paged attention kernels expect.
/// The padding is the null block's frame, or -1 in a pool without one.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BlockTable {
    entries: Vec<i32>,
    lengths: Vec<i32>,
    width: usize,
    width_min: usize,
}

impl BlockTable {
    /// Creates an empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty table with rows of at least `width_min` entries, for captured graphs.
    pub fn with_width(width_min: usize) -> Self {
        Self { width_min, ..Self::default() }
    }

    /// Returns the entries, row by row.
    pub fn entries(&self) -> &[i32] {
        &self.entries
    }

    /// Returns the entries of one sequence, including padding.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> &[i32] {
        assert!(row < self.rows(), "row {row} is out of range: the table has {} rows", self.rows());
        &self.entries[row * self.width..][..self.width]
    }

    /// Returns the number of tokens of each sequence, as its row shows it.
    pub fn lengths(&self) -> &[i32] {
        &self.lengths
    }

    /// Returns the number of rows, one per sequence.
    pub fn rows(&self) -> usize {
        self.lengths.len()
    }

    /// Returns the width of the rows: the blocks of the longest sequence, or the minimum width.
    pub fn width(&self) -> usize {
        self.width
    }
}

/// A block table in compressed sparse rows, as FlashInfer and similar libraries expect it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CsrTable {
    /// Start of each sequence's frames in `indices`, and the end of the last. `[sequences + 1]`.
    pub indptr: Vec<i32>,
    /// Frames, sequence by sequence.
    pub indices: Vec<i32>,
    /// Tokens in each sequence's last block: 1 to `block_tokens`; 0 if empty. `[sequences]`.
    pub last_page_len: Vec<i32>,
}

impl CsrTable {
    /// Creates an empty table.
    pub fn new() -> Self {
        Self::default()
    }
}

mod sealed {
    use super::*;

    pub trait List {
        fn sequences(&self) -> &Sequences;
        fn sequence_id(&self) -> SequenceId;
        fn block_tokens(&self) -> u32;
        /// Returns the numbers of tokens and of blocks.
        fn extent(&self) -> (u32, usize);
        /// Calls `f` with ids and tokens as of one moment; discard what earlier calls did.
        fn read(&self, f: impl FnMut(&[AtomicU32], u32));
        /// Returns frames and number of tokens, if frames are kept and current as of `logged`
        /// moves.
        fn frames(&self, _logged: MoveCount) -> Option<(&[i32], u32)> {
            None
        }
        /// Returns an error if one of these tokens was given up behind the window.
        fn check_kept(&self, tokens: &Range<usize>) -> Result<(), SequenceError>;
    }
}

/// Source of a table row: a [`Sequence`], or a [`SequenceView`] of one that another thread owns.
pub trait Listed: sealed::List {}
impl<T: sealed::List> Listed for T {}

impl sealed::List for Sequence {
    fn sequences(&self) -> &Sequences {
        &self.sequences
    }

    fn sequence_id(&self) -> SequenceId {
        self.id()
    }

    #[inline]
    fn block_tokens(&self) -> u32 {
        self.kind.block_tokens
    }

    #[inline]
    fn extent(&self) -> (u32, usize) {
        self.extent()
    }

    #[inline]
    fn read(&self, mut f: impl FnMut(&[AtomicU32], u32)) {
        let (tokens, blocks) = self.extent();
        f(&self.list.ids()[..blocks], tokens);
    }

    #[inline]
    fn frames(&self, logged: MoveCount) -> Option<(&[i32], u32)> {
        let frames = self.frames.as_of(logged)?;
        let (tokens, blocks) = self.extent();
        Some((&frames[..blocks], tokens))
    }

    #[inline]
    fn check_kept(&self, tokens: &Range<usize>) -> Result<(), SequenceError> {
        if self.front == 0 { Ok(()) } else { self.check_kept(tokens.clone()) }
    }
}

impl sealed::List for SequenceView {
    fn sequences(&self) -> &Sequences {
        &self.sequences
    }

    fn sequence_id(&self) -> SequenceId {
        self.id()
    }

    fn block_tokens(&self) -> u32 {
        self.list.block_tokens()
    }

    fn extent(&self) -> (u32, usize) {
        let tokens = self.list.tokens();
        (tokens, tokens.div_ceil(self.list.block_tokens()) as usize)
    }

    fn read(&self, f: impl FnMut(&[AtomicU32], u32)) {
        self.list.read(f);
    }

    fn check_kept(&self, tokens: &Range<usize>) -> Result<(), SequenceError> {
        self.check_kept(tokens)
    }
}

impl<T: sealed::List> sealed::List for &T {
    fn sequences(&self) -> &Sequences {
        T::sequences(self)
    }

    fn sequence_id(&self) -> SequenceId {
        T::sequence_id(self)
    }

    #[inline]
    fn block_tokens(&self) -> u32 {
        T::block_tokens(self)
    }

    #[inline]
    fn extent(&self) -> (u32, usize) {
        T::extent(self)
    }

    #[inline]
    fn read(&self, f: impl FnMut(&[AtomicU32], u32)) {
        T::read(self, f);
    }

    #[inline]
    fn frames(&self, logged: MoveCount) -> Option<(&[i32], u32)> {
        T::frames(self, logged)
    }

    #[inline]
    fn check_kept(&self, tokens: &Range<usize>) -> Result<(), SequenceError> {
        T::check_kept(self, tokens)
    }
}

impl Batch {
    /// Builds the padded block table of these sequences; on an error it is empty.
    ///
    /// # Panics
    /// If rows of the [minimum width](BlockTable::with_width) exceed memory.
    pub fn block_table<S: Listed>(
        &self,
        sequences: impl IntoIterator<Item = S, IntoIter: Clone>,
        out: &mut BlockTable,
    ) -> Result<(), SequenceError> {
        let sequences = sequences.into_iter();
        let BlockTable { entries, lengths, width, width_min } = out;
        entries.clear();
        let widest = self.extents(sequences.clone(), lengths)?;
        let (rows, needed) = (lengths.len(), widest.max(*width_min));
        if rows.checked_mul(needed).is_none_or(|all| entries.try_reserve(all).is_err()) {
            lengths.clear();
            panic!("a block table of {rows} rows of {needed} entries exceeds memory");
        }
        *width = needed;
        let blocks: &Core = &self.step.sequences.0.blocks;
        let padding = blocks.null_block().map_or(NOTHING, |null| blocks.frame(null).0 as i32);
        let logged = blocks.moves_logged();
        for (sequence, length) in sequences.zip(lengths) {
            let begin = entries.len();
            if let Some((frames, tokens)) = sequence.frames(logged)
                && tokens == *length as u32
            {
                entries.extend_from_slice(frames);
                entries.resize(begin + *width, padding);
                continue;
            }
            sequence.read(|ids, tokens| {
                // A view's sequence may have grown since its length was read.
                let tokens = tokens.min(*length as u32);
                *length = tokens as i32;
                let ids = &ids[..tokens.div_ceil(sequence.block_tokens()) as usize];
                entries.truncate(begin);
                entries.extend(ids.iter().map(|id| frame(blocks, id)));
            });
            entries.resize(begin + *width, padding);
        }
        Ok(())
    }

    /// Builds the block table of the sequences in compressed sparse rows; on an error it is empty.
    pub fn csr_table<S: Listed>(
        &self,
        sequences: impl IntoIterator<Item = S>,
        out: &mut CsrTable,
    ) -> Result<(), SequenceError> {
        let CsrTable { indptr, indices, last_page_len } = out;
        indptr.clear();
        indices.clear();
        last_page_len.clear();
        indptr.push(0);
        let blocks: &Core = &self.step.sequences.0.blocks;
        let logged = blocks.moves_logged();
        for sequence in sequences {
            let block_tokens = sequence.block_tokens();
            if let Err(error) = self.check(sequence.sequences(), sequence.sequence_id()) {
                indptr.truncate(1);
                indices.clear();
                last_page_len.clear();
                return Err(error);
            }
            let (begin, mut last) = (indices.len(), 0);
            let of_last = |tokens: u32| if tokens == 0 { 0 } else { (tokens - 1) % block_tokens + 1 };
            match sequence.frames(logged) {
                Some((frames, tokens)) => {
                    indices.extend_from_slice(frames);
                    last = of_last(tokens);
                }
                None => sequence.read(|ids, tokens| {
                    indices.truncate(begin);
                    indices.extend(ids.iter().map(|id| frame(blocks, id)));
                    last = of_last(tokens);
                }),
            }
            indptr.push(indices.len() as i32);
            last_page_len.push(last as i32);
        }
        Ok(())
    }

    /// Lists the number of tokens of each sequence, including drafted ones; on an error, nothing.
    pub fn lengths<S: Listed>(
        &self,
        sequences: impl IntoIterator<Item = S>,
        out: &mut Vec<i32>,
    ) -> Result<(), SequenceError> {
        self.extents(sequences, out).map(|_| ())
    }

    /// Lists the numbers of tokens, and returns the largest number of blocks; on an error, nothing.
    fn extents<S: Listed>(
        &self,
        sequences: impl IntoIterator<Item = S>,
        out: &mut Vec<i32>,
    ) -> Result<usize, SequenceError> {
        out.clear();
        let mut most = 0;
        for sequence in sequences {
            if let Err(error) = self.check(sequence.sequences(), sequence.sequence_id()) {
                out.clear();
                return Err(error);
            }
            let (tokens, blocks) = sequence.extent();
            out.push(tokens as i32);
            most = most.max(blocks);
        }
        Ok(most)
    }

    /// Appends to `out` the slots where a kernel writes the K and V of tokens, each `frame *
    /// block_tokens + offset`; on an error nothing. One mapping can serve all of a batch.
    pub fn slot_mapping<S: Listed>(
        &self,
        sequence: S,
        tokens: Range<usize>,
        out: &mut Vec<i64>,
    ) -> Result<(), SequenceError> {
        let (slots, in_block) = (tokens.clone(), sequence.block_tokens());
        self.fill_mapping(sequence, tokens, slots, in_block, out)
    }

    /// Appends to `out` the slots of the [compressed](crate::storage::groups::Reach::Compressed)
    /// entries that tokens complete, one for each `ratio` tokens of the sequence: `frame *
    /// (block_tokens / ratio) + offset`; on an error nothing.
    ///
    /// # Errors
    /// [`SequenceError::Invalid`] for a ratio that does not divide the tokens of a block; and as
    /// [`slot_mapping`](Self::slot_mapping).
    pub fn entry_mapping<S: Listed>(
        &self,
        sequence: S,
        ratio: usize,
        tokens: Range<usize>,
        out: &mut Vec<i64>,
    ) -> Result<(), SequenceError> {
        let block_tokens = sequence.block_tokens();
        let Some(0) = (block_tokens as usize).checked_rem(ratio) else {
            let (id, limit) = (sequence.sequence_id(), format_args!("a divisor of {block_tokens}"));
            return Err(SequenceError::invalid(id, "tokens of an entry", ratio, limit));
        };
        let entries = tokens.start / ratio..tokens.end / ratio;
        self.fill_mapping(sequence, tokens, entries, block_tokens / ratio as u32, out)
    }

    /// Appends slots, of which a block has `in_block`.
    #[inline(always)]
    fn fill_mapping<S: Listed>(
        &self,
        sequence: S,
        tokens: Range<usize>,
        slots: Range<usize>,
        in_block: u32,
        out: &mut Vec<i64>,
    ) -> Result<(), SequenceError> {
        let id = sequence.sequence_id();
        self.check(sequence.sequences(), id)?;
        let blocks: &Core = &self.step.sequences.0.blocks;
        let begin = out.len();
        if let Some((frames, length)) = sequence.frames(blocks.moves_logged()) {
            check_range(id, &tokens, length as usize)?;
            sequence.check_kept(&tokens)?;
            fill_slots(slots, in_block, |place| frames[place], out);
            return Ok(());
        }
        let mut outcome = Ok(());
        sequence.read(|ids, length| {
            out.truncate(begin);
            outcome = check_range(id, &tokens, length as usize).and_then(|()| sequence.check_kept(&tokens));
            if outcome.is_ok() {
                fill_slots(slots.clone(), in_block, |place| frame(blocks, &ids[place]), out);
            }
        });
        outcome
    }
}

#[inline]
fn check_range(id: SequenceId, tokens: &Range<usize>, length: usize) -> Result<(), SequenceError> {
    let (start, end) = (tokens.start, tokens.end);
    if start > end || end > length {
        let limit = format_args!("a range within its {length} tokens");
        return Err(SequenceError::invalid(id, "range of tokens", format_args!("{start}..{end}"), limit));
    }
    Ok(())
}

#[inline]
fn fill_slots(slots: Range<usize>, in_block: u32, frame: impl Fn(usize) -> i32, out: &mut Vec<i64>) {
    out.reserve(slots.len());
    if in_block == 1 {
        return out.extend(slots.map(|place| i64::from(frame(place))));
    }
    for (place, inside) in pieces(slots.start as u32..slots.end as u32, in_block) {
        let base = i64::from(frame(place as usize)) * i64::from(in_block);
        out.extend(base + i64::from(inside.start)..base + i64::from(inside.end));
    }
}
