//! Batches, and the frames that must outlast them.
//!
//! A batch is one step of the engine. Batches overlap and end out of order. A frame vacated while a
//! batch is in flight is *retired*: it is reused only when every batch that could have seen its old
//! owner has ended. Its *tag* is the newest ticket at that moment.
//!
//! - [`Clock`] numbers batches with tickets and finds the oldest one in flight.
//! - [`RetireList`] is one thread's list of retired frames.
//! - [`BatchSet`] is a set of batches, and [`Clock::poll_ended`] waits for their end.
//! - [`Watch`] measures how long the oldest batch has been in flight.
//!
//! To *announce* blocks that became available is to check the clock's `awaited` bit and, if it is
//! set, to *notify*: wake the first request in the queue (`Core::announce`).

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
pub(crate) use slots::SLOTS;
pub use watch::Watch;
pub use word::ClockWord;
