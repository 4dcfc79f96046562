//! The naive model: the expected behaviour of a pool, by sets and maps.
//!
//! [`run`] applies one list of [`Operation`]s to a real pool and to [`Model`] and compares every
//! result: blocks and their info, errors with all their fields, counts, and in the end a full
//! [`audit`](kvpool::Pool::audit). Property tests and the fuzz target both call it; they
//! differ in the source of the operations.
//!
//! One thread drives the pool, so that the model can be exact: an allocation succeeds if and only
//! if enough blocks are free, wherever they are cached, and otherwise fails with exactly the
//! model's numbers.

mod drive;
mod moves;
mod operation;
mod sequences;
mod state;

pub use drive::{BLOCK_TOKENS, Mismatch, Setup, run};
pub use operation::{Alien, Doing, Operation, Pick};
pub use state::{Model, Owned};
