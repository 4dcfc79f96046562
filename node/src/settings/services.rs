use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::error::SettingsError;
use super::location::EtcdLocation;
use super::reader::{Reader, without_password};
use super::value::{self, Address};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

/// Longest namespace of a tier, and longest topic of events, in bytes.
const NAMESPACE_MAX: usize = 256;
const TOPIC_MAX: usize = 255;

/// Schemes of addresses of a tier.
const REDIS: [&str; 4] = ["redis", "valkey", "rediss", "valkeys"];
const REDIS_UNIX: [&str; 2] = ["redis+unix", "valkey+unix"];
const MOONCAKE: &str = "mooncake";
const FILE: &str = "file";

/// Address of a store, which may contain a password; `Debug` omits it.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreAddress(String);

impl StoreAddress {
    /// Returns the address with its password.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for StoreAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        without_password(&self.0).fmt(f)
    }
}

/// A shared tier of cached blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct SharedTierSettings {
    /// Address of the store.
    pub address: StoreAddress,
    /// File with the authorities of a TLS server; `None`: the system's.
    pub ca: Option<PathBuf>,
    /// Identifies the model and the revision of its weights.
    pub namespace: String,
    /// When blocks are stored.
    pub policy: TierUse,
    /// Longest wait of a request for its prefix.
    pub wait: Duration,
    /// Timeout of a call of the store.
    pub patience: Duration,
    /// Threads that call the store.
    pub threads: usize,
}

/// When blocks are stored in a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum TierUse {
    /// When they are computed.
    WriteThrough,
    /// Before they are evicted.
    OnEviction,
    /// Never: only blocks of other nodes are read.
    ReadOnly,
}

/// A directory of nodes.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct MembershipSettings {
    /// The directory.
    pub location: EtcdLocation,
    /// File with the authorities of TLS servers; `None`: the system's.
    pub ca: Option<PathBuf>,
    /// Files with the client certificate and its key.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// Time after which an entry expires without renewal.
    pub lease: Duration,
    /// Address for members; by default that of `listen`, whose port replaces port 0.
    pub advertise: Option<Address>,
}

/// Events of the prefix cache over ZeroMQ.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct EventSettings {
    /// Address for subscribers.
    pub listen: SocketAddr,
    /// Address for replays.
    pub replay: Option<SocketAddr>,
    /// Topic of all batches.
    pub topic: String,
    /// Whether hashes have 24 bytes instead of 64 bits.
    pub full_hashes: bool,
}

impl Reader<'_> {
    pub(super) fn tier(&self) -> Result<Option<SharedTierSettings>, SettingsError> {
        let policy = self.required("tier-policy", |text| match text {
            "write-through" => Ok(TierUse::WriteThrough),
            "on-eviction" => Ok(TierUse::OnEviction),
            "read-only" => Ok(TierUse::ReadOnly),
            _ => Err("no such policy"),
        })?;
        let wait = |text: &str| value::time(text, Duration::from_millis(1)..=Duration::from_secs(10));
        let wait = self.required("tier-wait", wait)?;
        let patience = |text: &str| value::time(text, Duration::from_millis(10)..=MINUTE);
        let patience = self.required("tier-patience", patience)?;
        let threads = self.required("tier-threads", |text| value::whole(text, 1..=64))? as usize;
        let namespace = self.text("tier-namespace").map(str::to_owned);
        if let Some(name) = &namespace
            && !(1..=NAMESPACE_MAX).contains(&name.len())
        {
            return Err(self.refuse("tier-namespace", format!("it has {} bytes", name.len())));
        }
        let address = self.value("tier", |text| store(text).map(|()| StoreAddress(text.to_owned())))?;
        let ca = self.value("tier-ca", |text| Ok::<_, String>(PathBuf::from(text)))?;
        if ca.is_some() && !address.as_ref().is_some_and(|StoreAddress(text)| is_tls(text)) {
            return Err(self.refuse("tier-ca", "it is for the server of a rediss:// address in `tier`"));
        }
        let Some(address) = address else {
            if namespace.is_some() {
                return Err(self.needs("tier-namespace", "tier", "it names what is shared through a tier"));
            }
            return Ok(None);
        };
        let reason = "nodes that agree on it share blocks, and two models must not";
        let namespace = namespace.ok_or_else(|| self.needs("tier", "tier-namespace", reason))?;
        if self.entry("hash-key-file").or(self.entry("token-file")).is_none() {
            let reason = "nodes without a common one hash cached blocks differently, and share none";
            return Err(self.needs("tier", "hash-key-file", reason));
        }
        if self.entry("eviction").is_none() {
            return Err(self.refuse("tier", "it shares the blocks of the prefix cache, and eviction is off"));
        }
        Ok(Some(SharedTierSettings { address, ca, namespace, policy, wait, patience, threads }))
    }

    pub(super) fn membership(
        &self,
        warnings: &mut Vec<String>,
    ) -> Result<Option<MembershipSettings>, SettingsError> {
        let lease = |text: &str| value::time(text, Duration::from_secs(1)..=HOUR);
        let lease = self.required("membership-lease", lease)?;
        let advertise = self.value("advertise", str::parse::<Address>)?;
        let location = self.value("membership", str::parse::<EtcdLocation>)?;
        let (ca, certificate) = self.membership_tls(location.as_ref().is_some_and(EtcdLocation::is_tls))?;
        let Some(location) = location else {
            return match advertise {
                Some(_) => Err(self.needs("advertise", "membership", "members are told the address")),
                None => Ok(None),
            };
        };
        let Some(listen) = self.value("listen", str::parse::<Address>)? else {
            return Err(self.needs("membership", "listen", "members must reach this node"));
        };
        match &advertise {
            // Other hosts cannot use an unspecified address.
            None if listen.is_unspecified() => {
                let reason = "members cannot reach an address that stands for all of this host's";
                Err(self.needs("membership", "advertise", reason))
            }
            Some(address) if address.is_unspecified() => {
                Err(self.refuse("advertise", "members cannot reach an address that stands for all"))
            }
            Some(Address::Tcp { port: 0, .. }) if matches!(listen, Address::Unix(_)) => {
                Err(self.refuse("advertise", "`listen` is a Unix socket and has no port"))
            }
            _ => {
                if let (Some((_, entry)), true) =
                    (self.entry("membership"), location.sends_password_in_clear())
                {
                    warnings.push(format!(
                        "{}: the password is sent unencrypted to other hosts: use etcds://",
                        entry.origin
                    ));
                }
                Ok(Some(MembershipSettings { location, ca, certificate, lease, advertise }))
            }
        }
    }

    fn membership_tls(&self, is_tls: bool) -> Result<MembershipFiles, SettingsError> {
        const NAMES: [&str; 3] = ["membership-ca", "membership-cert", "membership-key"];
        let mut files = [None, None, None];
        for (file, name) in files.iter_mut().zip(NAMES) {
            *file = self.value(name, |text| Ok::<_, String>(PathBuf::from(text)))?;
            if file.is_some() && !is_tls {
                return Err(self.refuse(name, "it is for servers of an etcds:// address in `membership`"));
            }
        }
        match files {
            [ca, Some(cert), Some(key)] => Ok((ca, Some((cert, key)))),
            [ca, None, None] => Ok((ca, None)),
            [_, Some(_), None] => Err(self.needs(NAMES[1], NAMES[2], "a certificate is used with its key")),
            [_, None, Some(_)] => Err(self.needs(NAMES[2], NAMES[1], "a key is used with its certificate")),
        }
    }

    pub(super) fn kv_events(
        &self,
        warnings: &mut Vec<String>,
    ) -> Result<Option<EventSettings>, SettingsError> {
        let full_hashes = self.required("kv-events-hashes", |text| match text {
            "integer" => Ok(false),
            "bytes" => Ok(true),
            _ => Err("no such form"),
        })?;
        let topic = self.text("kv-events-topic").unwrap_or_default().to_owned();
        if topic.len() > TOPIC_MAX {
            return Err(self.refuse("kv-events-topic", format!("it has {} bytes", topic.len())));
        }
        let listen = self.value("kv-events", value::socket)?;
        let replay = self.value("kv-events-replay", value::socket)?;
        let Some(listen) = listen else {
            return match replay {
                Some(_) => {
                    Err(self.needs("kv-events-replay", "kv-events", "events are replayed to subscribers"))
                }
                None => Ok(None),
            };
        };
        if self.entry("eviction").is_none() {
            return Err(self.refuse("kv-events", "events are those of the prefix cache, and eviction is off"));
        }
        if replay.is_some_and(|replay| replay == listen && listen.port() != 0) {
            return Err(self.refuse("kv-events-replay", "subscribers have this address"));
        }
        for (name, address) in [("kv-events", Some(listen)), ("kv-events-replay", replay)] {
            let (Some(address), Some((_, entry))) = (address, self.entry(name)) else { continue };
            if !address.ip().is_loopback() {
                warnings.push(format!(
                    "{}: other hosts can read the tokens of prompts: events are neither authenticated nor encrypted",
                    entry.origin
                ));
            }
        }
        Ok(Some(EventSettings { listen, replay, topic, full_hashes }))
    }
}

type MembershipFiles = (Option<PathBuf>, Option<(PathBuf, PathBuf)>);

fn is_tls(store: &str) -> bool {
    store.starts_with("rediss://") || store.starts_with("valkeys://")
}

/// Validates the address of a store, as far as possible without its client.
fn store(text: &str) -> Result<(), String> {
    let (scheme, rest) = text.split_once("://").ok_or("it names no store")?;
    if REDIS_UNIX.contains(&scheme) {
        return if rest.starts_with('/') {
            Ok(())
        } else {
            Err("the path of the socket is missing".to_owned())
        };
    }
    if scheme == FILE {
        let (path, query) = rest.split_once('?').ok_or("a size is missing, as in ?size=200GiB")?;
        return match path.starts_with('/') && query.contains("size=") {
            true => Ok(()),
            false => Err("it is file:///PATH?size=BYTES".to_owned()),
        };
    }
    if scheme != MOONCAKE && !REDIS.contains(&scheme) {
        return Err(format!("no store is named by {scheme:?}"));
    }
    let rest = rest.rsplit_once('@').map_or(rest, |(_, rest)| rest);
    let (server, database) = match rest.split_once('/') {
        Some(_) if scheme == MOONCAKE => return Err("a master is HOST:PORT".to_owned()),
        Some((server, database)) => (server, Some(database)),
        None => (rest, None),
    };
    match server.parse::<Address>()? {
        Address::Tcp { port: 1.., .. } => {}
        _ => return Err("a port above 0 is needed".to_owned()),
    }
    match database {
        Some(number) if !number.is_empty() && number.parse::<u16>().is_err() => {
            Err(format!("{number:?} is no number of a database"))
        }
        _ => Ok(()),
    }
}
