//! What tells equal tokens apart: salt, tenant, adapter for a whole sequence; extra keys for some of its tokens.

use super::BlockHash;
use crate::error::PrefixError;

/// What all blocks of a sequence depend on beside its tokens. Sequences share blocks only if all of this is the same.
///
/// A salt makes blocks invisible to everybody who does not give the same one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrefixKeys<'a> {
    pub(super) salt: Option<&'a [u8]>,
    pub(super) tenant: Option<&'a [u8]>,
    pub(super) adapter: Option<&'a [u8]>,
}

impl<'a> PrefixKeys<'a> {
    /// None of them.
    pub const fn new() -> Self {
        Self { salt: None, tenant: None, adapter: None }
    }

    /// A secret of those who may share these blocks.
    #[must_use]
    pub const fn salt(mut self, salt: &'a [u8]) -> Self {
        self.salt = Some(salt);
        self
    }

    /// Whose blocks these are.
    #[must_use]
    pub const fn tenant(mut self, tenant: &'a [u8]) -> Self {
        self.tenant = Some(tenant);
        self
    }

    /// The adapter (LoRA) that the K and V were computed with.
    #[must_use]
    pub const fn adapter(mut self, adapter: &'a [u8]) -> Self {
        self.adapter = Some(adapter);
        self
    }

    /// Each by name; the order is part of the hash.
    pub(super) fn fields(&self) -> [(&'static str, Option<&'a [u8]>); 3] {
        [("salt", self.salt), ("tenant", self.tenant), ("adapter", self.adapter)]
    }

    pub(super) fn check(&self) -> Result<(), PrefixError> {
        match self.fields().into_iter().find(|(_, value)| value.is_some_and(<[u8]>::is_empty)) {
            Some((field, _)) => Err(PrefixError::EmptyKey { field }),
            None => Ok(()),
        }
    }
}

/// What a chain begins with: [`PrefixKeys`], hashed. To be kept by who has many sequences of one tenant or adapter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PrefixRoot(pub(super) BlockHash);

impl PrefixRoot {
    /// What stands in place of the parent of a first block.
    pub const fn hash(self) -> BlockHash {
        self.0
    }
}

/// An extra key of some tokens: hashed with where they are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Extra {
    /// First token, and the one after the last.
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) digest: BlockHash,
}
