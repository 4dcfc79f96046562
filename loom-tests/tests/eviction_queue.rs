//! Theorem: every block enqueued in the rank queue is popped once, by a thread that sees its bytes;
//! a pop finds every enqueued block that no other thread holds; and when all threads are done, the
//! remaining blocks come in the order of their ranks, those below the cursor first, even if they
//! were enqueued by an old cursor, or while a slot was cleared.
//!
//! Digits of one bit, unless a model says otherwise: level 0 has the two ranks from the cursor on,
//! level 1 two slots of two, level 2 two of four.
#![cfg(kvpool_loom)]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvpool::BlockId;
use kvpool::prefix::{Links, RankQueue};
use kvpool_loom_tests::{check, check_to};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU32;
use loom::thread;

/// A rank queue and its blocks, each with a cell for its bytes.
struct Enqueued {
    queue: RankQueue,
    next: Vec<AtomicU32>,
    /// Not loom's: a rank decides where a block goes, and carries nothing else.
    rank: Vec<AtomicU64>,
    bytes: Vec<UnsafeCell<u32>>,
}

// SAFETY: bytes are accessed by the owner of the block only. The models check exactly this.
unsafe impl Sync for Enqueued {}

impl Links for Enqueued {
    fn next(&self, id: BlockId) -> &AtomicU32 {
        &self.next[id.index()]
    }

    fn rank(&self, id: BlockId) -> u64 {
        self.rank[id.index()].load(Relaxed)
    }
}

impl Enqueued {
    /// Creates blocks of these ranks; the first `enqueued` of them are enqueued.
    fn new(levels: u32, ranks: &[u64], enqueued: usize) -> Arc<Self> {
        Self::with_digits(1, levels, ranks, enqueued)
    }

    fn with_digits(bits: u32, levels: u32, ranks: &[u64], enqueued: usize) -> Arc<Self> {
        let new = Self {
            queue: RankQueue::with_digits(bits, levels),
            next: ranks.iter().map(|_| AtomicU32::new(0)).collect(),
            rank: ranks.iter().map(|&rank| AtomicU64::new(rank)).collect(),
            bytes: ranks.iter().map(|_| UnsafeCell::new(0)).collect(),
        };
        (0..enqueued as u32).for_each(|id| new.push(id));
        Arc::new(new)
    }

    fn touch(&self, id: u32) {
        // SAFETY: the caller owns the block; the checker verifies it.
        self.bytes[id as usize].with_mut(|bytes| unsafe { *bytes += 1 });
    }

    fn push(&self, id: u32) {
        self.touch(id);
        self.queue.push(self, BlockId(id));
    }

    /// Pops without the second look: `None` means only that no hint was set.
    fn pop_by_hints(&self) -> Option<u32> {
        let id = self.queue.pop(self)?.0;
        self.touch(id);
        Some(id)
    }

    fn pop(&self) -> Option<u32> {
        let id = loop {
            match self.queue.pop(self) {
                Some(id) => break id.0,
                None if self.queue.look() => {}
                None => return None,
            }
        };
        self.touch(id);
        Some(id)
    }

    /// Ends a model: together with the blocks that the threads took, every block is present once,
    /// and the remaining ones came in order.
    fn finish(&self, taken: impl IntoIterator<Item = u32>) {
        let cursor = self.queue.cursor();
        let mut all: Vec<u32> = std::iter::from_fn(|| self.pop()).collect();
        let ranks: Vec<u64> = all.iter().map(|&id| self.rank(BlockId(id)).max(cursor)).collect();
        assert!(ranks.is_sorted(), "from cursor {cursor} on, blocks {all:?} came with ranks {ranks:?}");
        all.extend(taken);
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..self.next.len() as u32), "lost or duplicated: {all:?}");
        assert_eq!(self.queue.head(), None);
    }
}

#[test]
fn push_beside_pop() {
    check_to(3, "eviction_queue::push_beside_pop", || {
        let blocks = Enqueued::new(2, &[1, 0, 2], 1);
        let other = blocks.clone();
        let thread = thread::spawn(move || {
            other.push(1);
            other.pop()
        });
        blocks.push(2);
        let got = blocks.pop();
        let theirs = thread.join().unwrap();
        assert!(got.is_some() && theirs.is_some(), "there are three");
        blocks.finish(got.into_iter().chain(theirs));
    });
}

/// Both threads file the blocks of a due slot again.
#[test]
fn two_pops_in_a_cascade() {
    check_to(2, "eviction_queue::two_pops_in_a_cascade", || {
        let blocks = Enqueued::new(2, &[3, 2, 3], 3);
        let other = blocks.clone();
        let thread = thread::spawn(move || other.pop());
        let got = blocks.pop();
        let theirs = thread.join().unwrap();
        blocks.finish(got.into_iter().chain(theirs));
    });
}

/// A block is enqueued by a cursor that advances meanwhile: at level 0, and above, where its slot
/// comes to count as that of 6 and 7.
#[test]
fn overtaken() {
    for late in [1, 3] {
        check_to(3, "eviction_queue::overtaken", move || {
            let blocks = Enqueued::new(3, &[4, 5, late], 2);
            let other = blocks.clone();
            let thread = thread::spawn(move || other.push(2));
            let got = blocks.pop();
            assert!(got.is_some(), "two are enqueued throughout");
            thread.join().unwrap();
            blocks.finish(got);
        });
    }
}

/// The slot in which a block is late is needed for a later turn.
#[test]
fn met_a_stale_slot() {
    check_to(3, "eviction_queue::met_a_stale_slot", || {
        // Ranks 1 and 5 share a slot at level 0; the cursor goes to 4.
        let blocks = Enqueued::new(3, &[5, 5, 1], 2);
        let other = blocks.clone();
        let thread = thread::spawn(move || other.push(2));
        let got = blocks.pop();
        thread.join().unwrap();
        blocks.finish(got);
    });
}

/// A slot's top is popped, the one below too, and the top is enqueued again, while another thread
/// is about to pop it.
#[test]
fn a_top_that_comes_back() {
    check_to(2, "eviction_queue::a_top_that_comes_back", || {
        let blocks = Enqueued::new(1, &[0, 0], 2);
        let other = blocks.clone();
        let thread = thread::spawn(move || other.pop_by_hints());
        let first = blocks.pop_by_hints();
        let second = blocks.pop_by_hints();
        if let Some(first) = first {
            blocks.push(first);
        }
        let theirs = thread.join().unwrap();
        blocks.finish(second.into_iter().chain(theirs));
    });
}

/// A slot found empty fills while its hint is cleared: the hint is correct in the end, or the block
/// would come after that of the next slot.
#[test]
fn emptied_and_filled() {
    check_to(4, "eviction_queue::emptied_and_filled", || {
        let blocks = Enqueued::new(1, &[0, 1, 1, 0], 3);
        // The hint of slot 0 stays, a false positive.
        assert_eq!(blocks.pop(), Some(0));
        let other = blocks.clone();
        let thread = thread::spawn(move || other.pop());
        blocks.push(3);
        let theirs = thread.join().unwrap();
        assert!(theirs.is_some(), "two are enqueued throughout");
        blocks.finish([0].into_iter().chain(theirs));
    });
}

/// The last hint of a word is cleared, and with it the one above, while another slot of the word
/// fills: both hints are correct in the end, or a pop would not find the block.
#[test]
fn the_summary_of_an_emptied_word() {
    check_to(4, "eviction_queue::the_summary_of_an_emptied_word", || {
        let blocks = Enqueued::new(1, &[0, 1], 1);
        let other = blocks.clone();
        let thread = thread::spawn(move || other.pop_by_hints());
        blocks.push(1);
        let taken = thread.join().unwrap();
        let left = blocks.pop_by_hints();
        assert!(taken.is_some() && left.is_some(), "an enqueued block has no hint");
        blocks.finish(taken.into_iter().chain(left));
    });
}

/// Two threads fill a slot of a word that is cleared: the one that finds the bit set leaves the
/// summary to the other.
#[test]
fn two_pushes_into_an_emptied_word() {
    check_to(2, "eviction_queue::two_pushes_into_an_emptied_word", || {
        let blocks = Enqueued::new(1, &[0, 1, 1], 1);
        let threads = [blocks.clone(), blocks.clone()];
        let [pops, pushes] = threads;
        let pops = thread::spawn(move || pops.pop_by_hints());
        let pushes = thread::spawn(move || pushes.push(1));
        blocks.push(2);
        let taken = pops.join().unwrap();
        pushes.join().unwrap();
        let left = [blocks.pop_by_hints(), blocks.pop_by_hints()];
        assert!(taken.is_some() && left.iter().all(Option::is_some), "an enqueued block has no hint");
        blocks.finish(taken.into_iter().chain(left.into_iter().flatten()));
    });
}

/// A thread that may be stopped while it clears a hint hides no block.
#[test]
fn found_beside_a_cleared_hint() {
    check_to(3, "eviction_queue::found_beside_a_cleared_hint", || {
        let blocks = Enqueued::new(1, &[0, 0, 0], 1);
        assert_eq!(blocks.pop(), Some(0));
        let other = blocks.clone();
        let thread = thread::spawn(move || other.pop());
        blocks.push(1);
        blocks.push(2);
        let got = blocks.pop();
        assert!(got.is_some(), "the other thread has at most one");
        let theirs = thread.join().unwrap();
        blocks.finish([0].into_iter().chain(got).chain(theirs));
    });
}

/// A pop enqueues a block again that is not due yet, while another advances the cursor there; and
/// one is pushed behind both.
#[test]
fn looking_ahead() {
    check_to(1, "eviction_queue::looking_ahead", || {
        // Digits of two bits: 4 and 5 go to level 1, and have a slot at level 0 when the cursor is
        // at 2.
        let blocks = Enqueued::with_digits(2, 2, &[2, 4, 5, 3], 0);
        (1..3).for_each(|id| blocks.push(id));
        blocks.push(0);
        let other = blocks.clone();
        let thread = thread::spawn(move || other.pop());
        let got = blocks.pop();
        blocks.push(3);
        let theirs = thread.join().unwrap();
        blocks.finish(theirs.into_iter().chain(got));
    });
}

/// A rank grows while its block is enqueued, and while another thread pops it.
#[test]
fn outgrown() {
    check("eviction_queue::outgrown", || {
        let blocks = Enqueued::new(3, &[1, 2], 2);
        let other = blocks.clone();
        let thread = thread::spawn(move || {
            other.rank[0].store(7, Relaxed);
            other.pop()
        });
        let got = blocks.pop();
        let theirs = thread.join().unwrap();
        blocks.finish(got.into_iter().chain(theirs));
    });
}
