//! Allocation: the ladder that a request climbs, eviction, and the reserve. Read `ladder` first.

mod charge;
mod complete;
mod evict;
mod fast;
mod grab;
mod growth;
mod in_place;
mod ladder;
mod lists;
mod own;
mod reclaim;
mod refused;
mod reserve;
mod window;

pub(crate) use evict::WordCell;
pub(in crate::block) use grab::Grab;
pub use growth::ListEnd;
pub(crate) use growth::unit_of;
pub(in crate::block) use ladder::Aim;
pub use lists::ListShare;
pub(super) use lists::lists_of;
#[cfg(kvpool_loom)]
pub(in crate::block) use own::own;
