//! Allocation of frames: a lock-free buddy allocator over a two-level exclusive bitmap.
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
//! 1. A frame is in exactly one leaf bit, one unit bit, or one owner (a caller, or a thread during
//!    a split, merge or rollback): `leaf bits + 64 x unit bits + owned + in transit == total`.
//! 2. `unit bit set => leaf == 0`; at every quiescent point `leaf != ALL`: every mergeable leaf is
//!    merged.
//! 3. `word has a free aligned run of 2^k => its hint k is set`, at every quiescent point; false
//!    positives are allowed.
//! 4. Frames beyond the total are never free, whether they are yet to be added or have been
//!    removed. The last leaf of a pool whose total is not a multiple of 64 never merges.
//!
//! The [audit](Frames::audit) checks all four. A word is its whole state: **one** compare-exchange
//! claims an aligned run of up to 2^12 frames, or an exact run inside one word, and ABA is
//! harmless, since the claimed bits are free at that moment.
//!
//!
//! # Protocols
//!
//! - *Free*: `fetch_or`. A thread that sees a full leaf moves it up: compare-exchange ALL -> 0,
//!   then sets the unit bit.
//! - *Split*: takes a unit bit, then `fetch_or`s the unneeded frames into the leaf.
//! - *Hints*: set by the thread that gives a word a class, withdrawn by a searcher that finds the
//!   word lacks it; a Dekker pair with two fences.
//! - *Long and straddling runs*: word by word, low to high, rolled back on a conflict. Every test
//!   build checks it against an ownership oracle.
//! - *Exhaustion*: reported only after a walk over the bitmap during which no frame was in transit.
//! - *Growth*: prepare the bytes, publish a larger directory (or raise the number of frames if its
//!   words exist), free the new frames.
//! - *Shrinking*: collect every frame to be removed, then lower the number of frames (`shrink`).
//!
//! # Who may touch what
//!
//! A set bit belongs to the thread that clears it with a read-modify-write; no thread stores into a
//! word. The directory and its number of frames are changed by the holder of the growth lock, or by
//! the shrinker that it admitted. Hints, closed bits and reserved for growth bits are advice:
//! safety rests on the leaf and unit bits alone.
//!
//! # Files
//!
//! The words: `bits` (pure functions), `transit`, `hints`, `segment`, `directory`. The algorithms,
//! all on `map`'s view of them: `claim` (every change of a word), `search` (placement), `scan` (the
//! walk), `census`, `shrink`, `spare` (the room behind growing sequences). The whole: `frames`,
//! with a `tally` of free frames. Above it, the frames of one thread: `magazine`, `depot` (a
//! `stock` of magazines), `magazine_pair`, and the `owner` cell that holds them.
//!
//! The buddy over bitmap words with claims by one compare-exchange follows LLFree (Wrenger et al.,
//! USENIX ATC 2023) and NBBS (Marotta et al., 2018); the exclusive second level, exact runs and the
//! placement are original.

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
