use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use crate::settings;

/// Address at which a node listens.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Address {
    /// A TCP port.
    Tcp(SocketAddr),
    /// A TCP port of a host name, which is resolved at each use.
    Named {
        /// Name of the host.
        host: String,
        /// Port.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

impl From<settings::Address> for Address {
    fn from(address: settings::Address) -> Self {
        match address {
            settings::Address::Unix(path) => Self::Unix(path),
            settings::Address::Tcp { host, port } => match host.parse::<IpAddr>() {
                Ok(ip) => Self::Tcp((ip, port).into()),
                Err(_) => Self::Named { host, port },
            },
        }
    }
}

impl Address {
    /// Returns whether only this host can reach the address; false for a name.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Named { .. } => false,
            Self::Tcp(address) => address.ip().to_canonical().is_loopback(),
            Self::Unix(_) => true,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Named { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}
