//! Events, as subscribers receive them and as the ring holds them.

use std::ops::RangeInclusive;

use smallvec::SmallVec;

use super::super::{BlockHash, ExtraKey};
use crate::ids::BlockId;

/// A change of the cache, for routers.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum KvEvent {
    /// A full block can now be found by its hash.
    Stored {
        /// The block.
        block: BlockId,
        /// The hash by which it is found.
        hash: BlockHash,
        /// Hash of the block before it; `None` for a first block, and if `tokens` are unknown. Of a
        /// checkpoint of a state: hash of the last block, of group 0, of the tokens before it.
        parent: Option<BlockHash>,
        /// Its tokens; empty if appended before the subscription, or imported without a sequence,
        /// and of a checkpoint.
        tokens: SmallVec<[u32; 16]>,
        /// Number of tokens per block of its group; of a checkpoint, that of group 0.
        block_tokens: u32,
        /// The group of layers to which it belongs: see
        /// [`Pool::cache_groups`](crate::Pool::cache_groups). 0 in a frame pool.
        #[cfg_attr(feature = "serde", serde(default))]
        group: u32,
        /// The extra keys that touch its tokens, each after the position of its first token
        /// relative to the block's, which may be negative. Empty if unknown.
        extra_keys: Box<[(i64, ExtraKey)]>,
    },
    /// The block can no longer be found by this hash. Other blocks with the same hash may still be.
    Removed {
        /// The block.
        block: BlockId,
        /// The hash by which it was found.
        hash: BlockHash,
        /// The group of layers to which it belonged; 0 in a frame pool.
        #[cfg_attr(feature = "serde", serde(default))]
        group: u32,
    },
    /// No block stored before can be found any more.
    Cleared,
    /// Events were lost because they were received too slowly: list the pool's cached blocks again.
    Resync {
        /// Number of lost events. May include some that were not for this subscriber.
        lost: u64,
    },
}

/// An event and its position in the stream.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Numbered {
    /// Number of events published since the subscription before this one, including lost ones. For
    /// a [`KvEvent::Resync`], the number of the first lost event.
    pub number: u64,
    /// The event.
    pub event: KvEvent,
}

pub(super) struct Told {
    pub(super) audience: RangeInclusive<u64>,
    /// Era of the block, or that a `Cleared` ends; clears do not cover events of [`ANY_ERA`].
    pub(super) era: u64,
    pub(super) event: KvEvent,
}

pub(super) const ANY_ERA: u64 = u64::MAX;
