//! Values of settings. The caller adds the key and the accepted values to errors.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use kvpool::TenantId;
use kvpool::tenants::TenantLimits;

/// Size of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Size {
    /// Number of blocks, without the null block.
    Blocks(usize),
    /// Bytes for all blocks, including the null block.
    Bytes(u64),
}

impl Size {
    /// Returns the number of blocks of `block_bytes` bytes; 0 if none fits.
    pub fn blocks(self, block_bytes: usize) -> usize {
        match self {
            Self::Blocks(blocks) => blocks,
            Self::Bytes(bytes) => {
                let frames = bytes / (block_bytes.max(1) as u64);
                usize::try_from(frames).unwrap_or(usize::MAX).saturating_sub(1)
            }
        }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return whole(text, 1..=usize::MAX as u64).map(|blocks| Self::Blocks(blocks as usize));
        }
        bytes(text).map(Self::Bytes)
    }
}

/// Address of a node.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Address {
    /// A host and a port.
    Tcp {
        /// Name, or IP address without brackets.
        host: String,
        /// Port; 0 selects a free one for listening.
        port: u16,
    },
    /// A Unix socket on this host.
    Unix(PathBuf),
}

impl Address {
    /// Returns whether it is the unspecified address.
    pub fn is_unspecified(&self) -> bool {
        let Self::Tcp { host, .. } = self else { return false };
        host.parse().is_ok_and(|ip: IpAddr| ip.to_canonical().is_unspecified())
    }

    /// Returns whether bytes to this address stay on this host.
    pub fn is_loopback(&self) -> bool {
        match self {
            Self::Unix(_) => true,
            Self::Tcp { host, .. } => {
                host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.to_canonical().is_loopback())
            }
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            // The limit of Linux, including the terminating zero.
            return match path.len() {
                0 => Err("the path of the socket is missing".to_owned()),
                1..=107 => Ok(Self::Unix(path.into())),
                len => Err(format!("the path of a socket has at most 107 bytes, not {len}")),
            };
        }
        let (host, port) = text.rsplit_once(':').ok_or("a port is missing")?;
        let port = port.parse().map_err(|_| format!("{port:?} is no port"))?;
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match inner {
            Some(ip) => match ip.parse::<std::net::Ipv6Addr>() {
                Ok(_) => ip,
                Err(_) => return Err(format!("{ip:?} is no IPv6 address")),
            },
            None if host.contains(':') => return Err("an IPv6 address needs brackets".to_owned()),
            None => host,
        };
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
        if host.is_empty() || host.len() > 253 || !host.bytes().all(is_name) {
            return Err(format!("{host:?} is neither an IP address nor the name of a host"));
        }
        Ok(Self::Tcp { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// When a process counts as ended because another one of its name is linked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Restarts {
    /// When the other one proves it, or nothing depends on it.
    #[default]
    Proven,
    /// Always: the orchestrator guarantees that at most one process of a name lives.
    ByName,
}

impl FromStr for Restarts {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        match text {
            "proven" => Ok(Self::Proven),
            "by-name" => Ok(Self::ByName),
            _ => Err("neither proven nor by-name"),
        }
    }
}

/// Another node, by name and address.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PeerAddress {
    /// Its name.
    pub name: String,
    /// Its address.
    pub address: Address,
}

impl FromStr for PeerAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (peer, address) = text.split_once('=').ok_or_else(|| format!("{text:?} is not NAME=ADDRESS"))?;
        let named = name(peer)?;
        match address.parse() {
            Ok(Address::Tcp { port: 0, .. }) => Err(format!("peer {peer}: a port above 0 is needed")),
            Ok(address) => Ok(Self { name: named, address }),
            Err(error) => Err(format!("peer {peer}: {error}")),
        }
    }
}

pub(super) fn peers(text: &str) -> Result<Vec<PeerAddress>, String> {
    let mut peers: Vec<PeerAddress> = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let peer: PeerAddress = part.parse()?;
        if peers.iter().any(|other| other.name == peer.name) {
            return Err(format!("peer {} is there twice", peer.name));
        }
        peers.push(peer);
    }
    Ok(peers)
}

/// Parses tenants with their limits: `ID=FLOOR..QUOTA`, separated by commas.
pub(super) fn tenants(text: &str) -> Result<Vec<(TenantId, TenantLimits)>, String> {
    let mut tenants: Vec<(TenantId, TenantLimits)> = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (id, range) = part.split_once('=').ok_or_else(|| format!("{part:?} is not ID=FLOOR..QUOTA"))?;
        let id = TenantId(id.trim().parse().map_err(|_| format!("{:?} is not a whole number", id.trim()))?);
        let (floor, quota) =
            range.split_once("..").ok_or_else(|| format!("tenant {id}: {range:?} is not FLOOR..QUOTA"))?;
        let limit = |text: &str| match text.trim() {
            "" => Ok(None),
            text => bytes(text).map(Some).map_err(|why| format!("tenant {id}: {text:?} is {why}")),
        };
        if tenants.iter().any(|&(other, _)| other == id) {
            return Err(format!("tenant {id} is there twice"));
        }
        let limits = TenantLimits::new().floor(limit(floor)?.unwrap_or(0));
        tenants.push((id, limit(quota)?.map_or(limits, |quota| limits.quota(quota))));
    }
    Ok(tenants)
}

pub(super) fn name(text: &str) -> Result<String, String> {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if text.is_empty() || text.len() > 64 || !text.bytes().all(is_good) {
        return Err(format!("{text:?} is no name: 1 to 64 letters, digits, dots, hyphens and underscores"));
    }
    Ok(text.to_owned())
}

/// Parses the address of a ZeroMQ socket: `tcp://IP:PORT`, or `tcp://*:PORT` for all interfaces.
pub(crate) fn socket(text: &str) -> Result<SocketAddr, &'static str> {
    let rest = text.strip_prefix("tcp://").ok_or("it does not begin with tcp://")?;
    match rest.strip_prefix("*:") {
        Some(port) => {
            port.parse().map(|port| (Ipv4Addr::UNSPECIFIED, port).into()).map_err(|_| "a port is missing")
        }
        None => rest.parse().map_err(|_| "neither an IP address with a port, nor *:PORT"),
    }
}

pub(super) fn whole(text: &str, range: std::ops::RangeInclusive<u64>) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(value) if range.contains(&value) => Ok(value),
        Ok(_) if *range.end() == u64::MAX => Err(format!("below {}", range.start())),
        Ok(_) => Err(format!("not from {} to {}", range.start(), range.end())),
        Err(_) => Err("not a whole number".to_owned()),
    }
}

pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit.trim_start().to_ascii_lowercase().as_str() {
        "b" => 1,
        "kb" => 1000,
        "mb" => 1000_u64.pow(2),
        "gb" => 1000_u64.pow(3),
        "tb" => 1000_u64.pow(4),
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return Err("not a whole number with a unit (B, KiB, MiB, GiB, TiB, kB, MB, GB, TB)".to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| "not a whole number before the unit".to_owned())?;
    number.checked_mul(factor).ok_or_else(|| "more bytes than 64 bits can count".to_owned())
}

/// Parses a time with a unit, within a range.
pub(super) fn time(text: &str, range: std::ops::RangeInclusive<Duration>) -> Result<Duration, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| "not a whole number with a unit".to_owned())?;
    let milliseconds: u64 = match unit.trim_start() {
        "ms" => 1,
        "s" => 1000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        _ => return Err("not a whole number with a unit (ms, s, min, h)".to_owned()),
    };
    let time = number.checked_mul(milliseconds).map(Duration::from_millis);
    time.filter(|time| range.contains(time))
        .ok_or_else(|| format!("not from {:?} to {:?}", range.start(), range.end()))
}

pub(super) fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        // Excludes NaN.
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        Ok(_) => Err("not from 0 to 1".to_owned()),
        Err(_) => Err("not a number".to_owned()),
    }
}
