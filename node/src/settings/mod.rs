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
//! [`KEYS`] is the only list of keys: flags, variables, the file's keys and error messages derive
//! from it. The key `block-tokens` is the flag `--block-tokens`, the variable `KVPOOL_BLOCK_TOKENS`
//! and the file's key `block_tokens` (or `block-tokens`).

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
pub use value::{Address, PeerAddress, Restarts, Size};
pub(crate) use value::{bytes, socket};
