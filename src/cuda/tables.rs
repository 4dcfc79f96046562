//! What kernels read, in the device's memory: block tables, lengths and slots, filled on a stream and patched in place.
//!
//! ```text
//! fill        batch ──> pinned buffer of that batch's own ── the stream ──> table       all rows
//! patch       moved entries ──> pinned buffer ── the stream ── kernel ──> table         the entries that are out of date
//! ```
//!
//! The table's addresses never change, so that a graph that was captured once reads, whenever it is replayed, what was put
//! there last on its stream. The hazard that is excluded: a buffer that the next batch's table is written to while
//! the copy of this one's has not run. Each fill takes a buffer that nobody has, and gives it back when the stream got there.
//!
//! Who fills and who replays use one stream, or order two by events of their own: the table is one.

use std::sync::Arc;

use cudarc::driver::DeviceRepr;
use thiserror::Error;

use crate::error::{SequenceError, StorageError};
use crate::sequence::{Batch, BlockTable, Listed, MovedEntry};
use crate::storage::DeviceStream;

use super::command_scope::CommandScope;
use super::device::{Device, raw};
use super::kernels::Kernel;
use super::memory::{Memory, bytes_of};
use super::params::{PatchParams, THREADS};
use super::staging::BYTES_MAX;

// SAFETY: of C's layout, without references and padding, as asserted in `params`.
unsafe impl DeviceRepr for MovedEntry {}

/// CTAs that patch: entries are few.
const PATCH_CTAS: usize = 64;

/// Why a table was not filled or patched. Nothing was enqueued, unless the device refused in the middle.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum TableError {
    /// More sequences, blocks of one, or slots than the table was made for.
    #[error("{asked} {what}; the table was made for {max}")]
    TooLarge {
        /// `rows`, `columns`, or `slots`.
        what: &'static str,
        /// How many there are.
        asked: usize,
        /// How many there may be.
        max: usize,
    },
    /// An entry that the table does not have.
    #[error("entry {index} is of row {row} and column {column}; the table has {rows} rows of {columns}")]
    NoEntry {
        /// Where in the list.
        index: usize,
        /// Its row.
        row: u32,
        /// Its column.
        column: u32,
        /// Rows that were filled.
        rows: usize,
        /// Columns of the table.
        columns: usize,
    },
    /// The batch refused the sequences.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
    /// The device or the stream.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

/// Block tables, lengths and slots of one batch after another, at addresses that stay: `[rows][columns]`, `[rows]` of i32,
/// `[slots]` of i64.
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

/// What is kept until the last copy to it is over.
#[derive(Debug)]
struct Tables {
    entries: Memory,
    lengths: Memory,
    slots: Memory,
}

impl DeviceTable {
    /// Room for so many sequences of so many blocks, and so many tokens. What is there before the first fill is
    /// unspecified.
    ///
    /// # Errors
    ///
    /// What the device says.
    pub fn new(device: &Device, rows: usize, columns: usize, slots: usize) -> Result<Self, TableError> {
        let bytes = |what, n: usize, m: usize, each: usize| {
            let bytes = n.checked_mul(m).and_then(|count| count.checked_mul(each));
            // Kernels count entries in 32 bits.
            bytes.filter(|bytes| bytes / each <= u32::MAX as usize).ok_or(TableError::TooLarge {
                what,
                asked: n,
                max: u32::MAX as usize / m.max(1),
            })
        };
        let context = &device.0.context;
        let memory = Tables {
            entries: Memory::new(context, bytes("rows", rows, columns, size_of::<i32>())?)?,
            lengths: Memory::new(context, bytes("rows", rows, 1, size_of::<i32>())?)?,
            slots: Memory::new(context, bytes("slots", slots, 1, size_of::<i64>())?)?,
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

    /// Address of the entries, `[rows][columns]` of i32.
    pub fn entries(&self) -> u64 {
        self.memory.entries.address()
    }

    /// Address of the lengths in tokens, `[rows]` of i32.
    pub fn lengths(&self) -> u64 {
        self.memory.lengths.address()
    }

    /// Address of the slots, `[slots]` of i64.
    pub fn slots(&self) -> u64 {
        self.memory.slots.address()
    }

    /// Entries from one row to the next.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Rows that the last [`fill`](Self::fill) has set; the others hold what they held before.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Enqueues the block table of these sequences, and their lengths, as they are under this batch. Rows are padded as in
    /// [`BlockTable`].
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
        // SAFETY: the stream lives, and is of this device; the memory is this table's, and as long.
        let mut commands = unsafe { CommandScope::on(&self.device, raw(stream)) };
        // SAFETY: as above.
        unsafe {
            send(&mut commands, self.memory.entries.address(), bytes_of(self.scratch.entries()))?;
            send(&mut commands, self.memory.lengths.address(), bytes_of(self.scratch.lengths()))?;
        }
        self.rows = rows;
        self.end(commands, stream);
        Ok(())
    }

    /// Enqueues the slots of a batch's tokens: what [`Batch::slot_mapping`] lists.
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
        unsafe { send(&mut commands, self.memory.slots.address(), bytes_of(slots))? };
        self.end(commands, stream);
        Ok(())
    }

    /// Enqueues the entries that are out of date, in place: what [`Batch::moved_entries`] lists since the batch that the
    /// table was last filled or patched under.
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
            let grid = entries.len().div_ceil(THREADS as usize).min(PATCH_CTAS) as u32;
            // SAFETY: entries that the table has; a batch lists each once, and of two of one place either is as good.
            unsafe { commands.launch(Kernel::Patch, grid, &params)? };
        }
        self.end(commands, stream);
        Ok(())
    }

    /// The buffers go back when the stream got there.
    fn end(&self, mut commands: CommandScope<'_>, stream: &DeviceStream) {
        if cfg!(kvpool_mutant = "table_early") {
            commands.give_back();
        }
        // The device, too: it has the kernel that patches.
        let kept = (self.memory.clone(), self.device.clone(), stream.clone());
        commands.then(kept, Box::new(|_| ()));
    }
}

/// Enqueues bytes, in as many buffers as it takes.
///
/// # Safety
/// So many bytes from there on are nobody else's until the command scope is over.
unsafe fn send(commands: &mut CommandScope<'_>, to: u64, bytes: &[u8]) -> Result<(), StorageError> {
    for (part, at) in bytes.chunks(BYTES_MAX).zip((to..).step_by(BYTES_MAX)) {
        // SAFETY: the caller's.
        unsafe { commands.upload_to(at, part)? };
    }
    Ok(())
}
