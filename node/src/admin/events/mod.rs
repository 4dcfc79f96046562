//! Events for followers of a node: server-sent events.
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
//! | `map` | [`Cells`](kvpool_map::Cells): all of them | at first, for another size of the pool, and for many changes |
//! | `map_changes` | [`CellChanges`](kvpool_map::CellChanges) | when cells changed |
//! | `migrations` | [`MigrationList`](super::MigrationList) | all at first; then those that began, changed or ended; none of a pool of frames |
//!
//! # Numbers
//!
//! An event has an id. A follower that reconnects sends the last one as `Last-Event-ID`, as
//! browsers do automatically, and gets the events since. If the ring has lost them, or the node was
//! restarted, it begins with complete `stats`, `map` and `migrations`, the last of which has the
//! id.
//!
//! # History
//!
//! [`hub::Hub::history`] keeps the statistics of the last 15 minutes, one in five periods, also
//! without followers.
//!
//! # Bounds
//!
//! - [`Limits::followers`](super::Limits::followers) at a time; others are refused.
//! - The ring has at most [`hub::EVENTS_MAX`] events and about [`hub::BYTES_MAX`] bytes, for all
//!   followers together. A follower costs its position in it, and the buffers of one connection in
//!   the system and the HTTP library.
//! - A follower that the ring has overtaken is disconnected: it read nothing for many periods.

mod follow;
mod follower;
mod hub;
mod notice;
#[cfg(test)]
mod tests;
mod view;

pub use follower::Follower;
pub(super) use hub::Hub;
pub use notice::{Notice, SequenceSummary, StatsSummary};
pub(super) use view::CELLS_MAX;
