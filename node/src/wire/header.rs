//! The fixed header of a connection, and the proof of a token.
//!
//! ```text
//! bytes    0..8     8..10     10     11     12..16   16..24        24..56   56..64
//! field    magic    version   role   auth   zero     incarnation   nonce    zero
//! ```
//!
//! Numbers are little-endian. Magic and version have the same position in every version. The
//! version is that of the header's form; the nonce states the versions of the messages:
//!
//! ```text
//! bytes    0..24    24..28      28..30   30..32
//! nonce    random   b"\x8bkv\xf1"   first    last version of the messages
//! ```
//!
//! Earlier releases have 32 random bytes there ([`Versions::UNSTATED`]), and treat the versions as
//! a part of the nonce, a technique of TLS 1.3's `ServerHello.random`. One of 2^32 of their
//! connections is misread, and fails. The spare fields of a node that states versions are ignored.
//!
//! The proof is a MAC, keyed by the token, over both headers and a value that only the two ends of
//! this TLS connection know, as in RFC 9266. The nonces make each proof single-use; the exported
//! value makes a proof invalid on any other connection, which prevents replay and relay.

use super::WireError;

/// Version of the form of the header.
pub const WIRE_VERSION: u16 = 2;

/// Bytes of an encoded [`Header`].
pub const HEADER: usize = 64;

/// Bytes of an encoded [`Proof`].
pub const PROOF: usize = 32;

const MAGIC: [u8; 8] = *b"kvpool\r\n";

const STATED: [u8; 4] = *b"\x8bkv\xf1";

const STATED_AT: usize = 24;

const CONTEXT: &str = "kvpool node 2026 token of a connection";

/// Purpose of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Role {
    /// The side that accepted the connection, for any purpose.
    Acceptor = 0,
    /// Messages and heartbeats of a link.
    Control = 1,
    /// Bytes of frames.
    Data = 2,
}

/// The fixed header that both sides send before anything else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Version of the form of the header.
    pub version: u16,
    /// Purpose of the connection.
    pub role: Role,
    /// Whether this side has a token.
    pub has_token: bool,
    /// Random number of this process.
    pub incarnation: u64,
    /// Random number of this connection; its last bytes may [state](Self::stating) versions.
    pub nonce: [u8; 32],
}

/// Range of versions of the messages that a node speaks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Versions {
    /// The first.
    pub min: u16,
    /// The last.
    pub max: u16,
}

impl Versions {
    /// The versions of a node that states none.
    pub const UNSTATED: Self = Self { min: 4, max: 4 };

    /// Returns the greatest version that both speak.
    pub fn common(self, other: Self) -> Option<u16> {
        let max = self.max.min(other.max);
        (max >= self.min.max(other.min)).then_some(max)
    }
}

impl From<u16> for Versions {
    fn from(version: u16) -> Self {
        Self { min: version, max: version }
    }
}

impl std::fmt::Display for Versions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self { min, max } if min == max => min.fmt(f),
            Self { min, max } => write!(f, "{min} to {max}"),
        }
    }
}

impl Header {
    /// States the versions of the messages in the nonce.
    #[must_use]
    pub fn stating(mut self, versions: Versions) -> Self {
        let parts = [&STATED[..], &versions.min.to_le_bytes(), &versions.max.to_le_bytes()];
        self.nonce[STATED_AT..].copy_from_slice(&parts.concat());
        self
    }

    /// Returns the versions of the messages that the nonce states.
    pub fn stated(&self) -> Option<Versions> {
        let [min, max] = [28, 30].map(|at| u16::from_le_bytes([self.nonce[at], self.nonce[at + 1]]));
        (self.nonce[STATED_AT..28] == STATED && min <= max).then_some(Versions { min, max })
    }

    /// Encodes the header.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[10] = self.role as u8;
        bytes[11] = u8::from(self.has_token);
        bytes[16..24].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes[24..56].copy_from_slice(&self.nonce);
        bytes
    }

    /// Decodes the header of a peer.
    ///
    /// # Errors
    /// [`WireError::Magic`], [`WireError::Version`], [`WireError::Invalid`].
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self, WireError> {
        let field = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        if bytes[..8] != MAGIC {
            return Err(WireError::Magic { got: bytes[..8].try_into().expect("8 bytes") });
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != WIRE_VERSION {
            return Err(WireError::Version { ours: WIRE_VERSION, theirs: version });
        }
        let role = match bytes[10] {
            0 => Role::Acceptor,
            1 => Role::Control,
            2 => Role::Data,
            got => return Err(WireError::Invalid { what: "the role of a connection", got: got.into() }),
        };
        let has_token = match bytes[11] {
            0 => false,
            1 => true,
            got => return Err(WireError::Invalid { what: "the authentication", got: got.into() }),
        };
        let nonce = bytes[24..56].try_into().expect("32 bytes");
        let header = Self { version, role, has_token, incarnation: field(16), nonce };
        let spare = field(56) | u64::from(u32::from_le_bytes(bytes[12..16].try_into().expect("4 bytes")));
        if spare != 0 && header.stated().is_none() {
            return Err(WireError::Invalid { what: "a spare field of the header", got: spare });
        }
        Ok(header)
    }
}

/// The key derived from a token. `Debug` omits its contents.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Derives the key.
    pub fn of_token(token: &[u8]) -> Self {
        Self(blake3::derive_key(CONTEXT, token))
    }

    /// Returns one side's proof for a connection, given the connector's and the acceptor's header.
    ///
    /// `exported` is the keying material of the TLS connection, or zero without TLS.
    pub fn prove(&self, of_connector: bool, headers: [&[u8; HEADER]; 2], exported: &[u8; 32]) -> Proof {
        let mut mac = blake3::Hasher::new_keyed(&self.0);
        mac.update(if of_connector { b"connector" } else { b"acceptor " });
        for header in headers {
            mac.update(header);
        }
        mac.update(exported);
        Proof(mac.finalize())
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Proof that a side knows the token, compared in constant time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Proof(blake3::Hash);

impl Proof {
    /// The proof of a side without a token.
    pub const NONE: Self = Self(blake3::Hash::from_bytes([0; PROOF]));

    /// Decodes a proof.
    pub const fn from_bytes(bytes: [u8; PROOF]) -> Self {
        Self(blake3::Hash::from_bytes(bytes))
    }

    /// Encodes the proof.
    pub const fn as_bytes(&self) -> &[u8; PROOF] {
        self.0.as_bytes()
    }
}

/// The acceptor's answer to a proof.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Verdict {
    /// The proof is right.
    Accepted = 1,
    /// The proof is wrong.
    WrongToken = 2,
}

impl Verdict {
    /// Decodes a verdict.
    ///
    /// # Errors
    /// [`WireError::Invalid`].
    pub fn decode(byte: u8) -> Result<Self, WireError> {
        match byte {
            1 => Ok(Self::Accepted),
            2 => Ok(Self::WrongToken),
            got => Err(WireError::Invalid { what: "the verdict", got: got.into() }),
        }
    }
}
