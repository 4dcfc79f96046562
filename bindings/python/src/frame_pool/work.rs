//! What calls do with their lists of frames.

use kvpool::{FrameError, FramePool};
use pyo3::prelude::*;

/// Number of frames from which on a call releases the GIL.
///
/// Measured with `FramePool.keep` on Python 3.11: beside a thread that runs Python, a call that
/// releases the GIL gets it back after 5.2 ms, Python's switch interval, however short its work is.
/// A call that keeps the GIL lets the other thread wait for the work: 18 us for 512 frames, 0.14 ms
/// for 4,096, 0.6 ms for 16,384, 2.4 ms for 65,536. Beside no other thread, a release costs nothing
/// that could be measured. So a call that keeps
/// or frees frames has the GIL for about a millisecond at most. Calls that look up keys or evict do
/// several times as much for a frame: see [`searching`].
const DETACHED_FRAMES: usize = 32_768;

/// Does work on `frames` frames, without the GIL if they are many.
pub fn detached<R: Send>(py: Python<'_>, frames: usize, work: impl FnOnce() -> R + Send) -> R {
    if frames < DETACHED_FRAMES { work() } else { py.detach(work) }
}

/// Like [`detached`], for work that looks up keys or evicts.
pub fn searching<R: Send>(py: Python<'_>, frames: usize, work: impl FnOnce() -> R + Send) -> R {
    detached(py, frames.saturating_mul(8), work)
}

/// Drops a reference on each frame, and uncaches it.
pub fn discard(pool: &FramePool, frames: &[u32]) -> Result<(), FrameError> {
    // The usual case: nothing to forget.
    if frames.iter().all(|&frame| pool.is_writable(frame) == Ok(true)) {
        return pool.free(frames);
    }
    let mut references = Vec::with_capacity(frames.len());
    pool.references(frames, &mut references)?;
    if are_enough(frames, &references) {
        pool.uncache(frames)?;
    }
    // A frame without references is refused by name.
    pool.free(frames)
}

/// Takes a reference on each frame with its contents, whether it is in use, cached or free.
pub fn take(pool: &FramePool, frames: &[u32]) -> Result<(), FrameError> {
    if pool.share(frames).is_ok() {
        return Ok(());
    }
    for (index, &frame) in frames.iter().enumerate() {
        let taken = pool.share(&[frame]).or_else(|_| pool.claim(&[frame]));
        if let Err(error) = taken {
            // As before: those that were free are free again.
            pool.free(&frames[..index])?;
            return Err(at(error, index));
        }
    }
    Ok(())
}

/// Returns whether each frame has a reference for each time that it is named.
fn are_enough(frames: &[u32], references: &[u32]) -> bool {
    if frames.is_sorted_by(|a, b| a < b) || frames.is_sorted_by(|a, b| a > b) {
        return !references.contains(&0);
    }
    let mut counted: Vec<(u32, u32)> = frames.iter().copied().zip(references.iter().copied()).collect();
    counted.sort_unstable();
    counted.chunk_by(|a, b| a.0 == b.0).all(|same| same.len() <= same[0].1 as usize)
}

/// The error of a single frame, as that of the list which it is in.
fn at(error: FrameError, position: usize) -> FrameError {
    use FrameError as E;
    match error {
        E::OutOfRange { frame, frames, .. } => E::OutOfRange { index: position, frame, frames },
        E::Null { frame, .. } => E::Null { index: position, frame },
        E::Unavailable { frame, .. } => E::Unavailable { index: position, frame },
        E::InUse { frame, references, .. } => E::InUse { index: position, frame, references },
        error => error,
    }
}
