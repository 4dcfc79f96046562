//! Contents of a lease, in two words. A lease of one block, the most frequent kind, is an id and a
//! pointer: it is created, moved and dropped in registers. Several blocks are behind a pointer.
//!
//! A lease records whether it gave out handles or a second lease of its blocks. If not, no other
//! thread changes their words, and it releases them with plain stores ([`Exposure::Private`]).

use smallvec::SmallVec;

use crate::block::{Blocks, Exposure, INLINE_BLOCKS, KeepAlive};
use crate::ids::BlockId;
use crate::sync::{Arc, AtomicU8, Ordering::*};

pub(super) type Ids = SmallVec<[BlockId; INLINE_BLOCKS]>;

pub(super) enum Leased<'p> {
    /// One block of a borrowed pool.
    One { id: BlockId, seen: Seen, blocks: &'p Blocks },
    /// One block, and a reference that keeps the pool's blocks alive.
    OneOwned { id: BlockId, seen: Seen, keep_alive: Arc<KeepAlive> },
    /// Any number of blocks.
    Several(Box<Several<'p>>),
}

#[cfg(not(kvpool_loom))]
const _: () = assert!(size_of::<Leased<'_>>() <= 16, "a lease fits into two registers");

pub(super) struct Several<'p> {
    root: Root<'p>,
    seen: Seen,
    ids: Ids,
}

#[derive(Clone)]
pub(super) enum Root<'p> {
    Borrowed(&'p Blocks),
    Owned(Arc<KeepAlive>),
}

/// Whether handles or a second lease were given out, and whether the release is timed.
pub(super) struct Seen(AtomicU8);

/// A handle or a second lease was given out.
const SEEN: u8 = 1;
/// Neither was given out, and the release is timed.
const TIMED: u8 = 2;

impl Seen {
    #[inline]
    pub(super) fn new(is_seen: bool) -> Self {
        Self(AtomicU8::new(if is_seen { SEEN } else { 0 }))
    }

    #[inline]
    fn note(&self) {
        // Relaxed: the lease is borrowed here, and released when no borrow is left.
        self.0.store(SEEN, Relaxed);
    }

    #[inline]
    pub(super) fn exposure(&self) -> Exposure {
        if self.0.load(Relaxed) & SEEN != 0 { Exposure::Shared } else { Exposure::Private }
    }
}

impl<'p> Several<'p> {
    /// Creates a list of [`INLINE_BLOCKS`] placeholder ids.
    #[inline]
    pub(super) fn new(root: Root<'p>) -> Box<Self> {
        // In this order, so that it is constructed in place.
        let place = Box::new_uninit();
        let ids = Ids::from_buf([BlockId(0); INLINE_BLOCKS]);
        Box::write(place, Self { root, seen: Seen::new(false), ids })
    }

    #[inline]
    pub(super) fn inline_places(&mut self) -> &mut [BlockId] {
        &mut self.ids
    }

    pub(super) fn time(&mut self) {
        self.seen = Seen(AtomicU8::new(TIMED));
    }

    #[inline]
    pub(super) fn truncate(&mut self, len: usize) {
        self.ids.truncate(len);
    }

    #[inline]
    pub(super) fn push(&mut self, id: BlockId) {
        self.ids.push(id);
    }
}

impl Root<'_> {
    #[inline]
    fn blocks(&self) -> &Blocks {
        match self {
            Root::Borrowed(blocks) => blocks,
            Root::Owned(keep_alive) => keep_alive.blocks(),
        }
    }
}

impl<'p> Leased<'p> {
    #[inline]
    pub(super) fn one(root: Root<'p>, id: BlockId, seen: Seen) -> Self {
        match root {
            Root::Borrowed(blocks) => Self::One { id, seen, blocks },
            Root::Owned(keep_alive) => Self::OneOwned { id, seen, keep_alive },
        }
    }

    pub(super) fn new(root: Root<'p>, ids: Ids, seen: Seen) -> Self {
        match *ids {
            [id] => Self::one(root, id, seen),
            _ => Self::Several(Box::new(Several { root, seen, ids })),
        }
    }

    #[inline]
    pub(super) fn pool_blocks(&self) -> &Blocks {
        match self {
            Self::One { blocks, .. } => blocks,
            Self::OneOwned { keep_alive, .. } => keep_alive.blocks(),
            Self::Several(several) => several.root.blocks(),
        }
    }

    #[inline]
    pub(super) fn ids(&self) -> &[BlockId] {
        match self {
            Self::One { id, .. } | Self::OneOwned { id, .. } => std::slice::from_ref(id),
            Self::Several(several) => &several.ids,
        }
    }

    fn seen(&self) -> &Seen {
        match self {
            Self::One { seen, .. } | Self::OneOwned { seen, .. } => seen,
            Self::Several(several) => &several.seen,
        }
    }

    /// Returns whether other threads may change the blocks' words.
    #[inline]
    pub(super) fn exposure(&self) -> Exposure {
        self.seen().exposure()
    }

    #[inline]
    pub(super) fn is_timed(&self) -> bool {
        matches!(self, Self::Several(several) if several.seen.0.load(Relaxed) == TIMED)
    }

    pub(super) fn note_seen(&self) {
        self.seen().note();
    }

    /// Returns a copy of the exposure, for other leases of these blocks.
    fn same_seen(&self) -> Seen {
        Seen::new(self.exposure() == Exposure::Shared)
    }

    pub(super) fn shared(&self) -> Self {
        self.note_seen();
        Self::new(self.root(), Ids::from_slice(self.ids()), Seen::new(true))
    }

    pub(super) fn root(&self) -> Root<'p> {
        match self {
            Self::One { blocks, .. } => Root::Borrowed(blocks),
            Self::OneOwned { keep_alive, .. } => Root::Owned(Arc::clone(keep_alive)),
            Self::Several(several) => several.root.clone(),
        }
    }

    pub(super) fn rooted<'q>(self, root: Root<'q>) -> Leased<'q> {
        let (ids, seen) = (Ids::from_slice(self.ids()), self.same_seen());
        Leased::new(root, ids, seen)
    }

    /// Splits off the blocks from index `at` on. Panics if `at` is past the end.
    pub(super) fn split_off(&mut self, at: usize) -> Self {
        let (root, tail) = (self.root(), Ids::from_slice(&self.ids()[at..]));
        match self {
            Self::Several(several) => several.ids.truncate(at),
            Self::One { .. } | Self::OneOwned { .. } if at == 0 => {
                *self = Self::new(root.clone(), Ids::new(), self.same_seen());
            }
            Self::One { .. } | Self::OneOwned { .. } => {}
        }
        Self::new(root, tail, self.same_seen())
    }
}
