use std::fmt;
use std::str::FromStr;

use percent_encoding::percent_decode_str;

use super::value::{self, Address};

/// Location of a directory in etcd: `etcd://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]/CLUSTER`, or
/// `etcds://` for TLS.
///
/// Nodes with the same cluster name form one cluster. User and password may be percent-encoded;
/// `Debug` and `Display` omit them.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct EtcdLocation {
    is_tls: bool,
    user: Option<(String, String)>,
    endpoints: Vec<String>,
    cluster: String,
}

impl EtcdLocation {
    /// Returns the addresses of the servers, as `HOST:PORT`.
    pub fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// Returns the name of the cluster.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// Returns whether the servers are reached over TLS.
    pub fn is_tls(&self) -> bool {
        self.is_tls
    }

    #[cfg(any(feature = "etcd", test))]
    pub(crate) fn user(&self) -> Option<(&str, &str)> {
        self.user.as_ref().map(|(name, password)| (name.as_str(), password.as_str()))
    }

    /// Returns whether the password goes to another host without TLS.
    pub(super) fn sends_password_in_clear(&self) -> bool {
        let is_here = |server: &String| server.parse().is_ok_and(|address: Address| address.is_loopback());
        self.user.is_some() && !self.is_tls && !self.endpoints.iter().all(is_here)
    }

    #[cfg(any(feature = "etcd", test))]
    pub(crate) fn prefix(&self) -> String {
        format!("/kvpool/{}/members/", self.cluster)
    }
}

impl FromStr for EtcdLocation {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        let (is_tls, rest) = match text.split_once("://") {
            Some(("etcd", rest)) => (false, rest),
            Some(("etcds", rest)) => (true, rest),
            _ => return Err("it does not begin with etcd:// or etcds://"),
        };
        let (user, rest) = match rest.rsplit_once('@') {
            Some((credentials, rest)) => (Some(user(credentials)?), rest),
            None => (None, rest),
        };
        let (servers, cluster) = rest.split_once('/').ok_or("the name of the cluster is missing")?;
        let server = |server: &str| match server.parse() {
            Ok(address @ Address::Tcp { port: 1.., .. }) => Ok(address.to_string()),
            _ => Err("a server is not HOST:PORT"),
        };
        let endpoints = servers.split(',').map(server).collect::<Result<_, _>>()?;
        let cluster = value::name(cluster).map_err(|_| "the name of the cluster is not one of a node")?;
        Ok(Self { is_tls, user, endpoints, cluster })
    }
}

fn user(text: &str) -> Result<(String, String), &'static str> {
    let (name, password) = text.split_once(':').ok_or("what precedes @ is not USER:PASSWORD")?;
    if name.is_empty() || password.is_empty() {
        return Err("the user or the password is empty");
    }
    let decoded = |text| match percent_decode_str(text).decode_utf8() {
        Ok(text) => Ok(text.into_owned()),
        Err(_) => Err("the user or the password is not UTF-8"),
    };
    Ok((decoded(name)?, decoded(password)?))
}

impl fmt::Debug for EtcdLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

impl fmt::Display for EtcdLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "etcds" } else { "etcd" };
        write!(f, "{scheme}://{}/{}", self.endpoints.join(","), self.cluster)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_name_servers_and_a_cluster() {
        for text in ["etcd://127.0.0.1:2379/prod", "etcds://a:1,b.c:2,[::1]:3/gpu-1"] {
            let location: EtcdLocation = text.parse().unwrap();
            assert_eq!((location.to_string().as_str(), location.user()), (text, None));
            assert_eq!(location.is_tls(), text.starts_with("etcds"));
        }
        let location: EtcdLocation = "etcd://a:1,b:2/prod".parse().unwrap();
        assert_eq!((location.endpoints().len(), location.cluster()), (2, "prod"));
        assert_eq!(location.prefix(), "/kvpool/prod/members/");
    }

    #[test]
    fn credentials_are_read_and_not_shown() {
        let location: EtcdLocation = "etcds://kv:p@ss,%2F:1@a:1,b:2/prod".parse().unwrap();
        assert_eq!(location.user(), Some(("kv", "p@ss,/:1")));
        assert_eq!(location.to_string(), "etcds://a:1,b:2/prod");
        assert_eq!(format!("{location:?}"), "\"etcds://a:1,b:2/prod\"");
        assert!(!location.sends_password_in_clear());
        for (servers, is_clear) in [("localhost:1,[::1]:2", false), ("localhost:1,b:2", true)] {
            let location: EtcdLocation = format!("etcd://kv:x@{servers}/prod").parse().unwrap();
            assert_eq!(location.sends_password_in_clear(), is_clear, "{servers}");
        }
    }

    #[test]
    fn bad_locations_say_what_is_wrong() {
        for (text, reason) in [
            ("127.0.0.1:2379/prod", "etcd://"),
            ("etcd://127.0.0.1:2379", "the name of the cluster is missing"),
            ("etcd://127.0.0.1:2379/", "the name of the cluster is not"),
            ("etcd://127.0.0.1:2379/a/b", "the name of the cluster is not"),
            ("etcd:///prod", "HOST:PORT"),
            ("etcd://a:1,/prod", "HOST:PORT"),
            ("etcd://a:0/prod", "HOST:PORT"),
            ("etcd://unix:x/prod", "HOST:PORT"),
            ("https://a:1/prod", "etcds://"),
            ("etcds://kv@a:1/prod", "USER:PASSWORD"),
            ("etcds://:x@a:1/prod", "empty"),
            ("etcds://kv:@a:1/prod", "empty"),
            ("etcds://kv:%ff@a:1/prod", "UTF-8"),
        ] {
            let error = text.parse::<EtcdLocation>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
