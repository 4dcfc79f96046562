//! Keys: foreign hashes as a pool knows them, derived once for several calls.

use std::sync::OnceLock;

use kvpool::{FrameError, FrameGroup, FrameKey, FramePool};
use pyo3::prelude::*;

/// Group of the keys by which frames are kept.
const OWN_GROUP: FrameGroup = FrameGroup(u32::MAX);

/// Frames whose keys are derived together, which takes some microseconds.
const PART: usize = 64;

/// The key of each frame by which the frame is kept, derived when it is first needed.
pub struct OwnKeys(Box<[OnceLock<Box<[FrameKey]>>]>);

impl OwnKeys {
    pub fn new(frames_max: usize) -> Self {
        Self((0..frames_max.div_ceil(PART)).map(|_| OnceLock::new()).collect())
    }

    pub fn of(&self, pool: &FramePool, frames: &[u32]) -> Result<Vec<(u32, FrameKey)>, FrameError> {
        let own = |frame: u32| pool.key(OWN_GROUP, &frame.to_le_bytes());
        let key = |frame: u32| {
            let at = frame as usize;
            let Some(part) = self.0.get(at / PART) else { return own(frame) };
            let first = frame - (at % PART) as u32;
            Ok(part.get_or_init(|| (first..).take(PART).flat_map(own).collect())[at % PART])
        };
        frames.iter().map(|&frame| Ok((frame, key(frame)?))).collect()
    }
}

/// Keys of a pool, made by `FramePool.keys`. They are accepted wherever hashes are.
#[pyclass(frozen, module = "kvpool")]
pub struct FrameKeys(Vec<FrameKey>);

impl FrameKeys {
    pub fn new(keys: Vec<FrameKey>) -> Self {
        Self(keys)
    }

    pub fn keys(&self) -> &[FrameKey] {
        &self.0
    }
}

#[pymethods]
impl FrameKeys {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        format!("FrameKeys({} keys)", self.0.len())
    }
}
