//! Batches, and the frames that must outlast them.
//!
//! A batch is one step of the engine. Batches overlap and end out of order. A frame vacated while a
//! batch is in flight is *retired*: it is reused only when every batch that could have seen its old
//! owner has ended.
//!
//! - [`Clock`] numbers batches with tickets and knows the oldest one in flight.
//! - [`RetireList`] is one thread's list of retired frames.
//! - [`BatchSet`] remembers batches, and [`Clock::poll_ended`] waits for their end.
//! - [`Watch`] measures for how long the oldest batch has been in flight.

mod batch_set;
#[expect(clippy::module_inception, reason = "the floor is named after its main type")]
mod clock;
mod ends;
mod retire_list;
mod slots;
mod watch;
mod word;

pub use batch_set::{BatchRef, BatchSet, SetState};
pub use clock::{Clock, InFlight};
pub use ends::EndPlace;
pub use retire_list::RetireList;
pub use watch::Watch;
pub use word::ClockWord;
