//! The commands.

mod error;
mod info;
mod interrupt;
mod map;
mod policy;
mod replay;
mod shell;
mod workload;

pub use error::CommandError;
pub use info::info;
pub use map::map;
pub use policy::policy;
pub use replay::replay;
pub use shell::{completions, man};
