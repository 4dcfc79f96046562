//! The ids of a lease: one, or a few in the lease itself, or more on the heap.

use std::ops::Deref;

use smallvec::SmallVec;

use crate::block::INLINE_BLOCKS;
use crate::ids::BlockId;

/// Ids of the blocks of a lease.
///
/// A single id has a field of its own, apart from the array, so that a lease of one block is
/// created, moved and dropped in registers. An array whose first element is written and which is
/// then copied as a whole stalls on that store.
#[derive(Default)]
pub(super) struct LeasedIds {
    /// The id, if there is exactly one; `more` is then empty.
    one: Option<BlockId>,
    more: SmallVec<[BlockId; INLINE_BLOCKS]>,
}

impl LeasedIds {
    #[inline]
    pub(super) fn one(id: BlockId) -> Self {
        Self { one: Some(id), more: SmallVec::new() }
    }

    #[inline]
    pub(super) fn few(ids: [BlockId; INLINE_BLOCKS], len: usize) -> Self {
        Self { one: None, more: SmallVec::from_buf_and_len(ids, len) }
    }

    pub(super) fn more(ids: SmallVec<[BlockId; INLINE_BLOCKS]>) -> Self {
        Self { one: None, more: ids }
    }

    /// Keeps the first `len` ids.
    pub(super) fn truncate(&mut self, len: usize) {
        if len == 0 {
            self.one = None;
        }
        self.more.truncate(len);
    }
}

impl Deref for LeasedIds {
    type Target = [BlockId];

    #[inline]
    fn deref(&self) -> &[BlockId] {
        match &self.one {
            Some(id) => std::slice::from_ref(id),
            None => &self.more,
        }
    }
}
