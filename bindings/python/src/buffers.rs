//! Numbers that cross as lists or buffers: token ids and frames on the way in; frames, slots and
//! lengths on the way out, written into the caller's memory.
//!
//! Memory of the caller is read and written by raw pointers for the length of one call, with the
//! buffer held. Other threads may write the same memory meanwhile, which the buffer protocol does
//! not prevent: elements are read once, and checked after they were read.

use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList};

use crate::args::shown;
use crate::error::{Failure, Outcome, fields, raise};

fn refused(what: &str, message: String) -> Failure {
    raise("BufferRefused", message, fields![argument: what])
}

/// The type of a buffer's elements, as numpy names it.
fn type_name(buffer: &PyUntypedBuffer) -> String {
    let bits = buffer.item_size() * 8;
    match ElementType::from_format(buffer.format()) {
        ElementType::SignedInteger { .. } => format!("int{bits}"),
        ElementType::UnsignedInteger { .. } => format!("uint{bits}"),
        ElementType::Float { .. } => format!("float{bits}"),
        ElementType::Bool => "bool".to_owned(),
        _ => format!("format {:?}", buffer.format().to_string_lossy()),
    }
}

/// An integer type of elements.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Int {
    I32,
    I64,
    U32,
    U64,
}

impl Int {
    fn of(buffer: &PyUntypedBuffer) -> Option<Self> {
        // Other byte orders have a format of their own.
        if buffer.format().to_bytes().first().is_some_and(|first| b">!".contains(first)) {
            return None;
        }
        match ElementType::from_format(buffer.format()) {
            ElementType::SignedInteger { bytes: 4 } => Some(Self::I32),
            ElementType::SignedInteger { bytes: 8 } => Some(Self::I64),
            ElementType::UnsignedInteger { bytes: 4 } => Some(Self::U32),
            ElementType::UnsignedInteger { bytes: 8 } => Some(Self::U64),
            _ => None,
        }
    }
}

/// Non-negative 32-bit numbers: token ids, or frames.
pub struct Numbers(pub Vec<u32>);

impl<'a, 'py> FromPyObject<'a, 'py> for Numbers {
    type Error = PyErr;

    fn extract(obj: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(numbers(&obj)?))
    }
}

/// Reads numbers from a list, another sequence, or a one-dimensional buffer of 32 or 64 bits.
pub fn numbers(obj: &Bound<'_, PyAny>) -> Outcome<Vec<u32>> {
    if let Ok(list) = obj.cast::<PyList>() {
        let mut out = Vec::with_capacity(list.len());
        for item in list.iter() {
            out.push(item_number(&item, out.len())?);
        }
        return Ok(out);
    }
    let Ok(buffer) = PyUntypedBuffer::get(obj) else {
        let items = obj.try_iter().map_err(|_| {
            let name = obj.get_type().name().map(|name| name.to_string()).unwrap_or_default();
            PyTypeError::new_err(format!("{name} is neither a list of integers nor a buffer of them"))
        })?;
        let mut out = Vec::new();
        for item in items {
            out.push(item_number(&item?, out.len())?);
        }
        return Ok(out);
    };
    let Some(int) = Int::of(&buffer) else {
        let message =
            format!("the numbers are {}; they are int32, uint32, int64 or uint64", type_name(&buffer));
        return Err(refused("numbers", message));
    };
    if buffer.dimensions() != 1 || !buffer.is_c_contiguous() {
        let shape = buffer.shape();
        return Err(refused(
            "numbers",
            format!("the numbers of shape {shape:?} are not contiguous in one dimension"),
        ));
    }
    let (data, count) = (buffer.buf_ptr(), buffer.item_count());
    let mut out = Vec::with_capacity(count);
    for index in 0..count {
        // SAFETY: the buffer holds `count` contiguous elements of this size while it lives; they
        // need not be aligned.
        let value = unsafe {
            match int {
                Int::I32 => i64::from(data.cast::<i32>().add(index).read_unaligned()),
                Int::U32 => i64::from(data.cast::<u32>().add(index).read_unaligned()),
                Int::I64 => data.cast::<i64>().add(index).read_unaligned(),
                Int::U64 => i64::try_from(data.cast::<u64>().add(index).read_unaligned()).unwrap_or(i64::MAX),
            }
        };
        out.push(u32::try_from(value).map_err(|_| out_of_range(index, value))?);
    }
    Ok(out)
}

fn item_number(item: &Bound<'_, PyAny>, index: usize) -> Outcome<u32> {
    // True and False are 1 and 0.
    if let Ok(value) = item.extract::<u32>()
        && (value > 1 || !item.is_instance_of::<PyBool>())
    {
        return Ok(value);
    }
    // A number out of range, or no number at all.
    match item.extract::<i64>() {
        Ok(value) if !item.is_instance_of::<PyBool>() => Err(out_of_range(index, value)),
        Err(error) if error.is_instance_of::<PyTypeError>(item.py()) => Err(error.into()),
        _ => Err(out_of_range(index, shown(item))),
    }
}

fn out_of_range(index: usize, value: impl std::fmt::Display) -> Failure {
    let message = format!("entry {index} is {value}; it must be from 0 to {}", u32::MAX);
    raise("InvalidArgument", message, fields![index: index])
}

/// A writable, contiguous buffer of int32 or int64 that the caller gave.
pub struct Target {
    buffer: PyUntypedBuffer,
    what: &'static str,
    wide: bool,
}

impl Target {
    /// Checks a buffer: type, contiguity, writability, and the number of dimensions.
    pub fn new(obj: &Bound<'_, PyAny>, what: &'static str, dimensions: usize) -> Outcome<Self> {
        let buffer = PyUntypedBuffer::get(obj).map_err(|error| {
            // numpy refuses to export some types by a ValueError; an object without buffers raises
            // a TypeError.
            let is_refusal = error.is_instance_of::<PyBufferError>(obj.py());
            match is_refusal {
                true => refused(what, format!("{what}: {error}")),
                false => Failure::from(error),
            }
        })?;
        let wide = match Int::of(&buffer) {
            Some(Int::I32) => false,
            Some(Int::I64) => true,
            _ => {
                return Err(refused(
                    what,
                    format!("{what} is {}; it must be int32 or int64", type_name(&buffer)),
                ));
            }
        };
        if buffer.readonly() {
            return Err(refused(what, format!("{what} is read-only")));
        }
        if buffer.dimensions() != dimensions {
            return Err(refused(
                what,
                format!("{what} has shape {:?}; it must have {dimensions} dimensions", buffer.shape()),
            ));
        }
        if !buffer.is_c_contiguous() {
            return Err(refused(what, format!("{what} is not C-contiguous")));
        }
        if buffer.buf_ptr().addr() % buffer.item_size().max(1) != 0 && buffer.item_count() > 0 {
            return Err(refused(what, format!("{what} is not aligned to its elements")));
        }
        Ok(Self { buffer, what, wide })
    }

    /// Returns the shape.
    pub fn shape(&self) -> &[usize] {
        self.buffer.shape()
    }

    /// Refuses a dimension that is smaller than needed.
    pub fn check_room(&self, dimension: usize, needed: usize) -> Outcome<()> {
        let has = self.buffer.shape()[dimension];
        if has >= needed {
            return Ok(());
        }
        let what = self.what;
        let message = format!(
            "{what} has shape {:?}; dimension {dimension} must be at least {needed}",
            self.buffer.shape()
        );
        Err(raise("BufferRefused", message, fields![argument: what, dimension: dimension, needed: needed]))
    }

    /// Writes values from element `at` on. They must fit.
    pub fn write(&self, at: usize, values: impl ExactSizeIterator<Item = i64>) {
        let end = at + values.len();
        assert!(end <= self.buffer.item_count(), "the room was checked");
        let data = self.buffer.buf_ptr();
        for (index, value) in (at..).zip(values) {
            // SAFETY: inside of a writable buffer of aligned elements of this type, which is held.
            // Every int32 that is written came from an i32: frames, lengths and slots of 31 bits.
            unsafe {
                match self.wide {
                    true => data.cast::<i64>().add(index).write(value),
                    false => data.cast::<i32>().add(index).write(value as i32),
                }
            }
        }
    }

    /// Writes 32-bit values from element `at` on. They must fit.
    pub fn write_i32(&self, at: usize, values: &[i32]) {
        if self.wide {
            return self.write(at, values.iter().map(|&value| i64::from(value)));
        }
        assert!(at + values.len() <= self.buffer.item_count(), "the room was checked");
        // SAFETY: inside of a writable buffer of aligned int32, which is held. It does not overlap
        // memory of this library.
        unsafe {
            let target = self.buffer.buf_ptr().cast::<i32>().add(at);
            std::ptr::copy_nonoverlapping(values.as_ptr(), target, values.len());
        }
    }

    /// Refuses values that an int32 cannot hold.
    pub fn check_values(&self, largest: i64) -> Outcome<()> {
        if self.wide || largest <= i64::from(i32::MAX) {
            return Ok(());
        }
        let what = self.what;
        Err(refused(what, format!("{what} is int32, and cannot hold {largest}; pass an int64 buffer")))
    }
}
