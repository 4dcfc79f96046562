//! The baselines: free lists as in the engines, with a table of metadata.

use std::sync::Mutex as StdMutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crossbeam_queue::ArrayQueue;
use parking_lot::Mutex as ParkingMutex;
use smallvec::SmallVec;

use super::{Subject, Worker};

/// Numbers of the blocks of one allocation.
type Ids = SmallVec<[u32; 16]>;

/// A stock of free numbers.
pub trait FreeList: Sync {
    /// Name in reports.
    const NAME: &'static str;
    /// Creates a stock of `0..blocks`.
    fn filled(blocks: u32) -> Self;
    /// Takes one number.
    fn pop(&self) -> Option<u32>;
    /// Returns it to the stock.
    fn push(&self, id: u32);
    /// Takes `count` numbers, in one critical section if there is one.
    fn pop_many(&self, count: usize, ids: &mut Ids);
    /// Returns them to the stock, likewise.
    fn push_many(&self, ids: &[u32]);
    /// Returns how many there are.
    fn len(&self) -> usize;
    /// Returns whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// `std::sync::Mutex<Vec>`.
pub struct Standard(StdMutex<Vec<u32>>);

impl FreeList for Standard {
    const NAME: &'static str = "std Mutex<Vec>";

    fn filled(blocks: u32) -> Self {
        Self(StdMutex::new((0..blocks).rev().collect()))
    }

    fn pop(&self) -> Option<u32> {
        self.0.lock().unwrap().pop()
    }

    fn push(&self, id: u32) {
        self.0.lock().unwrap().push(id);
    }

    fn pop_many(&self, count: usize, ids: &mut Ids) {
        let mut free = self.0.lock().unwrap();
        let rest = free.len() - count;
        ids.extend(free.drain(rest..));
    }

    fn push_many(&self, ids: &[u32]) {
        self.0.lock().unwrap().extend_from_slice(ids);
    }

    fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

/// `parking_lot::Mutex<Vec>`.
pub struct Parking(ParkingMutex<Vec<u32>>);

impl FreeList for Parking {
    const NAME: &'static str = "parking_lot Mutex<Vec>";

    fn filled(blocks: u32) -> Self {
        Self(ParkingMutex::new((0..blocks).rev().collect()))
    }

    fn pop(&self) -> Option<u32> {
        self.0.lock().pop()
    }

    fn push(&self, id: u32) {
        self.0.lock().push(id);
    }

    fn pop_many(&self, count: usize, ids: &mut Ids) {
        let mut free = self.0.lock();
        let rest = free.len() - count;
        ids.extend(free.drain(rest..));
    }

    fn push_many(&self, ids: &[u32]) {
        self.0.lock().extend_from_slice(ids);
    }

    fn len(&self) -> usize {
        self.0.lock().len()
    }
}

/// `crossbeam_queue::ArrayQueue`.
pub struct Queued(ArrayQueue<u32>);

impl FreeList for Queued {
    const NAME: &'static str = "crossbeam ArrayQueue";

    fn filled(blocks: u32) -> Self {
        let free = ArrayQueue::new(blocks as usize);
        for id in 0..blocks {
            free.push(id).expect("the queue holds every block");
        }
        Self(free)
    }

    fn pop(&self) -> Option<u32> {
        self.0.pop()
    }

    fn push(&self, id: u32) {
        self.0.push(id).expect("the queue holds every block");
    }

    fn pop_many(&self, count: usize, ids: &mut Ids) {
        for _ in 0..count {
            ids.push(self.0.pop().expect("enough blocks are free"));
        }
    }

    fn push_many(&self, ids: &[u32]) {
        for &id in ids {
            self.push(id);
        }
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// Metadata of a block in use. Atomic only so that the table can be shared: only the block's owner
/// writes it.
#[derive(Default)]
struct Metadata {
    references: AtomicU32,
    owner: AtomicU64,
    used: AtomicU64,
}

/// A free list with a table of metadata.
pub struct Listed<L> {
    free: L,
    metadata: Box<[Metadata]>,
}

impl<L: FreeList> Subject for Listed<L> {
    type Worker<'a>
        = ListWorker<'a, L>
    where
        L: 'a;

    const NAME: &'static str = L::NAME;

    fn new(blocks: usize) -> Self {
        Self { free: L::filled(blocks as u32), metadata: (0..blocks).map(|_| Metadata::default()).collect() }
    }

    fn worker(&self) -> Self::Worker<'_> {
        ListWorker { subject: self, clock: 0 }
    }

    fn free_blocks(&self) -> usize {
        self.free.len()
    }
}

/// A thread that uses a free list.
pub struct ListWorker<'a, L> {
    subject: &'a Listed<L>,
    clock: u64,
}

impl<L: FreeList> Worker for ListWorker<'_, L> {
    type Block = u32;
    type Blocks = Ids;

    #[inline]
    fn allocate(&mut self) -> u32 {
        self.subject.free.pop().expect("enough blocks are free")
    }

    #[inline]
    fn free(&mut self, block: u32) {
        self.subject.free.push(block);
    }

    #[inline]
    fn allocate_many(&mut self, count: usize, owner: u64) -> Ids {
        let mut ids = Ids::new();
        self.subject.free.pop_many(count, &mut ids);
        self.clock += 1;
        for &id in &ids {
            let metadata = &self.subject.metadata[id as usize];
            metadata.references.store(1, Relaxed);
            metadata.owner.store(owner, Relaxed);
            metadata.used.store(self.clock, Relaxed);
        }
        ids
    }

    #[inline]
    fn free_many(&mut self, blocks: Ids) {
        for &id in &blocks {
            self.subject.metadata[id as usize].references.store(0, Relaxed);
        }
        self.subject.free.push_many(&blocks);
    }

    fn id(block: &u32) -> u32 {
        *block
    }

    fn ids(blocks: &Ids, visit: &mut dyn FnMut(u32)) {
        blocks.iter().for_each(|&id| visit(id));
    }
}
