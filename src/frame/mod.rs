//! Allocation of frames: a lock-free buddy allocator over a two-level bitmap.
//!
//! ```text
//! Frames ── directory (epoch-read) ── segment ── group   units  1 0 0 1 ..   64 whole units of 64 frames
//!    │                                       │                      │
//!    │                                       └── leaf           0110..01      64 frames of one unit
//!    └───── hints: which word may hold a run of 2^k
//! ```
//!
//! # Invariants
//!
//! 1. A frame is in exactly one leaf bit or unit bit, or is owned by a caller, or in transit: the
//!    sum of leaf bits, 64 x unit bits, owned frames and frames in transit is the total.
//! 2. `unit bit set => leaf == 0`. At every quiescent point all full leaves are merged.
//! 3. At every quiescent point, `word has a free aligned run of 2^k => its hint k is set`.
//! 4. Frames beyond the total are never free. The last leaf never merges unless it is complete.
//!
//! The [audit](Frames::audit) checks all four. **One** compare-exchange claims an aligned run of up
//! to 2^12 frames, or any run inside one word. ABA is harmless: the claimed bits are free at that
//! moment.
//!
//! A set bit is claimed by the thread that clears it with a read-modify-write; no thread stores
//! into a word. Only the holder of the growth lock, or the open shrink, changes the directory and
//! its number of frames. The hints and the `closed` and `reserved_for_growth` bits are advisory:
//! safety depends on the leaf and unit bits alone.
//!
//! # Files
//!
//! The words: `bits` (pure functions), `transit`, `hints`, `segment`, `directory`. The algorithms,
//! all on `map`'s view of them: `claim` (every change of a word), `search` (placement), `scan` (the
//! walk), `census`, `shrink`, `spare` (units reserved for growth). The whole: `frames`, with a
//! `tally` of free frames. The frames of one thread: `magazine`, `depot` (a `stock` of magazines),
//! `magazine_pair`, and the `owner` cell that holds them.
//!
//! The design follows LLFree (Wrenger et al., USENIX ATC 2023) and NBBS (Marotta et al., 2018).

mod bits;
mod census;
mod claim;
mod depot;
mod directory;
mod frames;
mod hints;
mod magazine;
mod magazine_pair;
mod map;
mod owner;
mod run_list;
mod scan;
mod search;
mod segment;
mod shrink;
mod spare;
mod stock;
mod tally;
mod transit;
mod window;

pub use census::{Census, ORDERS, outside_of_runs};
pub use depot::Depot;
pub use frames::{FrameConfig, FrameMask, Frames};
pub use magazine::Magazine;
pub use magazine_pair::MagazinePair;
pub use owner::{OwnerCell, Visits};
pub use run_list::RunList;
pub use shrink::Shrink;
pub use stock::Stock;
pub use tally::{Snapshot, Stripe, Tally};
pub use window::cheapest_window;

#[cfg(test)]
mod tests;
