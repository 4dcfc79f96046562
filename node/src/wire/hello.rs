use serde::de::{EnumAccess, VariantAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::WireError;

/// Maximum length of a node's name in bytes.
pub const NAME_MAX: usize = 64;

/// Role of a connection in a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum StreamPlace {
    /// A new link with this many data streams.
    Control {
        /// Data streams that the connector requests.
        streams: u16,
    },
    /// A data stream of a link.
    Data {
        /// The acceptor's number of the link.
        link: u128,
        /// Number of the stream.
        index: u16,
    },
}

/// A node's statement about itself, besides its name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub struct Statement {
    /// When the node began, in milliseconds since 1970 by the clock of its host.
    pub began_ms: u64,
    /// Number of a lock that at most one living process holds; `None` if the node has none.
    ///
    /// Another process that states the same number proves that this one has ended.
    pub lock: Option<[u8; 16]>,
    /// Maximum length of a message that the node receives on a control stream.
    pub message_bytes: u32,
}

/// First message of the connector.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Name of the node.
    pub name: String,
    /// Version of the messages on the control stream.
    pub messages: u16,
    /// Fingerprint of the layout of the node's blocks.
    pub fingerprint: [u8; 16],
    /// What the node states of itself.
    pub statement: Statement,
    /// Role of the connection.
    pub place: StreamPlace,
}

/// First message of the acceptor.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Welcome {
    /// The connection is part of a link.
    Accepted {
        /// Name of the node.
        name: String,
        /// Version of the messages on the control stream.
        messages: u16,
        /// Fingerprint of the layout of the node's blocks.
        fingerprint: [u8; 16],
        /// What the node states of itself.
        statement: Statement,
        /// Number of the link; random, because it authorizes data streams.
        link: u128,
        /// Data streams of the link.
        streams: u16,
    },
    /// The connection is refused, and ends here.
    Denied(Denial),
}

/// Why an acceptor refuses an authenticated peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, thiserror::Error)]
#[non_exhaustive]
pub enum Denial {
    /// Too many links are established.
    #[error("it has too many links")]
    Links,
    /// The name is not valid, or not that of the certificate.
    #[error("the name is not valid, or not that of the certificate")]
    Name,
    /// The message versions of both sides differ.
    #[error("it speaks version {theirs} of the messages, and this node version {ours}")]
    Messages {
        /// Version of the side that was refused.
        ours: u16,
        /// Version of the acceptor.
        theirs: u16,
    },
    /// No link waits for this data stream.
    #[error("no link waits for this data stream")]
    Stream,
    /// The connector has the acceptor's name, or is the same node.
    #[error("it has the same name, or is the same node")]
    OwnName,
    /// Another process of this name has a live link.
    #[error("another process of this name is linked and alive")]
    SecondProcess,
    /// A later process of this name was linked before.
    #[error("a process of this name that began later was linked before")]
    OlderProcess,
    /// Too many peers have to be remembered.
    #[error("it remembers too many other peers")]
    Peers,
    /// A reason of a later release. Never sent.
    #[error("for a reason that this release does not know: {0}")]
    #[serde(skip)]
    Unknown(u32),
}

impl<'de> Deserialize<'de> for Denial {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_enum("Denial", &[], Numbered)
    }
}

/// Decodes reasons by number, including unknown ones.
struct Numbered;

impl<'de> Visitor<'de> for Numbered {
    type Value = Denial;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a reason")
    }

    fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<Denial, A::Error> {
        use Denial::*;
        let (number, fields) = data.variant::<u32>()?;
        if number == 2 {
            let (ours, theirs) = fields.newtype_variant()?;
            return Ok(Messages { ours, theirs });
        }
        fields.unit_variant()?;
        let known = [(0, Links), (1, Name), (3, Stream), (4, OwnName), (5, SecondProcess)];
        let mut known = known.into_iter().chain([(6, OlderProcess), (7, Peers)]);
        let found = known.find(|(known, _)| *known == number);
        Ok(found.map_or(Unknown(number), |(_, denial)| denial))
    }
}

impl Hello {
    /// Validates the fields of an untrusted peer.
    ///
    /// # Errors
    /// [`WireError::Malformed`] for the name, [`WireError::Invalid`] for zero streams.
    pub fn check(&self) -> Result<(), WireError> {
        check_name(&self.name)?;
        match self.place {
            StreamPlace::Control { streams: 0 } => {
                Err(WireError::Invalid { what: "the number of data streams", got: 0 })
            }
            _ => Ok(()),
        }
    }
}

/// Checks the name of a node: 1 to 64 letters, digits, `-`, `_` and `.`.
///
/// # Errors
/// [`WireError::Malformed`].
pub fn check_name(name: &str) -> Result<(), WireError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > NAME_MAX || !name.bytes().all(allowed) {
        let reason =
            format!("it has {} bytes; 1 to {NAME_MAX} of a-z, 0-9, -, _ and . are valid", name.len());
        return Err(WireError::Malformed { what: "the name of a node", reason });
    }
    Ok(())
}
