//! A small inference engine over a real pool on the mock's device. It compares the data that it
//! reads with the data that it stored.
//!
//! ```text
//! Rig      a pool on a device             ── shared by all lanes
//! Lane     a stream and its sequences     ── step: begin, append, store, load, finish;  check
//! Gather   a kernel that reads through a table in the device's memory
//! Buffer   one step's pinned and device memory;   Rows   a token's row as stored and as loaded
//! ```
//!
//! A token's row depends on the token alone, so that blocks hit in the prefix cache are checked as
//! well. The results of a step are compared when an event of the *engine* was seen complete: the
//! pool's own report (`Finish`) is not trusted, because it is under test.
//!
//! Sequences stay with their lane, because work is only ordered within a stream. Lanes share the
//! prefix cache: the pool guarantees that a block that is hit there has been written.

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
