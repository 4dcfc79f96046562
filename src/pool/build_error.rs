use thiserror::Error;

use crate::error::{Invalid, PrefixError, StorageError, TenantError};

/// Reason why a pool could not be built.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// A number, the sizing, or the given storage is invalid.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The given storage has other references, perhaps from another pool that allocates its bytes.
    #[error("the storage has other references; a pool needs exclusive storage")]
    StorageShared,
    /// The configuration of the prefix cache is invalid.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// The limits of a tenant are invalid.
    #[error(transparent)]
    Tenant(#[from] TenantError),
    /// The storage could not be allocated.
    #[error(transparent)]
    Storage(#[from] StorageError),
}
