//! For backends in crates of their own, such as `kvpool-cuda`.
//!
//! Checks from [`check`], [`check_runs`] and
//! [`AdoptedTensors::checked`](super::AdoptedTensors::checked) return the same errors as the host
//! backend. A device's backend can copy to and from a [`HostStorage`](super::HostStorage) directly
//! if it can [lock](super::HostStorage::page_lock) the pages of its
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
