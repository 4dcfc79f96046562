//! Allocation: the ladder of places that a request searches, eviction, and the reserve.

mod evict;
mod grab;
mod ladder;
mod reserve;
mod window;

pub(in crate::block) use grab::Grab;
