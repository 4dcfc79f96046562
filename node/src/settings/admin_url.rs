use std::fmt;
use std::str::FromStr;

use super::value::Address;

/// Address of an admin interface: `http://HOST:PORT` or `HOST:PORT`, `https://HOST:PORT`, or
/// `unix:PATH`.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct AdminUrl {
    address: Address,
    is_tls: bool,
}

impl AdminUrl {
    /// Returns the address without its scheme.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Returns whether the interface speaks TLS.
    pub fn is_tls(&self) -> bool {
        self.is_tls
    }

    /// Returns the same URL with another address.
    #[must_use]
    pub fn at(&self, address: Address) -> Self {
        Self { address, is_tls: self.is_tls }
    }
}

impl FromStr for AdminUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (is_tls, rest) = match text.split_once("://") {
            Some((scheme @ ("http" | "https"), rest)) => (scheme == "https", rest.trim_end_matches('/')),
            Some((scheme, _)) => {
                return Err(format!("the admin interface speaks http and https, not {scheme}"));
            }
            None => (false, text),
        };
        match rest.parse()? {
            Address::Unix(_) if rest != text => Err("a Unix socket has no scheme: unix:PATH".to_owned()),
            address => Ok(Self { address, is_tls }),
        }
    }
}

impl fmt::Display for AdminUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self {
            Self { address: Address::Unix(_), .. } => "",
            Self { is_tls: true, .. } => "https://",
            Self { is_tls: false, .. } => "http://",
        };
        write!(f, "{scheme}{}", self.address)
    }
}
