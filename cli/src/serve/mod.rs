//! `kvpool serve`: a process around a node, with an admin interface and, on request, traffic.
//!
//! | file | what |
//! |---|---|
//! | `flags` | the settings as flags |
//! | `process` | the pool, the node, the admin interface, and the end |
//! | `signals` | signals to the process |
//! | `network` | settings for the network side of the node, and its certificates |
//! | `reload` | settings that are taken over at SIGHUP |
//! | `services` | the shared tier, the published events and the membership |
//! | `log` | messages on the standard error |
//! | `telemetry`, `traces` | messages and traces of the process, from the start to the end |

#[cfg(any(target_os = "linux", target_vendor = "apple"))]
mod descriptors;
mod flags;
mod log;
mod network;
mod process;
mod reload;
mod services;
mod signals;
mod telemetry;
#[cfg(feature = "otel")]
mod traces;

pub use flags::SettingsArgs;
pub use network::authorities;
pub use process::serve;
