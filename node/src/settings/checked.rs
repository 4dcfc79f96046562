use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use kvpool::prefix::policy::PolicyKind;
use kvpool::prefix::{HashKey, Hashing, PrefixHasher};
use kvpool::tenants::TenantLimits;
use kvpool::{DeviceId, Dtype, KvLayout, Pool, TenantId};

use super::admin_url::AdminUrl;
use super::entries::{Entries, Entry};
use super::error::SettingsError;
use super::reader::Reader;
use super::services::{EventSettings, MembershipSettings, SharedTierSettings};
use super::telemetry::{self, LogFormat, LogLevels, TraceTarget};
use super::token::{Token, Tokens};
use super::value::{self, Address, PeerAddress, Restarts, Size};

/// Name of the layout with 16 bytes per token, for tests and demonstrations.
pub const PROBE_LAYOUT: &str = "probe";

const DAY: Duration = Duration::from_secs(86_400);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

const REST_MAX: Duration = Duration::from_secs(1);

/// Minimum of the quota per peer in bytes.
const QUOTA_MIN: u64 = 1 << 20;

/// Settings of a node.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Settings {
    /// Name of the node.
    pub name: String,
    /// The pool.
    pub pool: PoolSettings,
    /// Address for peers; `None` if the node does not listen.
    pub listen: Option<Address>,
    /// Address of the admin interface; `None` for none.
    pub admin: Option<AdminUrl>,
    /// Most concurrent connections to the admin interface.
    pub admin_connections: usize,
    /// Other nodes, with distinct names.
    pub peers: Vec<PeerAddress>,
    /// Files for TLS.
    pub tls: Option<TlsFiles>,
    /// Tokens of the admin interface and of peers.
    pub token: Option<Tokens>,
    /// Tokens that permit only to read the admin interface.
    pub read_token: Option<Tokens>,
    /// Secret of the block hashes; by default the first token. Nodes share blocks if it is equal.
    pub hash_key: Option<Token>,
    /// Bytes that one peer may have in transfer to this node.
    pub peer_quota_bytes: u64,
    /// NIXL transfers; `None` for none.
    pub nixl: Option<NixlLocation>,
    /// Automatic migration.
    pub migrate: Option<MigrateBelow>,
    /// When a peer's process counts as ended because another one of its name is linked.
    pub restarts: Restarts,
    /// Age after which a doubt is resolved automatically; `None`: never.
    pub doubt_limit: Option<Duration>,
    /// The shared tier; `None` for none.
    pub tier: Option<SharedTierSettings>,
    /// The directory of nodes; `None`: only configured peers.
    pub membership: Option<MembershipSettings>,
    /// Events of the cache over ZeroMQ; `None`: not published.
    pub kv_events: Option<EventSettings>,
    /// Synthetic traffic; `None` for none.
    pub load: Option<LoadSettings>,
    /// Time for requests and transfers to finish after a termination signal.
    pub drain: Duration,
    /// Format of log messages on standard error.
    pub log: LogFormat,
    /// Levels of log messages.
    pub log_levels: LogLevels,
    /// Where traces are sent.
    pub traces: TraceTarget,
}

/// Purpose of the key that is derived from the secret of a cluster.
const HASH_KEY: &str = "kvpool 2026 hashes of cached blocks";

impl Settings {
    /// Returns the key of the hashes of cached blocks. Pools need the same one to exchange them.
    pub fn block_hash_key(&self) -> Option<HashKey> {
        self.hash_key.as_ref().map(|secret| HashKey::from_bytes(secret.key(HASH_KEY)))
    }

    /// Changes name and admin address by the number of a pool among those with the same settings.
    pub(super) fn tell_apart(&mut self, number: u16) -> Result<(), (&'static str, String)> {
        self.name =
            value::name(&format!("{}-{number}", self.name)).map_err(|why| ("name", why.to_string()))?;
        if let Some(admin) = &mut self.admin {
            let address = match admin.address() {
                Address::Unix(path) => Address::Unix(format!("{}.{number}", path.display()).into()),
                Address::Tcp { host, port } => {
                    let sum = if *port == 0 { Some(0) } else { port.checked_add(number) };
                    let port = sum.ok_or(("admin", format!("no port is {number} above this one")))?;
                    Address::Tcp { host: host.clone(), port }
                }
            };
            *admin = admin.at(address);
        }
        Ok(())
    }

    /// Returns why a pool hashes blocks differently than these settings say, if it does.
    pub(super) fn other_hashes(&self, pool: &Pool) -> Option<&'static str> {
        let (key, cache) = (self.block_hash_key()?, pool.prefix_cache()?);
        let of = |hashing| PrefixHasher::new(hashing, &key, cache.hasher().block_tokens());
        let agrees = |hashing| of(hashing).is_ok_and(|hasher| hasher.agrees_with(cache.hasher()));
        let is_same = agrees(Hashing::Fast) || agrees(Hashing::Keyed);
        (!is_same).then_some("the pool was built with another key of the hashes than this secret gives")
    }
}

/// Settings of a node's pool.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct PoolSettings {
    /// Number of blocks, without the null block.
    pub blocks: usize,
    /// Number of blocks to which the pool can grow.
    pub blocks_max: usize,
    /// Layout of the blocks.
    pub layout: KvLayout,
    /// Name of the layout, as given.
    pub layout_name: String,
    /// Device of the memory.
    pub device: DeviceId,
    /// Eviction policy; `None`: no prefix cache.
    pub eviction: Option<PolicyKind>,
    /// Tenants and their limits; `None`: a pool without tenants.
    pub tenants: Option<Vec<(TenantId, TenantLimits)>>,
    /// Bytes of each tenant's blocks that hints may retain or pin; `None`: no limit.
    pub tenant_hints: Option<u64>,
    /// Blocks reserved for urgent requests.
    pub reserve: usize,
    /// Background compaction.
    pub defrag: Option<DefragSettings>,
}

/// Background compaction.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DefragSettings {
    /// Fragmentation rate above which the pool is compacted, 0 to 1.
    pub threshold: f64,
    /// Time between two checks.
    pub interval: Duration,
}

/// Files for TLS, in PEM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsFiles {
    /// Certificate of this node, with its chain.
    pub cert: PathBuf,
    /// Private key of the certificate.
    pub key: PathBuf,
    /// Certificates of the peers' authorities, for mutual TLS. `None`: peers present the token.
    pub ca: Option<PathBuf>,
}

/// Where NIXL is found.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NixlLocation {
    /// The usual places.
    Auto,
    /// The library, or a folder of Python packages.
    At(PathBuf),
}

/// Automatic migration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MigrateBelow {
    /// Cached blocks move while fewer are free, and sequences while fewer are free or evictable.
    pub blocks: usize,
    /// Name of the peer.
    pub to: String,
}

/// Kind of synthetic traffic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LoadKind {
    /// New conversations, and those that arrive from peers.
    Conversations,
    /// Only those from peers.
    Arrivals,
}

/// Synthetic traffic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoadSettings {
    /// Kind of traffic.
    pub kind: LoadKind,
    /// Number of threads.
    pub threads: usize,
    /// Shortest pause of a thread between two steps.
    pub rest: Duration,
}

/// Checked settings, with warnings.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// The settings.
    pub settings: Settings,
    /// Warnings about settings that were accepted or ignored, without control characters.
    pub warnings: Vec<String>,
}

impl Loaded {
    pub(crate) fn log_warnings(self) -> Settings {
        self.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        self.settings
    }

    pub(super) fn check(entries: &Entries, mut warnings: Vec<String>) -> Result<Self, SettingsError> {
        let read = Reader(entries);
        let pool = read.pool()?;
        let (name, peers) = Self::peers(entries)?;
        let token = read.tokens("token-file", &mut warnings)?;
        let settings = Settings {
            name,
            listen: read.listening("listen", |address| address)?,
            admin: read.listening("admin", AdminUrl::address)?,
            admin_connections: read.required("admin-connections", |text| value::whole(text, 8..=1024))?
                as usize,
            tls: read.tls()?,
            hash_key: read.hash_key(token.as_ref(), &mut warnings)?,
            read_token: read.tokens("read-token-file", &mut warnings)?,
            token,
            peer_quota_bytes: read.required("peer-quota", quota)?,
            nixl: read.value("nixl", nixl)?,
            migrate: read.migrate(&peers, pool.blocks)?,
            restarts: read.required("restarts", str::parse)?,
            doubt_limit: read.value("doubt-limit", |text| value::time(text, SECOND..=DAY))?,
            tier: read.tier()?,
            membership: read.membership(&mut warnings)?,
            kv_events: read.kv_events(&mut warnings)?,
            load: read.load(&pool)?,
            drain: read.required("drain", |text| value::time(text, Duration::ZERO..=HOUR))?,
            log: read.required("log", str::parse)?,
            log_levels: read.value("log-level", str::parse)?.unwrap_or_else(LogLevels::off),
            traces: match read.value("otel-endpoint", telemetry::collector)? {
                Some(url) => TraceTarget::Url(url),
                None if entries.contains_key("otel-endpoint") => TraceTarget::Off,
                None => TraceTarget::Environment,
            },
            pool,
            peers,
        };
        read.check_exposure(&settings, &mut warnings)?;
        if settings.migrate.is_some() && settings.pool.eviction.is_some() && settings.hash_key.is_none() {
            warnings.push("migrate-below moves sequences only: nodes without a common hash-key-file or token-file hash cached blocks differently".to_owned());
        }
        Ok(Self { settings, warnings })
    }

    pub(super) fn hash_key(entries: &Entries) -> Result<Option<[u8; 32]>, SettingsError> {
        let (read, warnings) = (Reader(entries), &mut Vec::new());
        let token = read.tokens("token-file", warnings)?;
        Ok(read.hash_key(token.as_ref(), warnings)?.map(|secret| secret.key(HASH_KEY)))
    }

    pub(super) fn peers(entries: &Entries) -> Result<(String, Vec<PeerAddress>), SettingsError> {
        let read = Reader(entries);
        let name = read.value("name", value::name)?.unwrap_or_else(host_name);
        let peers = read.value("peers", value::peers)?.unwrap_or_default();
        if peers.iter().any(|peer| peer.name == name) {
            return Err(read.refuse("peers", format!("{name} is the name of this node")));
        }
        Ok((name, peers))
    }
}

pub(super) const HASHES_OF_FIRST_TOKEN: &str = "hashes of cached blocks are made from the first token: another first token makes the cache cold at the next start (hash-key-file)";

impl Reader<'_> {
    fn pool(&self) -> Result<PoolSettings, SettingsError> {
        let layout_name = self.required("layout", |text| Ok::<_, String>(text.to_owned()))?;
        let layout = self.layout(&layout_name)?;
        let block_bytes = layout.bytes_per_block();
        let blocks = self.required("size", str::parse::<Size>)?.blocks(block_bytes);
        if blocks == 0 {
            return Err(self.refuse("size", format!("too small for two blocks of {block_bytes} bytes each")));
        }
        let blocks_max = match self.value("size-max", str::parse::<Size>)? {
            None => blocks.saturating_mul(2).min(kvpool::FRAMES_MAX - 1).max(blocks),
            Some(size) => size.blocks(block_bytes),
        };
        if blocks_max < blocks {
            return Err(self.refuse("size-max", format!("{blocks_max} blocks; the pool has {blocks}")));
        }
        let reserve = self.required("reserve", |text| value::whole(text, 0..=u64::MAX))? as usize;
        if reserve >= blocks {
            return Err(self.refuse("reserve", format!("the pool has {blocks} blocks")));
        }
        let interval = |text: &str| value::time(text, Duration::from_millis(1)..=HOUR);
        let interval = self.required("defrag-interval", interval)?;
        let threshold = self.value("defrag-threshold", value::share)?;
        let eviction = self.value("eviction", str::parse)?;
        let tenants = self.value("tenants", value::tenants)?;
        if eviction.is_none() && tenants.is_some() {
            return Err(self.refuse("tenants", "they share the prefix cache, and eviction is off"));
        }
        let tenant_hints = self.value("tenant-hints", value::bytes)?;
        if tenants.is_none() && tenant_hints.is_some() {
            return Err(self.refuse("tenant-hints", "the pool has no tenants"));
        }
        Ok(PoolSettings {
            blocks,
            blocks_max,
            layout,
            layout_name,
            device: self.required("device", device)?,
            eviction,
            tenants,
            tenant_hints,
            reserve,
            defrag: threshold.map(|threshold| DefragSettings { threshold, interval }),
        })
    }

    fn layout(&self, name: &str) -> Result<KvLayout, SettingsError> {
        let tokens = self.required("block-tokens", |text| value::whole(text, 1..=4096))? as usize;
        let dtype = self.value("dtype", str::parse::<Dtype>)?;
        let builder = match name {
            name if name.eq_ignore_ascii_case(PROBE_LAYOUT) => {
                KvLayout::builder().layers(1).kv_heads(1).head_dim(4).dtype(Dtype::F16)
            }
            name => KvLayout::described(name).map_err(|error| self.refuse("layout", error.to_string()))?,
        };
        let builder = builder.block_tokens(tokens);
        let builder = match dtype {
            Some(dtype) => builder.dtype(dtype),
            None => builder,
        };
        // Name and block size are valid on their own.
        let culprit = if dtype.is_some() { "dtype" } else { "layout" };
        builder.build().map_err(|error| self.refuse(culprit, error.to_string()))
    }

    fn listening<T: FromStr<Err = String>>(
        &self,
        name: &str,
        of: impl FnOnce(&T) -> &Address,
    ) -> Result<Option<T>, SettingsError> {
        let value = self.value(name, str::parse::<T>)?;
        match value.as_ref().map(of) {
            Some(Address::Tcp { host, .. })
                if host != "localhost" && host.parse::<std::net::IpAddr>().is_err() =>
            {
                Err(self.refuse(name, format!("{host:?} is neither an IP address nor localhost")))
            }
            _ => Ok(value),
        }
    }

    fn tls(&self) -> Result<Option<TlsFiles>, SettingsError> {
        let path = |text: &str| match text {
            "" => Err("the path is missing"),
            text => Ok(PathBuf::from(text)),
        };
        let both = "a certificate and its private key belong together";
        match (self.value("tls-cert", path)?, self.value("tls-key", path)?, self.value("tls-ca", path)?) {
            (Some(cert), Some(key), ca) => Ok(Some(TlsFiles { cert, key, ca })),
            (Some(_), None, _) => Err(self.needs("tls-cert", "tls-key", both)),
            (None, Some(_), _) => Err(self.needs("tls-key", "tls-cert", both)),
            (None, None, Some(_)) => {
                Err(self.needs("tls-ca", "tls-cert", "peers check this node's certificate too"))
            }
            (None, None, None) => Ok(None),
        }
    }

    fn tokens(&self, key: &str, warnings: &mut Vec<String>) -> Result<Option<Tokens>, SettingsError> {
        let Some((_, Entry { text, origin })) = self.entry(key) else { return Ok(None) };
        let path = PathBuf::from(text);
        let tokens =
            Tokens::read(&path).map_err(|error| SettingsError::Token { origin: origin.clone(), error })?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = std::fs::metadata(&path).map_or(0, |metadata| metadata.permissions().mode());
            if mode & 0o077 != 0 {
                let mode = mode & 0o777;
                warnings.push(format!("{origin}: other users can read the file (mode {mode:o}): chmod 600"));
            }
        }
        Ok(Some(tokens))
    }

    fn hash_key(
        &self,
        token: Option<&Tokens>,
        warnings: &mut Vec<String>,
    ) -> Result<Option<Token>, SettingsError> {
        let Some(keys) = self.tokens("hash-key-file", warnings)? else {
            if token.is_some_and(|tokens| tokens.all().len() > 1) {
                warnings.push(HASHES_OF_FIRST_TOKEN.to_owned());
            }
            return Ok(token.map(|tokens| tokens.first().clone()));
        };
        match keys.all() {
            [key] => Ok(Some(key.clone())),
            _ => Err(self.refuse("hash-key-file", "it has more than one line".to_owned())),
        }
    }

    fn migrate(&self, peers: &[PeerAddress], blocks: usize) -> Result<Option<MigrateBelow>, SettingsError> {
        let below = self.value("migrate-below", |text| value::whole(text, 1..=u64::MAX))?;
        let to = self.value("migrate-to", value::name)?;
        match (below, to) {
            (None, None) => Ok(None),
            (Some(_), None) => Err(self.needs("migrate-below", "migrate-to", "blocks must move somewhere")),
            (None, Some(_)) => Err(self.needs("migrate-to", "migrate-below", "it says when blocks move")),
            (Some(below), Some(_)) if below as usize >= blocks => {
                Err(self.refuse("migrate-below", format!("the pool has {blocks} blocks")))
            }
            (Some(below), Some(to)) => {
                if peers.iter().all(|peer| peer.name != to) {
                    let names: Vec<_> = peers.iter().map(|peer| peer.name.as_str()).collect();
                    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                    return Err(
                        self.refuse("migrate-to", format!("no peer has this name; there are {names}"))
                    );
                }
                Ok(Some(MigrateBelow { blocks: below as usize, to }))
            }
        }
    }

    fn load(&self, pool: &PoolSettings) -> Result<Option<LoadSettings>, SettingsError> {
        let threads = self.required("load-threads", |text| value::whole(text, 1..=64))? as usize;
        let kind = self.value("load", |text| match text {
            "conversations" => Ok(LoadKind::Conversations),
            "arrivals" => Ok(LoadKind::Arrivals),
            _ => Err("no such traffic"),
        })?;
        if kind.is_some() && pool.layout.dtype().is_quantised() {
            let dtype = pool.layout.dtype();
            return Err(
                self.refuse("load", format!("bytes of {dtype} cannot be compared with what was stored"))
            );
        }
        let rest = self.required("load-rest", |text| value::time(text, Duration::ZERO..=REST_MAX))?;
        Ok(kind.map(|kind| LoadSettings { kind, threads, rest }))
    }

    /// Checks that no address that other hosts reach lacks TLS or a token.
    fn check_exposure(&self, settings: &Settings, warnings: &mut Vec<String>) -> Result<(), SettingsError> {
        let is_open = |address: Option<&Address>| address.is_some_and(|at| !at.is_loopback());
        let is_tls = settings.admin.as_ref().is_some_and(AdminUrl::is_tls);
        if is_tls && settings.tls.is_none() {
            return Err(self.needs("admin", "tls-cert", "https presents a certificate"));
        }
        let admin_is_open = is_open(settings.admin.as_ref().map(AdminUrl::address));
        if admin_is_open && settings.token.is_none() {
            let reason = "the admin interface is open to other hosts";
            return Err(self.needs("admin", "token-file", reason));
        }
        if settings.read_token.is_some() && settings.token.is_none() {
            let reason = "without it, every client has all rights";
            return Err(self.needs("read-token-file", "token-file", reason));
        }
        if let (Some(all), Some(read)) = (&settings.token, &settings.read_token)
            && read.all().iter().any(|token| all.all().contains(token))
        {
            let reason = "one of its tokens is in token_file too, which gives all rights".to_owned();
            return Err(self.refuse("read-token-file", reason));
        }
        if admin_is_open && !is_tls {
            warnings.push("the admin interface is open to other hosts over plain HTTP, which shows the token to the network: use https://IP:PORT with tls_cert, unix:PATH, or an address of the loopback".to_owned());
        }
        if is_open(settings.listen.as_ref()) && settings.tls.is_none() {
            return Err(self.needs("listen", "tls-cert", "plain text is for the loopback only"));
        }
        let is_remote = settings.peers.iter().any(|peer| !peer.address.is_loopback());
        if is_remote && settings.tls.is_none() {
            return Err(self.needs("peers", "tls-cert", "plain text is for the loopback only"));
        }
        let has_peers =
            settings.listen.is_some() || !settings.peers.is_empty() || settings.membership.is_some();
        match &settings.tls {
            Some(TlsFiles { ca: None, .. }) if settings.token.is_none() && has_peers => {
                Err(self.needs("tls-cert", "tls-ca", "peers need a certificate to be checked, or a token"))
            }
            _ => Ok(()),
        }
    }
}

fn device(text: &str) -> Result<DeviceId, String> {
    let ordinal = || text.strip_prefix("cuda:")?.parse().ok().map(DeviceId::Cuda);
    let host = (text == "host").then_some(DeviceId::Host);
    host.or_else(ordinal).ok_or_else(|| "neither host nor cuda:N".to_owned())
}

fn nixl(text: &str) -> Result<NixlLocation, &'static str> {
    match text {
        "" => Err("the path is missing"),
        "auto" => Ok(NixlLocation::Auto),
        path => Ok(NixlLocation::At(path.into())),
    }
}

fn quota(text: &str) -> Result<u64, String> {
    match value::bytes(text)? {
        bytes if bytes < QUOTA_MIN => Err(format!("below {QUOTA_MIN} bytes")),
        bytes => Ok(bytes),
    }
}

/// Returns the host's name, reduced to a valid node name, or `kvpool`.
fn host_name() -> String {
    let file = std::fs::read_to_string("/proc/sys/kernel/hostname");
    let name = file.ok().or_else(|| std::env::var("HOSTNAME").ok()).unwrap_or_default();
    value::name(name.trim()).unwrap_or_else(|_| "kvpool".to_owned())
}
