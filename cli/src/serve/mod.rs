//! `kvpool serve`: a process around a pool, with an admin interface and, on request, traffic.
//!
//! | file | what |
//! |---|---|
//! | `flags` | the settings as flags |
//! | `process` | the pool, the admin interface, signals, and the end |
//! | `load` | synthetic traffic |
//! | `conversation` | one thread of it |
//! | `shared` | what its threads share: requests, counters, halts |

mod conversation;
mod flags;
mod load;
mod process;
mod shared;

pub use flags::SettingsArgs;
pub use process::{ServeError, serve};
