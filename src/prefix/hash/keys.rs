//! Inputs that separate equal tokens: salt, tenant and adapter of a sequence; extra keys of some of
//! its tokens.

use super::BlockHash;
use crate::error::PrefixError;

/// Everything besides tokens that the blocks of a sequence depend on. Sequences share blocks only
/// if all of it is equal.
///
/// A salt hides blocks from all requests that do not give the same salt.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PrefixKeys<'a> {
    pub(super) salt: Option<&'a [u8]>,
    pub(super) tenant: Option<&'a [u8]>,
    pub(super) adapter: Option<&'a [u8]>,
}

impl<'a> PrefixKeys<'a> {
    /// Returns keys with no field set.
    pub const fn new() -> Self {
        Self { salt: None, tenant: None, adapter: None }
    }

    /// Sets a secret shared by the requests that may share these blocks.
    #[must_use]
    pub const fn salt(mut self, salt: &'a [u8]) -> Self {
        self.salt = Some(salt);
        self
    }

    /// Sets the tenant that owns these blocks.
    #[must_use]
    pub const fn tenant(mut self, tenant: &'a [u8]) -> Self {
        self.tenant = Some(tenant);
        self
    }

    /// Sets the adapter (LoRA) that K and V are computed with.
    #[must_use]
    pub const fn adapter(mut self, adapter: &'a [u8]) -> Self {
        self.adapter = Some(adapter);
        self
    }

    /// Returns each field by name; the order is part of the hash.
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

/// Hash of [`PrefixKeys`], from which a chain begins. Can be kept and reused for many sequences of
/// one tenant or adapter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PrefixRoot(pub(super) BlockHash);

impl PrefixRoot {
    /// Returns the value that serves as the parent's hash of a first block.
    pub const fn hash(self) -> BlockHash {
        self.0
    }
}

/// An extra key of some tokens, hashed together with their range.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Extra {
    /// Bounds of the range, half-open.
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) digest: BlockHash,
}
