//! Lists of frames and hashes that cross from Python.

use kvpool::{FrameGroup, FrameKey, FramePool};
use pyo3::buffer::PyBuffer;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::{PyBool, PyBytes, PyInt, PyList};

use crate::args::shown;
use crate::error::{Outcome, fields, invalid, raise};

use super::keys::FrameKeys;

/// Reads frames: a list, a buffer of u32, or any other iterable of integers.
pub fn frames_of(frames: &Bound<'_, PyAny>) -> Outcome<Vec<u32>> {
    if let Ok(list) = frames.cast::<PyList>() {
        if let Some(numbers) = plain_numbers(list) {
            return Ok(numbers);
        }
        return list.iter().enumerate().map(|(index, frame)| frame_of(index, &frame)).collect();
    }
    if let Ok(buffer) = PyBuffer::<u32>::get(frames) {
        if buffer.dimensions() != 1 {
            let message = format!("the frames have shape {:?}; they have one dimension", buffer.shape());
            return Err(raise("BufferRefused", message, fields![argument: "frames"]));
        }
        return Ok(buffer.to_vec(frames.py())?);
    }
    let mut numbers = Vec::new();
    for (index, frame) in frames.try_iter()?.enumerate() {
        numbers.push(frame_of(index, &frame?)?);
    }
    Ok(numbers)
}

/// Reads a list of nothing but integers of 32 bits; `None`: another list, or a wrong one.
///
/// The general way holds a reference on each item and asks for its type twice.
fn plain_numbers(list: &Bound<'_, PyList>) -> Option<Vec<u32>> {
    let number = |index| {
        // SAFETY: the interpreter is attached, and the list is a list. An index beyond its end, or
        // another kind of item, is an error or `None` here. The item is borrowed from the list, which
        // changes only if Python runs, or without a GIL another thread: the critical section excludes
        // both, since a number of the exact type is read without running Python.
        unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), index);
            if item.is_null() || ffi::PyLong_CheckExact(item) == 0 {
                None
            } else {
                Some(ffi::PyLong_AsLong(item))
            }
        }
    };
    let numbers: Option<Vec<u32>> = with_critical_section(list, || {
        (0..list.len()).map(|index| u32::try_from(number(index as ffi::Py_ssize_t)?).ok()).collect()
    });
    if numbers.is_none() {
        // The general way says what is wrong.
        drop(PyErr::take(list.py()));
    }
    numbers
}

type Part = Box<[Py<PyInt>]>;

/// The numbers of a pool's frames as Python objects: a list of frames is made of them, as Python has
/// the small integers. Each part is made when it is first needed.
pub struct Numbers(Box<[PyOnceLock<Part>]>);

/// Numbers that are made together, which takes some microseconds.
const PART: usize = 64;

impl Numbers {
    pub fn new(frames_max: usize) -> Self {
        Self((0..frames_max.div_ceil(PART)).map(|_| PyOnceLock::new()).collect())
    }

    /// Makes a list of frames.
    pub fn list<'py>(&self, py: Python<'py>, frames: &[u32]) -> PyResult<Bound<'py, PyList>> {
        let number =
            |frame: u32| frame.into_pyobject(py).map(Bound::unbind).unwrap_or_else(|never| match never {});
        let numbers = frames.iter().map(|&frame| {
            let at = frame as usize;
            let Some(part) = self.0.get(at / PART) else { return number(frame) };
            let first = frame - (at % PART) as u32;
            part.get_or_init(py, || (first..).take(PART).map(number).collect())[at % PART].clone_ref(py)
        });
        PyList::new(py, numbers)
    }
}

fn frame_of(index: usize, frame: &Bound<'_, PyAny>) -> Outcome<u32> {
    match frame.extract() {
        // True and False are 1 and 0.
        Ok(number) if number > 1 || !frame.is_instance_of::<PyBool>() => Ok(number),
        _ => Err(invalid(format!("entry {index}: {} is no frame number", shown(frame)))),
    }
}

/// Writes frames into a buffer that [`writable`] returned, which has room for them.
pub fn write_frames(buffer: &PyBuffer<u32>, frames: &[u32]) {
    let place = buffer.buf_ptr().cast::<u32>();
    // SAFETY: `writable` checked that the buffer is contiguous, writable and of u32; it cannot be
    // resized or freed while it is held. Its element type has no invalid values; a thread that writes
    // to it at the same time makes its own contents undefined in value only, as with any extension
    // that fills buffers.
    unsafe { std::ptr::copy_nonoverlapping(frames.as_ptr(), place, frames.len().min(buffer.item_count())) };
}

/// Checks a buffer of u32 that is to be filled, and holds it.
pub fn writable(buffer: &Bound<'_, PyAny>) -> Outcome<PyBuffer<u32>> {
    let refuse = |why: &str| raise("BufferRefused", format!("the buffer for frames {why}"), fields![]);
    let buffer = PyBuffer::<u32>::get(buffer).map_err(|_| refuse("is not a buffer of u32"))?;
    match (buffer.readonly(), buffer.is_c_contiguous()) {
        (true, _) => Err(refuse("is read-only")),
        (_, false) => Err(refuse("is not contiguous")),
        _ => Ok(buffer),
    }
}

/// Reads keys: `FrameKeys` of the pool, or a sequence of hashes in a group.
pub fn keys_of(pool: &FramePool, hashes: &Bound<'_, PyAny>, group: u32) -> Outcome<Vec<FrameKey>> {
    if let Ok(keys) = hashes.cast::<FrameKeys>() {
        return Ok(keys.get().keys().to_vec());
    }
    let mut keys = Vec::new();
    for (index, hash) in hashes.try_iter()?.enumerate() {
        let hash = hash?;
        let bytes = hash.cast::<PyBytes>().map_err(|_| {
            invalid(format!("entry {index}: a hash is an object of type bytes, and not {}", hash.get_type()))
        })?;
        pool.keys(FrameGroup(group), [bytes.as_bytes()], &mut keys).map_err(|error| match error {
            kvpool::FrameError::EmptyHash { .. } => kvpool::FrameError::EmptyHash { index },
            error => error,
        })?;
    }
    Ok(keys)
}
