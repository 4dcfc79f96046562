//! The calls of a batch for grouped sequences. Each takes all sequences of a step, and, for tables
//! and slots, a buffer for each list: one crossing a call.

use kvpool::{Batch, GroupCopy, GroupedAppended, GroupedSequence, Sequence, SequenceError};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyAnyMethods, PyInt};

use crate::args::{Place, Tokens, range};
use crate::batch::PyBatch;
use crate::buffers::{Numbers, Target};
use crate::error::{Failure, Outcome, fields, invalid, raise};
use crate::exclusive::Entered;
use crate::grouped::PyGroupedSequence;
use crate::record::record;
use crate::table::{PyBlockTable, csr_into, enter_all, write_table};

record! {
    /// Result of an append to a grouped sequence.
    GroupedAppend {
        /// Position of the first new token.
        start: usize,
        /// Position behind the last new token.
        stop: usize,
        /// Number of blocks taken in all lists, from reservations or allocated, including copies.
        new_blocks: usize,
        /// The copies on write and, at the first append behind a cached prefix, those that restore
        /// the states. The engine makes them before its own writes: number of the list, or behind
        /// all lists of the state, and frames from and to.
        copies: Vec<(usize, u32, u32)>,
        /// Positions of the tokens over which the batch steps the states, from and to: those
        /// between what they hold and the last final one. Drafts are among them once they are
        /// accepted, with the next append.
        stepped: (usize, usize),
    }
}

impl From<GroupedAppended> for GroupedAppend {
    fn from(appended: GroupedAppended) -> Self {
        Self {
            start: appended.tokens.start,
            stop: appended.tokens.end,
            new_blocks: appended.new_blocks,
            copies: frames_of(&appended.copies),
            stepped: (appended.stepped.start, appended.stepped.end),
        }
    }
}

fn frames_of(copies: &[GroupCopy]) -> Vec<(usize, u32, u32)> {
    let of = |copy: &GroupCopy| {
        let group = copy.group;
        copy.frames.clone().into_iter().map(move |frames| (group, frames.src.0, frames.dst.0))
    };
    copies.iter().flat_map(of).collect()
}

/// Sequences that a call names, all entered.
struct GroupedRow<'a>(Vec<Entered<'a, GroupedSequence>>);

impl<'a> GroupedRow<'a> {
    fn enter(sequences: &'a [Bound<'_, PyGroupedSequence>]) -> Outcome<Self> {
        Ok(Self(enter_all(sequences, |sequence| &sequence.get().sequence)?))
    }

    /// Returns one list of each sequence.
    fn list(&self, list: usize) -> impl Iterator<Item = &Sequence> + Clone {
        self.0.iter().map(move |entered| entered.group(list))
    }

    /// Refuses sequences of other pools. Returns the number of lists; `None` without sequences.
    fn check(&self, batch: &Batch) -> Outcome<Option<usize>> {
        batch.lengths(self.list(0), &mut Vec::new())?;
        Ok(self.0.first().map(|entered| entered.groups()))
    }

    /// As [`check`](Self::check), and checks the number of a list.
    fn check_list(&self, batch: &Batch, list: Place) -> Outcome<usize> {
        match self.check(batch)? {
            Some(lists) => Ok(range(list, Some(Place(list.0.saturating_add(1))), lists, "lists")?.start),
            None => Ok(list.0),
        }
    }

    /// Refuses a list of another length than there are sequences.
    fn check_count(&self, count: usize, what: &'static str) -> Outcome<()> {
        if count == self.0.len() {
            return Ok(());
        }
        let message = format!("{count} {what} for {} sequences", self.0.len());
        Err(raise("InvalidArgument", message, fields![sequences: self.0.len(), argument: what]))
    }

    /// Makes slots of tokens `starts..stops` of each sequence, one sequence behind the other.
    fn slots(
        &self,
        list: usize,
        (starts, stops): (&[u32], &[u32]),
        mut one: impl FnMut(&Sequence, std::ops::Range<usize>, &mut Vec<i64>) -> Result<(), SequenceError>,
    ) -> Outcome<Vec<i64>> {
        self.check_count(starts.len(), "starts")?;
        self.check_count(stops.len(), "stops")?;
        let mut slots = Vec::new();
        for ((sequence, &start), &stop) in self.list(list).zip(starts).zip(stops) {
            one(sequence, start as usize..stop as usize, &mut slots)?;
        }
        Ok(slots)
    }
}

/// What is appended to one sequence.
enum New {
    Count(usize),
    Ids(Vec<u32>),
}

impl New {
    fn read(entry: &Bound<'_, PyAny>, index: usize) -> Outcome<Self> {
        // Arrays have both.
        let is_scalar = || Ok::<_, PyErr>(entry.hasattr("__index__")? && !entry.hasattr("__len__")?);
        let is_number = entry.is_instance_of::<PyInt>() || is_scalar()?;
        let new = match is_number {
            true => Self::Count(entry.extract::<Tokens>()?.0),
            false => Self::Ids(entry.extract::<Numbers>()?.0),
        };
        if new.count() == 0 {
            let message = format!("entry {index} of the tokens is of no tokens");
            return Err(raise("InvalidArgument", message, Vec::new()));
        }
        Ok(new)
    }

    fn count(&self) -> usize {
        match self {
            Self::Count(tokens) => *tokens,
            Self::Ids(ids) => ids.len(),
        }
    }

    /// Refuses ids behind tokens whose ids are unknown, or in front of announced ones.
    fn check(&self, sequence: &GroupedSequence) -> Result<(), SequenceError> {
        let (id, length, announced) = (sequence.id(), sequence.len(), sequence.announced());
        let has_cache = || sequence.group(0).pool().is_some_and(|pool| pool.prefix_cache().is_some());
        match self {
            Self::Ids(_) if announced > length => Err(SequenceError::TokensAhead { id, length, announced }),
            Self::Ids(_) if announced < length && has_cache() => {
                Err(SequenceError::TokensUnknown { id, known: announced })
            }
            _ => Ok(()),
        }
    }
}

/// Reads one buffer for each list; None stands for a list that is left out.
fn per_list<'py>(out: &Bound<'py, PyAny>, lists: Option<usize>) -> Outcome<Vec<Option<Bound<'py, PyAny>>>> {
    let items = out.try_iter().map_err(|_| {
        PyTypeError::new_err("out is no list: it has a buffer, or None, for each list of the sequences")
    })?;
    let mut buffers = Vec::new();
    for item in items {
        let item = item?;
        buffers.push(if item.is_none() { None } else { Some(item) });
    }
    match lists {
        Some(lists) if lists != buffers.len() => {
            let message = format!("out has {} buffers; the sequences have {lists} lists", buffers.len());
            Err(raise("BufferRefused", message, fields![argument: "out", lists: lists]))
        }
        _ => Ok(buffers),
    }
}

/// Says of which list a buffer was refused.
fn of_list<T>(list: usize, outcome: Outcome<T>) -> Outcome<T> {
    outcome.map_err(|failure| failure.with("list", list))
}

#[pymethods]
impl PyBatch {
    /// Appends tokens to each sequence. An entry of `tokens` is a number of tokens, those announced
    /// first, or the ids of tokens behind the announced ones.
    ///
    /// Raises OutOfBlocks if there are too few blocks: `sequences` are the ids of those that lack
    /// them. No sequence has grown then, and the others keep what they need as reservations, for
    /// the next try. An error about one sequence or its tokens has its position in `row`.
    fn append_grouped(
        &self,
        sequences: Vec<Bound<'_, PyGroupedSequence>>,
        tokens: Vec<Bound<'_, PyAny>>,
    ) -> Outcome<Vec<GroupedAppend>> {
        let of_row = |row: usize| move |failure: Failure| failure.with("row", row);
        let read = |(row, entry): (usize, &Bound<'_, PyAny>)| New::read(entry, row).map_err(of_row(row));
        let new = tokens.iter().enumerate().map(read).collect::<Outcome<Vec<_>>>()?;
        let mut batch = self.enter()?;
        let mut row = GroupedRow::enter(&sequences)?;
        row.check_count(new.len(), "tokens")?;
        row.check(&batch)?;
        for (index, (sequence, new)) in row.0.iter_mut().zip(&new).enumerate() {
            // Of no tokens: it notices abandoned batches.
            let checked = sequence.reserve(0).and_then(|()| new.check(sequence));
            checked.map_err(|error| of_row(index)(error.into()))?;
        }
        let mut lacking: Option<(Failure, Vec<u64>)> = None;
        for (index, (sequence, new)) in row.0.iter_mut().zip(&new).enumerate() {
            match sequence.reserve(new.count()) {
                Ok(()) => {}
                Err(SequenceError::Alloc(error)) => {
                    lacking.get_or_insert_with(|| (error.into(), Vec::new())).1.push(sequence.id().0);
                }
                Err(error) => return Err(of_row(index)(error.into())),
            }
        }
        if let Some((failure, sequences)) = lacking {
            return Err(failure.with("sequences", sequences));
        }
        let mut appended = Vec::with_capacity(new.len());
        for (index, (sequence, new)) in row.0.iter_mut().zip(&new).enumerate() {
            let one = match new {
                New::Count(tokens) => batch.append_grouped(sequence, *tokens),
                New::Ids(ids) => batch.append_grouped(sequence, ids),
            };
            appended.push(one.map_err(|error| of_row(index)(error.into()))?.into());
        }
        Ok(appended)
    }

    /// Appends drafted tokens to a sequence: `accept` or `commit` makes some of them final. Its
    /// states stay as they are: the engine computes what follows the drafts from copies of its own.
    fn draft_grouped(
        &self,
        sequence: &Bound<'_, PyGroupedSequence>,
        tokens: Tokens,
    ) -> Outcome<GroupedAppend> {
        let mut batch = self.enter()?;
        let mut sequence = sequence.get().sequence.enter()?;
        Ok(batch.append_grouped(&mut sequence, kvpool::Tokens::Draft(tokens.0))?.into())
    }

    /// Keeps the states of a sequence behind all of its tokens, so that later prompts with the same
    /// tokens can be hit here. Returns the copies that the engine makes, behind the batch's own
    /// work on the sequence: number of the state behind all lists, and frames from and to. None are
    /// needed if the states are cached already, or cannot be found later.
    ///
    /// Raises InvalidSequenceArgument unless the sequence ends with a full block in every list, as
    /// at `next_cut`; OutOfBlocks if there are no blocks for the copies.
    fn checkpoint(&self, sequence: &Bound<'_, PyGroupedSequence>) -> Outcome<Vec<(usize, u32, u32)>> {
        let mut batch = self.enter()?;
        Ok(frames_of(&batch.checkpoint(&mut *sequence.get().sequence.enter()?)?))
    }

    /// Fills a table for each list, as `block_table` does: `out` has a `BlockTable`, a `[rows,
    /// width]` int32 or int64 buffer, or None for each list. Returns for each the number of columns
    /// that hold frames, 0 for None.
    ///
    /// The null block's frame stands in place of blocks that were given up behind a window. Nothing
    /// is written if a buffer is refused; `list` is its list.
    fn block_tables(
        &self,
        sequences: Vec<Bound<'_, PyGroupedSequence>>,
        out: &Bound<'_, PyAny>,
    ) -> Outcome<Vec<usize>> {
        enum To<'a> {
            Table(Entered<'a, kvpool::BlockTable>),
            Buffer(Target),
            Nothing,
        }
        let batch = self.enter()?;
        let row = GroupedRow::enter(&sequences)?;
        let out = per_list(out, row.check(&batch)?)?;
        let mut targets = Vec::with_capacity(out.len());
        for (list, out) in out.iter().enumerate() {
            let target = || {
                let Some(out) = out else { return Ok(To::Nothing) };
                if let Ok(table) = out.cast::<PyBlockTable>() {
                    return Ok(To::Table(table.get().fill(row.0.len())?));
                }
                let target = Target::new(out, "out", 2)?;
                target.check_room(0, row.0.len())?;
                target.check_room(1, row.list(list).map(Sequence::block_count).max().unwrap_or(0))?;
                Ok(To::Buffer(target))
            };
            targets.push(of_list(list, target())?);
        }
        let mut widths = Vec::with_capacity(targets.len());
        for (list, target) in targets.iter_mut().enumerate() {
            widths.push(match target {
                To::Table(table) => {
                    batch.block_table(row.list(list), table)?;
                    table.width()
                }
                To::Buffer(target) => {
                    let written = write_table(&batch, row.list(list), target, self.padding());
                    of_list(list, written)?.1
                }
                To::Nothing => 0,
            });
        }
        Ok(widths)
    }

    /// Writes the table of one list in compressed sparse rows, as `csr_table` does. Returns the
    /// number of blocks.
    fn csr_table_grouped(
        &self,
        sequences: Vec<Bound<'_, PyGroupedSequence>>,
        list: Place,
        indptr: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        last_page_len: &Bound<'_, PyAny>,
    ) -> Outcome<usize> {
        let batch = self.enter()?;
        let row = GroupedRow::enter(&sequences)?;
        let list = row.check_list(&batch, list)?;
        csr_into(&batch, row.list(list), [indptr, indices, last_page_len])
    }

    /// Writes the slots of tokens `starts[i]` to `stops[i]` of each sequence, one sequence behind
    /// the other, for each list: `frame * block_tokens + offset`, with the tokens of the list's
    /// blocks. `out` has a one-dimensional int32 or int64 buffer, or None, for each list. Returns
    /// their number.
    ///
    /// Nothing is written if a buffer is refused, with its `list`, or a token: SequenceError of the
    /// kind BehindWindow for one that was given up.
    fn slot_mappings(
        &self,
        sequences: Vec<Bound<'_, PyGroupedSequence>>,
        starts: Numbers,
        stops: Numbers,
        out: &Bound<'_, PyAny>,
    ) -> Outcome<usize> {
        let batch = self.enter()?;
        let row = GroupedRow::enter(&sequences)?;
        let out = per_list(out, row.check(&batch)?)?;
        let mut written = Vec::with_capacity(out.len());
        for (list, out) in out.iter().enumerate() {
            let Some(out) = out else { continue };
            let slots = row.slots(list, (&starts.0, &stops.0), |sequence, tokens, slots| {
                batch.slot_mapping(sequence, tokens, slots)
            })?;
            written.push((of_list(list, checked(out, &slots))?, slots));
        }
        written.iter().for_each(|(target, slots)| target.write(0, slots.iter().copied()));
        Ok(written.first().map_or(0, |(_, slots)| slots.len()))
    }

    /// Writes the slots of the compressed entries in one list that tokens `starts[i]` to `stops[i]`
    /// of each sequence complete, one for each `ratio` tokens (`LayerGroup.ratio`): `frame *
    /// (block_tokens / ratio) + offset`, into a one-dimensional int32 or int64 buffer. Returns
    /// their number.
    fn entry_mapping(
        &self,
        sequences: Vec<Bound<'_, PyGroupedSequence>>,
        starts: Numbers,
        stops: Numbers,
        list: Place,
        ratio: Tokens,
        out: &Bound<'_, PyAny>,
    ) -> Outcome<usize> {
        let batch = self.enter()?;
        let row = GroupedRow::enter(&sequences)?;
        let list = row.check_list(&batch, list)?;
        if ratio.0 == 0 {
            return Err(invalid("an entry is of 1 token or more, not of 0"));
        }
        let slots = row.slots(list, (&starts.0, &stops.0), |sequence, tokens, slots| {
            batch.entry_mapping(sequence, ratio.0, tokens, slots)
        })?;
        checked(out, &slots)?.write(0, slots.iter().copied());
        Ok(slots.len())
    }
}

/// Checks a buffer for slots.
fn checked(out: &Bound<'_, PyAny>, slots: &[i64]) -> Outcome<Target> {
    let target = Target::new(out, "out", 1)?;
    target.check_room(0, slots.len())?;
    target.check_values(slots.iter().copied().max().unwrap_or(0))?;
    Ok(target)
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<GroupedAppend>()
}
