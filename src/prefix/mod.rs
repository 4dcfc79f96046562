//! Prefix reuse: blocks that outlive their sequence, found again by what they hold.
//!
//! # Files
//!
//! `policy` which evictable block goes first.

pub mod policy;
//! `index` which block may hold what is looked for.

mod index;

pub use index::{Index, Inserted, Key};
//! `hash` what a block is known by.
//! `hash` what a block is known by · `events` what is stored and removed, told to routers.

mod events;
mod hash;

pub use events::{EVENTS, EventQueue, KvEvent, KvEvents, Numbered};
pub use hash::{BlockHash, Chain, HashFunction, HashKey, Hashing, PrefixHasher, PrefixKeys, PrefixRoot};
//! Prefix reuse: blocks that nobody owns any more, and that are kept for whoever asks for the same tokens again.
//!
//! # Files
//!
//! `queue` (which evictable block goes next: ranks, lock-free).

mod queue;

pub use queue::{Links, Wheel};
