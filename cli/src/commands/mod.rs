//! What each command does.

mod error;
mod map;
mod replay;
mod workload;

pub use error::CommandError;
pub use map::map;
pub use replay::replay;
