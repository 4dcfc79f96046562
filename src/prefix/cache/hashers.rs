//! The hashers of a cache: one for each list of a sequence, whose blocks may have unequal tokens.

use super::{CurrentWeights, PrefixCache, PrefixHasher};

impl PrefixCache {
    /// Sets the tokens of a block in each list of a sequence.
    pub(crate) fn with_lists(mut self, tokens: impl IntoIterator<Item = usize>) -> Self {
        self.hashers = tokens.into_iter().map(|tokens| self.hashers[0].in_blocks_of(tokens)).collect();
        self.weights = CurrentWeights::new(self.hashers.len());
        self
    }

    /// Returns the hasher of this cache; of the first list, if sequences have several.
    pub fn hasher(&self) -> &PrefixHasher {
        &self.hashers[0]
    }

    /// Returns the hasher of a list of a sequence.
    #[inline]
    pub(crate) fn hasher_of(&self, list: u32) -> &PrefixHasher {
        &self.hashers[list as usize]
    }
}
