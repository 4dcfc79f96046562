//! An inference engine in small, over a real pool on the mock's device: what it reads, it compares with what it stored.
//!
//! ```text
//! Rig      a pool on a device             ── what all lanes share
//! Lane     a stream and its sequences     ── step: begin, append, store, load, finish;  check: what came back
//! Gather   a kernel that reads through a table in the device's memory
//! Buffer   one step's pinned and device memory;   Rows   what a token's row is, and what is loaded of it
//! ```
//!
//! A token's row depends on the token alone, so that blocks found in the prefix cache are checked as well. What a step stored
//! and loaded is looked at when an event of the *engine's* was seen complete: what the pool says of the stream
//! (`Finish`) is not believed, it is what is tested.
//!
//! Sequences stay with their lane, as a stream's work is only ordered with itself. The prefix cache is what lanes
//! share: a block that is found there has been written, says the pool.

mod buffer;
mod gather;
mod lane;
mod rig;
mod rows;
mod wrong;

pub use buffer::{Buffer, Buffers, Mark};
pub use gather::Gather;
pub use lane::Lane;
pub use rig::{Rig, Shape, drained, layout_of};
pub use rows::Rows;
pub use wrong::Wrong;

/// Polls a future once, without a runtime.
pub fn poll<F: Future + ?Sized + Unpin>(future: &mut F) -> std::task::Poll<F::Output> {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    std::pin::Pin::new(future).poll(&mut context)
}
