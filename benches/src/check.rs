//! Checks of the results before any timing: no block has two owners.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::threads::together;
use crate::{Subject, Worker};

/// Ownership of numbers. A second owner of a number is a panic.
pub struct Owners(Box<[AtomicBool]>);

impl Owners {
    /// Creates the record for numbers below `numbers`.
    pub fn new(numbers: usize) -> Self {
        Self((0..numbers).map(|_| AtomicBool::new(false)).collect())
    }

    /// Records an owner of `id`.
    pub fn take(&self, id: u32) {
        assert!(!self.0[id as usize].swap(true, Relaxed), "block {id} has two owners");
    }

    /// Removes the owner of `id`. Must be called before the block is freed.
    pub fn give(&self, id: u32) {
        assert!(self.0[id as usize].swap(false, Relaxed), "block {id} was freed without an owner");
    }

    /// Returns for every number whether it has an owner.
    pub fn iter(&self) -> impl Iterator<Item = bool> {
        self.0.iter().map(|owned| owned.load(Relaxed))
    }
}

/// Allocates and frees blocks from `threads` threads at once, single ones and groups, and looks for
/// double owners and lost blocks.
pub fn check<S: Subject>(threads: usize) {
    let blocks = 4096;
    let subject = S::new(blocks);
    let owners = Owners::new(blocks + 1);
    let prepare = |thread| (subject.worker(), fastrand::Rng::with_seed(thread as u64));
    together(threads, prepare, |thread, (worker, random)| {
        let mut held = Vec::new();
        let mut groups = Vec::new();
        for _ in 0..20_000 {
            match random.u32(..8) {
                0..3 if held.len() < 256 => {
                    let block = worker.allocate();
                    owners.take(<S::Worker<'_> as Worker>::id(&block));
                    held.push(block);
                }
                3..5 if groups.len() < 16 => {
                    let group = worker.allocate_many(10, thread as u64);
                    <S::Worker<'_> as Worker>::ids(&group, &mut |id| owners.take(id));
                    groups.push(group);
                }
                5 if !groups.is_empty() => {
                    let group = groups.swap_remove(random.usize(..groups.len()));
                    <S::Worker<'_> as Worker>::ids(&group, &mut |id| owners.give(id));
                    worker.free_many(group);
                }
                _ if !held.is_empty() => {
                    let block = held.swap_remove(random.usize(..held.len()));
                    owners.give(<S::Worker<'_> as Worker>::id(&block));
                    worker.free(block);
                }
                _ => {}
            }
        }
        for block in held {
            owners.give(<S::Worker<'_> as Worker>::id(&block));
            worker.free(block);
        }
        for group in groups {
            <S::Worker<'_> as Worker>::ids(&group, &mut |id| owners.give(id));
            worker.free_many(group);
        }
    });
    assert_eq!(subject.free_blocks(), blocks, "{} lost blocks", S::NAME);
}
