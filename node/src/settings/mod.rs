//! Settings of a node: flags, environment variables and a TOML file become one checked struct.
//!
//! ```text
//! flags > environment (KVPOOL_*) > file (TOML) > defaults
//!      \________________ entries: key -> text, origin ________________/
//!                              | parse, per key
//!                              | check, between keys
//!                           Settings
//! ```
//!
//! [`KEYS`] is the only list of keys: flags, variables, the file's keys and the messages of errors
//! come from it. The key `block-tokens` is the flag `--block-tokens`, the variable
//! `KVPOOL_BLOCK_TOKENS` and the file's key `block_tokens` (or `block-tokens`).
//!
//! | file | content |
//! |---|---|
//! | `keys` | the list of keys |
//! | `origin` | the place that a value came from |
//! | `error` | errors, which name the key, the place and the accepted values |
//! | `value` | values: sizes, durations, addresses, peers |
//! | `token` | tokens, compared in constant time |
//! | `telemetry` | messages and traces of the process |
//! | `files` | reading of files, in bounds |
//! | `entries` | what the sources say, before it is parsed |
//! | `location` | addresses of etcd |
//! | `reader` | values of keys, and errors about them |
//! | `socket` | the default address for peers |
//! | `services` | the shared tier, the membership and the published events |
//! | `checked` | the struct, and the checks between keys |
//! | `sources` | reading of the sources, and which of them decides |

mod admin_url;
mod checked;
mod entries;
mod error;
mod files;
mod keys;
mod location;
mod origin;
mod reader;
mod services;
mod socket;
mod sources;
mod telemetry;
#[cfg(test)]
mod tests;
mod token;
mod value;

pub use admin_url::AdminUrl;
pub use checked::{
    DefragSettings, LoadKind, LoadSettings, Loaded, MigrateBelow, NixlLocation, PROBE_LAYOUT, PoolSettings,
    Settings, TlsFiles,
};
pub use error::SettingsError;
pub use files::read_file;
pub use keys::{CONFIG, KEYS, Key, VARIABLE_PREFIX};
pub use location::EtcdLocation;
pub use origin::Origin;
#[cfg(feature = "redis")]
pub(crate) use reader::without_password;
pub use services::{EventSettings, MembershipSettings, SharedTierSettings, StoreAddress, TierUse};
pub use socket::{default_socket, make_socket_folder};
pub use sources::Sources;
pub use telemetry::{LogFormat, LogLevels, TraceTarget};
pub use token::{Token, TokenError, Tokens};
pub(crate) use value::socket;
pub use value::{Address, PeerAddress, Restarts, Size};
