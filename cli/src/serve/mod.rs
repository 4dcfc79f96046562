//! `kvpool serve`: a process around a node, with an admin interface and, optionally, traffic.

#[cfg(any(target_os = "linux", target_vendor = "apple"))]
mod descriptors;
mod flags;
mod log;
mod process;
mod reload;
mod signals;
mod telemetry;
#[cfg(feature = "otel")]
mod traces;

pub use flags::SettingsArgs;
pub use process::serve;
