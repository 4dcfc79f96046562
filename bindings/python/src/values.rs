//! Buffers of the caller as values of a tier.
//!
//! A node keeps a block without the header of its value. So the block is a value itself, with a header
//! of its own: what is read is verified from the memory of the caller that stored it on.
//!
//! A thread of a tier may hold the memory of a get long after its call is over. So it holds a
//! reference to the call's [`Access`], not a buffer, and writes only while that is granted. The call
//! ends it before it releases the buffers: no byte is written afterwards, and no thread of a tier
//! ever waits for the GIL.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use kvpool_node::tier::{Landing, TierKey, TierRead, TierValue, ValueError, value_bytes, verify};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

use crate::error::{Failure, Outcome, fields, raise};

/// Bytes that are copied between two looks at the clock.
const PIECE: usize = 4 << 20;

fn refused(index: usize, message: String) -> Failure {
    raise("BufferRefused", message, fields![argument: "buffers", index: index])
}

/// Reads a list of contiguous buffers of `bytes` bytes, one for each of `count` keys.
fn buffers(
    list: &Bound<'_, PyAny>,
    count: usize,
    bytes: usize,
    writable: bool,
) -> Outcome<Vec<PyUntypedBuffer>> {
    let mut buffers = Vec::with_capacity(count);
    for (index, item) in list.try_iter()?.enumerate() {
        let item = item?;
        let buffer = PyUntypedBuffer::get(&item)
            .map_err(|error| refused(index, format!("entry {index} of the buffers: {error}")))?;
        if buffer.len_bytes() != bytes {
            let has = buffer.len_bytes();
            let message = format!("entry {index} of the buffers has {has} bytes; values have {bytes}");
            return Err(refused(index, message));
        }
        if !buffer.is_c_contiguous() {
            return Err(refused(index, format!("entry {index} of the buffers is not C-contiguous")));
        }
        if writable && buffer.readonly() {
            return Err(refused(index, format!("entry {index} of the buffers is read-only")));
        }
        buffers.push(buffer);
    }
    if buffers.len() != count {
        return Err(refused(buffers.len(), format!("{count} keys, and {} buffers", buffers.len())));
    }
    Ok(buffers)
}

/// Returns the size of the block that holds a value of this many bytes of the caller.
pub const fn block_bytes(bytes: usize) -> usize {
    value_bytes(bytes)
}

/// The deadline has passed.
struct Late;

/// Copies bytes, and looks at the clock between pieces of them.
///
/// # Safety
///
/// `from` must be valid for reads of as many bytes as `into` has.
unsafe fn copy_until(from: *const u8, into: &mut [u8], until: Instant) -> Result<(), Late> {
    for (number, piece) in into.chunks_mut(PIECE).enumerate() {
        if Instant::now() >= until {
            return Err(Late);
        }
        // SAFETY: as of this function; `into` is no memory of the caller's.
        unsafe { std::ptr::copy_nonoverlapping(from.add(number * PIECE), piece.as_mut_ptr(), piece.len()) }
    }
    Ok(())
}

/// Values to be stored.
pub struct Sources {
    buffers: Vec<PyUntypedBuffer>,
    bytes: usize,
}

impl Sources {
    /// Checks the buffers of a call with `count` keys.
    pub fn new(list: &Bound<'_, PyAny>, count: usize, bytes: usize) -> Outcome<Self> {
        Ok(Self { buffers: buffers(list, count, bytes, false)?, bytes })
    }

    /// Copies the values, and releases the buffers. Returns those that were copied by the deadline: the
    /// first ones.
    pub fn read(self, keys: &[TierKey], until: Instant) -> Vec<TierValue> {
        let value = |(key, buffer): (&TierKey, &PyUntypedBuffer)| {
            let fill = |into: &mut [u8]| {
                // SAFETY: `bytes` contiguous bytes of a buffer that is held, as was checked.
                unsafe { copy_until(buffer.buf_ptr().cast(), into, until) }
            };
            let block = |into: &mut [u8]| TierValue::write(key, &[], self.bytes, into, fill);
            // Before memory is allocated for it.
            if Instant::now() >= until {
                Err(Late)
            } else {
                TierValue::new(*key, &[], block_bytes(self.bytes), block)
            }
        };
        keys.iter().zip(&self.buffers).map_while(|one| value(one).ok()).collect()
    }
}

/// Whether the buffers of a call may still be written.
type Access = RwLock<bool>;

/// Memory for values. Dropping it ends all writes, and then releases the buffers.
pub struct Targets {
    buffers: Vec<PyUntypedBuffer>,
    bytes: usize,
    access: Arc<Access>,
}

impl Targets {
    /// Checks the buffers of a call with `count` keys.
    pub fn new(list: &Bound<'_, PyAny>, count: usize, bytes: usize) -> Outcome<Self> {
        let buffers = buffers(list, count, bytes, true)?;
        let mut begins: Vec<_> = buffers.iter().map(|buffer| buffer.buf_ptr().addr()).zip(0..).collect();
        begins.sort_unstable();
        let overlap = begins.windows(2).find(|pair| pair[1].0 - pair[0].0 < bytes);
        if let Some(&[(_, one), (_, other)]) = overlap {
            return Err(refused(other, format!("entries {one} and {other} of the buffers overlap")));
        }
        Ok(Self { buffers, bytes, access: Arc::new(RwLock::new(true)) })
    }

    /// Returns the reads of these keys.
    pub fn reads(&self, keys: &[TierKey]) -> Vec<TierRead> {
        let read = |(key, buffer): (&TierKey, &PyUntypedBuffer)| {
            let (into, bytes) = (buffer.buf_ptr().expose_provenance(), self.bytes);
            let access = self.access.clone();
            let memory = Box::new(Target { key: *key, into, bytes, access });
            TierRead { key: *key, bytes: value_bytes(block_bytes(bytes)), memory }
        };
        keys.iter().zip(&self.buffers).map(read).collect()
    }
}

impl Drop for Targets {
    fn drop(&mut self) {
        *self.access.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// Memory for one value, as the tier has it.
struct Target {
    key: TierKey,
    into: usize,
    bytes: usize,
    access: Arc<Access>,
}

impl Landing for Target {
    fn land(&mut self, value: &[u8]) -> Result<(), ValueError> {
        let block = verify(&self.key, block_bytes(self.bytes), value)?;
        let packed = verify(&self.key, self.bytes, block)?;
        let is_granted = self.access.read().unwrap_or_else(PoisonError::into_inner);
        // The call is over otherwise. The value is good: the key must not be remembered as failed.
        if *is_granted {
            let into: *mut u8 = std::ptr::with_exposed_provenance_mut(self.into);
            // SAFETY: `bytes` bytes of a writable buffer, which overlaps no other of the call. The call
            // holds it at least until this lock is released.
            unsafe { std::ptr::copy_nonoverlapping(packed.as_ptr(), into, self.bytes) };
        }
        Ok(())
    }
}
