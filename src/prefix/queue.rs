//! A lock-free priority queue of blocks by rank, smallest first, linked through the blocks' rows.
//! It allocates only at construction; a push or a pop touches a constant number of rows on average.
//!
//! A hierarchical timing wheel (Varghese and Lauck) with ranks in place of times. A slot of level
//! `l` is a stack of blocks whose ranks agree in all bits from `l * step` up. A level has `2^digit`
//! slots, used cyclically. The *cursor* is a rank that only grows; a level's window is the
//! `2^digit` slots from the cursor's slot on:
//!
//! ```text
//!            cursor
//!              v
//! level 0      |.|.|.|.|.|.|.|.|                               one rank per slot
//! level 1      |  due  |  next |       |       |  ...          2^step ranks per slot
//! level 2      |              due              |  next  ...    2^(2 step) ranks per slot
//! ```
//!
//! ```text
//! number(rank, l) = rank >> (l * step)       equal for all ranks of a slot
//! index           = number mod 2^digit       position of the slot in its level
//! turn            = number >> digit          how many times the level has wrapped
//! step            = digit - 1                a window spans two whole slots of the level above
//! ```
//!
//! - *Push*: into the lowest level whose window contains the rank. A rank below the cursor is
//!   *overdue*: it goes onto a separate stack, which is served first.
//! - *Pop*: of the first nonempty slots of all levels, choose the one that begins first, and among
//!   equals the one of the highest level. A slot of level 0 yields a block. A slot of a higher
//!   level ahead of the cursor moves the cursor to its beginning; it is then *due*, and its blocks
//!   are requeued one by one at lower levels. Any number of threads help.
//! - *Look-ahead*: for each block that level 0 yields, one block of each slot that is due *next* is
//!   requeued: windows overlap, so it already has a place at the level below. With evenly spread
//!   ranks, a slot is nearly empty when it is due; with uneven ones, a pop may requeue many blocks.
//! - *Correction*: ranks may grow meanwhile; a take from an outgrown slot requeues the block.
//!
//! Level 1 spans at least twice the number of blocks: with ranks from a counter, as in LRU, a block
//! is enqueued, requeued once, and taken.
//!
//! | word | of | what |
//! |---|---|---|
//! | [`head`] | a slot, and the overdue stack | the top block, the turn, a tag |
//! | next | a block's row | the block below; written by the thread that holds the block |
//! | hints | 64 slots, and 64 words of those | which are nonempty; may be wrong briefly |
//! | cursor | the whole queue | when it was set, no block was expected below it |
//!
//! # Invariants
//!
//! 1. *A block is in one stack or held by one thread.* A stack changes only by compare-exchange of
//!    its head, whose tag grows with each pop: a top that was removed and pushed again is detected.
//! 2. *All blocks in a slot have one number*, computed from their ranks when enqueued. A push that
//!    finds another turn has an old cursor, or a *stale* slot.
//! 3. *A stale slot*, whose number is behind its level's window, is spilled: its blocks become
//!    overdue.
//!
//! # Protocols
//!
//! *Hints.* Push: change the head, then set the bit if it is clear. Pop, on an empty slot: clear
//! the bit, apply a read-modify-write without effect to the head, and set the bit again if the slot
//! is nonempty. Both sides use read-modify-writes on the head, so the later one sees the effects of
//! the earlier one. The same protocol applies between a word of hints and the word above it.
//!
//! *The cursor.* Push: read the cursor, enqueue by it, fence, read it again, and spill the slot if
//! the cursor has passed it. Pop: move the cursor, fence, and spill each nonempty slot that it has
//! passed. One of the two sees the other (as in Dekker's algorithm), so no block stays in a slot
//! that will later count as one ahead.
//!
//! *Stopped threads.* A thread stopped between clearing a hint and its second look hides blocks
//! pushed in between; [`look`](RankQueue::look) finds them.
//!
//! # Guarantees
//!
//! 1. Every pushed block is popped exactly once.
//! 2. Lock-free. A stopped thread withholds only the blocks that it holds: one in `pop`, the given
//!    ones in a push, and one that it spills. It may delay others; `look` finds them.
//! 3. Without concurrency, blocks come in the order of their ranks (equal ranks in any order),
//!    after those whose ranks were below the cursor when they were enqueued or overtaken. The
//!    cursor never exceeds the smallest rank enqueued by an earlier operation.
//! 4. A block is enqueued at most once per level, and once more whenever its rank has grown or the
//!    cursor has passed it.
//! 5. `None` from `pop`: no hint was set. After `look` returned false: each head was empty at some
//!    moment during the call, so blocks enqueued before, and not moved meanwhile, were found.
//!
//! Models: `loom-tests/tests/eviction_queue.rs`.

mod geometry;
mod head;
mod level;
mod links;

use crate::ids::BlockId;
use crate::sync::{AtomicU64, AtomicUsize, CachePadded, Ordering::*, fence_after_rmw, prefetch};
use geometry::{Geometry, Slot};
use head::{LinkedBlocks, Stack};
use level::Level;
pub use links::Links;

/// Lock-free priority queue of blocks by rank, smallest first; under concurrency, approximately.
///
/// Ranks may grow while blocks are enqueued. A block whose rank was below the
/// [cursor](Self::cursor) when it was enqueued comes before all others.
pub struct RankQueue {
    geometry: Geometry,
    levels: Box<[Level]>,
    /// Number of levels that were ever used: ranks of a counter use two or three.
    used: CachePadded<AtomicUsize>,
    cursor: CachePadded<AtomicU64>,
    overdue: CachePadded<Stack>,
}

/// Distance of a pop's prefetch in slots of level 0: about the memory latency in pops.
const SOON: u64 = 4;

/// The nonempty slot that begins first.
struct FirstSlot {
    slot: Slot,
    start: u64,
    /// Smallest start of a slot of another level.
    runner_up: u64,
}

/// A block held by this thread that may be popped if its rank is at most `due`.
struct Candidate {
    id: BlockId,
    due: u64,
}

impl RankQueue {
    /// Creates an empty queue suited to a pool of `blocks`, with about `24 * sqrt(blocks)` slots.
    pub fn new(blocks: usize) -> Self {
        Self::of(Geometry::suited(blocks))
    }

    /// Creates an empty queue of `levels` levels with digits of `bits` bits; of fewer levels, if
    /// these suffice for ranks of 64 bits. Ranks beyond the last level count as the largest that
    /// fits.
    ///
    /// # Panics
    /// If `bits` is 0 or more than 12, or `levels` is 0.
    pub fn with_digits(bits: u32, levels: u32) -> Self {
        Self::of(Geometry::new(bits, levels))
    }

    fn of(geometry: Geometry) -> Self {
        Self {
            geometry,
            levels: (0..geometry.levels()).map(|_| Level::new(geometry.slots())).collect(),
            used: CachePadded::new(AtomicUsize::new(0)),
            cursor: CachePadded::new(AtomicU64::new(0)),
            overdue: CachePadded::new(Stack::default()),
        }
    }

    /// Enqueues a block that only the caller holds, and that is in no rank queue.
    pub fn push(&self, links: &impl Links, id: BlockId) {
        self.enqueue(links, id, self.rank(links, id));
    }

    /// Pushes several blocks, consecutive ones of one slot by a single compare-exchange.
    pub fn push_all(&self, links: &impl Links, ids: &[BlockId]) {
        let mut rest = ids;
        while let Some(&first) = rest.first() {
            let cursor = self.cursor.load(Relaxed);
            let Some(slot) = self.geometry.place(self.rank(links, first), cursor) else {
                self.overdue.push(links, LinkedBlocks::of(first), 0);
                rest = &rest[1..];
                continue;
            };
            let mut chain = LinkedBlocks::of(first);
            let alike =
                |&&id: &&BlockId| self.geometry.number(self.rank(links, id), slot.level) == slot.number;
            let more = rest[1..].iter().take_while(alike).map(|&id| chain.add(links, id)).count();
            if self.put(links, slot, chain, cursor) {
                rest = &rest[1 + more..];
            }
        }
    }

    /// Takes a block of about the smallest rank; exactly the smallest without concurrency. `None`:
    /// the queue looks empty.
    pub fn pop(&self, links: &impl Links) -> Option<BlockId> {
        loop {
            let cursor = self.cursor.load(Relaxed);
            let taken = match self.overdue.take(links) {
                Some(id) => Some(Candidate { id, due: cursor }),
                None => self.serve(links, &self.first(cursor)?, cursor),
            };
            if let Some(Candidate { id, due }) = taken {
                let rank = self.rank(links, id);
                if rank <= due {
                    return Some(id);
                }
                self.enqueue(links, id, rank);
            }
        }
    }

    /// Reads every head and repairs wrong hints; returns whether there is a block to pop. For
    /// callers that found the queue empty and have no alternative.
    #[cold]
    pub fn look(&self) -> bool {
        let found = self.levels.iter().map(Level::mark_all).filter(|&found| found).count();
        found > 0 || !self.overdue.head().is_empty()
    }

    /// Returns a lower bound of all enqueued ranks, counting ranks below the cursor as the cursor;
    /// `None` if the queue looks empty.
    pub fn head(&self) -> Option<u64> {
        let cursor = self.cursor.load(Relaxed);
        if !self.overdue.head().is_empty() {
            return Some(cursor);
        }
        self.first(cursor).map(|first| first.start.max(cursor))
    }

    /// Returns the cursor. Smaller ranks that are enqueued from now on count as this rank.
    #[cfg(feature = "internals")]
    pub fn cursor(&self) -> u64 {
        self.cursor.load(Relaxed)
    }

    /// Relaxed, like all accesses to ranks and the cursor: no other data depends on them.
    fn rank(&self, links: &impl Links, id: BlockId) -> u64 {
        links.rank(id).min(self.geometry.rank_max())
    }

    fn stack(&self, slot: Slot) -> &Stack {
        self.levels[slot.level].stack(self.geometry.index(slot.number))
    }

    fn enqueue(&self, links: &impl Links, id: BlockId, rank: u64) {
        loop {
            let cursor = self.cursor.load(Relaxed);
            match self.geometry.place(rank, cursor) {
                None => return self.overdue.push(links, LinkedBlocks::of(id), 0),
                Some(slot) if self.put(links, slot, LinkedBlocks::of(id), cursor) => return,
                Some(_) => {}
            }
        }
    }

    /// Pushes a chain into the slot that `cursor` selects; false, without effect, if it moved.
    fn put(&self, links: &impl Links, slot: Slot, chain: LinkedBlocks, cursor: u64) -> bool {
        let turn = self.geometry.turn(slot.number);
        let stack = self.stack(slot);
        if self.used.load(Relaxed) <= slot.level {
            // Before the push of the head, whose Release publishes it.
            self.used.fetch_max(slot.level + 1, Relaxed);
        }
        while let Err(other_turn) = stack.try_push(links, chain, turn) {
            // The thread that enqueued there read the cursor before the push that we acquired: if
            // it is still ours, theirs was no later, and the slot is stale. Model:
            // `met_a_stale_slot`.
            if self.cursor.load(Relaxed) != cursor {
                return false;
            }
            self.spill(links, stack, other_turn);
        }
        self.levels[slot.level].mark(self.geometry.index(slot.number));
        // Pairs with the fence in `advance`: it sees the chain, or we see the new cursor.
        fence_after_rmw();
        let now = self.cursor.load(Relaxed);
        if now != cursor && self.geometry.number(now, slot.level) > slot.number {
            self.spill(links, stack, turn);
        }
        true
    }

    /// Moves the contents of a stale slot to the overdue stack. Model: `overtaken`.
    fn spill(&self, links: &impl Links, stack: &Stack, turn: u8) {
        while let Some(id) = stack.take_of_turn(links, turn) {
            self.overdue.push(links, LinkedBlocks::of(id), 0);
        }
    }

    /// Returns the levels that were ever used. Relaxed, like a hint: may lack a level, unless this
    /// thread has acquired a head of it, or fenced after the fence in `put`.
    #[inline]
    fn used_levels(&self) -> impl Iterator<Item = (usize, &Level)> {
        self.levels[..self.used.load(Relaxed)].iter().enumerate()
    }

    fn first(&self, cursor: u64) -> Option<FirstSlot> {
        let mut best: Option<FirstSlot> = None;
        for (level, slots) in self.used_levels() {
            let at = self.geometry.number(cursor, level);
            let Some(distance) = slots.find(self.geometry.index(at), self.geometry.slots()) else { continue };
            // Wraps where a stale slot would lie beyond the last rank; the turn then differs.
            let slot = Slot { level, number: at.wrapping_add(distance as u64) };
            let start = self.geometry.start(slot);
            match &mut best {
                Some(best) if best.start < start => best.runner_up = best.runner_up.min(start),
                _ => {
                    let runner_up = best.map_or(u64::MAX, |best| best.start);
                    best = Some(FirstSlot { slot, start, runner_up });
                }
            }
        }
        best
    }

    /// Takes a block from the first slot, or makes progress towards one.
    fn serve(&self, links: &impl Links, first: &FirstSlot, cursor: u64) -> Option<Candidate> {
        let &FirstSlot { slot, start, runner_up } = first;
        let stack = self.stack(slot);
        let head = stack.head();
        let Some(top) = head.top() else {
            self.levels[slot.level].clear(self.geometry.index(slot.number));
            return None;
        };
        if head.turn() != self.geometry.turn(slot.number) {
            self.spill(links, stack, head.turn());
            return None;
        }
        if slot.level == 0 {
            let due = self.geometry.start_above(start);
            if due > cursor {
                // Its level-1 slot was requeued ahead; the cursor advances for the slots after it.
                self.advance(links, cursor, due);
                return None;
            }
            self.look_ahead(links, cursor);
            return self.take_nearest(links, slot, start);
        }
        if start <= cursor {
            return self.cascade(links, stack, cursor);
        }
        // Alone in its slot, before all others: take it without requeueing at each level.
        let due = self.geometry.end(slot).min(runner_up);
        if links.next(top).load(Relaxed) == 0 && self.rank(links, top) <= due {
            return stack.take_exactly(links, head).map(|id| Candidate { id, due });
        }
        self.advance(links, cursor, start);
        None
    }

    #[inline]
    fn take_nearest(&self, links: &impl Links, slot: Slot, start: u64) -> Option<Candidate> {
        let slots = &self.levels[0];
        let index = self.geometry.index(slot.number);
        if let Some(soon) = slots.stack(self.geometry.index(slot.number.wrapping_add(SOON))).head().top() {
            prefetch(links.next(soon));
        }
        let id = slots.stack(index).take(links)?;
        // A rank usually has one block; the hint would mislead the next pop.
        if slots.stack(index).head().is_empty() {
            slots.clear(index);
        }
        Some(Candidate { id, due: start })
    }

    /// Requeues a block of each slot due next. With evenly dense ranks, few are left by then.
    #[inline]
    fn look_ahead(&self, links: &impl Links, cursor: u64) {
        if !self.geometry.overlaps() {
            return;
        }
        for (level, slots) in self.used_levels().skip(1) {
            let next = self.geometry.number(cursor, level) + 1;
            let index = self.geometry.index(next);
            if !slots.is_marked(index) {
                continue;
            }
            if let Some(id) = slots.stack(index).take_of_turn(links, self.geometry.turn(next)) {
                self.enqueue(links, id, self.rank(links, id));
            }
            if slots.stack(index).head().is_empty() {
                slots.clear(index);
            }
        }
    }

    /// Requeues the blocks of a due slot, unless one of them can be popped at once. Stops when the
    /// cursor moves: the slot may then lie ahead, and requeued blocks would return to it.
    fn cascade(&self, links: &impl Links, stack: &Stack, cursor: u64) -> Option<Candidate> {
        while self.cursor.load(Relaxed) == cursor
            && let Some(id) = stack.take(links)
        {
            let rank = self.rank(links, id);
            if rank <= cursor {
                return Some(Candidate { id, due: cursor });
            }
            self.enqueue(links, id, rank);
        }
        None
    }

    /// Moves the cursor to the first slot's start, and spills blocks pushed behind it meanwhile.
    fn advance(&self, links: &impl Links, cursor: u64, to: u64) {
        if self.cursor.compare_exchange(cursor, to, Relaxed, Relaxed).is_err() {
            return;
        }
        // Pairs with the fence in `put`: the push sees the new cursor, or we see its blocks.
        fence_after_rmw();
        for (level, slots) in self.used_levels() {
            let from = self.geometry.number(cursor, level);
            let mut passed =
                (self.geometry.number(to, level) - from).min(self.geometry.slots() as u64) as usize;
            let mut at = from;
            while let Some(distance) = slots.find(self.geometry.index(at), passed) {
                let index = self.geometry.index(at + distance as u64);
                let stack = slots.stack(index);
                // Blocks already enqueued for the next turn stay.
                let turn = self.geometry.turn(self.geometry.ahead(index, level, to));
                let head = stack.head();
                if !head.is_empty() && head.turn() != turn {
                    self.spill(links, stack, head.turn());
                }
                at += distance as u64 + 1;
                passed -= distance + 1;
            }
        }
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;
