//! A segment: the bitmap of a power-of-two number of frames. A pool grows by segments.
//!
//! ```text
//! groups   [ units: 1 0 0 1 ... | closed | transit ]     one per 64 units: 4096 frames
//!                   |
//! leaves   [ 0 ] [ 0110..1 ] ...                        one per unit: 64 frames
//! ```
//!
//! A set bit is free. A set unit bit means that the unit is wholly free, and its leaf is 0.

use super::bits::{ALL, ones};
use super::transit::Transit;
use crate::config::{FAN, FAN_LOG2};
use crate::sync::{AtomicU64, AtomicUsize, CachePadded, Ordering, fence};

/// The units of one unit word and their state, in one cache line. In each mask, a set bit means:
pub(super) struct Group {
    /// The unit is wholly free.
    pub(super) units: AtomicU64,
    /// Allocators skip the unit, in `units` and in its leaf.
    pub(super) closed: AtomicU64,
    /// The unit is [reserved for growth](super::spare).
    pub(super) reserved_for_growth: AtomicU64,
    /// First frame of an open shrink, if its unit is in this group: that unit is closed from this
    /// frame on. Otherwise [`NO_CUT`].
    pub(super) cut: AtomicUsize,
    pub(super) transit: Transit,
}

pub(super) const NO_CUT: usize = usize::MAX;

impl Group {
    /// Returns the frames that allocators skip in the unit at `bit` of the group.
    #[inline]
    pub(super) fn closed_in_unit(&self, bit: u32, unit: usize) -> u64 {
        // Relaxed: advisory; safety depends on the bits.
        if self.closed.load(Ordering::Relaxed) >> bit & 1 == 0 { 0 } else { self.cut_of(bit, unit) }
    }

    #[inline]
    pub(super) fn is_reserved_for_growth(&self, bit: u32) -> bool {
        // Relaxed: advisory, like `closed`.
        self.reserved_for_growth.load(Ordering::Relaxed) >> bit & 1 == 1
    }

    #[cold]
    fn cut_of(&self, bit: u32, unit: usize) -> u64 {
        // Acquire: pairs with the Release that closes a cut unit: the cut is visible with it.
        fence(Ordering::Acquire);
        // Acquire: pairs with the Release at the end of a shrink, which opens the unit first.
        let cut = self.cut.load(Ordering::Acquire);
        if cut >> FAN_LOG2 == unit {
            ALL & !ones(0, (cut & (FAN - 1)) as u32)
        } else if self.closed.load(Ordering::Relaxed) >> bit & 1 == 1 {
            !0
        } else {
            // The shrink ended in between. Reached by the model `shrink`.
            0
        }
    }
}

pub(super) struct Segment {
    pub(super) leaves: Box<[AtomicU64]>,
    pub(super) groups: Box<[CachePadded<Group>]>,
}

/// Shape of a pool's segments, and the arithmetic from frames to words. Words are numbered across
/// the pool: leaf `frame / FAN`, which is also the unit's number, and group `unit /
/// units_in_group`. A group never crosses a segment.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    leaves_log2: u32,
    group_log2: u32,
}

impl Shape {
    pub(super) fn new(segment_frames: usize) -> Self {
        assert!(
            segment_frames.is_power_of_two(),
            "a segment of {segment_frames} frames is not a power of two"
        );
        let frames_log2 = segment_frames.ilog2();
        assert!(frames_log2 >= FAN_LOG2, "a segment of {segment_frames} frames is smaller than one unit");
        let leaves_log2 = frames_log2 - FAN_LOG2;
        Self { leaves_log2, group_log2: leaves_log2.min(FAN_LOG2) }
    }

    pub(super) fn segment_frames(self) -> usize {
        1 << (self.leaves_log2 + FAN_LOG2)
    }

    pub(super) fn leaves_in_segment(self) -> usize {
        1 << self.leaves_log2
    }

    pub(super) fn groups_in_segment(self) -> usize {
        1 << (self.leaves_log2 - self.group_log2)
    }

    pub(super) fn units_in_group(self) -> usize {
        1 << self.group_log2
    }

    pub(super) fn group_mask(self) -> u64 {
        ones(0, 1 << self.group_log2)
    }

    #[inline]
    pub(super) fn leaf_place(self, leaf: usize) -> (usize, usize) {
        (leaf >> self.leaves_log2, leaf & (self.leaves_in_segment() - 1))
    }

    #[inline]
    pub(super) fn group_place(self, group: usize) -> (usize, usize) {
        (group >> (self.leaves_log2 - self.group_log2), group & (self.groups_in_segment() - 1))
    }

    #[inline]
    pub(super) fn unit_place(self, unit: usize) -> (usize, u32) {
        (unit >> self.group_log2, (unit & (self.units_in_group() - 1)) as u32)
    }

    #[inline]
    pub(super) fn first_unit(self, group: usize) -> usize {
        group << self.group_log2
    }
}

impl Segment {
    pub(super) fn new(shape: Shape) -> Self {
        let group = |_| {
            let transit = Transit::new();
            CachePadded::new(Group {
                units: AtomicU64::new(0),
                closed: AtomicU64::new(0),
                reserved_for_growth: AtomicU64::new(0),
                cut: AtomicUsize::new(NO_CUT),
                transit,
            })
        };
        Self {
            leaves: (0..shape.leaves_in_segment()).map(|_| AtomicU64::new(0)).collect(),
            groups: (0..shape.groups_in_segment()).map(group).collect(),
        }
    }
}
