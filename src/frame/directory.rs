//! The directory: which segments the pool has now.
//!
//! The list is immutable once published. It is read under `epoch::pin`, replaced when the pool grows beyond its segments,
//! and freed by the epoch collector; the next one shares the segments that there were. No segment is ever dropped: a pool
//! that shrinks lowers the number of frames, and one that grows again within its segments raises it.

use super::bits::ALL;
use super::segment::{Group, Segment, Shape};
use crate::config::{FAN, FAN_LOG2};
use crate::sync::{Arc, AtomicU64, AtomicUsize, Ordering};

pub(super) struct Directory {
    pub(super) shape: Shape,
    /// Frames in use, the null block's included, at least one. The last segment may reach beyond, and after a shrink
    /// several may lie beyond.
    pub(super) frames: AtomicUsize,
    segments: Box<[Arc<Segment>]>,
}

impl Directory {
    /// A directory of `frames` frames that shares the segments of `old` and has as many new ones as are missing.
    pub(super) fn extend(shape: Shape, old: Option<&Self>, frames: usize) -> Self {
        let kept = old.map_or(&[][..], |old| &old.segments);
        let missing = frames.div_ceil(shape.segment_frames()).saturating_sub(kept.len());
        let added = (0..missing).map(|_| Arc::new(Segment::new(shape)));
        let frames = AtomicUsize::new(frames);
        Self { shape, frames, segments: kept.iter().cloned().chain(added).collect() }
    }

    /// Frames in use.
    ///
    /// Relaxed: it bounds walks and searches, and a moment's number does. Frames are taken by their bits alone, and none
    /// is free that is not in use.
    #[inline]
    pub(super) fn frames(&self) -> usize {
        self.frames.load(Ordering::Relaxed)
    }

    /// Frames that there are words for.
    pub(super) fn capacity(&self) -> usize {
        self.segments.len() * self.shape.segment_frames()
    }

    /// Leaves that hold frames in use.
    pub(super) fn leaves(&self) -> usize {
        self.frames().div_ceil(FAN)
    }

    /// Groups that hold frames in use.
    pub(super) fn groups(&self) -> usize {
        self.leaves().div_ceil(self.shape.units_in_group())
    }

    /// Groups that there are words for.
    pub(super) fn groups_ever(&self) -> usize {
        self.segments.len() * self.shape.groups_in_segment()
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

    /// Every frame of a unit that is free at this moment, wherever it is represented; if `open`, without those that
    /// allocators avoid.
    ///
    /// Acquire: whoever sees frames gone sees the passage that they went by (`transit`).
    #[inline]
    pub(super) fn free_in_unit(&self, unit: usize, open: bool) -> u64 {
        let (group, bit) = self.shape.unit_place(unit);
        let (Some(leaf), Some(group)) = (self.leaf(unit), self.group(group)) else { return 0 };
        let closed = if open { group.closed_in_unit(bit, unit) } else { 0 };
        let is_whole = group.units.load(Ordering::Acquire) >> bit & 1 == 1;
        let free = if is_whole { ALL } else { leaf.load(Ordering::Acquire) };
        free & !closed
    }

    /// The unit of a frame; the last one for a frame that the pool does not have.
    #[inline]
    pub(super) fn unit_near(&self, frame: usize) -> usize {
        frame.min(self.frames() - 1) >> FAN_LOG2
    }
}
