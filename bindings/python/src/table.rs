//! `BlockTable`, and tables written into the caller's buffers.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{
    AtomicUsize,
    Ordering::{Acquire, Release},
};

use kvpool::{Append, Batch, BlockTable, CsrTable, Sequence, SequenceError};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::args::{Count, Place, range};
use crate::buffers::Target;
use crate::error::{Failure, Outcome, fields, raise};
use crate::exclusive::{Entered, Exclusive};
use crate::sequence::PySequence;
use crate::tensor::is_packed;

/// Largest minimum width of a table, in columns: no sequence has as many blocks.
const WIDTH_MAX: usize = 1 << 24;

/// Entries of a table for which there is memory.
const ENTRIES_UNTRIED: usize = 1 << 24;

/// A padded block table: `[rows, width]` frames in int32, as paged attention kernels expect it.
///
/// `Batch.block_table` fills it, and reuses its memory. It is a buffer: `memoryview(table)` and
/// `numpy.asarray(table)` make no copy; while such a view exists, filling it again raises Busy. Rows
/// are padded with the null block's frame, or -1 in a pool without one.
#[pyclass(frozen, name = "BlockTable", module = "kvpool._kvpool")]
pub struct PyBlockTable {
    table: Exclusive<BlockTable>,
    width_min: usize,
    /// Number of exported buffers, which point into the table.
    exports: AtomicUsize,
}

/// Shape and strides of an exported buffer.
struct Export {
    shape: [isize; 2],
    strides: [isize; 2],
}

impl PyBlockTable {
    /// Returns the table, to be filled with this number of rows.
    pub fn fill(&self, rows: usize) -> Outcome<Entered<'_, BlockTable>> {
        let table = self.table.enter()?;
        let entries = self.width_min.saturating_mul(rows);
        // Tried first: the library cannot refuse it.
        if entries > ENTRIES_UNTRIED && Vec::<i32>::new().try_reserve_exact(entries).is_err() {
            let message =
                format!("there is no memory for a block table of {rows} rows and {} columns", self.width_min);
            return Err(raise("InvalidArgument", message, fields![rows: rows, width: self.width_min]));
        }
        // Acquire: pairs with the Release of the end of a view. None begins while it is entered.
        match self.exports.load(Acquire) {
            0 => Ok(table),
            views => Err(raise(
                "Busy",
                format!("{views} views of the table exist; delete them first"),
                fields![views: views],
            )),
        }
    }
}

#[pymethods]
impl PyBlockTable {
    #[new]
    #[pyo3(signature = (width_min=Count(0)), text_signature = "(width_min=0)")]
    fn new(width_min: Count) -> Outcome<Self> {
        if width_min.0 > WIDTH_MAX {
            let message =
                format!("a block table of {} columns; at most {WIDTH_MAX} are possible", width_min.0);
            return Err(raise("InvalidArgument", message, fields![width: width_min.0]));
        }
        let table = BlockTable::with_width(width_min.0);
        let table = Exclusive::new("block table", table);
        Ok(Self { table, width_min: width_min.0, exports: AtomicUsize::new(0) })
    }

    /// Number of rows, one per sequence.
    #[getter]
    fn rows(&self) -> Outcome<usize> {
        Ok(self.table.enter()?.rows())
    }

    /// Entries per row: the blocks of the longest sequence, or the minimum width.
    #[getter]
    fn width(&self) -> Outcome<usize> {
        Ok(self.table.enter()?.width())
    }

    /// Number of tokens of each sequence.
    #[getter]
    fn lengths(&self) -> Outcome<Vec<i32>> {
        Ok(self.table.enter()?.lengths().to_vec())
    }

    /// Returns the entries of one sequence, including padding.
    fn row<'py>(&self, py: Python<'py>, row: Place) -> Outcome<Bound<'py, PyList>> {
        let table = self.table.enter()?;
        let row = range(row, Some(Place(row.0.saturating_add(1))), table.rows(), "rows")?.start;
        Ok(PyList::new(py, table.row(row))?)
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        // SAFETY: Python passes a structure to fill in.
        let view = unsafe { &mut *view };
        view.obj = null_mut();
        if flags & ffi::PyBUF_WRITABLE != 0 {
            return Err(PyBufferError::new_err("a block table is read-only"));
        }
        let table = this.table.enter()?;
        if table.rows().checked_mul(table.width()) != Some(table.entries().len()) {
            return Err(PyBufferError::new_err("the table was not filled"));
        }
        let (rows, width) = (table.rows() as isize, table.width() as isize);
        let export = Box::new(Export { shape: [rows, width], strides: [width * 4, 4] });
        let asks = |flag: c_int| flags & flag == flag;
        if asks(ffi::PyBUF_F_CONTIGUOUS) && !is_packed(4, export.shape.iter().zip(&export.strides)) {
            return Err(PyBufferError::new_err("the table is C-contiguous, and not Fortran-contiguous"));
        }
        view.buf = table.entries().as_ptr().cast_mut().cast::<c_void>();
        view.len = rows * width * 4;
        view.readonly = 1;
        view.itemsize = 4;
        view.format = if flags & ffi::PyBUF_FORMAT != 0 { c"i".as_ptr().cast_mut() } else { null_mut() };
        view.ndim = 2;
        view.suboffsets = null_mut();
        view.shape = if asks(ffi::PyBUF_ND) { export.shape.as_ptr().cast_mut() } else { null_mut() };
        view.strides = if asks(ffi::PyBUF_STRIDES) { export.strides.as_ptr().cast_mut() } else { null_mut() };
        view.internal = Box::into_raw(export).cast();
        // Counted while the table is entered: a fill sees it, or ended before.
        this.exports.fetch_add(1, Release);
        drop(table);
        view.obj = slf.into_ptr();
        Ok(())
    }

    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: a view that was filled in above, and ends now.
        drop(unsafe { Box::from_raw((*view).internal.cast::<Export>()) });
        // Release: pairs with the Acquire of `fill`.
        self.exports.fetch_sub(1, Release);
    }

    fn __repr__(&self) -> Outcome<String> {
        let table = self.table.enter()?;
        Ok(format!("<kvpool.BlockTable of {} rows of {}>", table.rows(), table.width()))
    }
}

/// Sequences that a call names, all entered.
pub struct Row<'a>(Vec<Entered<'a, Sequence>>);

impl<'a> Row<'a> {
    /// Enters the sequences of a list, in order.
    pub fn enter(sequences: &'a [Bound<'_, PySequence>]) -> Outcome<Self> {
        Ok(Self(enter_all(sequences, |sequence| &*sequence.get().sequence)?))
    }

    /// The sequences, to be read.
    pub fn get(&self) -> impl Iterator<Item = &Sequence> + Clone {
        self.0.iter().map(|entered| &**entered)
    }

    /// Returns one token for each sequence, with its id if they are known.
    pub fn appends<'r>(&'r mut self, ids: Option<&'r [u32]>) -> Outcome<Vec<Append<'r>>> {
        let (sequences, tokens) = (self.0.len(), ids.map_or(self.0.len(), <[u32]>::len));
        if sequences != tokens {
            let message = format!("{tokens} tokens for {sequences} sequences");
            return Err(raise("InvalidArgument", message, fields![sequences: sequences, tokens: tokens]));
        }
        let append = |(place, entered): (usize, &'r mut Sequence)| match ids {
            Some(ids) => Append::new(entered, &ids[place..=place]),
            None => Append::new(entered, 1),
        };
        Ok(self.0.iter_mut().map(|entered| &mut **entered).enumerate().map(append).collect())
    }
}

/// Enters the values of a list of objects, in order, and names one that is listed twice.
pub fn enter_all<'a, 'py, P, T>(
    objects: &'a [Bound<'py, P>],
    value: impl Fn(&'a Bound<'py, P>) -> &'a Exclusive<T>,
) -> Outcome<Vec<Entered<'a, T>>> {
    let mut all = Vec::with_capacity(objects.len());
    for (index, object) in objects.iter().enumerate() {
        let entered = value(object).enter().map_err(|error| {
            match objects[..index].iter().position(|earlier| earlier.as_ptr() == object.as_ptr()) {
                Some(first) => repeated(first, index),
                None => error,
            }
        })?;
        all.push(entered);
    }
    Ok(all)
}

fn repeated(first: usize, index: usize) -> Failure {
    let message = format!("the sequences at indices {first} and {index} are the same");
    raise("InvalidArgument", message, fields![first: first, index: index])
}

/// Reused by the calls of a thread that write into a caller's buffer.
#[derive(Default)]
pub struct Scratch {
    pub table: BlockTable,
    pub csr: CsrTable,
    pub slots: Vec<i64>,
}

thread_local! {
    static SCRATCH: std::cell::RefCell<Scratch> = std::cell::RefCell::default();
}

/// Calls `f` with the thread's buffers.
pub fn with_scratch<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with(|scratch| match scratch.try_borrow_mut() {
        Ok(mut scratch) => f(&mut scratch),
        // A finalizer that Python ran inside of a call.
        Err(_) => f(&mut Scratch::default()),
    })
}

/// Writes a table into a `[rows, width]` buffer of two dimensions. Returns the number of rows and
/// of used columns.
pub fn write_table<'s>(
    batch: &Batch,
    row: impl Iterator<Item = &'s Sequence> + Clone,
    target: &Target,
    padding: i32,
) -> Outcome<(usize, usize)> {
    with_scratch(|scratch| {
        batch.block_table(row, &mut scratch.table)?;
        let (rows, width) = (scratch.table.rows(), scratch.table.width());
        target.check_room(0, rows)?;
        target.check_room(1, width)?;
        let stride = target.shape()[1];
        for index in 0..rows {
            target.write_i32(index * stride, scratch.table.row(index));
            let rest = stride - width;
            target.write(index * stride + width, (0..rest).map(|_| i64::from(padding)));
        }
        Ok((rows, width))
    })
}

/// Writes a compressed table into three buffers. Returns the number of frames.
pub fn csr_into<'s>(
    batch: &Batch,
    row: impl Iterator<Item = &'s Sequence>,
    [indptr, indices, last]: [&Bound<'_, PyAny>; 3],
) -> Outcome<usize> {
    let indptr = Target::new(indptr, "indptr", 1)?;
    let indices = Target::new(indices, "indices", 1)?;
    let last = Target::new(last, "last_page_len", 1)?;
    with_scratch(|scratch| {
        let csr = &mut scratch.csr;
        batch.csr_table(row, csr)?;
        for (target, values) in
            [(&indptr, &csr.indptr), (&indices, &csr.indices), (&last, &csr.last_page_len)]
        {
            target.check_room(0, values.len())?;
        }
        for (target, values) in
            [(&indptr, &csr.indptr), (&indices, &csr.indices), (&last, &csr.last_page_len)]
        {
            target.write_i32(0, values);
        }
        Ok(csr.indices.len())
    })
}

/// Writes slots into a buffer from element `at` on. Returns their number.
pub fn slots_into(
    slots: impl FnOnce(&mut Vec<i64>) -> Result<(), SequenceError>,
    out: &Bound<'_, PyAny>,
    at: usize,
) -> Outcome<usize> {
    let target = Target::new(out, "out", 1)?;
    with_scratch(|scratch| {
        scratch.slots.clear();
        slots(&mut scratch.slots)?;
        target.check_room(0, at.saturating_add(scratch.slots.len()))?;
        target.check_values(scratch.slots.iter().copied().max().unwrap_or(0))?;
        target.write(at, scratch.slots.iter().copied());
        Ok(scratch.slots.len())
    })
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyBlockTable>()
}
