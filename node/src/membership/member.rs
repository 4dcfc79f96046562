use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::error::MembershipError;
use crate::settings::Address;
use crate::wire::check_name;

const ENTRY_MAX: usize = 4096;

/// A node of a cluster, as it describes itself.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Member {
    /// Its name as a peer.
    pub name: String,
    /// Address for peers.
    pub address: Address,
    /// Address of its admin interface, `http://HOST:PORT`; `None` if other hosts cannot reach one.
    pub admin: Option<String>,
    /// Start time of its process, in milliseconds since 1970.
    pub started_ms: u64,
}

/// A member in a directory, as JSON. Unknown keys are ignored, so that later versions can add some.
#[derive(Serialize, Deserialize)]
struct Entry {
    name: String,
    address: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    admin: Option<String>,
    started_ms: u64,
}

impl Member {
    /// Describes a node that starts now.
    pub fn new(name: impl Into<String>, address: Address) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { name: name.into(), address, admin: None, started_ms: now.as_millis() as u64 }
    }

    /// Sets the address of the admin interface.
    #[must_use]
    pub fn admin(mut self, address: impl Into<String>) -> Self {
        self.admin = Some(address.into());
        self
    }

    pub(super) fn check(&self) -> Result<(), MembershipError> {
        let refused = |reason: String| MembershipError::Member { name: self.name.clone(), reason };
        check_name(&self.name).map_err(|error| refused(error.to_string()))?;
        if matches!(self.address, Address::Tcp { port: 0, .. }) {
            return Err(refused("its address needs a port above 0".into()));
        }
        match self.to_entry().len() {
            0..=ENTRY_MAX => Ok(()),
            bytes => Err(refused(format!("its entry has {bytes} bytes; the limit is {ENTRY_MAX}"))),
        }
    }

    pub(super) fn to_entry(&self) -> Vec<u8> {
        let Self { name, address, admin, started_ms } = self.clone();
        let entry = Entry { name, address: address.to_string(), admin, started_ms };
        serde_json::to_vec(&entry).expect("texts and numbers are JSON")
    }

    /// Parses an entry, which is untrusted.
    #[cfg(any(feature = "etcd", test))]
    pub(super) fn from_entry(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() > ENTRY_MAX {
            return Err(format!("{} bytes; the limit is {ENTRY_MAX}", bytes.len()));
        }
        let entry: Entry = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let Entry { name, address, admin, started_ms } = entry;
        let address = address.parse().map_err(|reason| format!("address {address:?}: {reason}"))?;
        let member = Self { name, address, admin, started_ms };
        member.check().map_err(|error| error.to_string())?;
        Ok(member)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        for address in ["10.0.0.1:7411", "[::1]:7411", "unix:/run/kvpool", "node-1.cluster:1"] {
            let member = Member::new("a", address.parse().unwrap()).admin("https://10.0.0.1:7410");
            assert_eq!(Member::from_entry(&member.to_entry()), Ok(member));
        }
    }

    #[test]
    fn later_versions_may_add_keys() {
        let entry = br#"{"name":"a","address":"h:1","started_ms":3,"zone":"x"}"#;
        let member = Member::from_entry(entry).unwrap();
        assert_eq!((member.name.as_str(), member.admin, member.started_ms), ("a", None, 3));
    }

    #[test]
    fn bad_entries_are_refused_with_the_reason() {
        let long = format!(r#"{{"name":"a","address":"h:1","started_ms":3,"x":"{:4096}"}}"#, "");
        for (entry, reason) in [
            ("", "EOF"),
            ("7", "invalid type"),
            (r#"{"name":"a","address":"h:1"}"#, "started_ms"),
            (r#"{"name":"a","address":"h","started_ms":3}"#, "a port is missing"),
            (r#"{"name":"a","address":"h:0","started_ms":3}"#, "a port above 0"),
            (r#"{"name":"a/b","address":"h:1","started_ms":3}"#, "a/b"),
            (r#"{"name":"","address":"h:1","started_ms":3}"#, "join as"),
            (&long, "the limit is 4096"),
        ] {
            let error = Member::from_entry(entry.as_bytes()).unwrap_err();
            assert!(error.contains(reason), "{entry}: {error}");
        }
    }
}
