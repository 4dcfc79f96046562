//! `PrefixCache`: the cached blocks of a pool, and pins on them.

use kvpool::prefix::BlockHash;
use kvpool::{PinnedPrefix, Pool, PrefixError, WeightsVersion};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::args::{Blocks, Extra, Keys, Weights};
use crate::buffers::Numbers;
use crate::error::{Outcome, fields, raise};
use crate::events::PyEvents;
use crate::exclusive::{Exclusive, InUse};
use crate::pool::PyPool;
use crate::record::record;

record! {
    /// Counts of the prefix cache since the pool was built.
    CacheStats {
        /// Prompts that were looked up. A request counts once, at its first append, and not if it
        /// came back after a preemption.
        lookups: u64,
        /// Full blocks of those prompts.
        lookup_blocks: u64,
        /// Leading blocks that were cached.
        hit_blocks: u64,
        /// Prompts of requests that came back after a preemption, which find what they have
        /// computed.
        resumed_lookups: u64,
        /// Full blocks of those prompts.
        resumed_lookup_blocks: u64,
        /// Leading blocks of those prompts that were cached.
        resumed_hit_blocks: u64,
        /// Blocks that were registered.
        registered_blocks: u64,
        /// Blocks that were evicted.
        evicted_blocks: u64,
        /// Blocks that `uncache` has taken out of the cache.
        uncached_blocks: u64,
        /// `hit_blocks / lookup_blocks`, 0 before the first lookup.
        hit_rate: f64,
    }
}

record! {
    /// Tokens of a sequence that were computed with the same versions of the weights. They end
    /// where the next range begins, or the sequence ends.
    VersionRange {
        /// Position of the first of them.
        start: usize,
        /// Version of the model.
        model: u64,
        /// Version of the adapter, 0 without one; None if it changed after the batch had begun.
        adapter: Option<u64>,
    }
}

impl VersionRange {
    /// Returns the ranges of a sequence.
    pub fn all(ranges: impl Iterator<Item = kvpool::VersionRange>) -> Vec<Self> {
        let record = |range: kvpool::VersionRange| Self {
            start: range.from,
            model: range.model.0,
            adapter: range.adapter.map(|version| version.0),
        };
        ranges.map(record).collect()
    }
}

/// The prefix cache of a pool. `Pool.prefix_cache` returns it.
#[pyclass(frozen, name = "PrefixCache", module = "kvpool._kvpool")]
pub struct PyPrefixCache {
    pool: Py<PyPool>,
}

impl PyPrefixCache {
    pub fn pool(&self) -> Outcome<InUse<Pool>> {
        self.pool.get().get()
    }
}

#[pymethods]
impl PyPool {
    /// The prefix cache, or None in a pool without one.
    #[getter]
    fn prefix_cache(slf: &Bound<'_, Self>) -> Outcome<Option<PyPrefixCache>> {
        let has_cache = slf.get().get()?.prefix_cache().is_some();
        Ok(has_cache.then(|| PyPrefixCache { pool: slf.clone().unbind() }))
    }
}

#[pymethods]
impl PyPrefixCache {
    /// Returns counts of lookups, hits and evictions.
    fn stats(&self) -> Outcome<CacheStats> {
        let pool = self.pool()?;
        let stats = pool.prefix_cache().map(|cache| cache.stats()).unwrap_or_default();
        Ok(CacheStats {
            lookups: stats.lookups,
            lookup_blocks: stats.lookup_blocks,
            hit_blocks: stats.hit_blocks,
            resumed_lookups: stats.resumed_lookups,
            resumed_lookup_blocks: stats.resumed_lookup_blocks,
            resumed_hit_blocks: stats.resumed_hit_blocks,
            registered_blocks: stats.registered_blocks,
            evicted_blocks: stats.evicted_blocks,
            uncached_blocks: stats.uncached_blocks,
            hit_rate: stats.hit_rate(),
        })
    }

    /// Returns the cached blocks: pairs of block id and hash. Visits the whole pool.
    fn blocks(&self, py: Python<'_>) -> Outcome<Vec<(u32, String)>> {
        let pool = self.pool.get().share()?;
        let blocks = py.detach(|| pool.cached_blocks());
        Ok(blocks.into_iter().map(|(id, hash)| (id.0, hash.to_string())).collect())
    }

    /// Makes every cached block unfindable, in the same time for any number. Blocks without an
    /// owner are evicted when their memory is needed, with LRU before those that are cached later;
    /// `evict` frees blocks at once.
    fn clear(&self) -> Outcome<()> {
        self.pool.get().share()?.clear_prefix_cache();
        Ok(())
    }

    /// Evicts blocks without an owner until `keep` are left. Returns how many were evicted.
    #[pyo3(signature = (keep=Blocks(0)), text_signature = "($self, keep=0)")]
    fn evict(&self, py: Python<'_>, keep: Blocks) -> Outcome<usize> {
        let pool = self.pool.get().share()?;
        Ok(py.detach(|| pool.evict_cached(keep.0)))
    }

    /// Sets the version of the model's weights, or of an adapter's: requests that begin after the
    /// call find cached blocks of this version only, here, in tiers and on other nodes. Returns the
    /// version before; a new pool has version 0. Takes the same time for any number of blocks.
    ///
    /// Call it between the last batch that computes with the old weights and the first one that
    /// computes with the new ones. The number is the engine's, the same in all pools that exchange
    /// blocks, and never that of other weights. Blocks of an earlier version are found again after
    /// a return to it. Sequences go on: see `Sequence.versions`. Raises CacheError for an adapter
    /// without bytes.
    #[pyo3(signature = (version, *, adapter=None))]
    fn begin_version(&self, version: Weights, adapter: Option<&Bound<'_, PyBytes>>) -> Outcome<u64> {
        let (pool, version) = (self.pool()?, WeightsVersion(version.0));
        let before = match adapter {
            None => pool.begin_version(version),
            Some(adapter) => pool.begin_adapter_version(adapter.as_bytes(), version),
        };
        Ok(before?.0)
    }

    /// Returns the current versions of the weights of the model, and of an adapter (0 without one).
    #[pyo3(signature = (adapter=None))]
    fn weights(&self, adapter: Option<&Bound<'_, PyBytes>>) -> Outcome<(u64, u64)> {
        let pool = self.pool()?;
        let weights =
            pool.prefix_cache().map(|cache| cache.weights(adapter.map(|adapter| adapter.as_bytes())));
        let weights = weights.unwrap_or_default();
        Ok((weights.model.0, weights.adapter.0))
    }

    /// Makes all blocks of these hashes unfindable, because their contents are wrong; their owners
    /// keep them: also those that were written before and are registered later. Returns the number
    /// of blocks that became free, and of those that their owners keep.
    ///
    /// Blocks that were computed from them have other hashes: pass these too. Raises CacheError for
    /// a text that is no hash; nothing has changed.
    fn uncache(&self, py: Python<'_>, hashes: Vec<String>) -> Outcome<(usize, usize)> {
        let parsed = hashes.iter().map(|hash| hash.parse::<BlockHash>().map_err(PrefixError::from));
        let hashes: Vec<_> = parsed.collect::<Result<_, _>>()?;
        let pool = self.pool.get().share()?;
        let uncached = py.detach(|| pool.uncache(&hashes));
        Ok((uncached.evicted_blocks, uncached.kept_blocks))
    }

    /// Keeps the cached prefix of these tokens from eviction until the result is closed.
    ///
    /// Raises CacheError if not even the first block is cached.
    #[pyo3(signature = (tokens, *, salt=None, adapter=None, extra_keys=None))]
    fn pin(
        &self,
        tokens: Numbers,
        salt: Option<&Bound<'_, PyBytes>>,
        adapter: Option<&Bound<'_, PyBytes>>,
        extra_keys: Option<Vec<Extra<'_>>>,
    ) -> Outcome<PyPinned> {
        let keys = Keys::new(salt, adapter, extra_keys);
        let pinned = self.pool()?.pin_prefix(&keys.get(), &tokens.0)?;
        Ok(PyPinned(Exclusive::new("pinned prefix", pinned)))
    }

    /// Subscribes to the events of the cache, from now on.
    fn events(&self) -> Outcome<PyEvents> {
        let pool = self.pool()?;
        let Some(cache) = pool.prefix_cache() else {
            return Err(raise(
                "CacheError",
                "the pool was built without a prefix cache",
                fields![kind: "NoCache"],
            ));
        };
        Ok(PyEvents::new(cache.events().subscribe()?))
    }

    fn __repr__(&self) -> Outcome<String> {
        let stats = self.stats()?;
        Ok(format!("<kvpool.PrefixCache, {} lookups, hit rate {:.3}>", stats.lookups, stats.hit_rate))
    }
}

/// A cached prefix that stays cached until it is closed, or collected. Also a context manager.
#[pyclass(frozen, name = "PinnedPrefix", module = "kvpool._kvpool")]
pub struct PyPinned(Exclusive<PinnedPrefix>);

#[pymethods]
impl PyPinned {
    /// Number of tokens of the full blocks that are pinned.
    #[getter]
    fn tokens(&self) -> Outcome<usize> {
        Ok(self.0.enter()?.tokens())
    }

    /// Ids of the blocks, in order.
    #[getter]
    fn blocks(&self) -> Outcome<Vec<u32>> {
        Ok(self.0.enter()?.blocks().iter().map(|id| id.0).collect())
    }

    /// Unpins the prefix. Does nothing if that was done already.
    fn close(&self) -> Outcome<()> {
        self.0.take_if_any().map(drop)
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyAny>) -> Outcome<()> {
        self.close()
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CacheStats>()?;
    module.add_class::<PyPrefixCache>()?;
    module.add_class::<VersionRange>()?;
    module.add_class::<PyPinned>()
}
