use std::time::Duration;

/// Why a node cannot join.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MembershipError {
    /// The directory cannot hold the node's description.
    #[error("a node cannot join as {name:?}: {reason}")]
    Member {
        /// Its name.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The time is too short or too long.
    #[error("an entry cannot expire after {lease:?}: 1 s to 1 h")]
    Lease {
        /// The time.
        lease: Duration,
    },
}
