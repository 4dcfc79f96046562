//! The current segments of the pool: immutable once published, read under `epoch::pin`, replaced
//! when the pool outgrows them, and freed by the epoch collector. Segments are never dropped.

use super::bits::ALL;
use super::segment::{Group, Segment, Shape};
use crate::config::{FAN, FAN_LOG2};
use crate::sync::{Arc, AtomicU64, AtomicUsize, Ordering};

pub(super) struct Directory {
    pub(super) shape: Shape,
    /// Number of frames in use, including the null block's. A shrink leaves segments beyond it.
    pub(super) frames: AtomicUsize,
    segments: Box<[Arc<Segment>]>,
}

impl Directory {
    pub(super) fn extend(shape: Shape, old: Option<&Self>, frames: usize) -> Self {
        let kept = old.map_or(&[][..], |old| &old.segments);
        let missing = frames.div_ceil(shape.segment_frames()).saturating_sub(kept.len());
        let added = (0..missing).map(|_| Arc::new(Segment::new(shape)));
        let frames = AtomicUsize::new(frames);
        Self { shape, frames, segments: kept.iter().cloned().chain(added).collect() }
    }

    /// Relaxed: a bound for walks and searches; claims depend on bits.
    #[inline]
    pub(super) fn frames(&self) -> usize {
        self.frames.load(Ordering::Relaxed)
    }

    pub(super) fn capacity(&self) -> usize {
        self.segments.len() * self.shape.segment_frames()
    }

    pub(super) fn leaves(&self) -> usize {
        self.frames().div_ceil(FAN)
    }

    pub(super) fn groups(&self) -> usize {
        self.leaves().div_ceil(self.shape.units_in_group())
    }

    pub(super) fn groups_ever(&self) -> usize {
        self.segments.len() * self.shape.groups_in_segment()
    }

    #[inline]
    pub(super) fn leaf(&self, leaf: usize) -> Option<&AtomicU64> {
        let (segment, place) = self.shape.leaf_place(leaf);
        Some(&self.segments.get(segment)?.leaves[place])
    }

    #[inline]
    pub(super) fn group(&self, group: usize) -> Option<&Group> {
        let (segment, place) = self.shape.group_place(group);
        Some(&self.segments.get(segment)?.groups[place])
    }

    /// Returns the frames of a unit that are free in either level; with `open`, without closed
    /// ones. Acquire: a thread that sees frames gone also sees the passage (`transit`).
    #[inline]
    pub(super) fn free_in_unit(&self, unit: usize, open: bool) -> u64 {
        let (group, bit) = self.shape.unit_place(unit);
        let (Some(leaf), Some(group)) = (self.leaf(unit), self.group(group)) else { return 0 };
        let closed = if open { group.closed_in_unit(bit, unit) } else { 0 };
        let is_whole = group.units.load(Ordering::Acquire) >> bit & 1 == 1;
        let free = if is_whole { ALL } else { leaf.load(Ordering::Acquire) };
        free & !closed
    }

    #[inline]
    pub(super) fn unit_near(&self, frame: usize) -> usize {
        frame.min(self.frames() - 1) >> FAN_LOG2
    }
}
