use std::sync::Arc;

use super::error::TierError;
use super::file::{FileSettings, FileStore};
use super::settings::TierSettings;
use super::shared_tier::SharedTier;

/// Addresses that [`connect`] accepts, for the help of a program.
pub const ADDRESSES: &str = "redis://HOST:PORT/DATABASE, rediss://HOST:PORT/DATABASE, redis+unix:///PATH, mooncake://HOST:PORT of a master, or file:///PATH?size=BYTES";

/// Starts a tier over the store at an address: one of [`ADDRESSES`].
///
/// A Redis server may be started later. A Mooncake master must run: the probe blocks for up to 15
/// seconds. The index of a directory is read: a second for a few million slots.
///
/// # Errors
/// [`TierError::Address`]; [`TierError::NotBuilt`] for a store whose feature is off;
/// [`TierError::Library`] and [`TierError::Probe`] of Mooncake; [`TierError::File`] of a directory.
pub fn connect(address: &str, settings: TierSettings) -> Result<Arc<SharedTier>, TierError> {
    settings.check()?;
    match address.split_once("://") {
        Some(("redis" | "valkey" | "rediss" | "valkeys" | "redis+unix" | "valkey+unix", _)) => {
            redis(address, settings)
        }
        Some(("file", _)) => {
            let store = FileStore::open(FileSettings::parse(address)?)?;
            Ok(Arc::new(SharedTier::new(store, settings)?))
        }
        Some(("mooncake", master)) if !master.is_empty() => mooncake(master, settings),
        _ => Err(TierError::Address {
            store: "tier",
            // Omits what may be a password.
            address: address.split_once("://").map_or("", |(scheme, _)| scheme).to_owned(),
            reason: format!("expected {ADDRESSES}"),
        }),
    }
}

#[cfg(feature = "redis")]
fn redis(address: &str, settings: TierSettings) -> Result<Arc<SharedTier>, TierError> {
    let store = super::redis::Redis::new(address, settings.authorities.as_deref(), settings.patience)?;
    Ok(Arc::new(SharedTier::new(store, settings)?))
}

#[cfg(not(feature = "redis"))]
fn redis(_address: &str, _settings: TierSettings) -> Result<Arc<SharedTier>, TierError> {
    Err(TierError::NotBuilt { store: "redis", feature: "redis" })
}

#[cfg(feature = "mooncake")]
fn mooncake(master: &str, settings: TierSettings) -> Result<Arc<SharedTier>, TierError> {
    let mut of_store = super::mooncake::MooncakeSettings::default();
    master.clone_into(&mut of_store.master);
    Ok(Arc::new(SharedTier::new(super::mooncake::Mooncake::connect(of_store)?, settings)?))
}

#[cfg(not(feature = "mooncake"))]
fn mooncake(_master: &str, _settings: TierSettings) -> Result<Arc<SharedTier>, TierError> {
    Err(TierError::NotBuilt { store: "mooncake", feature: "mooncake" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_names_a_store() {
        for address in ["", "redis", "http://user:secret@host", "mooncake://", "127.0.0.1:6379"] {
            let error = connect(address, TierSettings::default()).err().expect("a refusal");
            assert!(matches!(error, TierError::Address { .. }), "{address}: {error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
        let result = connect("redis://127.0.0.1:1", TierSettings::default());
        if cfg!(feature = "redis") {
            assert_eq!(result.ok().map(|tier| tier.name()), Some("redis"));
        } else {
            let text = result.err().expect("a refusal").to_string();
            assert!(text.contains("lacks the feature `redis`"), "{text}");
        }
    }
}
