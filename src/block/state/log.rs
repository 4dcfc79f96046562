//! Ring of the last moves, with which a block table that lives across batches is patched instead of
//! rebuilt. Movers append, one at a time; batches read without a lock.
//!
//! ```text
//! slot       block, stamp
//! begun      moves whose slot may have been written     head       moves that can be read
//! unlisted   waves whose moves are being published, and not in the log yet
//! ```
//!
//! # Protocol
//!
//! ```text
//! publish:  unlisted += 1;  words;  append, stamp;  unlisted -= 1 (Release)
//! reopen:   word: sealed -> open (Acquire);  unlisted (Acquire) > 0?  sealed again: refused
//! append:   begun := i + 1;  fence(Release);  slot[i] := block, PENDING;  head := i + 1 (Release)
//! stamp:    fence(SeqCst);  slot[i].stamp := the newest ticket
//! read:     h := head (Acquire);  slots h - 1 downwards while their stamp is not before the ticket;
//!           fence(Acquire);  slots below begun - SLOTS may have been overwritten: too long ago
//! count:    head (Acquire)
//! visit:    h := head (Acquire);  slots from a known count up to h;  fence(Acquire);  begun, as above
//! ```
//!
//! # Theorem
//!
//! A query for the moves since ticket `t` returns every move that a table built under `t` may miss,
//! or reports that `t` is too old:
//! - a move published after a table was built under `t` has a stamp of at least `t`, which is read
//!   after the publication. A move without a stamp counts as newer than all;
//! - a move that is not in the log yet is stamped after the batch began, by the two fences of
//!   [`Clock`](crate::clock::Clock): its old frame is kept until the batch ends, and a later query
//!   lists it. The old frame has the block's bytes: who opens the block to write it sees the new
//!   word, so also that there are unlisted moves, and does not, or sees them in the log.
//!
//! A reader that keeps frames together with a count `s` needs no stamps. If it read a word after
//! the count, each move that it missed has a number of at least `s`. If a batch counts `s` moves
//! again, the mover's fence of each missed move comes after the batch's. Models:
//! `loom-tests/tests/moved_since.rs`, `loom-tests/tests/kept_frames.rs`.

use std::ptr;

use crate::ids::{BlockId, FrameId, Ticket};
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Mutex, Ordering::*, fence};

const SLOTS: usize = if cfg!(kvpool_loom) { 2 } else { 1 << if cfg!(miri) { 8 } else { 14 } };

/// Stamp of a move that was appended and is not stamped yet.
const PENDING: u64 = u64::MAX;

/// A block that moved, and its current frame.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Moved {
    /// Id of the block.
    pub block: BlockId,
    /// Its frame: after this move, or a later one. A block that moved twice may be listed twice.
    pub to: FrameId,
}

/// The number of moves logged at some moment, which is also the number of the next move.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct MoveCount(u64);

/// Whether the log covers a query.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "a table that is too old must be rebuilt"]
pub enum Since {
    /// All moves since then were listed.
    Listed,
    /// More blocks have moved since then than the log holds: tables must be rebuilt.
    TooLong,
}

struct Slot {
    block: AtomicU32,
    stamp: AtomicU64,
}

type Ring = [Slot; SLOTS];

pub(in crate::block) struct MoveLog {
    begun: AtomicU64,
    head: AtomicU64,
    unlisted: AtomicU64,
    /// Null until the first move: a pool that never compacts has no log.
    ring: AtomicPtr<Ring>,
    writer: Mutex<()>,
}

/// A wave that publishes moves.
pub(in crate::block) struct Publishing<'a>(&'a MoveLog);

impl Drop for Publishing<'_> {
    fn drop(&mut self) {
        // Release: who sees it sees the moves in the log.
        self.0.unlisted.fetch_sub(1, Release);
    }
}

impl MoveLog {
    pub(in crate::block) fn new() -> Self {
        Self {
            begun: AtomicU64::new(0),
            head: AtomicU64::new(0),
            unlisted: AtomicU64::new(0),
            ring: AtomicPtr::new(ptr::null_mut()),
            writer: Mutex::new(()),
        }
    }

    /// Announces moves that are published before they are appended; until the result is dropped.
    pub(in crate::block) fn publishing(&self) -> Publishing<'_> {
        // Relaxed: the Release of each published word follows.
        self.unlisted.fetch_add(1, Relaxed);
        Publishing(self)
    }

    /// Returns whether moves may be missing whose words this thread has acquired.
    #[inline]
    pub(in crate::block) fn may_lack_moves(&self) -> bool {
        // Acquire: pairs with the Release of a wave that ended, whose moves are in the log.
        self.unlisted.load(Acquire) > 0
    }

    pub(in crate::block) fn append(&self, moved: &[BlockId], stamp: impl FnOnce() -> Ticket) -> Ticket {
        let _writer = self.writer.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let ring = self.ring();
        // Relaxed: only writers change it.
        let first = self.head.load(Relaxed);
        for (i, block) in (first..).zip(moved) {
            self.begun.store(i + 1, Relaxed);
            // Pairs with the fence in `read`: a reader of a field written below sees this count.
            fence(Release);
            let slot = &ring[i as usize % SLOTS];
            slot.block.store(block.0, Relaxed);
            slot.stamp.store(PENDING, Relaxed);
            // Release: publishes the slot; pairs with the Acquire in `read`.
            self.head.store(i + 1, Release);
        }
        let ticket = stamp();
        let last = first + moved.len() as u64;
        for i in first.max(last.saturating_sub(SLOTS as u64))..last {
            // Relaxed: a reader that misses it treats the move as newer than it is.
            ring[i as usize % SLOTS].stamp.store(ticket.0, Relaxed);
        }
        ticket
    }

    pub(in crate::block) fn read(
        &self,
        since: Ticket,
        out: &mut Vec<Moved>,
        moved: impl Fn(BlockId) -> Moved,
    ) -> Since {
        let begin = out.len();
        // Acquire: pairs with the Release in `append`.
        let head = self.head.load(Acquire);
        // SAFETY: a ring that was published lives as long as the log.
        let Some(ring) = (unsafe { self.ring.load(Acquire).as_ref() }) else { return Since::Listed };
        let mut at = head;
        let oldest = head.saturating_sub(SLOTS as u64);
        let mut reached = at == 0;
        while at > oldest {
            let slot = &ring[(at - 1) as usize % SLOTS];
            if slot.stamp.load(Relaxed) < since.0 {
                reached = true;
                break;
            }
            at -= 1;
            out.push(moved(BlockId(slot.block.load(Relaxed))));
            reached = at == 0;
        }
        // Pairs with the fence in `append`.
        fence(Acquire);
        let overwritten = self.begun.load(Relaxed).saturating_sub(SLOTS as u64);
        // The slot at which the walk stopped was read too: it is the lowest that must be intact.
        let lowest = if reached { at.saturating_sub(1) } else { at };
        let is_whole = reached && lowest >= overwritten;
        if !is_whole {
            out.truncate(begin);
            return Since::TooLong;
        }
        out[begin..].reverse();
        Since::Listed
    }

    #[inline]
    pub(in crate::block) fn count(&self) -> MoveCount {
        // Acquire: pairs with the Release in `append`: words read later are as new as counted
        // moves.
        MoveCount(self.head.load(Acquire))
    }

    /// Passes the blocks of the moves from number `from` on to `moved`, oldest first. Returns
    /// `TooLong`, and may pass only some, if there are more than `most` or the log holds.
    pub(in crate::block) fn visit(
        &self,
        from: MoveCount,
        most: u64,
        mut moved: impl FnMut(BlockId),
    ) -> (MoveCount, Since) {
        let count = self.count();
        let is_short = count.0 - from.0 <= most.min(SLOTS as u64);
        // SAFETY: a ring that was published lives as long as the log.
        let Some(ring) = unsafe { self.ring.load(Acquire).as_ref() }.filter(|_| is_short) else {
            return (count, if is_short { Since::Listed } else { Since::TooLong });
        };
        for i in from.0..count.0 {
            moved(BlockId(ring[i as usize % SLOTS].block.load(Relaxed)));
        }
        // Pairs with the fence in `append`.
        fence(Acquire);
        let overwritten = self.begun.load(Relaxed).saturating_sub(SLOTS as u64);
        (count, if from.0 >= overwritten { Since::Listed } else { Since::TooLong })
    }

    fn ring(&self) -> &Ring {
        // Acquire: another mover may have created it. Only the holder of `writer` creates one.
        let ring = self.ring.load(Acquire);
        if ring.is_null() {
            let slot = || Slot { block: AtomicU32::new(0), stamp: AtomicU64::new(0) };
            let fresh: Box<[Slot]> = std::iter::repeat_with(slot).take(SLOTS).collect();
            let fresh = Box::into_raw(fresh).cast::<Ring>();
            // Release: publishes the empty slots.
            self.ring.store(fresh, Release);
            // SAFETY: just made, and freed only with the log.
            return unsafe { &*fresh };
        }
        // SAFETY: as above.
        unsafe { &*ring }
    }

    pub(in crate::block) fn bytes(&self) -> usize {
        if self.ring.load(Relaxed).is_null() { 0 } else { size_of::<Ring>() }
    }
}

impl Drop for MoveLog {
    fn drop(&mut self) {
        let ring = self.ring.load(Relaxed);
        if !ring.is_null() {
            // SAFETY: made by `Box::into_raw` of a boxed slice of this length; `self` is exclusive.
            drop(unsafe { Box::from_raw(ring) });
        }
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    fn moved(n: u32) -> BlockId {
        BlockId(n)
    }

    fn since(log: &MoveLog, ticket: u64) -> Option<Vec<u32>> {
        let mut out = vec![];
        match log.read(Ticket(ticket), &mut out, |block| Moved { block, to: FrameId(0) }) {
            Since::Listed => Some(out.iter().map(|moved| moved.block.0).collect()),
            Since::TooLong => {
                assert!(out.is_empty());
                None
            }
        }
    }

    #[test]
    fn moves_that_a_table_may_miss_are_listed_oldest_first() {
        let log = MoveLog::new();
        assert_eq!((since(&log, 0), log.bytes()), (Some(vec![]), 0));
        log.append(&[moved(1), moved(2)], || Ticket(3));
        log.append(&[moved(3)], || Ticket(5));
        assert_eq!(since(&log, 0), Some(vec![1, 2, 3]));
        assert_eq!(since(&log, 3), Some(vec![1, 2, 3]), "batch 3 may have begun before");
        assert_eq!(since(&log, 4), Some(vec![3]));
        assert_eq!(since(&log, 6), Some(vec![]));
    }

    #[test]
    fn a_query_that_is_too_late_is_told_so() {
        let log = MoveLog::new();
        log.append(&[moved(0)], || Ticket(1));
        let many: Vec<BlockId> = (1..SLOTS as u32).map(moved).collect();
        log.append(&many, || Ticket(2));
        assert_eq!(since(&log, 0).map(|moves| moves.len()), Some(SLOTS));
        log.append(&[moved(7)], || Ticket(3));
        assert_eq!(since(&log, 0), None, "the first was overwritten");
        assert_eq!(since(&log, 3), Some(vec![7]));
        let more: Vec<BlockId> = (0..2 * SLOTS as u32 + 3).map(moved).collect();
        log.append(&more, || Ticket(4));
        assert_eq!((since(&log, 4), since(&log, 5)), (None, Some(vec![])));
    }

    #[test]
    fn moves_are_visited_from_a_count_on() {
        let log = MoveLog::new();
        let visit = |from: MoveCount, most: u64| {
            let mut blocks = vec![];
            let (count, since) = log.visit(from, most, |block| blocks.push(block.0));
            assert_eq!(count, log.count());
            (since == Since::Listed).then_some(blocks)
        };
        let none = log.count();
        assert_eq!(visit(none, 9), Some(vec![]));
        log.append(&[moved(1), moved(2)], || Ticket(3));
        let two = log.count();
        log.append(&[moved(3)], || Ticket(3));
        assert_eq!((visit(none, 9), visit(two, 9)), (Some(vec![1, 2, 3]), Some(vec![3])));
        assert_eq!((visit(none, 2), visit(log.count(), 0)), (None, Some(vec![])));
        let many: Vec<BlockId> = (0..SLOTS as u32 - 1).map(moved).collect();
        log.append(&many, || Ticket(4));
        assert_eq!(visit(two, u64::MAX).map(|blocks| blocks.len()), Some(SLOTS));
        assert_eq!(visit(none, u64::MAX), None, "overwritten");
    }
}
