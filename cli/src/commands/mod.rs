//! What each command does.

mod error;
mod replay;

pub use error::CommandError;
pub use replay::replay;
