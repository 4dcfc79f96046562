//! Addresses of a directory in etcd.

use std::fmt;
use std::str::FromStr;

use super::value::{self, Address};

/// Where a directory is in etcd: `etcd://HOST:PORT[,HOST:PORT...]/CLUSTER`.
///
/// Nodes with the same cluster name are members of one cluster.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct EtcdLocation {
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

    /// Returns the prefix of the keys of members.
    #[cfg(any(feature = "etcd", test))]
    pub(crate) fn prefix(&self) -> String {
        format!("/kvpool/{}/members/", self.cluster)
    }
}

impl FromStr for EtcdLocation {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        let rest = text.strip_prefix("etcd://").ok_or("it does not begin with etcd://")?;
        let (servers, cluster) = rest.split_once('/').ok_or("the name of the cluster is missing")?;
        let server = |server: &str| match server.parse() {
            Ok(address @ Address::Tcp { port: 1.., .. }) => Ok(address.to_string()),
            _ => Err("a server is not HOST:PORT"),
        };
        let endpoints = servers.split(',').map(server).collect::<Result<_, _>>()?;
        let cluster = value::name(cluster).map_err(|_| "the name of the cluster is not one of a node")?;
        Ok(Self { endpoints, cluster })
    }
}

impl fmt::Display for EtcdLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "etcd://{}/{}", self.endpoints.join(","), self.cluster)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_name_servers_and_a_cluster() {
        for text in ["etcd://127.0.0.1:2379/prod", "etcd://a:1,b.c:2,[::1]:3/gpu-1"] {
            let location: EtcdLocation = text.parse().unwrap();
            assert_eq!(location.to_string(), text);
        }
        let location: EtcdLocation = "etcd://a:1,b:2/prod".parse().unwrap();
        assert_eq!((location.endpoints().len(), location.cluster()), (2, "prod"));
        assert_eq!(location.prefix(), "/kvpool/prod/members/");
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
        ] {
            let error = text.parse::<EtcdLocation>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
