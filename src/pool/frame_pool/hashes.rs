//! Foreign hashes: keys, registration, lookups.

use crate::error::{FrameError, PrefixError};
use crate::ids::{BlockId, PoolTag};
use crate::prefix::{BlockHash, KvEvents};
use crate::sync::call;

use super::frame_pool::{FramePool, Shared};

/// Number of a group of layers among those that share a pool. Part of a [key](FramePool::key).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct FrameGroup(pub u32);

/// A pool's 192-bit key of a foreign hash in a group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FrameKey {
    hash: BlockHash,
    pool: PoolTag,
}

impl FrameKey {
    /// Returns the derived hash, by which [events](FramePool::events) name the key.
    pub fn hash(self) -> BlockHash {
        self.hash
    }
}

impl FramePool {
    /// Returns the key of a foreign hash, of any length but zero, in a group of layers. Two hashes
    /// have the same key with probability 2^-192, but contents with the same hash collide: among
    /// `n` contents, two share a hash of `b` bits with probability about `n^2 / 2^(b + 1)`.
    pub fn key(&self, group: FrameGroup, hash: &[u8]) -> Result<FrameKey, FrameError> {
        self.key_at(0, group, hash)
    }

    /// Appends the [keys](Self::key) of foreign hashes in a group of layers to `out`.
    pub fn keys<H: AsRef<[u8]>>(
        &self,
        group: FrameGroup,
        hashes: impl IntoIterator<Item = H>,
        out: &mut Vec<FrameKey>,
    ) -> Result<(), FrameError> {
        let before = out.len();
        for (index, hash) in hashes.into_iter().enumerate() {
            let key = self.key_at(index, group, hash.as_ref()).inspect_err(|_| out.truncate(before));
            out.push(key?);
        }
        Ok(())
    }

    fn key_at(&self, index: usize, group: FrameGroup, hash: &[u8]) -> Result<FrameKey, FrameError> {
        if hash.is_empty() {
            return Err(FrameError::EmptyHash { index });
        }
        Ok(FrameKey { hash: self.0.cache.hasher().foreign(group.0, hash), pool: self.tag() })
    }

    pub(super) fn check_key(&self, index: usize, key: FrameKey) -> Result<BlockHash, FrameError> {
        let pool = self.tag();
        if key.pool == pool {
            Ok(key.hash)
        } else {
            Err(FrameError::ForeignKey { index, key: key.pool, pool })
        }
    }

    /// Registers frames under keys, so that lookups find them. Their contents must be final.
    ///
    /// The caller has a reference on each frame. A frame may have several keys, and a key several
    /// frames: lookups return any one of at most 16, and further ones are
    /// [counted](crate::prefix::PrefixStats::forgotten_blocks). A lock serializes calls that add or
    /// remove keys. A frame whose last reference another thread drops concurrently is not
    /// registered.
    pub fn register(&self, frames: &[(u32, FrameKey)]) -> Result<(), FrameError> {
        let _call = call();
        let Shared { blocks, cache, .. } = &*self.0;
        let mut named = Vec::with_capacity(frames.len());
        for (index, &(frame, key)) in frames.iter().enumerate() {
            named.push((self.owned_block(index, frame)?, self.check_key(index, key)?));
        }
        cache.name(blocks, &named, || {
            let mut frames = frames.iter().enumerate();
            frames.try_for_each(|(index, &(frame, _))| self.owned_block(index, frame).map(drop))
        })
    }

    /// Drops one reference on each frame, and caches it, also without a key: for an engine that
    /// looks up hashes itself. A frame with further references is cached now, and evictable after
    /// the last. The pool needs to know that the contents are worth keeping, and not by which hash.
    /// [`share`](Self::share) gets a frame back, and [`uncache`](Self::uncache) forgets its
    /// contents.
    ///
    /// This counts as a key that no lookup has: a frame that has lost its other keys stays cached,
    /// [`uncache`](Self::uncache) counts it, and [`move_keys`](Self::move_keys) removes it.
    ///
    /// ```
    /// # use kvpool::{AllocRequest, FramePool};
    /// let pool = FramePool::builder(10).build()?;
    /// let mut table = Vec::new();
    /// pool.allocate(AllocRequest::new(10), &mut table)?;
    /// pool.keep(&table)?;
    /// assert_eq!((pool.counts().free(), pool.counts().evictable), (0, 10));
    /// pool.share(&table[..1])?;
    /// assert!(pool.allocate(AllocRequest::new(10), &mut table).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn keep(&self, frames: &[u32]) -> Result<(), FrameError> {
        let _call = call();
        let Shared { blocks, cache, .. } = &*self.0;
        cache.keep_nameless(blocks, frames)
    }

    fn owned_block(&self, index: usize, frame: u32) -> Result<BlockId, FrameError> {
        let (id, word) = self.0.blocks.used_in_place(index, frame)?;
        if word.is_owned() { Ok(id) } else { Err(FrameError::Unreferenced { index, frame: word.frame() }) }
    }

    /// Returns a frame of the key, if any, without taking a reference; for a single-threaded
    /// engine, which [shares](Self::share) it before any other call. Others use [`hit`](Self::hit).
    pub fn cached(&self, key: FrameKey) -> Result<Option<u32>, FrameError> {
        let _call = call();
        let hash = self.check_key(0, key)?;
        Ok(self.0.cache.peek(&self.0.blocks, hash).map(|frame| frame.0))
    }

    /// Appends a frame for each of the leading keys that are known to `out`, without taking
    /// references, and returns their number. Does not count as a lookup.
    pub fn cached_prefix(&self, keys: &[FrameKey], out: &mut Vec<u32>) -> Result<usize, FrameError> {
        let _call = call();
        let Shared { blocks, cache, .. } = &*self.0;
        keys.iter().enumerate().try_for_each(|(index, &key)| self.check_key(index, key).map(drop))?;
        let before = out.len();
        out.extend(keys.iter().map_while(|key| cache.peek(blocks, key.hash)).map(|frame| frame.0));
        Ok(out.len() - before)
    }

    /// Takes a reference on one frame for each of the leading keys that are known, appends the
    /// frames to `out`, and returns their number.
    pub fn hit(&self, keys: &[FrameKey], out: &mut Vec<u32>) -> Result<usize, FrameError> {
        let _call = call();
        let Shared { blocks, cache, .. } = &*self.0;
        let hashes = keys.iter().enumerate().map(|(index, &key)| self.check_key(index, key));
        let hashes = hashes.collect::<Result<Vec<_>, _>>()?;
        // First, so that a failed memory allocation leaks no reference.
        out.reserve(hashes.len());
        // A referenced block stays in its frame.
        let (mut hits, mut last) = (0, None);
        cache.take_prefix(blocks, &hashes, cache.era(), &mut |id| {
            out.push(blocks.frame(id).0);
            (hits, last) = (hits + 1, Some(id));
        });
        blocks.count_further(hits as isize);
        cache.count_lookup(hashes.len(), hits, false);
        cache.looked_up(&hashes, hits, last, None);
        Ok(hits)
    }

    /// Removes all keys of these frames, and returns the number of frames that had any. Cached
    /// frames without references become free. Free frames are skipped, since a cached frame may be
    /// evicted at any time.
    pub fn uncache(&self, frames: &[u32]) -> Result<usize, FrameError> {
        let _call = call();
        let Shared { blocks, cache, .. } = &*self.0;
        let ids = frames.iter().enumerate().map(|(index, &frame)| blocks.block_in_place(index, frame));
        let ids = ids.collect::<Result<Vec<_>, _>>()?;
        Ok(cache.uncache(blocks, ids))
    }

    /// Removes a key from all of its frames, and returns their number. Frames without other keys
    /// are no longer cached.
    pub fn unregister(&self, key: FrameKey) -> Result<usize, FrameError> {
        let _call = call();
        let hash = self.check_key(0, key)?;
        Ok(self.0.cache.unname(&self.0.blocks, hash))
    }

    /// Moves all keys of a frame to another one, for an engine that copied its contents, and
    /// returns their number. The caller has a reference on both. An error has index 0 for `from`
    /// and 1 for `to`, which must be another frame without keys.
    pub fn move_keys(&self, from: u32, to: u32) -> Result<usize, FrameError> {
        let _call = call();
        let Shared { blocks, cache, .. } = &*self.0;
        let source = self.owned_block(0, from)?;
        let target = self.owned_block(1, to)?;
        cache.rename(blocks, source, target, || {
            self.owned_block(0, from)?;
            let (id, word) = blocks.used_in_place(1, to)?;
            let is_new = word.is_owned() && !word.is_cached() && id != source;
            if is_new { Ok(()) } else { Err(FrameError::Cached { index: 1, frame: word.frame() }) }
        })
    }

    /// Returns the derived hashes of a frame's keys, in no particular order.
    pub fn hashes(&self, frame: u32) -> Result<Vec<BlockHash>, FrameError> {
        let id = self.0.blocks.block_in_place(0, frame)?;
        Ok(self.0.cache.hashes_of(&self.0.blocks, id))
    }

    /// Clears the cache if no frame has references, and returns the number of frames evicted.
    /// Visits every frame. If another thread takes a reference meanwhile, its frame keeps it and
    /// loses its keys.
    pub fn clear_idle(&self) -> Result<usize, FrameError> {
        let _call = call();
        let Shared { blocks, cache, .. } = &*self.0;
        let ids = (0..blocks.rows() as u32).map(BlockId);
        let frames = ids.clone().filter(|&id| blocks.word(id).is_owned()).count();
        if frames > 0 {
            return Err(FrameError::NotIdle { frames });
        }
        cache.clear();
        Ok(blocks.evict_these(ids))
    }

    /// Subscribes to registrations, removals and clears from now on. Events name keys by
    /// [`FrameKey::hash`]; an eviction removes each key of the frame.
    pub fn events(&self) -> Result<KvEvents, PrefixError> {
        self.0.cache.events().subscribe()
    }
}
