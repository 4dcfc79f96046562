//! Allocation: the ladder of places that a request searches, eviction, and the reserve.
//!
//! | file | contents |
//! |---|---|
//! | `fast` | few blocks, through the loaded magazine |
//! | `ladder` | all other requests: gather frames rung by rung, then own the blocks. Read it first |
//! | `own` | the last step of each allocation: a block becomes owned |
//! | `grab` | frames that one request has gathered so far |
//! | `growth` | frames for the list of a sequence, which grows |
//! | `in_place` | blocks for an engine whose ids are frames: runs, and frames taken by name |
//! | `evict` | eviction of cached blocks without owners: the pool's side of the prefix cache |
//! | `complete` | evictions out of order that complete a unit of free frames |
//! | `reclaim` | evictions ahead of need, in slices at the ends of batches and sequences, and by the background task |
//! | `window` | a run for a contiguous request out of a pool that is full of evictable blocks |
//! | `refused` | refusals without a walk |
//! | `reserve` | how requests and shrinks use the reserve |
//!

mod complete;
mod evict;
mod fast;
mod grab;
mod growth;
mod in_place;
mod ladder;
mod own;
mod reclaim;
mod refused;
mod reserve;
mod window;

pub(in crate::block) use grab::Grab;
pub use growth::ListEnd;
pub(crate) use growth::unit_of;
pub(in crate::block) use ladder::Aim;
#[cfg(kvpool_loom)]
pub(in crate::block) use own::own;
