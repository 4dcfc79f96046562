//! The directory: which segments the pool has now.
//!
//! Immutable once published. It is read under `epoch::pin`, replaced as a whole when the pool grows, and freed by the
//! epoch collector; the segments that the next one keeps are shared, one that it drops goes with the last directory
//! that named it, once nobody can be reading there.

use super::bits::ALL;
use super::segment::{Group, Segment, Shape};
use crate::config::{FAN, FAN_LOG2};
use crate::sync::{Arc, AtomicU64, Ordering};

pub(super) struct Directory {
    pub(super) shape: Shape,
    /// Frames in use, the null block's included. The last segment may reach beyond.
    pub(super) frames: usize,
    segments: Box<[Arc<Segment>]>,
}

impl Directory {
    /// A directory of `frames` frames that shares the segments of `old` and has as many new ones as are missing.
    pub(super) fn extend(shape: Shape, old: Option<&Self>, frames: usize) -> Self {
        let kept = old.map_or(&[][..], |old| &old.segments);
        let missing = frames.div_ceil(shape.segment_frames()) - kept.len();
        let added = (0..missing).map(|_| Arc::new(Segment::new(shape)));
        Self { shape, frames, segments: kept.iter().cloned().chain(added).collect() }
    }

    /// Leaves that hold frames in use.
    pub(super) fn leaves(&self) -> usize {
        self.frames.div_ceil(FAN)
    }

    /// Groups that hold frames in use.
    pub(super) fn groups(&self) -> usize {
        self.leaves().div_ceil(self.shape.units_in_group())
    }

    /// The leaf word of a unit, if it is part of the pool.
    #[inline]
    pub(super) fn leaf(&self, leaf: usize) -> Option<&AtomicU64> {
        let (segment, place) = self.shape.leaf_place(leaf);
        Some(&self.segments.get(segment)?.leaves[place])
    }

    /// A group, if it is part of the pool.
    #[inline]
    pub(super) fn group(&self, group: usize) -> Option<&Group> {
        let (segment, place) = self.shape.group_place(group);
        Some(&self.segments.get(segment)?.groups[place])
    }

    /// Every frame of a unit that is free at this moment, wherever it is represented; 0 for a closed unit if `open`.
    ///
    /// Acquire: whoever sees frames gone sees the passage that they went by (`transit`).
    #[inline]
    pub(super) fn free_in_unit(&self, unit: usize, open: bool) -> u64 {
        let (group, bit) = self.shape.unit_place(unit);
        let (Some(leaf), Some(group)) = (self.leaf(unit), self.group(group)) else { return 0 };
        if open && group.closed.load(Ordering::Relaxed) >> bit & 1 == 1 {
            return 0;
        }
        if group.units.load(Ordering::Acquire) >> bit & 1 == 1 { ALL } else { leaf.load(Ordering::Acquire) }
    }

    /// The unit of a frame; the last one for a frame that the pool does not have.
    #[inline]
    pub(super) fn unit_near(&self, frame: usize) -> usize {
        frame.min(self.frames - 1) >> FAN_LOG2
    }
}
