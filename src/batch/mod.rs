//! Batches: leases over device memory, and what must wait for them.
//!
//! A batch is one step of the engine: block tables are read under it, and device memory is touched until it ends.
//! Batches overlap and end out of order. A frame that is vacated while a batch is in flight is *retired*: it is
//! reused only once every batch that could have seen its old owner has ended.
//!
//! - [`Clock`] numbers batches with tickets and knows the oldest in flight.
//! - [`Limbo`] is one thread's list of retired frames.
//! - [`Watch`] says for how long the oldest has been in flight.

mod clock;
mod limbo;
mod watch;
mod word;

pub use clock::{Clock, InFlight};
pub use limbo::Limbo;
pub use watch::Watch;
pub use word::ClockWord;
