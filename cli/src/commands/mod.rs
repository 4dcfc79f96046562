//! The commands. Each returns its exit code.

#[cfg(feature = "node")]
mod admin;
#[cfg(feature = "node")]
mod events;
mod info;
mod interrupt;
mod layout;
mod map;
mod policy;
mod replay;
mod shell;
mod sweep;
#[cfg(feature = "node")]
mod tables;
#[cfg(feature = "node")]
mod topology;
mod workload;

#[cfg(feature = "top")]
pub use admin::top;
#[cfg(feature = "node")]
pub use admin::{audit, declare_ended, defrag, migrate, migration_status, owners, resize, stats};
#[cfg(feature = "node")]
pub use events::events;
pub use info::info;
pub use layout::layout;
pub use map::map;
pub use policy::policy;
pub use replay::replay;
pub use shell::{completions, man};
#[cfg(feature = "node")]
pub use topology::topology;
