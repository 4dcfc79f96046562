//! Membership of a cluster: its nodes, and where they listen.
//!
//! ```text
//! etcd, or a fixed list
//!    |  ^ join: name, address, start time; renewed while the process lives
//!    v  |
//! Membership --- watch: lists of members ---> Follower --- peers to connect to ---> Node
//! ```
//!
//! A [`Membership`] is a directory of nodes. A node [joins](Membership::join) it under its name,
//! and [watches](Membership::watch) the other members. A [`Follower`] makes members peers of a
//! [`Node`](crate::Node).
//!
//! # Guarantees
//!
//! - Losing the directory stops no node. Known members and links stay, and
//!   [`MemberList::is_current`] marks lists that may be out of date.
//! - A watcher that was late, paused or disconnected receives the newest complete list.
//! - A member that the directory has lost, for example by deletion of its data, stays for a grace
//!   period, in which a live node joins again.
//! - A node whose entry expired, for example because its process was paused, joins again, and logs
//!   a warning. [`JoinState::joins`] counts this.
//! - Of two processes with one name, the one that started later is the member. The other one waits,
//!   and logs why.
//!
//! Membership grants no rights: a peer must still authenticate over the link by its certificate or
//! the token, so the link to an attacker's entry is refused.

mod directory;
mod error;
#[cfg(feature = "etcd")]
mod etcd;
mod fixed;
mod follower;
mod joined;
mod member;
mod members;
mod reporter;

pub use crate::settings::EtcdLocation;
pub use directory::Membership;
pub use error::MembershipError;
#[cfg(feature = "etcd")]
pub use etcd::EtcdMembership;
pub use fixed::FixedMembers;
pub use follower::Follower;
pub use joined::{JoinState, JoinStatus, Joined};
pub use member::Member;
pub use members::{MemberList, Members};
pub use reporter::MembershipReporter;
