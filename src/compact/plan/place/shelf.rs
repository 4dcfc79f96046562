use std::mem;
use std::ops::Range;

/// Each length below this has a class of its own; longer ones share a class.
const CLASS_MAX: u32 = 1023;

const CLASSES: usize = CLASS_MAX as usize + 1;

const NONE: u32 = u32::MAX;

/// Consecutive open frames, and the keys of the frames on both sides.
#[derive(Clone, Copy)]
pub(super) struct Hole {
    pub start: u32,
    pub end: u32,
    pub before: u64,
    pub after: u64,
    next: u32,
}

impl Hole {
    pub(super) const fn new(frames: Range<u32>, before: u64, after: u64) -> Self {
        Self { start: frames.start, end: frames.end, before, after, next: NONE }
    }

    #[inline]
    pub(super) const fn len(&self) -> u32 {
        self.end - self.start
    }

    #[inline]
    pub(super) const fn is_closed(&self) -> bool {
        self.len() == 0 && self.before + 1 == self.after
    }
}

/// Consecutive blocks of a sequence that are not placed yet.
#[derive(Clone, Copy)]
pub(super) struct Chain {
    /// Key of the first block.
    pub key: u64,
    /// Slot of the first block.
    pub start: u32,
    pub len: u32,
    next: u32,
}

impl Chain {
    pub(super) const fn new(key: u64, slots: Range<u32>) -> Self {
        Self { key, start: slots.start, len: slots.end - slots.start, next: NONE }
    }

    pub(super) const fn without(self, len: u32) -> Self {
        Self { key: self.key + len as u64, start: self.start + len, len: self.len - len, next: NONE }
    }
}

#[inline]
const fn class(len: u32) -> usize {
    (if len < CLASS_MAX { len } else { CLASS_MAX }) as usize
}

/// Chains by length. They only get shorter: the search for the longest only descends.
pub(super) struct Chains {
    chains: Vec<Chain>,
    heads: [u32; CLASSES],
    longest: usize,
}

impl Chains {
    pub(super) fn with_capacity(chains: usize) -> Self {
        Self { chains: Vec::with_capacity(chains), heads: [NONE; CLASSES], longest: CLASSES - 1 }
    }

    pub(super) fn put(&mut self, mut chain: Chain) {
        if chain.len == 0 {
            return;
        }
        let head = &mut self.heads[class(chain.len)];
        chain.next = mem::replace(head, self.chains.len() as u32);
        self.chains.push(chain);
    }

    pub(super) fn pop_longest(&mut self) -> Option<Chain> {
        while self.heads[self.longest] == NONE {
            self.longest = self.longest.checked_sub(1)?;
        }
        let chain = self.chains[self.heads[self.longest] as usize];
        self.heads[self.longest] = chain.next;
        Some(chain)
    }
}

/// Holes by length. Of equal ones, the oldest comes first: the lowest, unless it is a remainder.
pub(super) struct Shelf {
    holes: Vec<Hole>,
    heads: [u32; CLASSES],
    tails: [u32; CLASSES],
    stocked: [u64; CLASSES / 64],
    words: u64,
}

impl Shelf {
    pub(super) fn with_capacity(holes: usize) -> Self {
        Self {
            holes: Vec::with_capacity(holes),
            heads: [NONE; CLASSES],
            tails: [NONE; CLASSES],
            stocked: [0; CLASSES / 64],
            words: 0,
        }
    }

    #[inline]
    pub(super) fn put(&mut self, hole: Hole) {
        if hole.len() == 0 {
            return;
        }
        let (class, index) = (class(hole.len()), self.holes.len() as u32);
        self.holes.push(Hole { next: NONE, ..hole });
        if self.heads[class] == NONE {
            self.heads[class] = index;
            self.stocked[class / 64] |= 1 << (class % 64);
            self.words |= 1 << (class / 64);
        } else {
            self.holes[self.tails[class] as usize].next = index;
        }
        self.tails[class] = index;
    }

    /// Takes the shortest hole that holds `len` blocks, or otherwise the longest hole. Panics if
    /// there is none: the caller opens at least as many frames as blocks.
    #[inline]
    pub(super) fn take_for(&mut self, len: u32) -> Hole {
        let class = self.class_for(class(len)).expect("at least as many frames are open as blocks leave");
        let hole = self.holes[self.heads[class] as usize];
        self.heads[class] = hole.next;
        if hole.next == NONE {
            self.stocked[class / 64] &= !(1 << (class % 64));
            self.words &= !(u64::from(self.stocked[class / 64] == 0) << (class / 64));
        }
        hole
    }

    #[inline]
    fn class_for(&self, class: usize) -> Option<usize> {
        let word = class / 64;
        let here = self.stocked[word] & !0 << (class % 64);
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        let above = self.words & !1 << word;
        if above != 0 {
            let word = above.trailing_zeros() as usize;
            return Some(word * 64 + self.stocked[word].trailing_zeros() as usize);
        }
        let longest = self.words.checked_ilog2()? as usize;
        Some(longest * 64 + self.stocked[longest].ilog2() as usize)
    }
}
