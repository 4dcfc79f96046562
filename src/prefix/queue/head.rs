//! The head of a stack of blocks: one word.
//!
//! | bits | field | meaning |
//! |---|---|---|
//! | 0..28 | top | id of the top block plus one; 0: the stack is empty |
//! | 28..36 | turn | turn of the level in which the blocks were enqueued |
//! | 36..64 | tag | number of takes, so that a top that was removed and pushed again is detected |
//!
//! ```text
//! push   {top, turn, tag}   ->  {id, turn, tag}          the turn may change if the stack was empty
//! take   {top, turn, tag}   ->  {below, turn, tag + 1}
//! ```
//!
//! A take reads the block below from the top block's row before the compare-exchange. If another
//! thread takes the block meanwhile and rewrites its row, the tag has changed and the exchange
//! fails, unless exactly a multiple of 2^28 takes came in between and the same block is on top.

use super::links::Links;
use crate::config::FRAME_BITS;
use crate::ids::BlockId;
use crate::sync::{AtomicU64, Ordering::*, prefetch};

const TOP_BITS: u32 = FRAME_BITS + 1;
const TURN_BITS: u32 = u8::BITS;
const TOP: u64 = (1 << TOP_BITS) - 1;
const TURN: u64 = ((1 << TURN_BITS) - 1) << TOP_BITS;
const ONE_TAG: u64 = 1 << (TOP_BITS + TURN_BITS);

// Every block id plus one has a value of its own.
const _: () = assert!((1 << FRAME_BITS) <= TOP);
const _: () = assert!(TOP_BITS + TURN_BITS <= 36, "at least 28 bits for the tag");

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct StackWord(u64);

impl StackWord {
    #[inline]
    pub(super) fn top(self) -> Option<BlockId> {
        named((self.0 & TOP) as u32)
    }

    #[inline]
    pub(super) fn is_empty(self) -> bool {
        self.0 & TOP == 0
    }

    #[inline]
    pub(super) fn turn(self) -> u8 {
        ((self.0 & TURN) >> TOP_BITS) as u8
    }

    #[inline]
    fn pushed(self, top: BlockId, turn: u8) -> Self {
        Self(self.0 & !(TOP | TURN) | u64::from(turn) << TOP_BITS | u64::from(link(top)))
    }

    /// `below` is the link read from the top block's row.
    #[inline]
    fn taken(self, below: u32) -> Self {
        let tag = ONE_TAG;
        Self((self.0 & !TOP).wrapping_add(tag) | u64::from(below) & TOP)
    }
}

#[inline]
fn link(id: BlockId) -> u32 {
    id.0 + 1
}

#[inline]
fn named(link: u32) -> Option<BlockId> {
    link.checked_sub(1).map(BlockId)
}

#[derive(Clone, Copy)]
pub(super) struct LinkedBlocks {
    top: BlockId,
    bottom: BlockId,
}

impl LinkedBlocks {
    #[inline]
    pub(super) fn of(id: BlockId) -> Self {
        Self { top: id, bottom: id }
    }

    #[inline]
    pub(super) fn add(&mut self, links: &impl Links, id: BlockId) {
        links.next(id).store(link(self.top), Relaxed);
        self.top = id;
    }
}

/// A lock-free stack of blocks (Treiber's), linked through their rows.
#[derive(Default)]
pub(super) struct Stack(AtomicU64);

impl Stack {
    #[inline]
    pub(super) fn head(&self) -> StackWord {
        // Acquire: pairs with the Release of a push; its cursor, row and rank are visible.
        StackWord(self.0.load(Acquire))
    }

    pub(super) fn push(&self, links: &impl Links, chain: LinkedBlocks, turn: u8) {
        while self.try_push(links, chain, turn).is_err() {}
    }

    /// Pushes a chain, unless the stack holds blocks of another turn, which it returns.
    #[inline]
    pub(super) fn try_push(&self, links: &impl Links, chain: LinkedBlocks, turn: u8) -> Result<(), u8> {
        let mut head = self.head();
        loop {
            if !head.is_empty() && head.turn() != turn {
                return Err(head.turn());
            }
            // Relaxed: exclusively ours until the exchange.
            links.next(chain.bottom).store((head.0 & TOP) as u32, Relaxed);
            // Release: pairs with the Acquire of a take. Acquire: pairs with the Release of
            // `touch`, so that a later push sees the hint cleared; on failure, as in `head`.
            match self.0.compare_exchange_weak(head.0, head.pushed(chain.top, turn).0, AcqRel, Acquire) {
                Ok(_) => return Ok(()),
                Err(now) => head = StackWord(now),
            }
        }
    }

    #[inline]
    pub(super) fn take(&self, links: &impl Links) -> Option<BlockId> {
        self.take_while(links, |_| true)
    }

    pub(super) fn take_of_turn(&self, links: &impl Links, turn: u8) -> Option<BlockId> {
        self.take_while(links, |head| head.turn() == turn)
    }

    /// Takes the top block if nothing has changed since `head`.
    pub(super) fn take_exactly(&self, links: &impl Links, head: StackWord) -> Option<BlockId> {
        self.take_while(links, |now| now == head)
    }

    #[inline]
    fn take_while(&self, links: &impl Links, holds: impl Fn(StackWord) -> bool) -> Option<BlockId> {
        let mut head = self.head();
        loop {
            let top = head.top().filter(|_| holds(head))?;
            // Relaxed: written before the push that we acquired, or the tag has changed.
            let below = links.next(top).load(Relaxed);
            // Acquire, both: pairs with the Release of pushes. A head changes by read-modify-writes
            // only, so every block below was pushed in a release sequence that this reads from.
            match self.0.compare_exchange_weak(head.0, head.taken(below).0, Acquire, Acquire) {
                Ok(_) => {
                    // A thread that requeues a slot needs the next block soon.
                    if let Some(below) = named(below) {
                        prefetch(links.next(below));
                    }
                    return Some(top);
                }
                Err(now) => head = StackWord(now),
            }
        }
    }

    /// A read-modify-write without effect, ordered against each push. Release: pairs with the
    /// Acquire of a later push. Acquire: as in [`head`](Self::head).
    #[inline]
    pub(super) fn touch(&self) -> StackWord {
        StackWord(self.0.fetch_add(0, AcqRel))
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_touch() {
        let last = BlockId((1 << FRAME_BITS) - 1);
        let mut head = StackWord(0);
        assert!(head.is_empty() && head.top().is_none());
        for tag in 0..3 {
            for (id, turn) in [(BlockId(0), 0), (last, u8::MAX), (BlockId(77), 3)] {
                let pushed = head.pushed(id, turn);
                assert_eq!((pushed.top(), pushed.turn(), pushed.0 / ONE_TAG), (Some(id), turn, tag));
            }
            head = head.pushed(last, 9).taken(0);
            assert_eq!((head.top(), head.turn(), head.0 / ONE_TAG), (None, 9, tag + 1));
        }
        let wrapped = StackWord(!0).taken(link(BlockId(5)));
        assert_eq!((wrapped.top(), wrapped.turn(), wrapped.0 / ONE_TAG), (Some(BlockId(5)), u8::MAX, 0));
    }
}
