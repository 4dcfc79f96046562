//! Batches, and the frames that must outlast them.
//!
//! A batch is one step of the engine: block tables are read under it, and device memory is accessed
//! until it ends. Batches overlap and end out of order. A frame vacated while a batch is in flight
//! is *retired*: it is reused only when every batch that could have seen its old owner has ended.
//!
//! - [`Clock`] numbers batches with tickets and knows the oldest one in flight.
//! - [`Limbo`] is one thread's list of retired frames.
//! - [`Watch`] measures for how long the oldest batch has been in flight.

#[expect(clippy::module_inception, reason = "the floor is named after its main type")]
mod clock;
mod limbo;
mod watch;
mod word;

pub use clock::{Clock, InFlight};
pub use limbo::Limbo;
pub use watch::Watch;
pub use word::ClockWord;
