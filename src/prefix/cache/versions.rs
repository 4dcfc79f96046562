//! The versions of the weights with which requests are hashed: see
//! [`weights`](super::super::weights).

use crate::error::Invalid;
use crate::ids::WeightsVersion;

use super::super::hash::{PrefixKeys, PrefixRoot, Weights};
use super::super::weights::WeightsStamp;
use super::{BlockHash, PrefixCache};

impl PrefixCache {
    /// Returns the current versions of the weights of a sequence, which may have an adapter.
    ///
    /// Hashes that are computed outside of a pool [take](PrefixKeys::weights) them, for example in
    /// a router.
    pub fn weights(&self, adapter: Option<&[u8]>) -> Weights {
        self.weights.of(adapter).0
    }

    /// Returns the hashes of the full blocks of tokens with these keys and the current weights. In
    /// a pool with several groups of layers, blocks have others: [`Sequence::block_hashes`] of each
    /// group.
    ///
    /// [`Sequence::block_hashes`]: crate::Sequence::block_hashes
    ///
    /// # Errors
    /// As for [`PrefixHasher::hashes`](super::super::PrefixHasher::hashes).
    pub fn hashes(&self, keys: &PrefixKeys<'_>, tokens: &[u32]) -> Result<Vec<BlockHash>, Invalid> {
        self.hasher().hashes(&keys.weights(self.weights(keys.adapter_name())), tokens)
    }

    pub(crate) fn begin_version(&self, version: WeightsVersion) -> WeightsVersion {
        let weights = Weights { model: version, adapter: WeightsVersion(0) };
        let root = |list: usize| {
            let root = self.hashers[list].root(&PrefixKeys::new().weights(weights));
            root.unwrap_or_else(|error| unreachable!("no key is set: {error}")).hash()
        };
        self.weights.begin(version, root)
    }

    pub(crate) fn begin_adapter_version(
        &self,
        adapter: &[u8],
        version: WeightsVersion,
    ) -> Result<WeightsVersion, Invalid> {
        self.weights.begin_of(adapter, version)
    }

    /// Returns what a batch that begins now computes with.
    #[inline]
    pub(crate) fn weights_stamp(&self) -> WeightsStamp {
        self.weights.stamp()
    }

    /// Returns the current versions of a sequence with this adapter, and the stamp for which they
    /// hold.
    #[inline]
    pub(crate) fn weights_now(&self, adapter: Option<&[u8]>) -> (Weights, WeightsStamp) {
        self.weights.of(adapter)
    }

    /// Returns the versions of a batch with this stamp for an adapter; `None` if unknown.
    pub(crate) fn weights_at(&self, stamp: WeightsStamp, adapter: Option<&[u8]>) -> Option<Weights> {
        self.weights.at(stamp, adapter)
    }

    /// Returns the root of a list's chains.
    ///
    /// # Errors
    /// [`Invalid`] for a key of zero bytes.
    pub(crate) fn root_of(
        &self,
        list: u32,
        keys: &PrefixKeys<'_>,
        weights: Weights,
    ) -> Result<BlockHash, Invalid> {
        if keys.is_plain()
            && weights.model != WeightsVersion(0)
            && let Some(root) = self.weights.root(list, weights.model)
        {
            return Ok(root);
        }
        self.hasher_of(list).root(&keys.weights(weights)).map(PrefixRoot::hash)
    }
}
