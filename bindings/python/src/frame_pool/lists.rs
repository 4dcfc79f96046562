//! Lists of frames and hashes that cross from Python.

use kvpool::{FrameGroup, FrameKey, FramePool};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyList};

use crate::args::shown;
use crate::error::{Outcome, fields, invalid, raise};

use super::keys::FrameKeys;

/// Reads frames: a list, a buffer of u32, or any other iterable of integers.
pub fn frames_of(frames: &Bound<'_, PyAny>) -> Outcome<Vec<u32>> {
    if let Ok(list) = frames.cast::<PyList>() {
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
