//! A directory in etcd.
//!
//! Each member is a key `/kvpool/CLUSTER/members/NAME` with a lease of etcd, which its process
//! renews every third of the time.
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
//! A list after a reconnection may lack known members, for example because etcd lost its data. They
//! stay for the grace period, in which live nodes join again: see [`known`].
//!
//! etcd answers requests for an expired lease with a time to live of 0. A process that was paused
//! notices by that, whatever its clocks say.

mod connection;
mod directory;
mod entry;
mod known;
mod watch;

pub use directory::EtcdMembership;
