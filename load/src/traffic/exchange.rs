//! The exchange of sequences between the node and the threads of the traffic.
//!
//! Each thread has a slot, the desk. Between two steps it holds the thread's sequences, and the
//! node may take one; during a step it is empty. Sequences that arrive, or return, wait in one
//! queue, from which each thread takes at its next step. Locks are held for a few instructions.
//!
//! A sequence may leave during its answer. One that another node began leaves only by an operator's
//! request: two nodes that are both short of memory would send it back and forth. Sequences of
//! other origin than synthetic traffic, or all if there is no traffic, stay unchanged until an
//! operator moves them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvpool::{Sequence, SequenceId};
use kvpool_node::Offers;

use super::running::Running;

/// Most arrived sequences that are kept without traffic that continues them. Further ones wait at
/// the node, which refuses those without a slot.
const KEPT_MAX: usize = 1024;

/// Exchanges sequences between the threads of the traffic and other nodes.
pub struct Exchange {
    desks: Vec<Mutex<Vec<Running>>>,
    queue: Mutex<VecDeque<Sequence>>,
    /// Number of sequences taken from a desk.
    pub(super) taken: AtomicU64,
    /// Sequences that no traffic continues.
    kept: Mutex<Vec<Sequence>>,
}

impl Exchange {
    /// Creates the desks of this many threads; without any, there is no traffic.
    pub fn new(threads: usize) -> Self {
        let desks = (0..threads).map(|_| Mutex::default()).collect();
        Self { desks, queue: Mutex::default(), taken: AtomicU64::new(0), kept: Mutex::default() }
    }

    /// Takes all sequences from a thread's desk, for a step.
    pub(super) fn pick_up(&self, thread: usize) -> Vec<Running> {
        std::mem::take(&mut lock(&self.desks[thread]))
    }

    pub(super) fn lay_down(&self, thread: usize, running: Vec<Running>) {
        *lock(&self.desks[thread]) = running;
    }

    pub(super) fn keep(&self, sequence: Sequence) {
        lock(&self.kept).push(sequence);
    }

    /// Returns whether another sequence can be kept. Reliable only for the single task that adds
    /// sequences.
    pub fn has_room(&self) -> bool {
        lock(&self.kept).len() < KEPT_MAX
    }

    /// Closes the sequences that no traffic continues.
    pub fn close_kept(&self) {
        let all = std::mem::take(&mut *lock(&self.kept));
        drop(all);
    }

    pub(super) fn arrived(&self) -> Option<Sequence> {
        lock(&self.queue).pop_front()
    }

    /// Returns the id of the sequence with the longest rest of an answer among those that may
    /// leave.
    pub(super) fn longest(&self) -> Option<SequenceId> {
        let rest = |running: &Running| running.total - running.sequence.len();
        let longest = |desk: &Mutex<Vec<Running>>| {
            let desk = lock(desk);
            let leaving = desk.iter().filter(|running| running.may_leave());
            leaving.map(|running| (rest(running), running.sequence.id())).max()
        };
        self.desks.iter().filter_map(longest).max().map(|(_, id)| id)
    }

    /// Takes the sequence with the highest score.
    fn take<S: Ord>(&self, score: impl Fn(&Running) -> Option<S>) -> Option<Sequence> {
        for desk in &self.desks {
            let mut desk = lock(desk);
            let scored = desk.iter().enumerate().filter(|(_, running)| running.may_leave());
            let best = scored.filter_map(|(place, running)| Some((score(running)?, place))).max();
            if let Some((_, place)) = best {
                self.taken.fetch_add(1, Relaxed);
                return Some(desk.remove(place).sequence);
            }
        }
        None
    }
}

impl Offers for Exchange {
    fn offer(&self, blocks: usize) -> Option<Sequence> {
        let distance = |running: &Running| running.sequence.block_count().abs_diff(blocks);
        self.take(|running| (!running.is_arrived).then(|| std::cmp::Reverse(distance(running))))
    }

    fn release(&self, id: SequenceId) -> Option<Sequence> {
        let found = self.take(|running| (running.sequence.id() == id).then_some(()));
        found.or_else(|| {
            let mut kept = lock(&self.kept);
            let place = kept.iter().position(|sequence| sequence.id() == id)?;
            Some(kept.swap_remove(place))
        })
    }

    fn take_back(&self, sequence: Sequence) {
        if self.desks.is_empty() {
            self.keep(sequence);
        } else {
            lock(&self.queue).push_back(sequence);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
