use std::time::Duration;

use super::error::MembershipError;
use super::joined::Joined;
use super::member::Member;
use super::members::Members;

/// A directory of the nodes of a cluster.
///
/// Both methods return immediately, and work in the background on the current tokio runtime. An
/// unreachable directory is retried, and not an error.
pub trait Membership: Send + Sync + 'static {
    /// Enters a node until the returned value is dropped.
    ///
    /// Without renewal, for example while its process is paused, the entry expires after the time
    /// `lease`, which a directory may extend to a minimum.
    ///
    /// # Errors
    /// [`MembershipError::Lease`] and [`MembershipError::Member`] for values that the directory
    /// cannot hold.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    fn join(&self, member: Member, lease: Duration) -> Result<Joined, MembershipError>;

    /// Follows the members.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    fn watch(&self) -> Members;
}
