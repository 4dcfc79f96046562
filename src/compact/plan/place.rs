//! Which block goes to which open frame, so that neighbours in a sequence are neighbours in memory.
//!
//! The blocks that leave are taken out of the places where they lie, and seen by sequence: a *chain* is a stretch of a
//! sequence all of whose blocks leave. The *holes* are the maximal runs of open frames. However chains are cut and put
//! into holes, the sequences lie in as many runs as there are pieces that do not touch their neighbours. So:
//!
//! 1. *Anchored*: a hole behind the block before a chain takes the chain's beginning, as much as fits; one in front of
//!    the block after it takes its end. That piece costs nothing, whether the chain fits or not.
//! 2. *Best fit, longest first*: what is left of a chain goes into the shortest hole that takes it whole; if there is none,
//!    the longest hole is filled, and the rest is a chain of its own.
//! 3. Blocks without a sequence fill the shortest holes.
//!
//! ```text
//! slots   one for each place from a sequence's first to its last block that leaves:   . 7 8 . . 2 3 4
//!         the number of its move, or none                                               chain   chain
//! shelf   the holes by length; those of `CLASS_MAX` and more together
//! ```

use std::ops::Range;

use crate::ids::{FrameId, Order};

use super::super::snapshot::FrameState;
use super::map::{self, Map};
use super::{Move, donors};

/// Where a move goes before it is placed.
pub(super) const NOWHERE: FrameId = FrameId(u32::MAX);

/// No move, no hole, no chain.
const NONE: u32 = u32::MAX;

/// Lengths up to here are told apart.
const CLASS_MAX: u32 = 1023;

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
    let keys: Vec<u64> = moves.iter().map(|one| map.state(one.from.0).key()).collect();
    let (mut slots, loose) = Slots::of(map, &keys);
    let before = links_of(map, leaving, moves, &keys);
    let mut board = Board { moves, after: 0, kept: 0 };

    // A neighbour's key, if it stays. A frame that is free or leaves has none that anything is linked to.
    let key = |frame: u32| {
        let stays = (frame as usize) < map.len() && !map::has(leaving, frame);
        if stays { map.state(frame).key() } else { FrameState::FREE.key() }
    };
    let mut shelf = Shelf::new();
    map::each_run(&open, |start, end| {
        let before = if start == 0 { FrameState::FREE.key() } else { key(start - 1) };
        let mut hole = Hole { start, end, before, after: key(end), next: NONE };
        let first = hole.before + 1;
        if let Some(at) = slots.find(first) {
            let taken = slots.chain_from(at, hole.len());
            board.fill(&mut hole, &mut slots.moves[taken], first);
        }
        if let Some(at) = slots.find(hole.after.wrapping_sub(1))
            && hole.len() > 0
        {
            let taken = slots.chain_up_to(at, hole.len());
            let first = hole.after - taken.len() as u64;
            board.fill_end(&mut hole, &mut slots.moves[taken], first);
        }
        shelf.put(hole);
    });

    let mut chains = slots.chains();
    while let Some(chain) = chains.pop_longest() {
        let mut hole = shelf.take_for(chain.len);
        let len = chain.len.min(hole.len());
        let range = chain.start as usize..(chain.start + len) as usize;
        board.fill(&mut hole, &mut slots.moves[range], chain.key);
        shelf.put(hole);
        chains.put(chain.without(len));
    }
    for index in loose {
        let mut hole = shelf.take_for(1);
        board.fill(&mut hole, &mut [index], keys[index as usize]);
        shelf.put(hole);
    }
    Links { joins: board.after - board.kept, breaks: before - board.kept }
}

/// How many links have an end that leaves.
fn links_of(map: &Map<'_>, leaving: &[u64], moves: &[Move], keys: &[u64]) -> usize {
    let frames = map.snapshot.frames();
    let of = |(one, key): (&Move, &u64)| {
        let at = one.from.index();
        let is_next = frames.get(at + 1).is_some_and(|next| key + 1 == next.key());
        // The link to a block that leaves as well is that one's.
        let is_last = at > 0 && frames[at - 1].key() + 1 == *key && !map::has(leaving, one.from.0 - 1);
        usize::from(is_next) + usize::from(is_last)
    };
    moves.iter().zip(keys).map(of).sum()
}

/// Consecutive open frames, and the keys of what lies on both sides of them.
#[derive(Clone, Copy)]
struct Hole {
    start: u32,
    end: u32,
    before: u64,
    after: u64,
    /// On the shelf: the next of its class.
    next: u32,
}

impl Hole {
    #[inline]
    const fn len(&self) -> u32 {
        self.end - self.start
    }
}

/// The moves, and what they have done to links so far.
struct Board<'a> {
    moves: &'a mut [Move],
    /// Links that an end of has come to.
    after: usize,
    /// Those of them that were there before: their ends have moved together.
    kept: usize,
}

impl Board<'_> {
    /// Puts consecutive blocks of a sequence, the first of them with `key`, at the beginning of a hole.
    #[inline]
    fn fill(&mut self, hole: &mut Hole, slots: &mut [u32], key: u64) {
        self.after += usize::from(hole.before + 1 == key);
        self.put(hole.start, slots);
        hole.start += slots.len() as u32;
        hole.before = key + slots.len() as u64 - 1;
        self.after += usize::from(hole.len() == 0 && hole.before + 1 == hole.after);
    }

    /// The same, at the end of a hole.
    #[inline]
    fn fill_end(&mut self, hole: &mut Hole, slots: &mut [u32], key: u64) {
        self.after += usize::from(key + slots.len() as u64 == hole.after);
        hole.end -= slots.len() as u32;
        self.put(hole.end, slots);
        hole.after = key;
        self.after += usize::from(hole.len() == 0 && hole.before + 1 == hole.after);
    }

    /// Consecutive blocks to consecutive frames. The slots are used up.
    #[inline]
    fn put(&mut self, start: u32, slots: &mut [u32]) {
        self.after += slots.len() - 1;
        let mut last = NONE;
        for (slot, to) in slots.iter_mut().zip(start..) {
            let one = &mut self.moves[*slot as usize];
            one.to = FrameId(to);
            self.kept += usize::from(last.wrapping_add(1) == one.from.0 && last != NONE);
            last = one.from.0;
            *slot = NONE;
        }
    }
}

/// A sequence's part of the slots.
#[derive(Clone, Copy)]
struct Extent {
    /// The place of its first slot.
    first: u32,
    /// The place of its last.
    last: u32,
    /// Its first slot.
    base: u32,
    /// How many slots it has.
    len: u32,
}

/// The blocks that leave, by sequence and place.
struct Slots {
    extents: Vec<Extent>,
    moves: Vec<u32>,
}

impl Slots {
    /// The slots, and the moves that have none: of no sequence, of a place that another has in a torn snapshot, or of
    /// sequences with so many gaps that their slots would outgrow the pool.
    fn of(map: &Map<'_>, keys: &[u64]) -> (Self, Vec<u32>) {
        let empty = Extent { first: u32::MAX, last: 0, base: 0, len: 0 };
        let mut extents = vec![empty; map.snapshot.sequences().len()];
        for key in keys {
            let (sequence, place) = FrameState::parts(*key);
            if let Some(extent) = extents.get_mut(sequence) {
                extent.first = extent.first.min(place);
                extent.last = extent.last.max(place);
            }
        }
        let (mut total, limit) = (0, map.len() * 2);
        for extent in &mut extents {
            let len = if extent.first <= extent.last { extent.last - extent.first + 1 } else { 0 };
            if len > 0 && total + len as usize <= limit {
                (extent.base, extent.len) = (total as u32, len);
                // One that stays empty, so that no chain goes on in the next sequence.
                total += len as usize + 1;
            }
        }
        let mut slots = Self { extents, moves: vec![NONE; total] };
        let mut loose = Vec::new();
        for (index, key) in keys.iter().enumerate() {
            let (sequence, place) = FrameState::parts(*key);
            match slots.at(sequence, place).map(|at| &mut slots.moves[at]) {
                Some(slot) if *slot == NONE => *slot = index as u32,
                _ => loose.push(index as u32),
            }
        }
        (slots, loose)
    }

    /// The slot of a sequence's place.
    #[inline]
    fn at(&self, sequence: usize, place: u32) -> Option<usize> {
        let extent = self.extents.get(sequence)?;
        let at = place.wrapping_sub(extent.first);
        if at < extent.len { Some((extent.base + at) as usize) } else { None }
    }

    /// The slot with a block of this key that is still to be placed.
    #[inline]
    fn find(&self, key: u64) -> Option<usize> {
        let (sequence, place) = FrameState::parts(key);
        self.at(sequence, place).filter(|at| self.moves[*at] != NONE)
    }
    /// As many slots from `at` on as are taken, at most `limit`.
    #[inline]
    fn chain_from(&self, at: usize, limit: u32) -> Range<usize> {
        let most = &self.moves[at..self.moves.len().min(at + limit as usize)];
        let len = most.iter().position(|slot| *slot == NONE).unwrap_or(most.len());
        at..at + len
    }

    /// As many slots up to `at`, and with it, as are taken, at most `limit`.
    #[inline]
    fn chain_up_to(&self, at: usize, limit: u32) -> Range<usize> {
        let most = &self.moves[(at + 1).saturating_sub(limit as usize)..=at];
        let len = most.iter().rev().position(|slot| *slot == NONE).unwrap_or(most.len());
        at + 1 - len..at + 1
    }

    /// The chains that are left.
    fn chains(&self) -> Chains {
        let mut chains = Chains { chains: Vec::new(), heads: [NONE; CLASSES], longest: CLASSES - 1 };
        for (sequence, extent) in self.extents.iter().enumerate() {
            let mut at = extent.base as usize;
            let end = at + extent.len as usize;
            while at < end {
                let len = self.chain_from(at, (end - at) as u32).len() as u32;
                if len > 0 {
                    let place = extent.first + (at as u32 - extent.base);
                    let key = FrameState::key_of(sequence, place);
                    chains.put(Chain { key, start: at as u32, len, next: NONE });
                }
                at += len as usize + 1;
            }
        }
        chains
    }
}

/// Blocks that follow each other in a sequence, and are still to be placed.
#[derive(Clone, Copy)]
struct Chain {
    /// The first one's.
    key: u64,
    /// The first one's slot.
    start: u32,
    len: u32,
    /// The next of its class.
    next: u32,
}

impl Chain {
    /// What is left once the first `len` blocks are placed.
    const fn without(self, len: u32) -> Self {
        Self { key: self.key + len as u64, start: self.start + len, len: self.len - len, next: NONE }
    }
}

/// Lengths are counted up to here, and one class is for those beyond.
const CLASSES: usize = CLASS_MAX as usize + 1;

#[inline]
const fn class(len: u32) -> usize {
    (if len < CLASS_MAX { len } else { CLASS_MAX }) as usize
}

/// Chains by length. They only get shorter, so that the longest is found by going down.
struct Chains {
    chains: Vec<Chain>,
    heads: [u32; CLASSES],
    longest: usize,
}

impl Chains {
    fn put(&mut self, mut chain: Chain) {
        if chain.len == 0 {
            return;
        }
        let head = &mut self.heads[class(chain.len)];
        chain.next = std::mem::replace(head, self.chains.len() as u32);
        self.chains.push(chain);
    }

    fn pop_longest(&mut self) -> Option<Chain> {
        while self.heads[self.longest] == NONE {
            self.longest = self.longest.checked_sub(1)?;
        }
        let chain = self.chains[self.heads[self.longest] as usize];
        self.heads[self.longest] = chain.next;
        Some(chain)
    }
}

/// Holes by length; of equals, the one that was there first, which is the lowest unless it is a rest.
struct Shelf {
    holes: Vec<Hole>,
    heads: [u32; CLASSES],
    /// Of a class that has a hole.
    tails: [u32; CLASSES],
    /// A bit for each class that has a hole.
    stocked: [u64; CLASSES / 64],
}

impl Shelf {
    fn new() -> Self {
        Self { holes: Vec::new(), heads: [NONE; CLASSES], tails: [NONE; CLASSES], stocked: [0; CLASSES / 64] }
    }

    #[inline]
    fn put(&mut self, hole: Hole) {
        if hole.len() == 0 {
            return;
        }
        let (class, index) = (class(hole.len()), self.holes.len() as u32);
        self.holes.push(Hole { next: NONE, ..hole });
        if self.heads[class] == NONE {
            self.heads[class] = index;
            self.stocked[class / 64] |= 1 << (class % 64);
        } else {
            self.holes[self.tails[class] as usize].next = index;
        }
        self.tails[class] = index;
    }

    /// The shortest hole that takes `len` blocks, or else the longest.
    ///
    /// # Panics
    ///
    /// If there is none: the caller opens as many frames as blocks.
    #[inline]
    fn take_for(&mut self, len: u32) -> Hole {
        let class = self.class_for(class(len)).expect("as many frames are open as blocks leave");
        let hole = self.holes[self.heads[class] as usize];
        self.heads[class] = hole.next;
        if hole.next == NONE {
            self.stocked[class / 64] &= !(1 << (class % 64));
        }
        hole
    }

    #[inline]
    fn class_for(&self, class: usize) -> Option<usize> {
        let (first, bit) = (class / 64, class % 64);
        let here = self.stocked[first] & !0 << bit;
        let above = || (first + 1..self.stocked.len()).map(|word| (word, self.stocked[word]));
        let fits = std::iter::once((first, here)).chain(above()).find(|(_, bits)| *bits != 0);
        if let Some((word, bits)) = fits {
            return Some(word * 64 + bits.trailing_zeros() as usize);
        }
        let longest = self.stocked.iter().rposition(|bits| *bits != 0)?;
        Some(longest * 64 + self.stocked[longest].ilog2() as usize)
    }
}
