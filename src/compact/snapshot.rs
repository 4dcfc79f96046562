//! What every frame of a pool held at one moment, as far as a planner needs to know.
//!
//! # A frame's state
//!
//! | bits | field | meaning |
//! |---|---|---|
//! | 0..30 | place | the block's position in its sequence's list; 0 without a sequence |
//! | 30..62 | sequence | index into the snapshot's sequences; all ones for none |
//! | 62..64 | kind | [`FrameKind`] |
//!
//! The lower 62 bits are the *key*. Two frames `f` and `f + 1` are *linked* if the key of the second is the key of the
//! first plus one: neighbours in a sequence that are neighbours in memory. No link leads into or out of a frame without
//! a sequence, because [`PLACE_MAX`] keeps the last places unused.
//!
//! A snapshot of a pool that goes on serving is torn: a block may be seen twice, or not at all. Nothing here or in the
//! planner relies on it being consistent; only the worth of the plan suffers.

use std::fmt;

use crate::frame::outside_of_runs;
use crate::ids::{FrameId, Order, Run, SequenceId};

use super::plan::{Move, Plan};

const PLACE_BITS: u32 = 30;
const SEQUENCE_BITS: u32 = 32;
pub(super) const KIND_SHIFT: u32 = PLACE_BITS + SEQUENCE_BITS;
const NO_SEQUENCE: u32 = u32::MAX;

const _: () = assert!(KIND_SHIFT + 2 == u64::BITS);
const _: () = assert!(crate::ids::FRAMES_MAX <= PLACE_MAX as usize);

/// The last place in a sequence that a frame's state can name.
pub const PLACE_MAX: u32 = (1 << PLACE_BITS) - 2;

/// What can be done with a frame.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum FrameKind {
    /// Free in the bitmaps: a block can move here.
    Free = 0,
    /// Free, but in a magazine or retired: nothing can move here, and nothing has to leave.
    Away = 1,
    /// Owned, sealed, unpinned: its block can move.
    Movable = 2,
    /// Owned and open, pinned or moving already, or the null block's: it stays.
    Fixed = 3,
}

/// What one frame holds: its [`FrameKind`], and which block of which sequence, if any.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct FrameState(u64);

impl FrameState {
    /// A free frame.
    pub const FREE: Self = Self::new(FrameKind::Free, None);
    /// A frame that is free and out of reach.
    pub const AWAY: Self = Self::new(FrameKind::Away, None);

    /// A frame of `kind` that holds block `place` of the snapshot's sequence number `sequence`. A block that belongs to
    /// several sequences names one. With a place past [`PLACE_MAX`] it counts as without a sequence, and so does a frame
    /// that is free.
    #[inline]
    pub const fn new(kind: FrameKind, block: Option<(u32, u32)>) -> Self {
        let is_owned = matches!(kind, FrameKind::Movable | FrameKind::Fixed);
        let key = match block {
            Some((sequence, place)) if is_owned && place <= PLACE_MAX => {
                Self::key_of(sequence as usize, place)
            }
            _ => Self::key_of(NO_SEQUENCE as usize, 0),
        };
        Self((kind as u64) << KIND_SHIFT | key)
    }

    /// What can be done with the frame.
    #[inline]
    pub const fn kind(self) -> FrameKind {
        match self.0 >> KIND_SHIFT {
            0 => FrameKind::Free,
            1 => FrameKind::Away,
            2 => FrameKind::Movable,
            _ => FrameKind::Fixed,
        }
    }

    /// Which block it holds: the sequence's index in the snapshot, and the place in that sequence's list.
    #[inline]
    pub const fn block(self) -> Option<(u32, u32)> {
        let sequence = (self.0 >> PLACE_BITS) as u32;
        if sequence == NO_SEQUENCE { None } else { Some((sequence, self.0 as u32 & ((1 << PLACE_BITS) - 1))) }
    }

    /// The whole word; see the [module docs](self).
    #[inline]
    pub(super) const fn bits(self) -> u64 {
        self.0
    }

    /// Sequence and place as one number.
    #[inline]
    pub(super) const fn key(self) -> u64 {
        self.0 & !(3 << KIND_SHIFT)
    }

    /// The key of a sequence's place.
    #[inline]
    pub(super) const fn key_of(sequence: usize, place: u32) -> u64 {
        (sequence as u64) << PLACE_BITS | place as u64
    }

    /// The sequence and place of a key, which need not be those of any frame.
    #[inline]
    pub(super) const fn parts(key: u64) -> (usize, u32) {
        ((key >> PLACE_BITS) as usize, key as u32 & ((1 << PLACE_BITS) - 1))
    }

    /// Whether the block in the frame after this one is the next of the same sequence.
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

/// What every frame of a pool held at one moment: the planner's input, and what a picture of the pool is drawn from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    order: Order,
    frames: Vec<FrameState>,
    sequences: Vec<SequenceId>,
    /// Frames of the null block, and of the reserve.
    null: usize,
    reserved: usize,
}

impl Snapshot {
    /// Of `frames`, by number, in a pool that measures fragmentation at `order`. The frames' states name sequences by
    /// their index in `sequences`; one that is past its end is a sequence to every measure here, but the planner does
    /// not look for its neighbours.
    pub const fn new(order: Order, frames: Vec<FrameState>, sequences: Vec<SequenceId>) -> Self {
        Self { order, frames, sequences, null: 0, reserved: 0 }
    }

    /// Of a pool with a null block, or with so many blocks in its reserve, which are
    /// [away](FrameKind::Away): where they are set aside, at the front of a pool, no run could be.
    pub const fn setting_aside(mut self, has_null_block: bool, reserved: usize) -> Self {
        (self.null, self.reserved) = (has_null_block as usize, reserved);
        self
    }

    /// The order at which the pool measures fragmentation.
    pub const fn order(&self) -> Order {
        self.order
    }

    /// Every frame, by number.
    pub fn frames(&self) -> &[FrameState] {
        &self.frames
    }

    /// The sequences that frames name by index.
    pub fn sequences(&self) -> &[SequenceId] {
        &self.sequences
    }

    /// How many frames are of `kind`.
    pub fn count(&self, kind: FrameKind) -> usize {
        self.frames.iter().filter(|state| state.kind() == kind).count()
    }

    /// How many aligned runs of `2^order` frames are wholly free.
    pub fn free_runs(&self, order: Order) -> usize {
        if order.0 >= usize::BITS as u8 {
            return 0;
        }
        let is_free = |run: &&[FrameState]| run.iter().all(|state| state.kind() == FrameKind::Free);
        self.frames.chunks_exact(order.frames()).filter(is_free).count()
    }

    /// The [fragmentation rate](crate::block::Core::fragmentation): of the free aligned runs of
    /// `2^order` frames that there could be, if all blocks lay as well as they can, the share that
    /// there is not, from 0 to 1; 0 where there could be none. Frames that are
    /// [away](FrameKind::Away) are free, and in no run; the reserve's are not free.
    pub fn fragmentation(&self, order: Order) -> f64 {
        let free = (self.count(FrameKind::Free) + self.count(FrameKind::Away)).saturating_sub(self.reserved);
        let set_aside = self.null + self.reserved;
        outside_of_runs(self.free_runs(order), self.frames.len(), set_aside, free, order)
    }

    /// The longest run of free frames, at any alignment; the first of several.
    pub fn longest_free_run(&self) -> Option<Run> {
        let mut longest: Option<Run> = None;
        let mut at = 0;
        for piece in self.frames.chunk_by(|a, b| a.kind() == b.kind()) {
            let len = piece.len() as u32;
            if piece[0].kind() == FrameKind::Free && longest.is_none_or(|run| run.len < len) {
                longest = Some(Run { start: FrameId(at), len });
            }
            at += len;
        }
        longest
    }

    /// Pairs of neighbouring frames that hold neighbouring blocks of one sequence.
    pub fn links(&self) -> usize {
        self.frames.windows(2).filter(|pair| pair[0].is_linked_to(pair[1])).count()
    }

    /// The mean length of the runs in which sequences lie, in frames: what one descriptor of a transfer moves. Each
    /// block counts for the one sequence that its frame names. 0 if no frame names any.
    pub fn mean_sequence_run(&self) -> f64 {
        let frames = self.frames.iter().filter(|state| state.block().is_some()).count();
        if frames == 0 { 0.0 } else { frames as f64 / (frames - self.links()) as f64 }
    }

    /// As it would be if the plan succeeded in full: what left is free.
    ///
    /// # Panics
    ///
    /// As [`apply_moves`](Self::apply_moves).
    pub fn apply(&mut self, plan: &Plan) {
        self.apply_moves(&plan.moves);
    }

    /// As it would be after these moves, one after the other: what left is free.
    ///
    /// # Panics
    ///
    /// If a move comes from a frame whose block cannot move, or goes to one that is not free: no plan for this
    /// snapshot does.
    pub fn apply_moves(&mut self, moves: &[Move]) {
        for &Move { from, to } in moves {
            let (source, target) = (self.frames[from.index()], self.frames[to.index()]);
            assert!(source.kind() == FrameKind::Movable, "frame {from} cannot move to {to}: {source:?}");
            assert!(target.kind() == FrameKind::Free, "frame {to} is no destination of {from}: {target:?}");
            self.frames[to.index()] = source;
            self.frames[from.index()] = FrameState::FREE;
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
            _ => FrameState::new(FrameKind::Fixed, None),
        });
        Snapshot::new(Order(2), frames.collect(), vec![SequenceId(0); 2])
    }

    #[test]
    fn a_state_says_what_it_was_made_of() {
        for kind in [FrameKind::Free, FrameKind::Away] {
            let state = FrameState::new(kind, Some((7, 7)));
            assert_eq!((state.kind(), state.block()), (kind, None));
        }
        for kind in [FrameKind::Movable, FrameKind::Fixed] {
            for block in [None, Some((0, 0)), Some((7, PLACE_MAX)), Some((NO_SEQUENCE - 1, 3))] {
                let state = FrameState::new(kind, block);
                assert_eq!((state.kind(), state.block()), (kind, block));
            }
            assert_eq!(FrameState::new(kind, Some((1, PLACE_MAX + 1))).block(), None);
        }
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
        assert!(!of(NO_SEQUENCE - 1, PLACE_MAX).is_linked_to(FrameState::FREE));
    }

    #[test]
    fn fragmentation_is_the_share_of_runs_that_are_missing() {
        // One run of 4, and 10 free frames; the run across the border at 8 is not aligned.
        let text = "....mm..m.fa..";
        assert_eq!(snapshot(text).free_runs(Order(2)), 1);
        assert_eq!(snapshot(text).count(FrameKind::Free), 9);
        assert_eq!(snapshot(text).fragmentation(Order(2)), 1.0 / 2.0);
        assert_eq!(snapshot(text).fragmentation(Order(0)), 1.0 - 9.0 / 10.0);
        assert_eq!(snapshot(text).fragmentation(Order(200)), 0.0, "no pool has such a run");
        assert_eq!(snapshot("....f").fragmentation(Order(2)), 0.0);
        assert_eq!(snapshot("f....").fragmentation(Order(2)), 1.0, "if the first could move");
        assert_eq!(snapshot("f....").setting_aside(true, 0).fragmentation(Order(2)), 0.0);
        assert_eq!(snapshot("faaaa.m.....").fragmentation(Order(2)), 1.0 / 2.0);
        assert_eq!(snapshot("faaaa.m.....").setting_aside(true, 4).fragmentation(Order(2)), 0.0);
        assert_eq!(snapshot("mf").fragmentation(Order(1)), 0.0);
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
