//! The interface to a directory of nodes.

use std::time::Duration;

use super::error::MembershipError;
use super::joined::Joined;
use super::member::Member;
use super::members::Members;

/// A directory of the nodes of a cluster.
///
/// Both functions return at once, and work in the background on the current tokio runtime. A
/// directory that cannot be reached is no error: it is tried again.
pub trait Membership: Send + Sync + 'static {
    /// Enters a node, which stays entered until the returned value is dropped.
    ///
    /// Without a renewal, for example while its process is paused, the entry expires after the time
    /// `lease`. A directory may extend the time to a minimum of its own.
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
