//! The block word: all state of a block that must change in one step.
//!
//! | bits | field | meaning |
//! |---|---|---|
//! | 0..27 | frame | frame that holds the block's bytes |
//! | 27..40 | references | number of references; 0: the block is free, or evictable |
//! | 40..56 | generation | low bits of the count of the block's frees; the high bits are in its info |
//! | 56..60 | pins | while above 0, the block is neither evicted nor moved |
//! | 60 | sealed | the bytes are final: written by a batch that has ended |
//! | 61 | moving | of an owned or evictable block: the bytes are being copied to another frame. Of a free block: the frame is held, as a destination or permanently |
//! | 62 | cached | known to the prefix cache. Without references: evictable, the bytes stay until the frame is needed |
//! | 63 | | unused |
//!
//! # Transitions
//!
//! ```text
//! free (references 0) --allocate--> owned --share/release--> owned --release of the last--> free, generation + 1
//! owned --seal--> sealed --begin_move--> moving --publish--> sealed, in another frame
//!                 sealed --reopen--> owned        moving --end_move--> sealed, where it was
//!                                                 moving --last release--> held: the frame is the mover's
//! owned --seal_cached--> cached --release of the last--> evictable, generation + 1
//!                        cached <--hit-- evictable --evict--> free        cached --uncache--> owned
//! owned --keep_only_in--> evictable, generation + 1: both steps in one, by the only owner
//! free --hold--> held (free, moving) --unhold--> free        only by the owner of the frame
//! ```
//!
//! An evictable block moves like an owned one, even while it is hit or released, and is not evicted
//! meanwhile. While the bytes are being copied, only the mover or the last release ends the move. A
//! pin prevents the publication. A writer is refused as if the block were shared, and copies.
//!
//! # Recurring words
//!
//! A compare-exchange compares 16 of the generation's 48 bits. It wrongly succeeds only if, since
//! the thread's load, the block was released a multiple of 65,536 times and has the same frame,
//! references, pins and flags. The high bits, in the [info](super::info), are compared in between,
//! so a handle that was stale at the load is always refused.
//!
//! | operation | what prevents the word from recurring meanwhile |
//! |---|---|
//! | release, share, reopen by an owner | its own reference: the generation does not change while there is one |
//! | `begin_move`, `publish_move`, `end_move` | nothing is needed: they decide by the word that they exchange. The moving flag, and a held frame, belong to the mover |
//! | pin, unpin by handle | the reference of the block's owner. Exposed: an owner that releases it concurrently |
//! | `uncache` | the reference of the caller. Without one, nothing is needed: it decides by the word that it exchanges |
//! | `seal_cached`, `seal` at the end of a batch | the sequence's reference. Exposed: a sequence that releases the block concurrently |
//! | `hit` | nothing. The cache therefore compares the block's contents again under the reference that the hit took, and drops the reference if they differ |
//! | `evict` | nothing. Exposed: the evicting thread, between reading the tag and the exchange |
//! | `evict_released`, which may run seconds after the release that made the word | nothing. A wrong success evicts an evictable block whose newest tag is old enough: the cache loses that block, and nothing else breaks |
//!
//! Leasing and dropping one block 65,536 times takes about 0.7 ms, less than a preemption. The
//! thread must be stopped inside an exposed step of about 5 ns, and resume in one generation of
//! 65,536: with 1,000 preemptions per second, the probability is 8e-11 per step beside such a loop.

use std::fmt;

use crate::config::FRAME_BITS;
use crate::ids::{FrameId, Generation};

const REFS_BITS: u32 = 13;
const GENERATION_BITS: u32 = 16;
const PINS_BITS: u32 = 4;

const REFS_SHIFT: u32 = FRAME_BITS;
const GENERATION_SHIFT: u32 = REFS_SHIFT + REFS_BITS;
const PINS_SHIFT: u32 = GENERATION_SHIFT + GENERATION_BITS;
const FLAGS_SHIFT: u32 = PINS_SHIFT + PINS_BITS;
const _: () = assert!(FLAGS_SHIFT + 3 <= u64::BITS, "three bits remain for flags");

const FRAME_MASK: u64 = (1 << FRAME_BITS) - 1;
const REFS_MASK: u64 = ((1 << REFS_BITS) - 1) << REFS_SHIFT;
const GENERATION_MASK: u64 = ((1 << GENERATION_BITS) - 1) << GENERATION_SHIFT;
const PINS_MASK: u64 = ((1 << PINS_BITS) - 1) << PINS_SHIFT;
const SEALED: u64 = 1 << FLAGS_SHIFT;
const MOVING: u64 = 1 << (FLAGS_SHIFT + 1);
const CACHED: u64 = 1 << (FLAGS_SHIFT + 2);

const ONE_REF: u64 = 1 << REFS_SHIFT;
const ONE_GENERATION: u64 = 1 << GENERATION_SHIFT;
const ONE_PIN: u64 = 1 << PINS_SHIFT;

/// A block's packed state. Transitions return the next word, `None` if they are not allowed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BlockWord(u64);

/// Result of releasing a reference, and the caller's duty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "the last reference owes its frame to the pool"]
pub enum Released {
    /// Other references remain; the caller has no duty.
    Shared(BlockWord),
    /// It was the last: the caller owns the frame and must give it back.
    Last {
        /// Word of the block, now free.
        word: BlockWord,
        /// The generation's low bits wrapped around: the caller first increments the high bits.
        carry: bool,
    },
    /// It was the last of a moving block: the mover [frees](BlockWord::take_left) the frame.
    ToMover {
        /// Word of the block: free, and held.
        word: BlockWord,
    },
    /// It was the last of a cached block, which keeps its frame. The caller notifies the evictor.
    Evictable {
        /// Word of the block: evictable.
        word: BlockWord,
    },
}

impl Released {
    /// Returns the word after the release.
    pub const fn word(self) -> BlockWord {
        match self {
            Self::Shared(word)
            | Self::Last { word, .. }
            | Self::ToMover { word, .. }
            | Self::Evictable { word } => word,
        }
    }
}

impl BlockWord {
    /// Maximum number of references on a block.
    pub const REFS_MAX: u32 = (1 << REFS_BITS) - 1;
    /// Maximum number of pins on a block.
    pub const PINS_MAX: u32 = (1 << PINS_BITS) - 1;
    /// Number of bits of the generation in the word.
    pub const GENERATION_BITS: u32 = GENERATION_BITS;

    /// Creates the word of a free block of generation 0 in a frame.
    #[inline]
    pub const fn free(frame: FrameId) -> Self {
        Self(frame.0 as u64)
    }

    /// Creates a word from its bits.
    #[inline]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the bits.
    #[inline]
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    /// Returns the frame that holds the bytes.
    #[inline]
    pub const fn frame(self) -> FrameId {
        FrameId((self.0 & FRAME_MASK) as u32)
    }

    /// Returns the number of references.
    #[inline]
    pub const fn refs(self) -> u32 {
        ((self.0 & REFS_MASK) >> REFS_SHIFT) as u32
    }

    /// Returns the low bits of the generation.
    #[inline]
    pub const fn generation_low(self) -> u64 {
        (self.0 & GENERATION_MASK) >> GENERATION_SHIFT
    }

    /// Returns whether the low bits of `generation` equal the word's.
    #[inline]
    pub const fn is_of(self, generation: Generation) -> bool {
        self.generation_low() == generation.0 & ((1 << GENERATION_BITS) - 1)
    }

    /// Returns the word with the last generation before the low bits wrap around.
    #[cfg(kvpool_loom)]
    pub const fn before_the_turn(self) -> Self {
        Self(self.0 | GENERATION_MASK)
    }

    /// Returns the number of pins.
    #[inline]
    pub const fn pins(self) -> u32 {
        ((self.0 & PINS_MASK) >> PINS_SHIFT) as u32
    }

    /// Returns whether the block is free: unowned and not cached.
    #[inline]
    pub const fn is_free(self) -> bool {
        self.0 & (REFS_MASK | CACHED) == 0
    }

    /// Returns whether the block has an owner.
    #[inline]
    pub const fn is_owned(self) -> bool {
        self.0 & REFS_MASK != 0
    }

    /// Returns whether the block is evictable: unowned and cached.
    #[inline]
    pub const fn is_evictable(self) -> bool {
        self.0 & (REFS_MASK | CACHED) == CACHED
    }

    /// Returns whether the bytes are final.
    #[inline]
    pub const fn is_sealed(self) -> bool {
        self.0 & SEALED != 0
    }

    /// Returns whether the bytes are being copied to another frame.
    #[inline]
    pub const fn is_moving(self) -> bool {
        self.0 & MOVING != 0
    }

    /// Returns whether the prefix cache knows the block.
    #[inline]
    pub const fn is_cached(self) -> bool {
        self.0 & CACHED != 0
    }

    /// Returns whether the block is free and not held, so that its frame may be in a free list.
    #[inline]
    pub const fn is_available(self) -> bool {
        self.0 & (REFS_MASK | CACHED | MOVING) == 0
    }

    /// Returns whether the block is free and its frame held.
    #[inline]
    pub const fn is_held(self) -> bool {
        self.is_free() && self.is_moving()
    }

    /// Holds a free block: free -> held. `None`: owned, or already held.
    #[inline]
    pub const fn hold(self) -> Option<Self> {
        if self.is_available() { Some(Self(self.0 | MOVING)) } else { None }
    }

    /// Ends a hold: held -> free. `None`: not held.
    #[inline]
    pub const fn unhold(self) -> Option<Self> {
        if self.is_held() { Some(Self(self.0 & !MOVING)) } else { None }
    }

    /// Allocates: free -> owned by one reference, pinned once if `pinned`.
    #[inline]
    pub const fn allocate(self, pinned: bool) -> Self {
        Self(self.0 + ONE_REF + if pinned { ONE_PIN } else { 0 })
    }

    /// Adds a reference. `None`: not owned, or full.
    #[inline]
    pub const fn share(self) -> Option<Self> {
        if !self.is_owned() || self.0 & REFS_MASK == REFS_MASK { None } else { Some(Self(self.0 + ONE_REF)) }
    }

    /// Adds a reference to a block found in the prefix cache. `None`: not cached, or full.
    #[inline]
    pub fn hit(self) -> Option<Self> {
        let full = self.0 & REFS_MASK == REFS_MASK;
        let cached = self.is_cached();
        if !cached || full { None } else { Some(Self(self.0 + ONE_REF)) }
    }

    /// Adds a reference and its pin to a block of a frame pool. `None`: free, or full.
    #[inline]
    pub fn share_in_place(self) -> Option<Self> {
        // An evictable block has no pins: its last release cleared them.
        if self.is_evictable() { Some(Self(self.hit()?.0 + ONE_PIN)) } else { self.share() }
    }

    /// Uncaches a block for one of its owners: cached -> owned. `None`: any other word.
    #[inline]
    pub const fn uncache(self) -> Option<Self> {
        if self.is_owned() && self.is_cached() { Some(Self(self.0 & !CACHED)) } else { None }
    }

    /// Evicts: evictable -> free; the caller owns the frame. `None`: owned, free, or moving.
    #[inline]
    pub fn evict(self) -> Option<Self> {
        let is_to_go = self.is_evictable();
        if !is_to_go || self.is_moving() {
            return None;
        }
        Some(Self(self.0 & (FRAME_MASK | GENERATION_MASK)))
    }

    /// Drops a reference. `None`: not owned. The last release clears pins and flags, except the
    /// moving flag, which passes the frame to the mover. A cached block becomes evictable, unless
    /// its generation wraps around: only the owner of a free block's frame can carry.
    #[inline]
    pub fn release(self) -> Option<Released> {
        match self.refs() {
            0 => None,
            1 => {
                let word = self.freed();
                if self.is_cached() && !word.carries() {
                    return Some(Released::Evictable {
                        word: Self(word.0 | self.0 & (SEALED | MOVING | CACHED)),
                    });
                }
                Some(if self.is_moving() {
                    Released::ToMover { word: Self(word.0 | MOVING) }
                } else {
                    Released::Last { word, carry: word.carries() }
                })
            }
            _ => Some(Released::Shared(Self(self.0 - ONE_REF))),
        }
    }

    /// Uncaches if the last release would wrap the generation around. `None`: any other word.
    #[inline]
    pub fn outlived(self) -> Option<Self> {
        if self.refs() == 1 && self.is_cached() && self.freed().carries() {
            Some(Self(self.0 & !CACHED))
        } else {
            None
        }
    }

    /// [Releases](Self::release) the only reference of a block neither moving nor cached. `None`:
    /// any other word, or a wrap-around.
    #[inline]
    pub fn release_only(self) -> Option<Self> {
        let is_only = self.0 & (REFS_MASK | MOVING | CACHED) == ONE_REF;
        if is_only && !self.freed().carries() { Some(self.freed()) } else { None }
    }

    /// Like [`release_only`](Self::release_only), for a block in this frame.
    #[inline]
    pub fn release_only_in(self, frame: FrameId) -> Option<Self> {
        let generation = self.0.wrapping_add(ONE_GENERATION) & GENERATION_MASK;
        if self.is_only_in(frame) && generation != 0 { Some(Self(generation | frame.0 as u64)) } else { None }
    }

    /// Like [`release_only_in`](Self::release_only_in), and caches the block: it becomes evictable.
    #[inline]
    pub fn keep_only_in(self, frame: FrameId) -> Option<Self> {
        self.release_only_in(frame).map(|freed| Self(freed.0 | SEALED | CACHED))
    }

    /// Returns whether `release_only_in` would succeed, ignoring a wrap-around.
    #[inline]
    pub fn is_only_in(self, frame: FrameId) -> bool {
        self.0 & (FRAME_MASK | REFS_MASK | MOVING | CACHED) == ONE_REF | frame.0 as u64
    }

    /// Like [`release_only`](Self::release_only), for a block that is neither sealed nor pinned.
    #[inline]
    pub fn release_private(self) -> Option<Self> {
        let next = self.0.wrapping_sub(ONE_REF).wrapping_add(ONE_GENERATION);
        // Zero above the generation, unless it wraps around into the pins.
        let differs = (self.0 & !(FRAME_MASK | GENERATION_MASK)) ^ ONE_REF | next >> PINS_SHIFT;
        if differs == 0 { Some(Self(next)) } else { None }
    }

    /// Like [`release_only`](Self::release_only), for a cached block, which becomes evictable.
    #[inline]
    pub fn release_kept(self) -> Option<Self> {
        let freed = self.freed();
        let is_only = self.0 & (REFS_MASK | CACHED) == ONE_REF | CACHED;
        (is_only && !freed.carries()).then_some(Self(freed.0 | self.0 & (SEALED | MOVING | CACHED)))
    }

    #[inline]
    fn freed(self) -> Self {
        Self(self.0 & FRAME_MASK | self.0.wrapping_add(ONE_GENERATION) & GENERATION_MASK)
    }

    /// Returns whether the generation's low bits are 0, see [`Released::Last`].
    #[inline]
    pub const fn carries(self) -> bool {
        self.0 & GENERATION_MASK == 0
    }

    /// Adds a pin. `None`: not owned, or full.
    #[inline]
    pub const fn pin(self) -> Option<Self> {
        if !self.is_owned() || self.0 & PINS_MASK == PINS_MASK { None } else { Some(Self(self.0 + ONE_PIN)) }
    }

    /// Drops a pin. `None`: not owned, or not pinned.
    #[inline]
    pub const fn unpin(self) -> Option<Self> {
        if !self.is_owned() || self.0 & PINS_MASK == 0 { None } else { Some(Self(self.0 - ONE_PIN)) }
    }

    /// Marks the bytes as final. `None`: not owned.
    #[inline]
    pub const fn seal(self) -> Option<Self> {
        if self.is_owned() { Some(Self(self.0 | SEALED)) } else { None }
    }

    /// Marks the bytes as final and the block as cached. `None`: not owned.
    #[inline]
    pub const fn seal_cached(self) -> Option<Self> {
        if self.is_owned() { Some(Self(self.0 | SEALED | CACHED)) } else { None }
    }

    /// Makes the bytes writable again. `None`: free, shared, cached or moving.
    #[inline]
    pub fn reopen(self) -> Option<Self> {
        let reads = self.is_moving();
        if self.refs() == 1 && !self.is_cached() && !reads {
            Some(Self(self.0 & !(SEALED | MOVING)))
        } else {
            None
        }
    }

    /// Begins a copy to another frame. `None`: free, not sealed, pinned, or already moving.
    #[inline]
    pub const fn begin_move(self) -> Option<Self> {
        let movable = !self.is_free() && self.is_sealed() && self.pins() == 0 && !self.is_moving();
        if movable { Some(Self(self.0 | MOVING)) } else { None }
    }

    /// Publishes a complete copy: the bytes are now in `to`. `None`: released or pinned meanwhile.
    #[inline]
    pub fn publish_move(self, to: FrameId) -> Option<Self> {
        let pinned = self.pins() != 0;
        let released = self.is_free();
        if !self.is_moving() || pinned || released {
            return None;
        }
        Some(Self(self.0 & !(MOVING | FRAME_MASK) | to.0 as u64))
    }

    /// Returns the word of the free block displaced by a published move, now in the frame `left`.
    #[inline]
    pub const fn displaced(self, left: FrameId) -> Self {
        Self(self.0 & GENERATION_MASK | left.0 as u64)
    }

    /// Ends the hold left by the last release, if any; returns whether that release carries.
    #[inline]
    pub const fn take_left(self) -> Option<(Self, bool)> {
        match self.unhold() {
            Some(word) => Some((word, word.0 & GENERATION_MASK == 0)),
            None => None,
        }
    }

    /// Ends a move without publishing. `None`: released meanwhile, and the frame is the mover's.
    #[inline]
    pub const fn end_move(self) -> Option<Self> {
        if self.is_moving() && !self.is_free() { Some(Self(self.0 & !MOVING)) } else { None }
    }
}

impl fmt::Debug for BlockWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockWord")
            .field("bits", &format_args!("{:#018x}", self.0))
            .field("frame", &self.frame())
            .field("refs", &self.refs())
            .field("generation_low", &self.generation_low())
            .field("pins", &self.pins())
            .field("sealed", &self.is_sealed())
            .field("moving", &self.is_moving())
            .field("cached", &self.is_cached())
            .finish()
    }
}

#[cfg(test)]
mod tests;
