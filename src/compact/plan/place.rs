//! Assigns open frames to blocks, so that neighbours in a sequence are neighbours in memory.
//!
//! A *chain* is a maximal range of a sequence whose blocks all leave, from any frames. The *holes*
//! are the maximal runs of open frames. However chains are cut and put into holes, the number of
//! runs of sequences is the number of pieces that do not touch their neighbours. Hence:
//!
//! 1. *Anchored*: a hole after the predecessor of a chain takes the beginning of the chain, as much
//!    as fits; a hole before its successor takes the end. Such a piece adds no run.
//! 2. *Best fit, longest first*: the rest of a chain goes into the shortest hole that holds it
//!    whole. Without one, the longest hole is filled, and the remainder becomes another chain.
//! 3. Blocks without a sequence fill the shortest holes.
//!
//! `slots` finds blocks by sequence and place; `shelf` finds chains and holes by length.

mod shelf;
mod slots;

use std::ops::Range;

use crate::ids::{FrameId, Order};

use self::shelf::{Hole, Shelf};
use self::slots::Slots;
use super::super::goal::Move;
use super::super::snapshot::FrameState;
use super::donors;
use super::map::{self, Map};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Links {
    /// Pairs that become neighbours.
    pub joins: usize,
    /// Pairs that are no longer neighbours.
    pub breaks: usize,
}

/// Gives every move a destination outside of `emptied`. The sources of the moves are the frames in
/// `leaving`; at least as many frames outside of `emptied` are free.
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

    // The key of a neighbouring frame whose block stays. Free and leaving frames count as `FREE`,
    // whose key is linked to no other.
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
    // Links that exist again, because both ends have moved together.
    let kept = board.slots.write(map, leaving, moves, &keys);
    Links { joins: board.after - kept, breaks: before - kept }
}

fn keys(map: &Map<'_>, leaving: &[u64], moves: &[Move]) -> (Vec<u64>, usize) {
    let frames = map.snapshot.frames();
    let mut links = 0;
    let of = |one: &Move| {
        // No branch: these scattered reads should not wait for each other. The first frame is
        // compared with itself, and so is the last, because no key is its own successor.
        let at = one.from.index();
        let (last, next) = (at.saturating_sub(1), (at + 1).min(frames.len() - 1));
        let key = frames[at].key();
        // A link to a leaving predecessor is counted there.
        let is_last = (frames[last].key() + 1 == key) & !map::has(leaving, last as u32);
        links += usize::from(key + 1 == frames[next].key()) + usize::from(is_last);
        key
    };
    let keys = moves.iter().map(of).collect();
    (keys, links)
}

struct Board {
    slots: Slots,
    /// Number of links with a placed end.
    after: usize,
}

impl Board {
    /// The first block of `piece` has `key`.
    #[inline]
    fn fill(&mut self, hole: &mut Hole, piece: Range<usize>, key: u64) {
        let len = piece.len() as u32;
        self.slots.put(piece, hole.start);
        self.note(hole, len, key);
    }

    #[inline]
    fn note(&mut self, hole: &mut Hole, len: u32, key: u64) {
        self.after += len as usize - 1 + usize::from(hole.before + 1 == key);
        hole.start += len;
        hole.before = key + u64::from(len) - 1;
        self.after += usize::from(hole.is_closed());
    }

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
