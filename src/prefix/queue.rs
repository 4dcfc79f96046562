//! Which block goes next: a lock-free priority queue of blocks by rank, smallest first, linked through the blocks' own
//! rows. It allocates nothing once it is there, and a push or a pop touches a constant number of rows on average,
//! however many blocks there are.
//!
//! # The rank queue
//!
//! A hierarchical rank queue (Varghese and Lauck's timing rank queue), with ranks for times. A slot of level `l` takes the ranks that
//! agree in all bits from `l * step` on, and is the head of a stack of blocks. A level has `2^digit` slots, and goes
//! around. The *cursor* is a rank that only grows; a level's window are the slots from the cursor's on, once around:
//!
//! ```text
//!            cursor
//!              v
//! level 0      |.|.|.|.|.|.|.|.|                               one rank a slot
//! level 1      |  due  |  next |       |       |  ...          2^step ranks a slot
//! level 2      |              due              |  next  ...    2^(2 step) ranks a slot
//! ```
//!
//! ```text
//! number(rank, l) = rank >> (l * step)       what is the same for all ranks of a slot
//! index           = number mod 2^digit       where the slot is
//! turn            = number >> digit          how often the level has gone around
//! step            = digit - 1                a window has two slots of the level above, whole
//! ```
//!
//! - *Push*: into the lowest level whose window has the rank. A rank below the cursor is *overdue*: a stack of its own,
//!   which is served first.
//! - *Pop*: the first slot of each level that holds something; of those the one that begins first, of equals that of the
//!   higher level. One of level 0 gives a block. One of a higher level that lies ahead takes the cursor to its beginning,
//!   and then it is *due*: its blocks are filed again, one by one, by now at lower levels. Any number of threads help.
//! - *Looking ahead*: with each block that level 0 gives, one of each slot that is due *next* is filed again. Windows
//!   overlap, so that all of it has a place below by then. Where ranks lie about evenly, a slot that comes due is
//!   nearly empty, and no pop pays for a whole slot; where they do not, one does.
//! - *Correction*: a rank may grow while its block is filed. Whoever takes a block off a slot that its rank has outgrown
//!   files it again.
//!
//! The digits are chosen so that level 1 goes around at least twice the number of blocks: where ranks are handed out by
//! a counter, as LRU does, a block is filed, filed again once, and taken.
//!
//! # Words
//!
//! | word | of | what |
//! |---|---|---|
//! | [head](head) | a slot, and the overdue | the block on top, the turn, a tag |
//! | next | a block's row | the block below; whose hands the block is in, writes it |
//! | hints | 64 slots, and 64 words of those | which hold something; may be wrong for a moment |
//! | cursor | the rank queue | no block was expected below it when it was set |
//!
//! # Invariants
//!
//! 1. *A block is in one stack or in one thread's hands.* A stack changes by compare-exchange of its head only, whose tag
//!    grows with each pop: a stack that lost its top and got it back is not taken for what it was.
//! 2. *A slot holds blocks of one number*, filed by ranks that they had then. Who would push onto one of another turn
//!    has an old cursor, or has met a *stale* slot.
//! 3. *A stale slot*, whose number is behind its level's window, is spilled: its blocks become overdue, one by one.
//!
//! # Protocols
//!
//! *Hints.* Push: change the head, then look at the bit, and set it if need be. Pop, of a slot that it finds empty: clear
//! the bit, then **change** the head (by nothing), and set the bit again if the slot has filled. Both touch the head with a
//! read-modify-write: of two, the later one has seen what the earlier one did before. The same once more
//! between a word of hints and the word above it.
//!
//! *The cursor.* Push: read the cursor, file by it, fence, read it again: if it has passed the slot, spill the slot. Pop:
//! move the cursor, fence, look at every slot that it has passed: spill those that hold something. One of
//! the two sees the other (a Dekker pair), so that no block is left behind in a slot that will count as one ahead.
//!
//! *Stopped.* A thread that is stopped between clearing a hint and looking again hides what came in between. Whoever
//! found nothing, and has no other way, [looks](RankQueue::look) at every head.
//!
//! # What holds
//!
//! 1. Every block that is pushed is popped once, by somebody.
//! 2. Lock-free. A thread that is stopped anywhere keeps what it has in its hands: one block in `pop`, those that it was
//!    given in a push, and in either one that it spills. It may make others come late; `look` finds them.
//! 3. With nobody else in the rank queue, blocks come in the order of their ranks; those below the cursor, as it was when they
//!    were filed or overtaken, before all others, in no order. The cursor is never beyond the smallest rank filed
//!    by who went before. Equal ranks come in no particular order.
//! 4. A block is filed at most once a level, and once more whenever its rank has grown or the cursor has passed it.
//! 5. `None` of `pop`: no hint was set. Of `pop` after a `look` that was false: each head was empty at a moment during the
//!    call. Who was filed before, and was moved by nobody meanwhile, would have been found.
//!
//! Models: `loom-tests/tests/eviction_queue.rs`.

mod geometry;
mod head;
mod level;

use crate::ids::BlockId;
use crate::sync::{AtomicU32, AtomicU64, CachePadded, Ordering::*, fence_after_rmw};
use geometry::{Geometry, Slot};
use head::{Chain, Stack, fetch};
use level::Level;

/// What the rank queue needs of a block's row. Rows are never freed while there is a rank queue.
pub trait Links {
    /// A word for the rank queue alone.
    fn next(&self, id: BlockId) -> &AtomicU32;

    /// The block's rank. It may grow at any time, also while the block is filed.
    fn rank(&self, id: BlockId) -> u64;
}

/// A priority queue of blocks by rank, smallest first. See the [module](self).
pub struct RankQueue {
    geometry: Geometry,
    levels: Box<[Level]>,
    cursor: CachePadded<AtomicU64>,
    /// Blocks whose ranks are below the cursor.
    overdue: CachePadded<Stack>,
}

/// The slot of level 0 whose block is fetched while one is popped lies so many further on: pops are that much faster than
/// memory.
const SOON: u64 = 4;

/// The slot that begins first.
struct First {
    slot: Slot,
    start: u64,
    /// No slot of another level begins before.
    runner_up: u64,
}

/// A block in our hands that may be popped if its rank is not beyond `due`.
struct Taken {
    id: BlockId,
    due: u64,
}

impl RankQueue {
    /// An empty one, with digits that suit a pool of `blocks`. It takes some bytes for each of about `24 * sqrt(blocks)`
    /// slots.
    pub fn new(blocks: usize) -> Self {
        Self::of(Geometry::suited(blocks))
    }

    /// An empty one of at most `levels` levels, but no more than ranks of 64 bits need, with digits of so many bits. Ranks
    /// that have no place count as the largest that has one.
    ///
    /// # Panics
    /// If a digit has no bit or more than 12, or if there is no level.
    pub fn with_digits(bits: u32, levels: u32) -> Self {
        Self::of(Geometry::new(bits, levels))
    }

    fn of(geometry: Geometry) -> Self {
        Self {
            geometry,
            levels: (0..geometry.levels()).map(|_| Level::new(geometry.slots())).collect(),
            cursor: CachePadded::new(AtomicU64::new(0)),
            overdue: CachePadded::new(Stack::default()),
        }
    }

    /// Files a block by its rank. It is in no rank queue, and in nobody's hands but the caller's.
    pub fn push(&self, links: &impl Links, id: BlockId) {
        self.file(links, id, self.rank(links, id));
    }

    /// As [`push`](Self::push), for several: consecutive ones that go into one slot are linked first, and pushed by one
    /// compare-exchange.
    pub fn push_all(&self, links: &impl Links, ids: &[BlockId]) {
        let mut rest = ids;
        while let Some(&first) = rest.first() {
            let cursor = self.cursor.load(Relaxed);
            let Some(slot) = self.geometry.place(self.rank(links, first), cursor) else {
                self.overdue.push(links, Chain::of(first), 0);
                rest = &rest[1..];
                continue;
            };
            let mut chain = Chain::of(first);
            let alike =
                |&&id: &&BlockId| self.geometry.number(self.rank(links, id), slot.level) == slot.number;
            let more = rest[1..].iter().take_while(alike).map(|&id| chain.add(links, id)).count();
            if self.put(links, slot, chain, cursor) {
                rest = &rest[1 + more..];
            }
        }
    }

    /// Takes about the smallest: the smallest, when nobody else is in the rank queue. `None`: it looks empty, after a few loads.
    pub fn pop(&self, links: &impl Links) -> Option<BlockId> {
        loop {
            let cursor = self.cursor.load(Relaxed);
            let taken = match self.overdue.take(links) {
                Some(id) => Some(Taken { id, due: cursor }),
                None => self.serve(links, &self.first(cursor)?, cursor),
            };
            if let Some(Taken { id, due }) = taken {
                let rank = self.rank(links, id);
                if rank <= due {
                    return Some(id);
                }
                self.file(links, id, rank);
            }
        }
    }

    /// Looks at every head, and sets the hints right that a thread left wrong which is stopped just there. True: there is
    /// something to pop. For who was told that there is nothing, and has no other way.
    #[cold]
    pub fn look(&self) -> bool {
        if cfg!(kvpool_mutant = "wheel_no_look") {
            return false;
        }
        let found = self.levels.iter().map(Level::mark_all).filter(|&found| found).count();
        found > 0 || !self.overdue.head().is_empty()
    }

    /// No block that is filed has a smaller rank than this, but for those below the cursor, which count as the cursor. None
    /// if the rank queue looks empty. A few loads.
    pub fn head(&self) -> Option<u64> {
        let cursor = self.cursor.load(Relaxed);
        if !self.overdue.head().is_empty() {
            return Some(cursor);
        }
        self.first(cursor).map(|first| first.start.max(cursor))
    }

    /// A rank that nothing filed from now on comes before: smaller ones count as this one.
    pub fn cursor(&self) -> u64 {
        self.cursor.load(Relaxed)
    }

    /// Relaxed, as all ranks and the cursor: nothing is read on the strength of them.
    fn rank(&self, links: &impl Links, id: BlockId) -> u64 {
        links.rank(id).min(self.geometry.rank_max())
    }

    fn stack(&self, slot: Slot) -> &Stack {
        self.levels[slot.level].stack(self.geometry.index(slot.number))
    }

    /// Files a block of our own.
    fn file(&self, links: &impl Links, id: BlockId, rank: u64) {
        loop {
            let cursor = self.cursor.load(Relaxed);
            match self.geometry.place(rank, cursor) {
                None => return self.overdue.push(links, Chain::of(id), 0),
                Some(slot) if self.put(links, slot, Chain::of(id), cursor) => return,
                Some(_) => {}
            }
        }
    }

    /// Pushes a chain into the slot in which `cursor` puts it. False: the cursor has moved on, and nothing is done.
    fn put(&self, links: &impl Links, slot: Slot, chain: Chain, cursor: u64) -> bool {
        let turn = self.geometry.turn(slot.number);
        let stack = self.stack(slot);
        while let Err(other_turn) = stack.try_push(links, chain, turn) {
            // Whoever filed there read the cursor before its head was released to us: if we still see the one that
            // we went by, theirs was no later, and the slot is stale. Model: `met_a_stale_slot`.
            if self.cursor.load(Relaxed) != cursor {
                return false;
            }
            self.spill(links, stack, other_turn);
        }
        self.levels[slot.level].mark(self.geometry.index(slot.number));
        if cfg!(kvpool_mutant = "wheel_no_second_read") {
            return true;
        }
        // Pairs with the fence in `advance`: it sees the chain, or we see the new cursor.
        fence_after_rmw();
        let now = self.cursor.load(Relaxed);
        if now != cursor && self.geometry.number(now, slot.level) > slot.number {
            self.spill(links, stack, turn);
        }
        true
    }

    /// Makes overdue what a stale slot holds. Model: `overtaken`.
    fn spill(&self, links: &impl Links, stack: &Stack, turn: u8) {
        while let Some(id) = stack.take_of_turn(links, turn) {
            self.overdue.push(links, Chain::of(id), 0);
        }
    }

    /// The slot that begins first, as the hints say.
    fn first(&self, cursor: u64) -> Option<First> {
        let mut best: Option<First> = None;
        for (level, slots) in self.levels.iter().enumerate() {
            let at = self.geometry.number(cursor, level);
            let Some(distance) = slots.find(self.geometry.index(at), self.geometry.slots()) else { continue };
            // It wraps where a stale slot would be beyond the last rank, and says another turn.
            let slot = Slot { level, number: at.wrapping_add(distance as u64) };
            let start = self.geometry.start(slot);
            match &mut best {
                Some(best) if best.start < start => best.runner_up = best.runner_up.min(start),
                _ => {
                    let runner_up = best.map_or(u64::MAX, |best| best.start);
                    best = Some(First { slot, start, runner_up });
                }
            }
        }
        best
    }

    /// Takes a block off the first slot, or brings the rank queue nearer to giving one.
    fn serve(&self, links: &impl Links, first: &First, cursor: u64) -> Option<Taken> {
        let &First { slot, start, runner_up } = first;
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
                // All of its level-1 slot has been filed ahead. The cursor goes on for what comes after.
                self.advance(links, cursor, due);
                return None;
            }
            self.look_ahead(links, cursor);
            return self.take_nearest(links, slot, start);
        }
        if start <= cursor {
            return self.cascade(links, stack, cursor);
        }
        // Alone in its slot, and before everything else: what would be filed again at each level below, is taken here.
        let due = self.geometry.end(slot).min(runner_up);
        if links.next(top).load(Relaxed) == 0 && self.rank(links, top) <= due {
            return stack.take_exactly(links, head).map(|id| Taken { id, due });
        }
        self.advance(links, cursor, start);
        None
    }

    /// Takes a block off a slot of level 0.
    #[inline]
    fn take_nearest(&self, links: &impl Links, slot: Slot, start: u64) -> Option<Taken> {
        let slots = &self.levels[0];
        let index = self.geometry.index(slot.number);
        if let Some(soon) = slots.stack(self.geometry.index(slot.number.wrapping_add(SOON))).head().top() {
            fetch(links.next(soon));
        }
        let id = slots.stack(index).take(links)?;
        // As a rule a rank is had by one block, and the hint would be in vain for the next pop.
        if slots.stack(index).head().is_empty() {
            slots.clear(index);
        }
        Some(Taken { id, due: start })
    }

    /// Files a block again of each slot that comes due next: all of it is in the window of the level below already. When
    /// it is due, little is left to do, where the ranks are about as dense as before.
    #[inline]
    fn look_ahead(&self, links: &impl Links, cursor: u64) {
        if !self.geometry.overlaps() {
            return;
        }
        for (level, slots) in self.levels.iter().enumerate().skip(1) {
            let next = self.geometry.number(cursor, level) + 1;
            let index = self.geometry.index(next);
            if !slots.is_marked(index) {
                continue;
            }
            if let Some(id) = slots.stack(index).take_of_turn(links, self.geometry.turn(next)) {
                self.file(links, id, self.rank(links, id));
            }
            if slots.stack(index).head().is_empty() {
                slots.clear(index);
            }
        }
    }

    /// Files the blocks of a due slot again, unless one of them can go at once. Once the cursor has moved on, the slot may
    /// be one that lies ahead, where blocks would come back to as we file them.
    fn cascade(&self, links: &impl Links, stack: &Stack, cursor: u64) -> Option<Taken> {
        while self.cursor.load(Relaxed) == cursor
            && let Some(id) = stack.take(links)
        {
            let rank = self.rank(links, id);
            if rank <= cursor {
                return Some(Taken { id, due: cursor });
            }
            self.file(links, id, rank);
        }
        None
    }

    /// Moves the cursor on, to the beginning of the first slot, and spills what was pushed behind it meanwhile.
    fn advance(&self, links: &impl Links, cursor: u64, to: u64) {
        if self.cursor.compare_exchange(cursor, to, Relaxed, Relaxed).is_err()
            || cfg!(kvpool_mutant = "wheel_no_look_behind")
        {
            return;
        }
        // Pairs with the fence in `put`: who filed by the old cursor sees the new one, or we see what it filed.
        fence_after_rmw();
        for (level, slots) in self.levels.iter().enumerate() {
            let from = self.geometry.number(cursor, level);
            let mut passed =
                (self.geometry.number(to, level) - from).min(self.geometry.slots() as u64) as usize;
            let mut at = from;
            while let Some(distance) = slots.find(self.geometry.index(at), passed) {
                let index = self.geometry.index(at + distance as u64);
                let stack = slots.stack(index);
                // What is there already for the rank queue's next turn stays.
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
