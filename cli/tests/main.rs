//! The tests of the program. Those of a node and of `kvpool top` need their features.

mod common;

mod layout;
mod models;
mod policy;
mod replay;
mod sessions;
mod sweep;
#[cfg(target_os = "linux")]
mod terminal;

#[cfg(all(feature = "node", target_os = "linux"))]
mod links;
#[cfg(all(feature = "node", target_os = "linux"))]
mod log;
#[cfg(all(feature = "node", target_os = "linux"))]
mod nodes;
#[cfg(all(feature = "node", target_os = "linux"))]
mod operate;
#[cfg(all(feature = "node", target_os = "linux"))]
mod refusals;
#[cfg(all(feature = "node", target_os = "linux"))]
mod serve;
#[cfg(all(feature = "node", target_os = "linux"))]
mod services;
#[cfg(all(feature = "node", target_os = "linux"))]
mod signals;
#[cfg(all(feature = "top", target_os = "linux"))]
mod top;
