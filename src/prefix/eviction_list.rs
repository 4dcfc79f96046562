//! The evictable blocks in eviction order, linked, for callers that read it from any block on.
//!
//! The [queues](super::queues) cannot be read in order: a block that was hit and released again is
//! still linked at its former rank, and a walk from its new rank on does not meet it. So the first
//! read builds this list from the places in the rows, and each release then appends to it. Before
//! the first read, a release only loads a flag.
//!
//! ```text
//! released   at the end of its class: useless blocks, then evict-first ones, then the others
//! hit, evicted, uncached   stays linked; a reader that meets it unlinks it
//! ```
//!
//! A block has one node, so the list does not grow with the number of releases, and each stale node
//! is passed once per release. A moved block keeps its node, as it keeps its place in the queues.
//!
//! # Protocol
//!
//! Everything is under a lock but the flag. Release: make the word evictable, set the place, fence,
//! read the flag, append. First read: set the flag, fence, link the blocks whose words are
//! evictable by their places. One of the two sees the other (as in Dekker's algorithm), so an
//! evictable block is linked in order once its release has ended. The first read holds the lock
//! meanwhile, so the release appends after it. Releases at the same time are in either order.
//! Model: `released_beside_the_first_read` in `loom-tests/tests/frame_pool.rs`.

use std::sync::PoisonError;

use crate::ids::{BlockId, FrameId};
use crate::sync::{AtomicBool, Mutex, Ordering::*, fence, fence_after_rmw};

/// Class and block. Smaller classes are evicted first.
pub(super) type Classed = (u32, BlockId);

const CLASSES: u32 = 3;
/// The node after the last one, and before the first one.
const END: u32 = CLASSES - 1;

#[derive(Default)]
pub(super) struct EvictionList {
    is_read: AtomicBool,
    links: Mutex<Links>,
}

/// A circular list. Node `c` marks the end of class `c`; then one node per block, which is linked
/// to itself if it is not in the list.
#[derive(Default)]
struct Links(Vec<Link>);

#[derive(Clone, Copy)]
struct Link {
    before: u32,
    after: u32,
}

impl EvictionList {
    /// Returns whether released blocks have to be [added](Self::add). The caller has made their
    /// words evictable, set their places, and performed a read-modify-write since.
    #[inline]
    pub(super) fn is_read(&self) -> bool {
        // Pairs with the fence in `read`.
        fence_after_rmw();
        self.is_read.load(Relaxed)
    }

    #[cold]
    pub(super) fn add(&self, released: impl Iterator<Item = Classed>) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        released.for_each(|(class, id)| links.append(class, id));
    }

    /// Appends the frames of up to `most` blocks after `cursor`, or of the first ones, to `out`.
    /// `all` returns the evictable blocks in order, `frame_of` the frame of an evictable block.
    pub(super) fn read(
        &self,
        cursor: Option<BlockId>,
        most: usize,
        all: impl FnOnce() -> Vec<Classed>,
        frame_of: impl Fn(BlockId) -> Option<FrameId>,
        out: &mut Vec<u32>,
    ) {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_read.load(Relaxed) {
            self.is_read.store(true, Relaxed);
            // Pairs with the fence in `is_read`.
            fence(SeqCst);
            all().into_iter().for_each(|(class, id)| links.append(class, id));
        }
        links.walk(cursor, most, frame_of, out);
    }
}

impl Links {
    fn append(&mut self, class: u32, id: BlockId) {
        let node = self.node(id);
        self.unlink(node);
        let after = class.min(END);
        let before = self.0[after as usize].before;
        self.0[node as usize] = Link { before, after };
        self.0[before as usize].after = node;
        self.0[after as usize].before = node;
    }

    fn unlink(&mut self, node: u32) {
        let Link { before, after } = self.0[node as usize];
        self.0[before as usize].after = after;
        self.0[after as usize].before = before;
        self.0[node as usize] = Link { before: node, after: node };
    }

    /// Returns the node of a block, which it adds for a pool that has grown.
    fn node(&mut self, id: BlockId) -> u32 {
        if self.0.is_empty() {
            let mark = |class| Link { before: (class + END) % CLASSES, after: (class + 1) % CLASSES };
            self.0.extend((0..CLASSES).map(mark));
        }
        let node = CLASSES + id.0;
        self.0.extend((self.0.len() as u32..=node).map(|node| Link { before: node, after: node }));
        node
    }

    fn walk(
        &mut self,
        cursor: Option<BlockId>,
        most: usize,
        frame_of: impl Fn(BlockId) -> Option<FrameId>,
        out: &mut Vec<u32>,
    ) {
        let end = out.len().saturating_add(most);
        let from = cursor.map_or(END, |id| self.node(id));
        let Some(&Link { after: mut node, .. }) = self.0.get(from as usize) else { return };
        // A block that is not linked is after itself.
        while node != END && node != from && out.len() < end {
            let after = self.0[node as usize].after;
            if let Some(id) = node.checked_sub(CLASSES).map(BlockId) {
                match frame_of(id) {
                    Some(frame) => out.push(frame.0),
                    None => self.unlink(node),
                }
            }
            node = after;
        }
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn classes_and_releases_are_in_order() {
        let list = EvictionList::default();
        let ids = |cursor: Option<u32>, most, gone: &[u32]| {
            let mut out = Vec::new();
            let frame_of = |id: BlockId| (!gone.contains(&id.0)).then_some(FrameId(id.0));
            list.read(
                cursor.map(BlockId),
                most,
                || vec![(0, BlockId(4)), (2, BlockId(9))],
                frame_of,
                &mut out,
            );
            out
        };
        assert!(!list.is_read());
        assert_eq!(ids(None, 9, &[]), [4, 9]);
        assert!(list.is_read());
        list.add(
            [(2, 1), (1, 7), (2, 0), (0, 5), (1, 6), (2, 9)]
                .map(|(class, id)| (class, BlockId(id)))
                .into_iter(),
        );
        assert_eq!(ids(None, 9, &[]), [4, 5, 7, 6, 1, 0, 9]);
        assert_eq!(ids(Some(5), 3, &[]), [7, 6, 1]);
        assert_eq!(ids(Some(4), 9, &[5, 6, 9]), [7, 1, 0]);
        assert!(ids(Some(9), 9, &[]).is_empty(), "unlinked by the last read");
        assert_eq!(ids(None, 9, &[]), [4, 7, 1, 0]);
        assert!(ids(Some(0), 9, &[]).is_empty());
        assert!(ids(Some(1_000), 9, &[]).is_empty(), "not linked yet");
    }
}
