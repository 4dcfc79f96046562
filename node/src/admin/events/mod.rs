//! What followers of a node are told: server-sent events.
//!
//! ```text
//! Admin -- once a period, or in five without followers --> Hub: the view, and a ring of events
//!                                                        |  each follower at its own place of the ring
//!                                                        v
//!                                                    HTTP answers without end
//! ```
//!
//! | event | data | when |
//! |---|---|---|
//! | `stats` | [`StatsSummary`] | every period, by default a second |
//! | `map` | [`Cells`](kvpool_map::Cells): all of them | to begin with, for another size of the pool, and for many changes |
//! | `map_changes` | [`CellChanges`](kvpool_map::CellChanges) | when cells changed |
//! | `migrations` | [`MigrationList`](super::MigrationList) | all to begin with; then those that began, changed or ended |
//!
//! # Numbers
//!
//! An event has an id. A follower that was cut off sends the last one as `Last-Event-ID`, as
//! browsers do by themselves, and gets the events since. If the ring has lost them, or the node was
//! started anew, it begins with all of `stats`, `map` and `migrations`, of which the last has the
//! id.
//!
//! # History
//!
//! The statistics of the last 15 minutes, one in five periods, are kept for [`hub::Hub::history`],
//! also while there are no followers.
//!
//! # Bounds
//!
//! - [`Limits::followers`](super::Limits::followers) at a time; others are refused.
//! - The ring has at most [`hub::EVENTS_MAX`] events and about [`hub::BYTES_MAX`] bytes, for all
//!   followers together. A follower has its place in it, and what the system and the HTTP library
//!   buffer of one connection.
//! - A follower that the ring has left behind is cut off: it read nothing for many periods.
//!
//! | file | content |
//! |---|---|
//! | `notice` | the events |
//! | `view` | the state of a node, and what changed since another one |
//! | `hub` | the ring |
//! | `follow` | a follower's place, and its answer |
//! | `follower` | the client |

mod follow;
mod follower;
mod hub;
mod notice;
#[cfg(test)]
mod tests;
mod view;

pub use follower::Follower;
pub(super) use hub::Hub;
pub use notice::{Notice, StatsSummary};
pub(super) use view::CELLS_MAX;
