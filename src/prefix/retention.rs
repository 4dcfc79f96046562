//! Blocks beside the policy's order: demoted ones are evicted before all others, and retained ones
//! after them, until a time.
//!
//! | class | served | rank |
//! |---|---|---|
//! | demoted | first | bits 63 and 62 · order |
//! | retained, by priority; pinned | last, in this order | bit 63 · end of retention in ms since the cache was built, 38 bits · low 24 bits of an order |
//!
//! By the low bits of a rank, the end of a prefix precedes its beginning among blocks retained
//! until the same moment. They wrap every 16 million releases; a prefix released across the wrap is
//! evicted beginning first, which only costs hits. Ends after 8 years are equal. Ranks of policies
//! are below bit 63.
//!
//! # Protocol
//!
//! Blocks that are placed together form *runs* of consecutive ranks, each in a heap of its class. A
//! place is given to an evictable block, also without a reference on it:
//!
//! ```text
//! place    row: rank, state, queue;   push the run
//! take     pop a run;  of each of its blocks:  row: rank is that in the run, word: evictable  =>  evict it, or put it back
//!                                              else                                           =>  drop it
//! return   a reference that was no use of the block is dropped;  row: a new rank of the same end;  push a run of it
//! ```
//!
//! A block that is hit and released gets another place, and its former run drops it. So a block may
//! be in any number of runs, of which one counts. An entry of a policy's queue may still have a
//! block with such a place; its taker drops it.
//!
//! A place is three words. If a hint and a release store theirs at once, the queue may be that of
//! the hint, and the rank that of the release, without bit 63. Then no run has the block, and its
//! entry drops it: the taker sees that the bit is missing, and enqueues the block by that rank. The
//! other mixture is a rank of the hint in a queue of the policy: both the run and the entry have
//! the block.
//!
//! *Theorem.* An evictable block that no thread holds is in an entry of a queue, as in the
//! [queues](super::queues), or in a run of its rank. The last store of a rank is followed by a push
//! of that run, if it has bit 63, or else by the swap of a flag, whose taker enqueues the block
//! again.
//!
//! Pushing is lock-free. The heaps are behind a lock that is only tried: a thread that finds it
//! taken evicts others. If a thread stops with the lock, or with a run, these blocks are only found
//! by the walk at the end of the allocation ladder, as those of entries that stopped threads hold.
//! Blocks that no longer count are dropped when there are twice as many as were left the last time.
//!
//! # The end of a retention
//!
//! No timer: before an eviction asks the policy, it gives blocks whose retention has ended a place
//! by the order of their release, with the priority of their class; what else it knew of the
//! request is lost. Where the policy does not place by order, it is the order of the hint.
//!
//! `earliest` is at most the first end of a run. Push: push the run, then lower it. Raise: exchange
//! it for the maximum, look at all runs, then lower it to the first. Both are read-modify-writes
//! with AcqRel: a raise that comes later sees the run, an earlier one is lowered again.
//!
//! Retention is no reservation: a request that would be refused otherwise evicts retained blocks,
//! and one for a run of frames may evict them before others.
//!
//! Models: `retained_against_a_hit`, `two_places_of_one_block`, `a_run_against_a_hit`,
//! `the_end_of_retention_against_a_hit`, `filled_again_under_a_stale_entry` in
//! `loom-tests/tests/evictable.rs`. There, the queue of pushed runs is one atomic step for each call.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hint::spin_loop;
use std::sync::TryLockError;

use crate::ids::BlockId;
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, CachePadded, Mutex, Ordering::*, Queue};

use super::policy::{CachePriority, Millis};

/// Class of demoted blocks; those of retained ones follow.
pub(super) const DEMOTED: usize = 0;

/// Number of classes.
pub(super) const CLASSES: usize = CachePriority::ALL.len() + 2;

/// Queue of a row in the first class. No policy has as many queues.
pub(super) const QUEUE: usize = 32;

/// Minimum number of blocks in runs from which on those that do not count are dropped.
const TIDIED_AT: usize = 1_000;

/// Maximum number of blocks in a run.
pub(super) const RUN_MAX: usize = if cfg!(kvpool_loom) { 2 } else { 64 };

const ORDER_BITS: u32 = 24;
const ORDER_MASK: u64 = (1 << ORDER_BITS) - 1;
/// In ranks of places beside the policy's order, and in no others.
pub(super) const BESIDE_BIT: u64 = 1 << 63;
const DEMOTED_BIT: u64 = 1 << 62;

/// Until when blocks are retained, and in which class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Retention {
    pub until: Millis,
    pub priority: CachePriority,
    pub is_pinned: bool,
}

/// Where blocks stand beside the policy's order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Beside {
    Demoted,
    Retained(Retention),
}

impl Beside {
    pub(super) fn class(self) -> usize {
        match self {
            Self::Demoted => DEMOTED,
            Self::Retained(Retention { is_pinned: true, .. }) => CLASSES - 1,
            Self::Retained(Retention { priority, .. }) => 1 + priority as usize,
        }
    }

    fn rank(self, built: Millis, order: u64) -> u64 {
        match self {
            Self::Demoted => BESIDE_BIT | DEMOTED_BIT | order & (DEMOTED_BIT - 1),
            Self::Retained(Retention { until, .. }) => start_of(until - built) | order & ORDER_MASK,
        }
    }
}

/// Returns the first rank of retention until this time, in milliseconds since the cache was built.
fn start_of(until_ms: u64) -> u64 {
    BESIDE_BIT | until_ms.min((DEMOTED_BIT - 1) >> ORDER_BITS) << ORDER_BITS
}

/// Returns the rank of the same end, by another order.
pub(super) fn renewed(rank: u64, order: u64) -> u64 {
    if rank & DEMOTED_BIT == 0 {
        rank & !ORDER_MASK | order & ORDER_MASK
    } else {
        Beside::Demoted.rank(Millis(0), order)
    }
}

/// Returns the class of a block beside the policy's order; `None`: a release has stored another queue
/// since.
pub(super) fn class_of(class: Option<usize>, rank: u64) -> usize {
    let of_rank = if rank & DEMOTED_BIT == 0 { 1 + CachePriority::Normal as usize } else { DEMOTED };
    class.unwrap_or(of_rank).min(CLASSES - 1)
}

/// Returns the priority that a class of retained blocks stands for.
pub(super) fn priority_of(class: usize) -> CachePriority {
    CachePriority::ALL.get(class - 1).copied().unwrap_or_default()
}

/// Blocks with consecutive ranks, all of one class.
#[derive(Debug)]
pub(super) struct PlacedRun {
    class: usize,
    ids: Vec<(u64, BlockId)>,
    next: usize,
}

impl PlacedRun {
    pub(super) fn of(class: usize) -> Self {
        Self { class, ids: Vec::new(), next: 0 }
    }

    pub(super) fn with_room(class: usize) -> Self {
        Self { ids: Vec::with_capacity(RUN_MAX), ..Self::of(class) }
    }

    pub(super) fn push(&mut self, rank: u64, id: BlockId) {
        self.ids.push((rank, id));
    }

    /// Returns whether a block of this rank may be the next one.
    pub(super) fn follows(&self, class: usize, rank: u64) -> bool {
        let is_next = |&(last, _): &(u64, BlockId)| last < rank && last & !ORDER_MASK == rank & !ORDER_MASK;
        self.class == class && self.rest().len() < RUN_MAX && self.ids.last().is_some_and(is_next)
    }

    /// Reverses the order of blocks that were pushed from the last to the first.
    pub(super) fn reverse(&mut self) {
        self.ids.reverse();
    }

    /// Returns the blocks that are left, with their ranks, in order.
    pub(super) fn rest(&self) -> &[(u64, BlockId)] {
        &self.ids[self.next..]
    }

    pub(super) fn skip(&mut self, blocks: usize) {
        self.next += blocks;
    }

    fn rank(&self) -> u64 {
        self.rest().first().map_or(u64::MAX, |&(rank, _)| rank)
    }
}

impl PartialEq for PlacedRun {
    fn eq(&self, other: &Self) -> bool {
        self.rank() == other.rank()
    }
}

impl Eq for PlacedRun {}

impl PartialOrd for PlacedRun {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for PlacedRun {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.rank().cmp(&other.rank())
    }
}

/// What a thread gets of a class.
#[derive(Debug)]
pub(super) enum Taken {
    Run(PlacedRun),
    /// There is none.
    None,
    /// Another thread has the heaps.
    Busy,
}

/// Attempts to get the heaps.
const TRIES: usize = if cfg!(kvpool_loom) { 1 } else { 100 };

type Heaps = [BinaryHeap<Reverse<PlacedRun>>; CLASSES];

/// The runs of all classes.
pub(super) struct BesideOrder {
    /// When the cache was built.
    built: Millis,
    is_used: AtomicBool,
    inbox: Queue<PlacedRun>,
    heaps: Mutex<Heaps>,
    /// Number of blocks in runs of each class, including those that no longer count.
    blocks: [AtomicUsize; CLASSES],
    /// Number of them from which on those are dropped.
    tidied_at: AtomicUsize,
    /// The latest era in which an eviction was.
    era: AtomicU64,
    earliest: CachePadded<AtomicU64>,
}

impl BesideOrder {
    pub(super) fn new(built: Millis) -> Self {
        Self {
            built,
            is_used: AtomicBool::new(false),
            inbox: Queue::new(),
            heaps: Mutex::new(std::array::from_fn(|_| BinaryHeap::new())),
            blocks: std::array::from_fn(|_| AtomicUsize::new(0)),
            tidied_at: AtomicUsize::new(TIDIED_AT),
            era: AtomicU64::new(0),
            earliest: CachePadded::new(AtomicU64::new(u64::MAX)),
        }
    }

    /// Returns whether a block ever had such a place.
    #[inline]
    pub(super) fn is_used(&self) -> bool {
        // Relaxed, here and below: a block that is missed is evicted late, or found by a walk.
        self.is_used.load(Relaxed)
    }

    pub(super) fn rank(&self, beside: Beside, order: u64) -> u64 {
        beside.rank(self.built, order)
    }

    /// Pushes a run whose places are set.
    pub(super) fn push(&self, run: PlacedRun) {
        if run.rest().is_empty() {
            return;
        }
        if !self.is_used() {
            self.is_used.store(true, Relaxed);
        }
        let (class, first) = (run.class, run.rank() & !ORDER_MASK);
        self.blocks[class].fetch_add(run.rest().len(), Relaxed);
        self.inbox.push(run);
        if class != DEMOTED {
            self.earliest.fetch_min(first, AcqRel);
        }
    }

    fn with_heaps<R>(&self, f: impl FnOnce(&mut Heaps) -> R) -> Option<R> {
        let mut heaps = (0..TRIES).find_map(|_| match self.heaps.try_lock() {
            Ok(heaps) => Some(heaps),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                spin_loop();
                None
            }
        })?;
        while let Some(run) = self.inbox.pop() {
            heaps[run.class].push(Reverse(run));
        }
        Some(f(&mut heaps))
    }

    /// Takes the first run of a class, if its rank is below `below`.
    pub(super) fn take(&self, class: usize, below: u64) -> Taken {
        if self.blocks[class].load(Relaxed) == 0 {
            return Taken::None;
        }
        let taken = self.with_heaps(|heaps| {
            heaps[class].peek().filter(|first| first.0.rank() < below)?;
            heaps[class].pop().map(|run| run.0)
        });
        match taken {
            Some(Some(run)) => {
                self.blocks[class].fetch_sub(run.rest().len(), Relaxed);
                Taken::Run(run)
            }
            Some(None) => Taken::None,
            None => Taken::Busy,
        }
    }

    /// Returns whether this is the first eviction in an era.
    pub(super) fn enters(&self, era: u64) -> bool {
        // Never back: a thread may have read the era before a clear.
        self.era.load(Relaxed) < era && self.era.fetch_max(era, Relaxed) < era
    }

    /// Returns whether another thread has the heaps, and perhaps blocks of this class in them.
    pub(super) fn is_busy(&self, class: usize) -> bool {
        self.blocks[class].load(Relaxed) > 0 && self.with_heaps(|_| ()).is_none()
    }

    /// Returns the rank below which retention has ended, if there may be such blocks.
    pub(super) fn ended(&self, now: Millis) -> Option<u64> {
        let ended = start_of((now - self.built).saturating_add(1));
        (self.earliest.load(Relaxed) < ended).then_some(ended)
    }

    /// Raises the earliest end, after those before it were taken.
    pub(super) fn raise_earliest(&self) {
        let before = self.earliest.swap(u64::MAX, AcqRel);
        let first = self.with_heaps(|heaps| {
            let first =
                heaps[DEMOTED + 1..].iter().filter_map(|heap| heap.peek()).map(|first| first.0.rank());
            first.min().map_or(u64::MAX, |rank| rank & !ORDER_MASK)
        });
        self.earliest.fetch_min(first.unwrap_or(before), AcqRel);
    }

    /// Drops blocks that no longer count, if there are many.
    pub(super) fn tidy(&self, counts: impl Fn(u64, BlockId) -> bool) {
        let all = || self.blocks.iter().map(|blocks| blocks.load(Relaxed)).sum::<usize>();
        if all() < self.tidied_at.load(Relaxed) {
            return;
        }
        self.with_heaps(|heaps| {
            for (heap, blocks) in heaps.iter_mut().zip(&self.blocks) {
                let mut gone = 0;
                let mut runs = std::mem::take(heap).into_vec();
                for Reverse(run) in &mut runs {
                    let before = run.rest().len();
                    run.ids.drain(..run.next);
                    run.next = 0;
                    run.ids.retain(|&(rank, id)| counts(rank, id));
                    gone += before - run.ids.len();
                }
                runs.retain(|run| !run.0.ids.is_empty());
                *heap = runs.into();
                blocks.fetch_sub(gone, Relaxed);
            }
            self.tidied_at.store((2 * all()).max(TIDIED_AT), Relaxed);
        });
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    fn run(class: usize, ranks: impl IntoIterator<Item = u64>) -> PlacedRun {
        let mut run = PlacedRun::of(class);
        ranks.into_iter().for_each(|rank| run.push(rank, BlockId(rank as u32)));
        run
    }

    #[test]
    fn classes_and_ends_are_ordered() {
        let at = |until, priority, is_pinned| {
            Beside::Retained(Retention { until: Millis(until), priority, is_pinned })
        };
        let classes = CachePriority::ALL.map(|priority| at(5, priority, false).class());
        assert_eq!(
            (Beside::Demoted.class(), classes, at(5, CachePriority::Low, true).class()),
            (0, [1, 2, 3], 4)
        );
        assert_eq!(classes.map(priority_of), CachePriority::ALL);
        let rank = |until, order| at(until, CachePriority::Low, false).rank(Millis(1), order);
        assert!(rank(5, u64::MAX) < rank(6, 0) && rank(6, 1) < rank(6, 2) && rank(0, 1) == rank(1, 1));
        let demoted = |order| Beside::Demoted.rank(Millis(1), order);
        assert!(rank(u64::MAX, u64::MAX) < demoted(0) && demoted(1) < demoted(2));
        assert!([rank(0, 0), rank(u64::MAX, 7), demoted(9)].iter().all(|rank| rank & BESIDE_BIT != 0));
        assert_eq!((renewed(rank(5, 1), 7), renewed(demoted(1), 7)), (rank(5, 7), demoted(7)));
    }

    /// Also where the clock does not begin at zero.
    #[test]
    fn runs_come_by_rank_and_end_by_time() {
        for built in [0, 1_764_000_000_000, u64::MAX - 100] {
            let order = BesideOrder::new(Millis(built));
            assert!(!order.is_used() && matches!(order.take(1, u64::MAX), Taken::None));
            for until in [7, 3, 5] {
                order.push(run(2, [start_of(until), start_of(until) + 1]));
            }
            let ended = |now| order.ended(Millis(built + now));
            assert_eq!(ended(2), None);
            let below = ended(5).unwrap();
            let taken = || match order.take(2, below) {
                Taken::Run(run) => Some(run.rest()[0].0),
                _ => None,
            };
            assert_eq!([taken(), taken(), taken()], [Some(start_of(3)), Some(start_of(5)), None]);
            order.raise_earliest();
            assert_eq!(ended(6), None);
            assert!(ended(7).is_some());
            order.push(run(3, [start_of(4)]));
            assert!(ended(4).is_some());
        }
    }

    #[test]
    fn an_era_is_entered_once_and_never_left() {
        let order = BesideOrder::new(Millis(0));
        assert_eq!([3, 3, 2, 4].map(|era| order.enters(era)), [true, false, false, true]);
    }

    #[test]
    fn what_no_longer_counts_is_dropped() {
        let order = BesideOrder::new(Millis(0));
        (0..99).for_each(|first| order.push(run(DEMOTED, first * 10..first * 10 + 10)));
        order.tidy(|_, _| panic!("not many"));
        order.push(run(DEMOTED, 990..1_000));
        order.tidy(|rank, _| rank % 100 == 5);
        let take = || match order.take(DEMOTED, u64::MAX) {
            Taken::Run(run) => Some(run),
            _ => None,
        };
        let left: Vec<u64> = std::iter::from_fn(take)
            .flat_map(|run| run.rest().iter().map(|&(rank, _)| rank).collect::<Vec<_>>())
            .collect();
        assert_eq!(left, (0..10).map(|hundred| hundred * 100 + 5).collect::<Vec<_>>());
        assert_eq!(order.blocks[DEMOTED].load(Relaxed), 0);
    }
}
