//! Metadata that two ends exchange before they write to each other.

use kvpool::transport::TransportError;
use serde::{Deserialize, Serialize};

use super::span::Region;

const VERSION: u16 = 1;

const BYTES_MAX: usize = 64 << 10;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Metadata {
    version: u16,
    pub(super) nixl: Option<String>,
    pub(super) agent: Vec<u8>,
    /// By id.
    pub(super) regions: Vec<Region>,
}

impl Metadata {
    pub(super) fn new(nixl: Option<String>, agent: Vec<u8>, regions: Vec<Region>) -> Self {
        Self { version: VERSION, nixl, agent, regions }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("plain data")
    }

    /// Decodes a peer's metadata and checks its version of NIXL against this end's.
    pub(super) fn of_peer(bytes: &[u8], own: Option<&str>) -> Result<Self, TransportError> {
        let refused = |why: String| Err(TransportError::Metadata(why));
        if bytes.len() > BYTES_MAX {
            return refused(format!("{} bytes, of at most {BYTES_MAX}", bytes.len()));
        }
        let version = postcard::take_from_bytes::<u16>(bytes).map(|(version, _)| version);
        match version {
            Ok(VERSION) => {}
            Ok(other) => return refused(format!("version {other} of their form; this end has {VERSION}")),
            Err(error) => return refused(error.to_string()),
        }
        let metadata: Self = match postcard::from_bytes(bytes) {
            Ok(metadata) => metadata,
            Err(error) => return refused(error.to_string()),
        };
        metadata.regions.iter().try_for_each(Region::check)?;
        if let (Some(own), Some(theirs)) = (own, metadata.nixl.as_deref())
            && !talk(own, theirs)
        {
            return refused(format!("NIXL {theirs} at the peer, {own} here: they do not talk to each other"));
        }
        Ok(metadata)
    }
}

/// Returns whether two releases of NIXL are compatible: same or neighbouring minor versions.
fn talk(one: &str, other: &str) -> bool {
    let parse = |version: &str| {
        let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
        Some((parts.next()??, parts.next()??))
    };
    match (parse(one), parse(other)) {
        (Some((major, minor)), Some((other_major, other_minor))) => {
            major == other_major && minor.abs_diff(other_minor) <= 1
        }
        // Not comparable: NIXL itself refuses what it cannot read.
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_survive_the_way_and_garbage_is_refused() {
        let metadata = Metadata::new(Some("1.5.1".into()), vec![1, 2, 3], Vec::new());
        let bytes = metadata.to_bytes();
        assert_eq!(Metadata::of_peer(&bytes, Some("1.4.0")).unwrap(), metadata);
        for len in 0..bytes.len() {
            assert!(
                matches!(Metadata::of_peer(&bytes[..len], None), Err(TransportError::Metadata(_))),
                "{len}"
            );
        }
        assert!(Metadata::of_peer(&vec![1; BYTES_MAX + 1], None).is_err());
    }

    #[test]
    fn versions_apart_are_named() {
        let bytes = Metadata::new(Some("1.5.1".into()), Vec::new(), Vec::new()).to_bytes();
        let error = Metadata::of_peer(&bytes, Some("1.2.0")).unwrap_err().to_string();
        assert!(error.contains("1.5.1") && error.contains("1.2.0"), "{error}");
        let mut newer = Metadata::new(None, Vec::new(), Vec::new());
        newer.version = VERSION + 1;
        let error = Metadata::of_peer(&newer.to_bytes(), None).unwrap_err().to_string();
        assert!(error.contains("version 2"), "{error}");
    }
}
