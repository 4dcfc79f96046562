//! The planner's view of every frame of a pool at one moment. The bits of a frame's state:
//!
//! | bits | field | meaning |
//! |---|---|---|
//! | 0..30 | place | the block's position in its sequence's list; 0 without a sequence |
//! | 30..61 | sequence | index into the snapshot's sequences; all ones for none |
//! | 61..64 | kind | [`FrameKind`] |
//!
//! The lower 61 bits are the *key*. Frames `f` and `f + 1` are *linked* if the second key is the
//! first plus one: they are neighbours both in a sequence and in memory. Frames without a sequence
//! are not linked, because [`PLACE_MAX`] keeps the last places unused. Evictable blocks in adjacent
//! frames are, since most come from one sequence: their sequence is a number above all others, and
//! their place is their frame.
//!
//! The *ends* are the frames of the last blocks of growing lists. The frame after an end is the
//! list's *room* if it is free: the next block continues the run there.
//!
//! A snapshot of a pool in use is not atomic: a block may appear twice, or not at all.

use std::fmt;

use crate::config::FAN;
use crate::frame::outside_of_runs;
use crate::ids::{FrameId, Order, Run, SequenceId};

use super::goal::{Move, Plan};

const PLACE_BITS: u32 = 30;
const SEQUENCE_BITS: u32 = 31;
pub(super) const KIND_SHIFT: u32 = PLACE_BITS + SEQUENCE_BITS;
const NO_SEQUENCE: u32 = (1 << SEQUENCE_BITS) - 1;

/// The sequence of evictable blocks, whose places are their frames.
pub(super) const CACHED: u32 = NO_SEQUENCE - 1;

const _: () = assert!(KIND_SHIFT + 3 == u64::BITS);
const _: () = assert!(crate::ids::FRAMES_MAX <= PLACE_MAX as usize);

/// The last place in a sequence that a frame's state can represent.
pub const PLACE_MAX: u32 = (1 << PLACE_BITS) - 2;

/// What the planner may do with a frame.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum FrameKind {
    /// Free in the bitmaps: a block can move here.
    Free = 0,
    /// Free, but in a magazine or retired: no block can move here, and none has to leave.
    Away = 1,
    /// Owned, sealed and unpinned: its block can move.
    Movable = 2,
    /// Open, pinned or already moving, or the null block's: its block stays.
    Fixed = 3,
    /// Free in the bitmaps, in a unit reserved for growth: a block moves here only for a goal at a
    /// given place ([`Goal::Run`](super::Goal::Run) and [`Goal::Empty`](super::Goal::Empty)).
    ReservedForGrowth = 5,
    /// Evictable: its block can move, or be dropped by an allocation.
    Evictable = 6,
}

impl FrameKind {
    /// Returns whether the frame is in the bitmaps.
    pub const fn is_free(self) -> bool {
        matches!(self, Self::Free | Self::ReservedForGrowth)
    }

    /// Returns whether the frame's block can move.
    pub const fn can_move(self) -> bool {
        matches!(self, Self::Movable | Self::Evictable)
    }
}

/// A frame's [`FrameKind`], and the sequence and place of its block, if any.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct FrameState(u64);

impl FrameState {
    /// A free frame.
    pub const FREE: Self = Self::new(FrameKind::Free, None);
    /// A frame that is free but cannot be a destination.
    pub const AWAY: Self = Self::new(FrameKind::Away, None);
    /// A free frame in a unit reserved for growth.
    pub const RESERVED_FOR_GROWTH: Self = Self::new(FrameKind::ReservedForGrowth, None);

    /// Returns the state of `frame` that holds an evictable block.
    pub const fn evictable(frame: FrameId) -> Self {
        Self((FrameKind::Evictable as u64) << KIND_SHIFT | Self::key_of(CACHED as usize, frame.0))
    }

    /// Returns the state of a frame of `kind` that holds `block`, if any: the sequence's index in
    /// the snapshot, and the place in the sequence. For a shared block, name any of its sequences.
    /// Free and evictable frames, sequences from 2^31 - 2 on, and places beyond [`PLACE_MAX`] count
    /// as without a sequence.
    #[inline]
    pub const fn new(kind: FrameKind, block: Option<(u32, u32)>) -> Self {
        let is_owned = matches!(kind, FrameKind::Movable | FrameKind::Fixed);
        let key = match block {
            Some((sequence, place)) if is_owned && place <= PLACE_MAX && sequence < CACHED => {
                Self::key_of(sequence as usize, place)
            }
            _ => Self::key_of(NO_SEQUENCE as usize, 0),
        };
        Self((kind as u64) << KIND_SHIFT | key)
    }

    /// Returns the kind.
    #[inline]
    pub const fn kind(self) -> FrameKind {
        match self.0 >> KIND_SHIFT {
            0 => FrameKind::Free,
            1 => FrameKind::Away,
            2 => FrameKind::Movable,
            5 => FrameKind::ReservedForGrowth,
            6 => FrameKind::Evictable,
            _ => FrameKind::Fixed,
        }
    }

    /// Returns the block as its sequence's index in the snapshot and its place in that sequence.
    #[inline]
    pub const fn block(self) -> Option<(u32, u32)> {
        let sequence = (self.key() >> PLACE_BITS) as u32;
        if sequence >= CACHED { None } else { Some((sequence, self.0 as u32 & ((1 << PLACE_BITS) - 1))) }
    }

    #[inline]
    pub(super) const fn bits(self) -> u64 {
        self.0
    }

    #[inline]
    pub(super) const fn key(self) -> u64 {
        self.0 & !(7 << KIND_SHIFT)
    }

    #[inline]
    pub(super) const fn key_of(sequence: usize, place: u32) -> u64 {
        (sequence as u64) << PLACE_BITS | place as u64
    }

    /// Returns the sequence and place of a key, which need not be the key of any frame.
    #[inline]
    pub(super) const fn parts(key: u64) -> (usize, u32) {
        ((key >> PLACE_BITS) as usize, key as u32 & ((1 << PLACE_BITS) - 1))
    }

    /// Returns whether the frame after this one holds the next block of the same sequence.
    #[inline]
    pub(super) const fn is_linked_to(self, next: Self) -> bool {
        self.key() + 1 == next.key()
    }
}

impl fmt::Debug for FrameState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.block() {
            Some((sequence, place)) => write!(f, "{:?}({sequence}:{place})", self.kind()),
            None => write!(f, "{:?}", self.kind()),
        }
    }
}

/// The state of every frame of a pool at one moment: the input of the planner and of displays.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    order: Order,
    frames: Vec<FrameState>,
    sequences: Vec<SequenceId>,
    /// One bit per frame with the last block of a growing list; empty if there is none.
    ends: Vec<u64>,
    dropped: Vec<u64>,
    /// Number of null blocks (0 or 1), and of frames in the reserve.
    null: usize,
    reserved: usize,
}

impl Snapshot {
    /// Returns a snapshot of `frames`, indexed by number. The pool measures fragmentation at
    /// `order`. Frames name sequences by their index in `sequences`; an index past its end counts
    /// as a sequence in every measure here, but the planner ignores its neighbours.
    pub const fn new(order: Order, frames: Vec<FrameState>, sequences: Vec<SequenceId>) -> Self {
        Self { order, frames, sequences, ends: Vec::new(), dropped: Vec::new(), null: 0, reserved: 0 }
    }

    /// Excludes a null block and `reserved` blocks of the reserve, whose frames are
    /// [away](FrameKind::Away), from the measures. Both are in front, where they leave no room for
    /// a run.
    pub const fn setting_aside(mut self, has_null_block: bool, reserved: usize) -> Self {
        (self.null, self.reserved) = (has_null_block as usize, reserved);
        self
    }

    /// Sets the ends: the last frames of growing lists. Ignores frames outside of the snapshot.
    pub fn with_ends(mut self, ends: impl IntoIterator<Item = FrameId>) -> Self {
        self.ends = vec![0; self.frames.len().div_ceil(64)];
        for end in ends.into_iter().filter(|end| end.index() < self.frames.len()) {
            self.ends[end.index() / 64] |= 1 << (end.index() % 64);
        }
        self
    }

    /// Returns the snapshot as if the evictable blocks whose frames `can_go` accepts were dropped.
    /// Frames of reserved units are then reserved for growth. The others become `staying`, if
    /// given.
    pub(super) fn without_evictable(
        mut self,
        can_go: impl Fn(FrameId) -> bool,
        staying: Option<FrameState>,
    ) -> Self {
        self.dropped = vec![0; self.frames.len().div_ceil(64)];
        for (unit, (frames, dropped)) in self.frames.chunks_mut(FAN).zip(&mut self.dropped).enumerate() {
            let is_reserved_for_growth = frames.contains(&FrameState::RESERVED_FOR_GROWTH);
            for (at, state) in frames.iter_mut().enumerate() {
                if state.kind() != FrameKind::Evictable {
                    continue;
                }
                if can_go(FrameId((unit * FAN + at) as u32)) {
                    *dropped |= 1 << at;
                    *state = if is_reserved_for_growth {
                        FrameState::RESERVED_FOR_GROWTH
                    } else {
                        FrameState::FREE
                    };
                } else {
                    *state = staying.unwrap_or(*state);
                }
            }
        }
        self
    }

    /// Returns one bit per frame whose evictable block counts as dropped, or nothing if none does.
    /// Blocks can move there, but lists do not grow there.
    pub(super) fn dropped(&self) -> &[u64] {
        &self.dropped
    }

    /// Returns one bit per end, or nothing if there is none.
    pub(super) fn ends(&self) -> &[u64] {
        &self.ends
    }

    /// Returns the number of rooms: lists that can grow into the frame after their last block.
    pub fn rooms(&self) -> usize {
        let is_end =
            |frame: usize| self.ends.get(frame / 64).is_some_and(|word| word >> (frame % 64) & 1 == 1);
        let is_free = |frame: usize| self.frames.get(frame).is_some_and(|state| state.kind().is_free());
        (0..self.frames.len()).filter(|&frame| is_end(frame) && is_free(frame + 1)).count()
    }

    /// Returns the order at which the pool measures fragmentation.
    pub const fn order(&self) -> Order {
        self.order
    }

    /// Returns the state of every frame, indexed by number.
    pub fn frames(&self) -> &[FrameState] {
        &self.frames
    }

    /// Returns the sequences that frames name by index.
    pub fn sequences(&self) -> &[SequenceId] {
        &self.sequences
    }

    /// Returns the number of frames of `kind`.
    pub fn count(&self, kind: FrameKind) -> usize {
        self.frames.iter().filter(|state| state.kind() == kind).count()
    }

    /// Returns the number of aligned runs of `2^order` frames that are entirely free.
    pub fn free_runs(&self, order: Order) -> usize {
        self.runs_of(order, FrameKind::is_free)
    }

    fn runs_of(&self, order: Order, which: impl Fn(FrameKind) -> bool) -> usize {
        if order.0 >= usize::BITS as u8 {
            return 0;
        }
        let is_of = |run: &&[FrameState]| run.iter().all(|state| which(state.kind()));
        self.frames.chunks_exact(order.frames()).filter(is_of).count()
    }

    /// Returns the fragmentation rate at `order`, 0 to 1: one minus the number of free aligned runs
    /// of `2^order` frames, divided by the number that the same free frames would form under the
    /// best placement of all blocks; 0 if no such run is possible. [Away](FrameKind::Away) frames
    /// count as free, but are in no run; frames of the reserve do not count.
    pub fn fragmentation(&self, order: Order) -> f64 {
        self.outside_of_runs(order, FrameKind::is_free)
    }

    /// Returns [`fragmentation`](Self::fragmentation) as if all evictable blocks had been dropped:
    /// the share of the runs that no eviction can provide, but moves could.
    pub fn available_fragmentation(&self, order: Order) -> f64 {
        self.outside_of_runs(order, |kind| kind.is_free() || kind == FrameKind::Evictable)
    }

    fn outside_of_runs(&self, order: Order, which: impl Fn(FrameKind) -> bool + Copy) -> f64 {
        let is_unowned = |kind| kind == FrameKind::Away || which(kind);
        let unowned = self.frames.iter().filter(|state| is_unowned(state.kind())).count();
        let set_aside = self.null + self.reserved;
        let free = unowned.saturating_sub(self.reserved);
        outside_of_runs(self.runs_of(order, which), self.frames.len(), set_aside, free, order)
    }

    /// Returns the longest run of free frames, at any alignment; of equal ones, the first.
    pub fn longest_free_run(&self) -> Option<Run> {
        let mut longest: Option<Run> = None;
        let mut at = 0;
        for piece in self.frames.chunk_by(|a, b| a.kind().is_free() == b.kind().is_free()) {
            let len = piece.len() as u32;
            if piece[0].kind().is_free() && longest.is_none_or(|run| run.len < len) {
                longest = Some(Run { start: FrameId(at), len });
            }
            at += len;
        }
        longest
    }

    /// Returns the number of neighbouring frames that hold neighbouring blocks of one sequence, or
    /// evictable blocks that have been neighbours since the snapshot was taken.
    pub fn links(&self) -> usize {
        self.frames.windows(2).filter(|pair| pair[0].is_linked_to(pair[1])).count()
    }

    /// Returns the mean length of the runs that sequences occupy, in frames; 0 if no frame names a
    /// sequence. One descriptor of a transfer moves one such run. A shared block counts once.
    pub fn mean_sequence_run(&self) -> f64 {
        let frames = self.frames.iter().filter(|state| state.block().is_some()).count();
        let is_link = |pair: &&[FrameState]| pair[0].is_linked_to(pair[1]) && pair[0].block().is_some();
        let links = self.frames.windows(2).filter(is_link).count();
        if frames == 0 { 0.0 } else { frames as f64 / (frames - links) as f64 }
    }

    /// Changes the snapshot as if all moves of the plan had succeeded, as
    /// [`apply_moves`](Self::apply_moves) does.
    pub fn apply(&mut self, plan: &Plan) {
        self.apply_moves(&plan.moves);
    }

    /// Changes the snapshot as if these moves had been made in order; vacated frames become free.
    ///
    /// # Panics
    /// If the source of a move cannot move, or its destination is not free. No plan for this
    /// snapshot contains such a move.
    pub fn apply_moves(&mut self, moves: &[Move]) {
        for &Move { from, to } in moves {
            let (source, target) = (self.frames[from.index()], self.frames[to.index()]);
            assert!(source.kind().can_move(), "frame {from} cannot move to {to}: {source:?}");
            assert!(target.kind().is_free(), "frame {to} cannot take the block of {from}: {target:?}");
            self.frames[to.index()] = source;
            self.frames[from.index()] = FrameState::FREE;
            if let Some(word) = self.ends.get_mut(from.index() / 64) {
                let is_end = *word >> (from.index() % 64) & 1;
                *word &= !(1 << (from.index() % 64));
                self.ends[to.index() / 64] |= is_end << (to.index() % 64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(text: &str) -> Snapshot {
        let frames = text.chars().map(|c| match c {
            '.' => FrameState::FREE,
            'a' => FrameState::AWAY,
            'm' => FrameState::new(FrameKind::Movable, None),
            's' => FrameState::RESERVED_FOR_GROWTH,
            'e' => FrameState::new(FrameKind::Evictable, None),
            _ => FrameState::new(FrameKind::Fixed, None),
        });
        Snapshot::new(Order(2), frames.collect(), vec![SequenceId(0); 2])
    }

    #[test]
    fn a_state_says_what_it_was_made_of() {
        for kind in [FrameKind::Free, FrameKind::Away, FrameKind::ReservedForGrowth, FrameKind::Evictable] {
            let state = FrameState::new(kind, Some((7, 7)));
            assert_eq!((state.kind(), state.block()), (kind, None));
        }
        for kind in [FrameKind::Movable, FrameKind::Fixed] {
            for block in [None, Some((0, 0)), Some((7, PLACE_MAX)), Some((CACHED - 1, 3))] {
                let state = FrameState::new(kind, block);
                assert_eq!((state.kind(), state.block()), (kind, block));
            }
            assert_eq!(FrameState::new(kind, Some((1, PLACE_MAX + 1))).block(), None);
            assert_eq!(FrameState::new(kind, Some((CACHED, 0))).block(), None);
        }
        let cached = FrameState::evictable(FrameId(5));
        assert_eq!((cached.kind(), cached.block()), (FrameKind::Evictable, None));
        assert_eq!(size_of::<FrameState>(), 8);
    }

    #[test]
    fn only_the_next_block_of_the_same_sequence_is_linked() {
        let of = |sequence, place| FrameState::new(FrameKind::Movable, Some((sequence, place)));
        let fixed = FrameState::new(FrameKind::Fixed, Some((0, 1)));
        assert!(of(0, 0).is_linked_to(of(0, 1)) && of(0, 0).is_linked_to(fixed));
        assert!(!of(0, 1).is_linked_to(of(0, 0)) && !of(0, 1).is_linked_to(of(1, 2)));
        assert!(!of(0, 0).is_linked_to(of(0, 0)) && !of(0, PLACE_MAX).is_linked_to(of(1, 0)));
        let none = FrameState::new(FrameKind::Movable, None);
        assert!(!none.is_linked_to(none) && !none.is_linked_to(of(0, 0)));
        assert!(!of(CACHED - 1, PLACE_MAX).is_linked_to(FrameState::FREE));
        let cached = |frame| FrameState::evictable(FrameId(frame));
        assert!(cached(4).is_linked_to(cached(5)) && !cached(4).is_linked_to(cached(6)));
        assert!(!of(CACHED - 1, PLACE_MAX).is_linked_to(cached(0)) && !cached(0).is_linked_to(none));
    }

    #[test]
    fn fragmentation_is_the_share_of_runs_that_are_missing() {
        // One run of 4, and 10 free frames; the run across the border at 8 is not aligned.
        let text = "....mm..m.fa..";
        assert_eq!(snapshot(text).free_runs(Order(2)), 1);
        assert_eq!(snapshot(text).count(FrameKind::Free), 9);
        assert_eq!(snapshot(text).fragmentation(Order(2)), 1.0 / 2.0);
        assert_eq!(snapshot(text).fragmentation(Order(0)), 1.0 - 9.0 / 10.0);
        assert_eq!(snapshot(text).fragmentation(Order(200)), 0.0, "no pool has a run of this order");
        assert_eq!(snapshot("....f").fragmentation(Order(2)), 0.0);
        assert_eq!(snapshot("f....").fragmentation(Order(2)), 1.0, "the first could move away");
        assert_eq!(snapshot("f....").setting_aside(true, 0).fragmentation(Order(2)), 0.0);
        assert_eq!(snapshot("faaaa.m.....").fragmentation(Order(2)), 1.0 / 2.0);
        assert_eq!(snapshot("faaaa.m.....").setting_aside(true, 4).fragmentation(Order(2)), 0.0);
        assert_eq!(snapshot("mf").fragmentation(Order(1)), 0.0);
        assert_eq!(snapshot("mm.s.s..").fragmentation(Order(2)), 0.0, "reserved for growth frames are free");
        assert_eq!(snapshot("eee...e.").fragmentation(Order(2)), 1.0);
        assert_eq!(snapshot("eee...e.").available_fragmentation(Order(2)), 0.0);
        assert_eq!(snapshot("eme...e.").available_fragmentation(Order(2)), 0.0, "7 frames make one run");
        assert_eq!(snapshot("eme...em").available_fragmentation(Order(2)), 1.0);
        assert_eq!(snapshot("..mm...m").longest_free_run(), Some(Run { start: FrameId(4), len: 3 }));
        assert_eq!(snapshot("a").longest_free_run(), None);
    }

    #[test]
    fn runs_of_sequences_are_counted_where_they_lie() {
        let mut snapshot = snapshot("mm.m");
        assert_eq!(snapshot.mean_sequence_run(), 0.0);
        for (frame, place) in [(0, 4), (1, 5), (3, 6)] {
            snapshot.frames[frame] = FrameState::new(FrameKind::Movable, Some((1, place)));
        }
        assert_eq!(snapshot.mean_sequence_run(), 1.5);
        snapshot.apply_moves(&[Move { from: FrameId(3), to: FrameId(2) }]);
        assert_eq!((snapshot.mean_sequence_run(), snapshot.links()), (3.0, 2));
    }

    #[test]
    #[should_panic(expected = "frame 0 cannot move to 1: Fixed")]
    fn what_is_fixed_does_not_move() {
        snapshot("f.").apply_moves(&[Move { from: FrameId(0), to: FrameId(1) }]);
    }
}
