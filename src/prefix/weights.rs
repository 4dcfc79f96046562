//! Which versions of the weights tokens are computed with, so that no request finds K and V of
//! other weights.
//!
//! The versions are part of the root of each chain of hashes. A change only stores a number:
//! requests that are hashed from then on have other hashes, in this pool, in tiers and on other
//! nodes; and those of an earlier version are found again when it returns.
//!
//! ```text
//! change    model: v                                            begin_version
//! hash      v;  root = B(root, ..., v, ...)                     a request, before each lookup if v has changed
//! batch     v, when it begins: all that it writes is computed with v
//! write     by a batch of another version than the sequence's hashes: nothing that the sequence
//!           fills is registered any more                        sequence/versions.rs
//! ```
//!
//! # Invariant
//!
//! A block is registered under a hash of version `v` only if each batch that wrote a token of its
//! chain began while `v` was current, or the token came from a block registered under such a hash.
//!
//! Versions are compared by value, so that a return to an earlier version between two looks is no
//! change. A batch cannot read the versions of all adapters: it notes how many changes there were,
//! and an adapter's entry has the number of its last one. If that is later than the batch, the
//! adapter's version then is unknown, and equal to no other. A lookup at the moment of a change is
//! before or after it.
//!
//! Model: `loom-tests/tests/weights.rs`.

use std::sync::PoisonError;

use crate::error::Invalid;
use crate::ids::WeightsVersion;
use crate::sync::{AtomicBool, AtomicU64, Map, Mutex, Ordering::*, fence};

use super::hash::{BlockHash, Weights};

/// What a batch or a request reads of the current versions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct WeightsStamp {
    pub(crate) model: WeightsVersion,
    /// Number of changes of adapters' versions.
    pub(crate) changes: u64,
}

#[derive(Clone, Copy, Default)]
struct OfAdapter {
    version: WeightsVersion,
    /// Number of the change that set it.
    change: u64,
}

/// The current versions.
pub(super) struct CurrentWeights {
    /// Whether there was a change: all else is read only after it.
    has_changed: AtomicBool,
    model: AtomicU64,
    changes: AtomicU64,
    /// Read and written like the registry of open sequences: by parts, each for a moment.
    adapters: Map<Box<[u8]>, OfAdapter>,
    /// Held by a change. No lookup and no batch waits for it.
    turns: Mutex<()>,
    /// By list of a sequence: the root of chains without keys.
    roots: Box<[RootCell]>,
}

impl CurrentWeights {
    pub(super) fn new(lists: usize) -> Self {
        Self {
            has_changed: AtomicBool::new(false),
            model: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            adapters: Map::new(),
            turns: Mutex::new(()),
            roots: (0..lists).map(|_| RootCell::default()).collect(),
        }
    }

    #[inline]
    pub(super) fn stamp(&self) -> WeightsStamp {
        // Acquire: pairs with the Release in `changed`.
        if !self.has_changed.load(Acquire) {
            return WeightsStamp::default();
        }
        // Relaxed: a thread that was told of a change reads it, or a later one. Acquire: pairs with
        // the Release in `begin_of`, so that the entries of these changes are found.
        let (model, changes) = (self.model.load(Relaxed), self.changes.load(Acquire));
        WeightsStamp { model: WeightsVersion(model), changes }
    }

    /// Returns the current versions of a sequence with this adapter, and the stamp for which they
    /// hold.
    #[inline]
    pub(super) fn of(&self, adapter: Option<&[u8]>) -> (Weights, WeightsStamp) {
        let mut stamp = self.stamp();
        let mut weights = Weights { model: stamp.model, adapter: WeightsVersion(0) };
        if let Some(adapter) = adapter.filter(|_| stamp.changes > 0) {
            // It is the adapter's last change up to the number in the stamp, or one after it.
            let of = self.adapters.get(adapter).unwrap_or_default();
            weights.adapter = of.version;
            stamp.changes = stamp.changes.max(of.change);
        }
        (weights, stamp)
    }

    /// Returns the versions of a batch with this stamp for an adapter; `None` if unknown.
    #[cold]
    pub(super) fn at(&self, stamp: WeightsStamp, adapter: Option<&[u8]>) -> Option<Weights> {
        let mut version = WeightsVersion(0);
        if let Some(adapter) = adapter {
            let of = self.adapters.get(adapter).unwrap_or_default();
            version = Some(of.version).filter(|_| of.change <= stamp.changes)?;
        }
        Some(Weights { model: stamp.model, adapter: version })
    }

    /// Sets the model's version. `root` computes the root of a list. Returns the version before.
    pub(super) fn begin(&self, version: WeightsVersion, root: impl Fn(usize) -> BlockHash) -> WeightsVersion {
        let _turn = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        self.roots.iter().enumerate().for_each(|(list, cell)| cell.set(version, root(list)));
        let before = self.model.swap(version.0, Relaxed);
        self.changed();
        WeightsVersion(before)
    }

    /// Sets an adapter's version. Returns the version before.
    ///
    /// # Errors
    /// [`Invalid`] for a name without bytes.
    pub(super) fn begin_of(
        &self,
        adapter: &[u8],
        version: WeightsVersion,
    ) -> Result<WeightsVersion, Invalid> {
        if adapter.is_empty() {
            return Err(Invalid::new("adapter", "no bytes", "at least one"));
        }
        let _turn = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.adapters.get(adapter).unwrap_or_default().version;
        if before != version {
            let change = self.changes.load(Relaxed) + 1;
            // First: a batch that reads this number finds the entry.
            self.adapters.insert(adapter.into(), OfAdapter { version, change });
            self.changes.store(change, Release);
            self.changed();
        }
        Ok(before)
    }

    fn changed(&self) {
        // Release: pairs with the Acquire in `stamp`.
        self.has_changed.store(true, Release);
    }

    /// Returns the root of chains without keys, unless another thread changes it at this moment.
    pub(super) fn root(&self, list: u32, version: WeightsVersion) -> Option<BlockHash> {
        self.roots[list as usize].get(version)
    }
}

/// The root of chains without keys in the current version, which would take as long to compute as
/// ten lookups. Written in turns; a reader that meets a writer computes the root instead.
#[derive(Default)]
struct RootCell {
    /// Odd while the rest is written.
    turn: AtomicU64,
    version: AtomicU64,
    words: [AtomicU64; 3],
}

impl RootCell {
    fn get(&self, version: WeightsVersion) -> Option<BlockHash> {
        // Acquire: pairs with the Release in `set`.
        let turn = self.turn.load(Acquire);
        let is_of = self.version.load(Relaxed) == version.0;
        let [low, high, check] = self.words.each_ref().map(|word| word.load(Relaxed));
        // The loads above precede the one below. Pairs with the fence in `set`: if a load saw a
        // word of a later turn, the one below sees that turn.
        fence(Acquire);
        let is_whole = turn.is_multiple_of(2) && turn > 0 && self.turn.load(Relaxed) == turn;
        let key = u128::from(low) | u128::from(high) << 64;
        (is_whole && is_of).then(|| BlockHash::new(key, check))
    }

    /// The caller writes in its turn.
    fn set(&self, version: WeightsVersion, root: BlockHash) {
        let turn = self.turn.load(Relaxed);
        self.turn.store(turn + 1, Relaxed);
        // Pairs with the fence in `get`.
        fence(Release);
        self.version.store(version.0, Relaxed);
        let [low, high] = root.words();
        for (word, value) in self.words.iter().zip([low, high, root.check()]) {
            word.store(value, Relaxed);
        }
        // Release: pairs with the Acquire in `get`.
        self.turn.store(turn + 2, Release);
    }
}
