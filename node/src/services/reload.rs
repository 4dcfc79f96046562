//! Reloading of settings while the node runs: peers, certificates and tokens.

use super::credentials::Credentials;
use super::error::ServiceError;
use crate::settings::{Loaded, PeerAddress, Settings};
use crate::transport::tcp::PeerSettings;

/// Settings that were read again, with the certificates and tokens that they name.
pub struct Reread {
    pub(super) settings: Settings,
    pub(super) credentials: Credentials,
}

impl Reread {
    /// Reads certificates, and logs the warnings of the settings. Blocks.
    ///
    /// # Errors
    /// [`ServiceError::Setting`] for a file that cannot be used.
    pub fn new(loaded: Loaded) -> Result<Self, ServiceError> {
        let settings = loaded.log_warnings();
        Ok(Self { credentials: Credentials::read(&settings)?, settings })
    }
}

pub(super) fn peers(peers: &[PeerAddress]) -> Vec<PeerSettings> {
    peers.iter().map(|peer| PeerSettings::new(&peer.name, peer.address.clone().into())).collect()
}

/// The settings in effect.
pub(super) struct Applied {
    /// The settings of the start; other keys than these need a restart.
    pub(super) first: Settings,
    peers: Vec<PeerAddress>,
    credentials: Credentials,
}

impl Applied {
    pub fn new(settings: Settings, credentials: Credentials) -> Self {
        Self { peers: settings.peers.clone(), first: settings, credentials }
    }

    /// Returns the changes as text, and keeps the new values.
    pub fn replace(&mut self, read: Reread) -> String {
        let Reread { settings, credentials } = read;
        let new = settings.peers.clone();
        let added = new.iter().filter(|peer| !self.peers.contains(peer));
        let removed = self.peers.iter().filter(|peer| !new.contains(peer));
        let shown = |sign: char| move |peer: &PeerAddress| format!(" {sign}{}={}", peer.name, peer.address);
        let peers: String = added.map(shown('+')).chain(removed.map(shown('-'))).collect();
        let peers = if peers.is_empty() { " none" } else { &peers };
        let mut text = format!("changes of peers:{peers}");
        if credentials.certificates != self.credentials.certificates {
            text += "; new certificates";
        }
        let tokens = |of: &Credentials| (of.admin.all.clone(), of.admin.read.clone());
        if tokens(&credentials) != tokens(&self.credentials) {
            text += "; other tokens";
        }
        let others = others(&self.first, &settings);
        if !others.is_empty() {
            text += &format!("; changes that need a restart: {}", others.join(", "));
        }
        (self.peers, self.credentials) = (new, credentials);
        text
    }
}

fn others(first: &Settings, now: &Settings) -> Vec<&'static str> {
    let (a, b) = (&first.pool, &now.pool);
    let all = [
        ("name", first.name != now.name),
        ("size", a.blocks != b.blocks),
        ("size_max", a.blocks_max != b.blocks_max),
        ("layout", a.layout != b.layout),
        ("device", a.device != b.device),
        ("defrag", a.defrag != b.defrag),
        ("eviction", a.eviction != b.eviction),
        ("tenants", a.tenants != b.tenants),
        ("tenant_hints", a.tenant_hints != b.tenant_hints),
        ("reserve", a.reserve != b.reserve),
        ("listen", first.listen != now.listen),
        ("admin", first.admin != now.admin),
        ("admin_connections", first.admin_connections != now.admin_connections),
        ("peer_quota", first.peer_quota_bytes != now.peer_quota_bytes),
        ("nixl", first.nixl != now.nixl),
        ("migrate", first.migrate != now.migrate),
        ("restarts", first.restarts != now.restarts),
        ("doubt_limit", first.doubt_limit != now.doubt_limit),
        ("tier", first.tier != now.tier),
        ("membership", first.membership != now.membership),
        ("kv_events", first.kv_events != now.kv_events),
        ("load", first.load != now.load),
        ("hash_key_file", first.hash_key != now.hash_key),
        ("drain", first.drain != now.drain),
        ("log", first.log != now.log),
        ("log_level", first.log_levels != now.log_levels),
        ("otel_endpoint", first.traces != now.traces),
    ];
    all.into_iter().filter(|&(_, is_other)| is_other).map(|(name, _)| name).collect()
}
