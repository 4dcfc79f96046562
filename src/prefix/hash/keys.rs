//! Inputs that separate equal tokens: salt and adapter of a sequence, extra keys of some tokens.

use std::fmt;
use std::ops::Range;

use super::BlockHash;
use crate::error::Invalid;
use crate::ids::WeightsVersion;

/// The versions of the weights that K and V are computed with.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Weights {
    /// Version of the model.
    pub model: WeightsVersion,
    /// Version of the sequence's adapter; 0 without one.
    pub adapter: WeightsVersion,
}

/// Everything besides tokens that the blocks of a sequence depend on; sequences share blocks only
/// if it is equal.
///
/// A salt, for example of a tenant, hides blocks from requests without it. Salt and adapter
/// separate whole sequences; an extra key separates them from the first block that it touches.
///
/// ```
/// use kvpool::prefix::{ExtraKey, PrefixKeys};
///
/// // Tokens 12..588 of the prompt are the placeholders of an image.
/// let image = [ExtraKey::new(12..588, b"hash of the pixels")];
/// let keys = PrefixKeys::new().salt(b"tenant 7").extra_keys(&image);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrefixKeys<'a> {
    pub(super) salt: Option<&'a [u8]>,
    pub(super) adapter: Option<&'a [u8]>,
    pub(super) extra: &'a [ExtraKey],
    pub(super) weights: Weights,
}

/// The key of tokens that stand for data which their ids do not identify, such as an image.
///
/// The key (for example a hash of the pixels) and the bounds of the range enter the hashes of all
/// blocks that the range touches, and so of all later ones. Repetitions and order do not matter.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ExtraKey {
    /// Positions of the tokens in their sequence.
    pub tokens: Range<usize>,
    /// The key.
    pub key: Box<[u8]>,
}

impl ExtraKey {
    /// Creates the key of the tokens at these positions.
    pub fn new(tokens: Range<usize>, key: &[u8]) -> Self {
        Self { tokens, key: key.into() }
    }

    /// Returns an error unless the key has bytes, and a nonempty range within `from..to`.
    pub(crate) fn check(&self, from: usize, to: usize) -> Result<(), Invalid> {
        let Range { start, end } = self.tokens;
        let refused = |limit: fmt::Arguments<'_>| {
            Err(Invalid::new("extra key", format_args!("a key of tokens {start}..{end}"), limit))
        };
        if self.key.is_empty() {
            Err(Invalid::new("extra key", "no bytes", "at least one"))
        } else if start >= end {
            refused(format_args!("a range that is not empty"))
        } else if start < from {
            refused(format_args!("a start from {from} on, as the tokens before are hashed"))
        } else if end > to {
            refused(format_args!("an end of at most {to}"))
        } else {
            Ok(())
        }
    }

    pub(crate) fn touching(keys: &[Self], tokens: Range<usize>) -> impl Iterator<Item = &Self> {
        keys.iter().filter(move |key| key.tokens.start < tokens.end && key.tokens.end > tokens.start)
    }

    /// Returns the `keys` that touch a block of these tokens, as its event has them.
    pub(crate) fn of_block(keys: &[Self], tokens: Range<usize>) -> Box<[(i64, Self)]> {
        let first = tokens.start as i64;
        Self::touching(keys, tokens).map(|key| (key.tokens.start as i64 - first, key.clone())).collect()
    }
}

impl<'a> PrefixKeys<'a> {
    /// Returns keys with no field set.
    pub const fn new() -> Self {
        let weights = Weights { model: WeightsVersion(0), adapter: WeightsVersion(0) };
        Self { salt: None, adapter: None, extra: &[], weights }
    }

    /// Sets a secret shared by the requests that may share these blocks.
    #[must_use]
    pub const fn salt(mut self, salt: &'a [u8]) -> Self {
        self.salt = Some(salt);
        self
    }

    /// Sets the adapter (LoRA) that K and V are computed with.
    #[must_use]
    pub const fn adapter(mut self, adapter: &'a [u8]) -> Self {
        self.adapter = Some(adapter);
        self
    }

    /// Sets the versions of the weights, for hashes that are computed outside of a pool, by a
    /// [hasher](super::PrefixHasher). A pool sets its
    /// [current](crate::prefix::PrefixCache::weights) ones, and ignores these.
    #[must_use]
    pub const fn weights(mut self, weights: Weights) -> Self {
        self.weights = weights;
        self
    }

    /// Returns the name of the adapter.
    pub(crate) const fn adapter_name(&self) -> Option<&'a [u8]> {
        self.adapter
    }

    /// Sets the keys of ranges of tokens, such as images.
    #[must_use]
    pub const fn extra_keys(mut self, keys: &'a [ExtraKey]) -> Self {
        self.extra = keys;
        self
    }

    pub(crate) fn extra(&self) -> &'a [ExtraKey] {
        self.extra
    }

    pub(crate) fn check_extra(&self, tokens: usize) -> Result<(), Invalid> {
        let mut keys = self.extra.iter().zip(0..);
        keys.try_for_each(|(key, index)| key.check(0, tokens).map_err(|error| error.at(index)))
    }

    /// Returns whether only the versions of the weights and extra keys may be set.
    pub(crate) const fn is_plain(&self) -> bool {
        self.salt.is_none() && self.adapter.is_none()
    }

    pub(super) fn fields(&self) -> [(&'static str, Option<&'a [u8]>); 2] {
        [("salt", self.salt), ("adapter", self.adapter)]
    }

    pub(super) fn check(&self) -> Result<(), Invalid> {
        match self.fields().into_iter().find(|(_, value)| value.is_some_and(<[u8]>::is_empty)) {
            Some((field, _)) => Err(Invalid::new(field, "no bytes", "at least one; omit it instead")),
            None => Ok(()),
        }
    }
}

/// Hash of [`PrefixKeys`], from which a chain begins. Can be reused for many sequences.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PrefixRoot(pub(super) BlockHash);

impl PrefixRoot {
    /// Returns the hash in place of the parent's for a first block.
    pub const fn hash(self) -> BlockHash {
        self.0
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Extra {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) digest: BlockHash,
}
