//! A directory in etcd.
//!
//! Each member is a key `/kvpool/CLUSTER/members/NAME` with an etcd lease, which its process renews
//! every third of the time.
//!
//! ```text
//! join:   connect -> grant a lease -> put the key, unless a later process has it -> renew, check the key
//!            ^                 ^                                                     | connection lost: reconnect, same lease
//!            |                 +---- lease expired, or key lost: warn, join again ---+
//! watch:  connect -> list at revision R -> events from R + 1 on
//!            ^   stream lost, compacted   |
//!            +----------------------------+   meanwhile the known members stay
//! ```
//!
//! A list after a reconnection may lack known members, for example if etcd lost its data. They stay
//! for the grace period, in which live nodes join again: see [`known`].
//!
//! etcd answers requests for an expired lease with a time to live of 0, by which a process notices
//! that it was paused, regardless of its clocks.

mod connection;
mod directory;
mod entry;
mod known;
mod watch;

pub use directory::EtcdMembership;
