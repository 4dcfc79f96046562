//! Which block goes to which open frame, so that neighbours in a sequence are neighbours in memory.
//!
//! The blocks that leave are seen by sequence: a *chain* is a stretch of a sequence all of whose blocks leave, wherever
//! they lie. The *holes* are the maximal runs of open frames. However chains are cut and put into holes, the sequences
//! lie in as many runs as there are pieces that do not touch their neighbours. So:
//!
//! 1. *Anchored*: a hole behind the block before a chain takes the chain's beginning, as much as fits; one in front of
//!    the block after it takes its end. That piece costs nothing, whether the chain fits or not.
//! 2. *Best fit, longest first*: what is left of a chain goes into the shortest hole that takes it whole; if there is
//!    none, the longest hole is filled, and the rest is a chain of its own.
//! 3. Blocks without a sequence fill the shortest holes.
//!
//! `slots` finds blocks by sequence and place; `shelf` finds chains and holes by length.

mod shelf;
mod slots;

use std::ops::Range;

use crate::ids::{FrameId, Order};

use self::shelf::{Hole, Shelf};
use self::slots::Slots;
use super::super::snapshot::FrameState;
use super::map::{self, Map};
use super::{Move, donors};

/// Where a move goes before it is placed.
pub(super) const NOWHERE: FrameId = FrameId(u32::MAX);

/// What placing does to the neighbourhoods of sequences.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Links {
    /// Pairs that become neighbours.
    pub joins: usize,
    /// Pairs that were.
    pub breaks: usize,
}

/// Gives every move a destination outside of `emptied`. The moves' sources are what is `leaving`, and at least as many
/// frames are free outside.
pub(super) fn place(
    map: &Map<'_>,
    order: Order,
    emptied: &[u64],
    leaving: &[u64],
    moves: &mut [Move],
) -> Links {
    let open = donors::open(map, order, emptied, moves.len());
    let (keys, before) = keys(map, leaving, moves);
    let (slots, loose) = Slots::of(map, &keys);
    let mut board = Board { slots, after: 0 };

    // A neighbour's key, if it stays. A frame that is free or leaves has none that anything is linked to.
    let key = |frame: u32| {
        let stays = (frame as usize) < map.len() && !map::has(leaving, frame);
        if stays { map.state(frame).key() } else { FrameState::FREE.key() }
    };
    let mut shelf = Shelf::with_capacity(map::runs(&open));
    map::each_run(&open, |start, end| {
        let before = if start == 0 { FrameState::FREE.key() } else { key(start - 1) };
        let mut hole = Hole::new(start..end, before, key(end));
        let first = hole.before + 1;
        if let Some(at) = board.slots.find(first) {
            let piece = board.slots.chain_from(at, hole.len());
            board.fill(&mut hole, piece, first);
        }
        if let Some(at) = board.slots.find(hole.after.wrapping_sub(1))
            && hole.len() > 0
        {
            let piece = board.slots.chain_up_to(at, hole.len());
            let first = hole.after - piece.len() as u64;
            board.fill_end(&mut hole, piece, first);
        }
        shelf.put(hole);
    });

    let mut chains = board.slots.chains();
    while let Some(chain) = chains.pop_longest() {
        let mut hole = shelf.take_for(chain.len);
        let len = chain.len.min(hole.len());
        board.fill(&mut hole, chain.start as usize..(chain.start + len) as usize, chain.key);
        shelf.put(hole);
        chains.put(chain.without(len));
    }
    for index in loose {
        let (mut hole, key) = (shelf.take_for(1), keys[index as usize]);
        moves[index as usize].to = FrameId(hole.start);
        board.note(&mut hole, 1, key);
        shelf.put(hole);
    }
    // Links that were there before, and are again: both ends have moved together.
    let kept = board.slots.write(map, leaving, moves, &keys);
    Links { joins: board.after - kept, breaks: before - kept }
}

/// The moves' keys, and how many links have an end that leaves.
fn keys(map: &Map<'_>, leaving: &[u64], moves: &[Move]) -> (Vec<u64>, usize) {
    let frames = map.snapshot.frames();
    let mut links = 0;
    let of = |one: &Move| {
        // No branch here: these reads are all over the pool, and should not wait for each other. The first frame is
        // compared with itself, and so is the last: no block is the next of its own.
        let at = one.from.index();
        let (last, next) = (at.saturating_sub(1), (at + 1).min(frames.len() - 1));
        let key = frames[at].key();
        // The link to a block that leaves as well is that one's.
        let is_last = (frames[last].key() + 1 == key) & !map::has(leaving, last as u32);
        links += usize::from(key + 1 == frames[next].key()) + usize::from(is_last);
        key
    };
    let keys = moves.iter().map(of).collect();
    (keys, links)
}

/// The blocks, and what placing them has done to links so far.
struct Board {
    slots: Slots,
    /// Links that an end of has come to.
    after: usize,
}

impl Board {
    /// Puts a piece of a chain, the first of it with `key`, at the beginning of a hole.
    #[inline]
    fn fill(&mut self, hole: &mut Hole, piece: Range<usize>, key: u64) {
        let len = piece.len() as u32;
        self.slots.put(piece, hole.start);
        self.note(hole, len, key);
    }

    /// Counts the links of `len` blocks that go to the beginning of a hole.
    #[inline]
    fn note(&mut self, hole: &mut Hole, len: u32, key: u64) {
        self.after += len as usize - 1 + usize::from(hole.before + 1 == key);
        hole.start += len;
        hole.before = key + u64::from(len) - 1;
        self.after += usize::from(hole.is_closed());
    }

    /// Puts a piece of a chain, the first of it with `key`, at the end of a hole.
    #[inline]
    fn fill_end(&mut self, hole: &mut Hole, piece: Range<usize>, key: u64) {
        let len = piece.len() as u32;
        self.after += len as usize - 1 + usize::from(key + u64::from(len) == hole.after);
        hole.end -= len;
        hole.after = key;
        self.slots.put(piece, hole.end);
        self.after += usize::from(hole.is_closed());
    }
}
