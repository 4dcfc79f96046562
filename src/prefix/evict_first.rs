//! Links of the queue of evict-first blocks, which only caches of frame pools have. In others,
//! blocks are [demoted](super::retention).
//!
//! A block that was released normally, hit, and released as evict-first may still be in an entry of
//! a queue of the policy, because a hit does not dequeue it. With one set of links it would wait
//! there. So this queue has its own links and `enqueued` flag, and a block may be in two entries;
//! the place in its [row](super::row) makes one outdated. The theorem of the
//! [queues](super::queues) holds for each flag: a release sets the place, then swaps the flag of
//! its queue.

use crate::block::{GrowTable, TablePart};
use crate::ids::BlockId;
use crate::sync::{AtomicBool, AtomicU32, Ordering::*};

use super::queue::Links;
use super::row::QueueLinks;

pub(super) struct EvictFirstPart {
    enqueued: Box<[AtomicBool]>,
    links: Box<[QueueLinks]>,
}

impl TablePart for EvictFirstPart {
    fn new(_base: usize, len: usize) -> Self {
        Self {
            enqueued: (0..len).map(|_| AtomicBool::new(false)).collect(),
            links: (0..len).map(|_| QueueLinks::default()).collect(),
        }
    }

    fn len(&self) -> usize {
        self.links.len()
    }
}

pub(super) type EvictFirst = GrowTable<EvictFirstPart>;

impl EvictFirst {
    pub(super) fn of(&self, id: BlockId) -> (&AtomicBool, &QueueLinks) {
        let (part, at) = self.locate(id.index());
        (&part.enqueued[at], &part.links[at])
    }
}

impl Links for EvictFirst {
    fn next(&self, id: BlockId) -> &AtomicU32 {
        &self.of(id).1.next
    }

    fn rank(&self, id: BlockId) -> u64 {
        self.of(id).1.rank.load(Relaxed)
    }
}
