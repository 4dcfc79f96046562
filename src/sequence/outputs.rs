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
        fn tokens(&self) -> u32;
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
    fn tokens(&self) -> u32 {
        self.extent().0
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

    fn tokens(&self) -> u32 {
        self.list.tokens()
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
    fn tokens(&self) -> u32 {
        T::tokens(self)
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
        self.lengths(sequences.clone(), lengths)?;
        let block_tokens = self.step.sequences.0.block_tokens;
        let longest = lengths.iter().copied().max().unwrap_or(0) as u32;
        let (rows, needed) = (lengths.len(), (longest.div_ceil(block_tokens) as usize).max(*width_min));
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
                let ids = &ids[..tokens.div_ceil(block_tokens) as usize];
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
        let block_tokens = self.step.sequences.0.block_tokens;
        let blocks: &Core = &self.step.sequences.0.blocks;
        let logged = blocks.moves_logged();
        for sequence in sequences {
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
        out.clear();
        for sequence in sequences {
            if let Err(error) = self.check(sequence.sequences(), sequence.sequence_id()) {
                out.clear();
                return Err(error);
            }
            out.push(sequence.tokens() as i32);
        }
        Ok(())
    }

    /// Appends to `out` the slots where a kernel writes the K and V of tokens, each `frame *
    /// block_tokens + offset`; on an error nothing. One mapping can serve all of a batch.
    pub fn slot_mapping<S: Listed>(
        &self,
        sequence: S,
        tokens: Range<usize>,
        out: &mut Vec<i64>,
    ) -> Result<(), SequenceError> {
        let id = sequence.sequence_id();
        self.check(sequence.sequences(), id)?;
        let block_tokens = self.step.sequences.0.block_tokens;
        let blocks: &Core = &self.step.sequences.0.blocks;
        let begin = out.len();
        if let Some((frames, length)) = sequence.frames(blocks.moves_logged()) {
            check_range(id, &tokens, length as usize)?;
            sequence.check_kept(&tokens)?;
            fill_slots(tokens, block_tokens, |place| frames[place], out);
            return Ok(());
        }
        let mut outcome = Ok(());
        sequence.read(|ids, length| {
            out.truncate(begin);
            outcome = check_range(id, &tokens, length as usize).and_then(|()| sequence.check_kept(&tokens));
            if outcome.is_ok() {
                fill_slots(tokens.clone(), block_tokens, |place| frame(blocks, &ids[place]), out);
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
fn fill_slots(tokens: Range<usize>, block_tokens: u32, frame: impl Fn(usize) -> i32, out: &mut Vec<i64>) {
    out.reserve(tokens.len());
    if block_tokens == 1 {
        return out.extend(tokens.map(|place| i64::from(frame(place))));
    }
    for (place, inside) in pieces(tokens.start as u32..tokens.end as u32, block_tokens) {
        let base = i64::from(frame(place as usize)) * i64::from(block_tokens);
        out.extend(base + i64::from(inside.start)..base + i64::from(inside.end));
    }
}
