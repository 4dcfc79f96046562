//! Block tables, lengths and slots in the device's memory, filled on a stream and patched in place.
//!
//! ```text
//! fill    batch ──> pinned buffer of its own ── the stream ──> table          all rows
//! patch   moved entries ──> pinned buffer ── the stream ── kernel ──> table   outdated entries
//! ```
//!
//! The table's addresses never change, so that a captured graph, whenever it is replayed, reads
//! what was written last on its stream. This excludes one hazard: writing the next batch's table to
//! a buffer whose copy for this batch has not run yet. Each fill takes an unused buffer, and gives
//! it back when the stream has reached that point.
//!
//! Fills and replays use one stream, or two that are ordered by the engine's own events: there is
//! only one table.

use std::sync::Arc;

use thiserror::Error;

use kvpool::storage::DeviceStream;
use kvpool::{Batch, BlockTable, Listed, MovedEntry};
use kvpool::{SequenceError, StorageError};

use super::command_scope::CommandScope;
use super::device::{Device, raw};
use super::launch::Work;
use super::memory::{Memory, bytes_of};
use super::params::PatchParams;
use super::staging::BYTES_MAX;

/// Why a table was not filled or patched. No work was enqueued, unless the device failed half-way.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum TableError {
    /// More sequences, blocks per sequence, or slots than the table has room for.
    #[error("{asked} {what}; the table has room for {max}")]
    TooLarge {
        /// `rows`, `columns`, or `slots`.
        what: &'static str,
        /// Requested number.
        asked: usize,
        /// Maximum.
        max: usize,
    },
    /// An entry outside of the table.
    #[error(
        "entry {index} is for row {row}, column {column}; the table has {rows} rows of {columns} columns"
    )]
    NoEntry {
        /// Index in the list.
        index: usize,
        /// Row of the entry.
        row: u32,
        /// Column of the entry.
        column: u32,
        /// Rows that the last fill has set.
        rows: usize,
        /// Columns of the table.
        columns: usize,
    },
    /// The batch refused the sequences.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
    /// An error of the device or the stream.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Block tables, lengths and slots of successive batches, at constant addresses: `[rows][columns]`
/// and `[rows]` of i32, `[slots]` of i64.
#[derive(Debug)]
pub struct DeviceTable {
    device: Device,
    memory: Arc<Tables>,
    rows_max: usize,
    columns: usize,
    slots_max: usize,
    /// Rows that the last fill has set.
    rows: usize,
    scratch: BlockTable,
}

/// Memory that is kept until the last copy to it is complete.
#[derive(Debug)]
struct Tables {
    entries: Memory,
    lengths: Memory,
    slots: Memory,
}

impl DeviceTable {
    /// Creates a table with room for `rows` sequences of `columns` blocks, and for `slots` tokens.
    ///
    /// Its contents before the first fill are unspecified.
    ///
    /// # Errors
    ///
    /// An error of the device, or [`TableError::TooLarge`].
    pub fn new(device: &Device, rows: usize, columns: usize, slots: usize) -> Result<Self, TableError> {
        let memory = |what, asked: usize, width: usize, each: usize| {
            // Kernels count entries in 32 bits.
            let max = u32::MAX as usize / width.max(1);
            let bytes = (asked <= max).then(|| (asked * width).checked_mul(each)).flatten();
            let bytes = bytes.ok_or(TableError::TooLarge { what, asked, max })?;
            Ok::<_, TableError>(Memory::new(&device.0.context, bytes)?)
        };
        let memory = Tables {
            entries: memory("rows", rows, columns, size_of::<i32>())?,
            lengths: memory("rows", rows, 1, size_of::<i32>())?,
            slots: memory("slots", slots, 1, size_of::<i64>())?,
        };
        Ok(Self {
            device: device.clone(),
            memory: Arc::new(memory),
            rows_max: rows,
            columns,
            slots_max: slots,
            rows: 0,
            scratch: BlockTable::with_width(columns),
        })
    }

    /// Returns the address of the entries, `[rows][columns]` of i32.
    pub fn entries(&self) -> u64 {
        self.memory.entries.address()
    }

    /// Returns the address of the lengths in tokens, `[rows]` of i32.
    pub fn lengths(&self) -> u64 {
        self.memory.lengths.address()
    }

    /// Returns the address of the slots, `[slots]` of i64.
    pub fn slots(&self) -> u64 {
        self.memory.slots.address()
    }

    /// Returns the number of entries from one row to the next.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the number of rows that the last [`fill`](Self::fill) has set.
    ///
    /// The other rows keep their previous contents.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Enqueues the block table and the lengths of these sequences, as of this batch.
    ///
    /// Rows are padded as in [`BlockTable`].
    ///
    /// # Errors
    ///
    /// [`TableError`].
    pub fn fill<S: Listed>(
        &mut self,
        stream: &DeviceStream,
        batch: &Batch,
        sequences: impl IntoIterator<Item = S, IntoIter: Clone>,
    ) -> Result<(), TableError> {
        self.device.check_stream(stream, "filling a block table")?;
        batch.block_table(sequences, &mut self.scratch)?;
        let (rows, width) = (self.scratch.rows(), self.scratch.width());
        for (what, asked, max) in [("rows", rows, self.rows_max), ("columns", width, self.columns)] {
            if asked > max {
                return Err(TableError::TooLarge { what, asked, max });
            }
        }
        // SAFETY: the stream lives, and is of this device; the memory belongs to this table, and is
        // large enough.
        let mut commands = unsafe { CommandScope::on(&self.device, raw(stream)) };
        // SAFETY: as above.
        unsafe {
            commands.upload_to(self.entries(), bytes_of(self.scratch.entries()))?;
            commands.upload_to(self.lengths(), bytes_of(self.scratch.lengths()))?;
        }
        self.rows = rows;
        self.end(commands, stream);
        Ok(())
    }

    /// Enqueues the slots of a batch's tokens, as listed by [`Batch::slot_mapping`].
    ///
    /// # Errors
    ///
    /// [`TableError`].
    pub fn fill_slots(&mut self, stream: &DeviceStream, slots: &[i64]) -> Result<(), TableError> {
        self.device.check_stream(stream, "filling slots")?;
        let (what, asked, max) = ("slots", slots.len(), self.slots_max);
        if asked > max {
            return Err(TableError::TooLarge { what, asked, max });
        }
        // SAFETY: as in `fill`.
        let mut commands = unsafe { CommandScope::on(&self.device, raw(stream)) };
        // SAFETY: as in `fill`.
        unsafe { commands.upload_to(self.slots(), bytes_of(slots))? };
        self.end(commands, stream);
        Ok(())
    }

    /// Enqueues updates of outdated entries, in place.
    ///
    /// The entries are those that [`Batch::moved_entries`] lists since the batch under which the
    /// table was last filled or patched.
    ///
    /// # Errors
    ///
    /// [`TableError`].
    pub fn patch(&mut self, stream: &DeviceStream, entries: &[MovedEntry]) -> Result<(), TableError> {
        self.device.check_stream(stream, "patching a block table")?;
        let (rows, columns) = (self.rows, self.columns);
        let outside = |entry: &MovedEntry| entry.row as usize >= rows || entry.column as usize >= columns;
        if let Some(index) = entries.iter().position(outside) {
            let MovedEntry { row, column, .. } = entries[index];
            return Err(TableError::NoEntry { index, row, column, rows, columns });
        }
        // SAFETY: as in `fill`.
        let mut commands = unsafe { CommandScope::on(&self.device, raw(stream)) };
        for entries in entries.chunks(BYTES_MAX / size_of::<MovedEntry>()) {
            let params = PatchParams {
                table: self.memory.entries.address(),
                entries: commands.upload(bytes_of(entries))?,
                row_stride: columns as u32,
                n: entries.len() as u32,
            };
            // SAFETY: the entries are in the table; a batch lists each entry once, and of two
            // entries for one place either is correct.
            unsafe { commands.launch(Work::Patch, &params)? };
        }
        self.end(commands, stream);
        Ok(())
    }

    /// Returns the buffers when the stream has reached this point.
    fn end(&self, commands: CommandScope<'_>, stream: &DeviceStream) {
        // Also keep the device, which owns the patch kernel.
        let kept = (self.memory.clone(), self.device.clone(), stream.clone());
        commands.then(kept, Box::new(|_| ()));
    }
}
