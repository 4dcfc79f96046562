//! Membership of a cluster: which nodes there are, and where they listen.
//!
//! ```text
//! etcd, or a fixed list
//!    |  ^ join: name, address, start time; renewed while the process lives
//!    v  |
//! Membership --- watch: lists of members ---> Follower --- peers to connect to ---> Node
//! ```
//!
//! A [`Membership`] is a directory of nodes. A node [joins](Membership::join) it under its name,
//! and [watches](Membership::watch) it for the other members. A [`Follower`] makes members peers of
//! a [`Node`](crate::Node): it connects to them, and drops those that left once no migration with
//! them is under way.
//!
//! # Guarantees
//!
//! - Losing the directory stops no node. Known members stay, links stay, and a list that may be out
//!   of date says so ([`MemberList::is_current`]).
//! - Each list is complete. A watcher that was late, paused or disconnected receives the newest
//!   list, and misses no member.
//! - A member that the directory has lost, for example because its data was deleted, is kept for a
//!   grace period, within which a live node joins again.
//! - A node whose entry expired, for example because its process was paused, joins again by itself,
//!   and logs a warning. [`JoinState::joins`] counts it.
//! - Of two processes with one name, the one that started later is the member. The other one waits,
//!   and logs why.
//!
//! Membership grants no rights: a peer must prove its name over the link as before, by its
//! certificate or the token. An entry of an attacker leads to a link that is refused.

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
