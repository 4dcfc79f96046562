//! The shared retire list: old frames of moves, and retired frames of threads that cannot enter
//! their thread cache. Threads push at the head and take the whole list, so no address is compared
//! after its node was freed. A stopped thread blocks no other: it keeps the chain that it took.
//!
//! ```text
//! push:   frames += n;  node.next := head;  head: node.next -> node (Release), again if it changed
//! sift:   chain := head.swap(null) (Acquire);  runs not due are pushed back as one chain;  runs due are given out
//! ```

use std::ptr;

use crate::ids::{Run, Ticket};
use crate::sync::{AtomicPtr, AtomicU64, AtomicUsize, Frozen, Ordering::*};

use super::wake_guard::{Announce, WakeGuard};

struct Node {
    retired: Frozen<(Run, Ticket)>,
    next: *mut Node,
}

pub(in crate::block) struct SharedRetireList {
    head: AtomicPtr<Node>,
    frames: AtomicUsize,
    newest_tag: AtomicU64,
    /// At most the tag of every node, except for a moment: avoids walks that find nothing due.
    oldest_tag: AtomicU64,
}

impl Default for SharedRetireList {
    fn default() -> Self {
        Self {
            head: AtomicPtr::new(ptr::null_mut()),
            frames: AtomicUsize::new(0),
            newest_tag: AtomicU64::new(0),
            oldest_tag: AtomicU64::new(u64::MAX),
        }
    }
}

struct Chain {
    first: *mut Node,
    last: *mut Node,
}

impl Chain {
    const EMPTY: Self = Self { first: ptr::null_mut(), last: ptr::null_mut() };

    fn push(&mut self, mut node: Box<Node>) {
        node.next = self.first;
        self.first = Box::into_raw(node);
        if self.last.is_null() {
            self.last = self.first;
        }
    }

    fn pop(&mut self) -> Option<Box<Node>> {
        if self.first.is_null() {
            return None;
        }
        // SAFETY: the nodes of a chain were made by `Box::into_raw` and are exclusively its own.
        let node = unsafe { Box::from_raw(self.first) };
        self.first = node.next;
        Some(node)
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

impl SharedRetireList {
    /// Retires a run until every batch with a ticket up to `tag` has ended.
    pub(in crate::block) fn push(&self, run: Run, tag: Ticket) {
        // Relaxed, both: statistics.
        self.newest_tag.fetch_max(tag.0, Relaxed);
        self.frames.fetch_add(run.len as usize, Relaxed);
        let mut chain = Chain::EMPTY;
        chain.push(Box::new(Node { retired: Frozen::new((run, tag)), next: ptr::null_mut() }));
        self.put(chain);
        // After the node, because `reclaim` resets before it takes. Relaxed: a hint; callers that
        // must not miss anything do not read it.
        self.oldest_tag.fetch_min(tag.0, Relaxed);
    }

    pub(in crate::block) fn is_due(&self, oldest: Ticket) -> bool {
        self.oldest_tag.load(Relaxed) < oldest.0
    }

    /// Returns the number of frames, including those being sifted, and the newest tag ever pushed.
    pub(in crate::block) fn mirror(&self) -> (usize, Ticket) {
        (self.frames.load(Relaxed), Ticket(self.newest_tag.load(Relaxed)))
    }

    pub(in crate::block) fn is_empty(&self) -> bool {
        // Relaxed: a hint.
        self.head.load(Relaxed).is_null()
    }

    /// Passes the runs with tags below `oldest` to `free`. Other threads find none meanwhile.
    pub(in crate::block) fn reclaim(
        &self,
        oldest: Ticket,
        _: &WakeGuard<'_, impl Announce>,
        mut free: impl FnMut(Run),
    ) {
        self.oldest_tag.store(u64::MAX, Relaxed);
        let mut chain = self.take();
        let (mut due, mut waiting) = (Chain::EMPTY, Chain::EMPTY);
        let mut oldest_waiting = u64::MAX;
        while let Some(node) = chain.pop() {
            let (_, tag) = *node.retired;
            if tag < oldest {
                due.push(node)
            } else {
                oldest_waiting = oldest_waiting.min(tag.0);
                waiting.push(node)
            }
        }
        self.put(waiting);
        self.oldest_tag.fetch_min(oldest_waiting, Relaxed);
        while let Some(node) = due.pop() {
            let (run, _) = *node.retired;
            free(run);
            self.frames.fetch_sub(run.len as usize, Relaxed);
        }
    }

    /// Calls `f` with the runs in the list. Other threads find none meanwhile.
    pub(in crate::block) fn for_each(&self, _: &WakeGuard<'_, impl Announce>, mut f: impl FnMut(Run)) {
        let mut chain = self.take();
        let mut seen = Chain::EMPTY;
        while let Some(node) = chain.pop() {
            f(node.retired.0);
            seen.push(node);
        }
        self.put(seen);
    }

    fn take(&self) -> Chain {
        // The load avoids a write when the list is empty. Acquire: pairs with the Release in `put`.
        let first = if self.is_empty() { ptr::null_mut() } else { self.head.swap(ptr::null_mut(), Acquire) };
        Chain { first, last: ptr::null_mut() }
    }

    fn put(&self, chain: Chain) {
        let (first, last) = (chain.first, chain.last);
        std::mem::forget(chain);
        if first.is_null() {
            return;
        }
        let mut head = self.head.load(Relaxed);
        loop {
            // SAFETY: the chain is ours until it is published.
            unsafe { (*last).next = head };
            // Release: publishes the nodes. ABA is harmless: the head is only linked to.
            match self.head.compare_exchange_weak(head, first, Release, Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }
}

impl Drop for SharedRetireList {
    fn drop(&mut self) {
        drop(self.take());
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;
    use crate::block::{Blocks, BlocksConfig};
    use crate::ids::{DeviceId, FrameId};

    #[test]
    fn frames_are_counted_and_none_is_lost_between_threads() {
        const RUNS: u32 = if cfg!(miri) { 40 } else { 20_000 };
        let shared_retire_list = SharedRetireList::default();
        let config = BlocksConfig {
            frames: 64,
            frames_max: 64,
            segment_frames: 64,
            magazine_blocks: 0,
            threads: 1,
            has_null_block: false,
            reserve: 0,
            run_frames: 0,
            device: DeviceId::Host,
        };
        let blocks = Blocks::new(config, None);
        let wake_guard = &blocks.wake_guard();
        let got: Vec<u32> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..2)
                .map(|thread| {
                    let shared_retire_list = &shared_retire_list;
                    scope.spawn(move || {
                        let mut got = Vec::new();
                        for i in 0..RUNS {
                            shared_retire_list
                                .push(Run { start: FrameId(2 * i + thread), len: 1 }, Ticket(i as u64 % 2));
                            if i % 8 == 0 {
                                shared_retire_list
                                    .reclaim(Ticket(1), wake_guard, |run| got.push(run.start.0));
                            }
                        }
                        got
                    })
                })
                .collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let mut all = got;
        let mut waiting = 0;
        shared_retire_list.for_each(wake_guard, |_| waiting += 1);
        assert_eq!(
            (shared_retire_list.mirror(), all.len() + waiting),
            ((waiting, Ticket(1)), 2 * RUNS as usize)
        );
        shared_retire_list.reclaim(Ticket(2), wake_guard, |run| all.push(run.start.0));
        all.sort_unstable();
        assert_eq!(all, (0..2 * RUNS).collect::<Vec<_>>());
        assert_eq!(shared_retire_list.mirror().0, 0);
        shared_retire_list.push(Run { start: FrameId(0), len: 3 }, Ticket(9));
    }
}
