//! The leaving blocks by sequence and place.
//!
//! ```text
//! one slot per place from a sequence's first to its last leaving block, and one more
//! waiting   . 1 1 . . 1 1 1 .   one bit per slot: its block is not placed yet
//!             chain   chain     (the last slot has no block, so that no chain crosses sequences)
//! to          7 8     2 3 4     the destination frame, once the block is placed
//! ```
//!
//! The search for neighbours reads only the bits, which fit into a cache that would not hold the
//! frame numbers. One final pass copies the destinations to the moves.

use std::ops::Range;

use crate::ids::FrameId;

use super::super::super::goal::{Move, NOWHERE};
use super::super::super::snapshot::{CACHED, FrameState};
use super::super::map::{self, Map};
use super::shelf::{Chain, Chains};

#[derive(Clone, Copy)]
struct Extent {
    first: u32,
    last: u32,
    base: u32,
    len: u32,
}

pub(super) struct Slots {
    /// By sequence; the last one is that of evictable blocks.
    extents: Vec<Extent>,
    waiting: Vec<u64>,
    to: Vec<u32>,
}

#[inline]
const fn index_of(sequence: usize, extents: usize) -> usize {
    if sequence == CACHED as usize {
        extents - 1
    } else if sequence < extents - 1 {
        sequence
    } else {
        extents
    }
}

impl Slots {
    /// Returns the slots, and the indices of the moves without a slot: their blocks have no
    /// sequence, or a place that another block occupies (a snapshot is not atomic), or their
    /// sequences have so many gaps that the slots would outnumber the pool's frames.
    pub(super) fn of(map: &Map<'_>, keys: &[u64]) -> (Self, Vec<u32>) {
        let empty = Extent { first: u32::MAX, last: 0, base: 0, len: 0 };
        let count = map.snapshot.sequences().len() + 1;
        let mut extents = vec![empty; count];
        for key in keys {
            let (sequence, place) = FrameState::parts(*key);
            if let Some(extent) = extents.get_mut(index_of(sequence, count)) {
                extent.first = extent.first.min(place);
                extent.last = extent.last.max(place);
            }
        }
        let (mut total, limit) = (0, map.len() * 2);
        for extent in &mut extents {
            let len = if extent.first <= extent.last { extent.last - extent.first + 1 } else { 0 };
            if len > 0 && total + len as usize <= limit {
                (extent.base, extent.len) = (total as u32, len);
                total += len as usize + 1;
            }
        }
        let mut slots = Self { extents, waiting: vec![0; total.div_ceil(64)], to: vec![0; total] };
        let mut loose = Vec::new();
        for (index, key) in keys.iter().enumerate() {
            match slots.at(*key) {
                Some(at) if !map::has(&slots.waiting, at as u32) => {
                    slots.waiting[at / 64] |= 1 << (at % 64);
                }
                _ => loose.push(index as u32),
            }
        }
        (slots, loose)
    }

    #[inline]
    fn at(&self, key: u64) -> Option<usize> {
        let (sequence, place) = FrameState::parts(key);
        let extent = self.extents.get(index_of(sequence, self.extents.len()))?;
        let at = place.wrapping_sub(extent.first);
        if at < extent.len { Some((extent.base + at) as usize) } else { None }
    }

    #[inline]
    pub(super) fn find(&self, key: u64) -> Option<usize> {
        self.at(key).filter(|at| map::has(&self.waiting, *at as u32))
    }

    #[inline]
    pub(super) fn chain_from(&self, at: usize, limit: u32) -> Range<usize> {
        let mut len = 0;
        while len < limit && (at + len as usize) / 64 < self.waiting.len() {
            let next = at + len as usize;
            let ones = (self.waiting[next / 64] >> (next % 64)).trailing_ones();
            len += ones;
            if ones == 0 || !(next + ones as usize).is_multiple_of(64) {
                break;
            }
        }
        at..at + len.min(limit) as usize
    }

    #[inline]
    pub(super) fn chain_up_to(&self, at: usize, limit: u32) -> Range<usize> {
        let end = at + 1;
        let mut len = 0;
        while len < limit && end > len as usize {
            let last = end - 1 - len as usize;
            let ones = (self.waiting[last / 64] << (63 - last % 64)).leading_ones();
            len += ones;
            if ones as usize != last % 64 + 1 {
                break;
            }
        }
        end - len.min(limit) as usize..end
    }

    #[inline]
    pub(super) fn put(&mut self, piece: Range<usize>, start: u32) {
        for (slot, to) in piece.zip(start..) {
            self.waiting[slot / 64] &= !(1 << (slot % 64));
            self.to[slot] = to;
        }
    }

    pub(super) fn chains(&self) -> Chains {
        let mut chains = Chains::with_capacity(map::runs(&self.waiting));
        let mut extents = self.extents.iter().enumerate().filter(|(_, extent)| extent.len > 0).peekable();
        map::each_run(&self.waiting, |start, end| {
            while extents.peek().is_some_and(|(_, extent)| extent.base + extent.len <= start) {
                extents.next();
            }
            let (index, extent) = extents.peek().expect("every slot belongs to a sequence");
            let sequence = if index + 1 == self.extents.len() { CACHED as usize } else { *index };
            let key = FrameState::key_of(sequence, extent.first + (start - extent.base));
            chains.put(Chain::new(key, start..end));
        });
        chains
    }

    /// Copies the destinations to the moves that have none yet. Returns the number of moved blocks
    /// that follow the same predecessor in memory before and after.
    pub(super) fn write(&self, map: &Map<'_>, leaving: &[u64], moves: &mut [Move], keys: &[u64]) -> usize {
        let mut together = 0;
        // The previous move: the predecessor's, if any, except for a region's first block.
        let (mut last, mut last_key) = (Move { from: NOWHERE, to: NOWHERE }, FrameState::FREE.key());
        for (one, &key) in moves.iter_mut().zip(keys) {
            let at = self.at(key);
            if one.to == NOWHERE {
                one.to = FrameId(self.to[at.expect("a block without a slot is placed already")]);
            }
            let follows = |last: Move| last.to.0.wrapping_add(1) == one.to.0;
            together += usize::from(if last.from.0.wrapping_add(1) == one.from.0 {
                last_key + 1 == key && follows(last)
            } else {
                let before = FrameId(one.from.0.wrapping_sub(1));
                let is_next =
                    one.from.0 > 0 && map::has(leaving, before.0) && map.state(before.0).key() + 1 == key;
                is_next
                    && self
                        .at(key - 1)
                        .is_some_and(|at| follows(Move { from: before, to: FrameId(self.to[at]) }))
            });
            (last, last_key) = (*one, key);
        }
        together
    }
}
