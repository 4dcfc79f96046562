//! Which physical place belongs to whom: a lock-free buddy over a two-level exclusive bitmap.
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
//! 1. A frame is in exactly one leaf bit, one unit bit, or one owner (a caller, or a thread in mid split, merge or
//!    rollback): `leaf bits + 64 x unit bits + owned + in transit == total`.
//! 2. `unit bit set  =>  leaf == 0`; at every quiescent point `leaf != ALL`: what can be merged is merged.
//! 3. `word has a free aligned run of 2^k  =>  its hint k is set`, at every quiescent point; a hint may be set in vain.
//! 4. Frames beyond the total are never free, whether they are still to come or have gone. The last leaf of a pool whose
//!    total is no multiple of 64 never merges.
//!
//! The [audit](Frames::audit) checks all four. A word is its whole state, so that an aligned run of up to 2^12 frames, and an
//! exact run that fits into one word of either level, is claimed by **one** compare-exchange, and ABA is harmless: the
//! bits that are taken are free at that moment, whatever they were before. A third level was tried and rejected: a
//! thread in mid split would hide a quarter of a million frames.
//!
//! # Protocols
//!
//! - *Free*: `fetch_or`. Whoever sees a leaf full moves it up: compare-exchange ALL -> 0, then the unit bit.
//! - *Split*: a unit bit is taken, what is not wanted is `fetch_or`ed into the leaf.
//! - *Hints*: set by who gives a word a class, withdrawn by who looked in vain; a Dekker pair with two fences.
//! - *Long and straddling runs*: word by word, low to high, and everything back on a conflict. This is where published
//!   allocators hand frames out twice; every test build runs it against an ownership oracle.
//! - *Exhaustion*: said only after a walk over the bitmap during which no frame was in transit.
//! - *Growth*: prepare the bytes, publish a larger directory (or raise the number of frames, where the words are there),
//!   free the new frames.
//! - *Shrinking*: collect every frame that is to go, then lower the number (`shrink`).
//!
//! # Who may touch what
//!
//! A set bit belongs to whoever clears it with a read-modify-write. Nobody stores into a word. The directory, and the
//! number of frames in it, are changed by the holder of the growth lock, or by the one shrinker that it let in; it is read under `epoch::pin` and never kept.
//! Hints and closed bits are advice that anybody may change: safety rests on the leaf and unit bits alone.
//!
//! # Files
//!
//! The words: `bits` (pure functions), `transit`, `hints`, `segment`, `directory`. The algorithms, all on `map`'s view of
//! them: `claim` (every change of a word), `search` (placement), `scan` (the walk), `census`,
//! `shrink`. The whole: `frames`, with a `tally` of what is free.
//! Above it, a thread's own stock: `magazine`, `depot` (a `stock` of them), `cache`, and the cell that it lives in, `owner`.
//!
//! The buddy over bitmap words with claims by one compare-exchange follows LLFree (Wrenger et al., USENIX ATC 2023)
//! and NBBS (Marotta et al., 2018); the exclusive second level, exact runs and the placement are this pool's own.

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
mod stock;
mod tally;
mod transit;

pub use census::{Census, ORDERS, outside_of_runs};
pub use depot::Depot;
pub use frames::{FrameConfig, FrameMask, Frames};
pub use magazine::Magazine;
pub use magazine_pair::MagazinePair;
pub use owner::{OwnerCell, Visits};
pub use run_list::RunList;
pub use shrink::Shrink;
pub use stock::Stock;

#[cfg(test)]
mod tests;
