//! For backends in crates of their own, such as `kvpool-cuda`.
//!
//! A backend that checks its arguments by [`check`], [`check_runs`] and
//! [`AdoptedTensors::checked`](super::AdoptedTensors::checked) returns the same errors as that of
//! the host. A device's backend copies to and from a [`HostStorage`](super::HostStorage) directly
//! if it can lock the pages ([`page_lock`](super::HostStorage::page_lock)) of its
//! [`extents`](super::HostStorage::extents), and by [`through_host`] otherwise.

pub use super::page_lock::{PageLock, Pages, Refusal};
pub use super::storage::{check_runs, through_host};
pub use super::tiles::Extent;

/// Checks of rows, and of lists of slots, moves and runs, before any byte moves.
pub mod check {
    pub use crate::storage::check::{
        dtype, frame, frames, layer, moves, packed_bytes, rows, runs, runs_disjoint, slots, slots_unique,
    };
}
