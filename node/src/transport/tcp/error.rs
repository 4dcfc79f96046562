use std::fmt;
use std::io;

use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};

use super::address::Address;
use crate::wire::{Denial, Versions, WireError};

/// A side of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// This node.
    Ours,
    /// The peer.
    Theirs,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ours => "this node's",
            Self::Theirs => "the peer's",
        })
    }
}

/// Why a certificate was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CertificateProblem {
    /// It has expired.
    #[error("it is expired")]
    Expired,
    /// It is not valid yet.
    #[error("it is not valid yet")]
    NotYetValid,
    /// No trusted authority has signed it.
    #[error("it is not signed by a trusted authority")]
    Foreign,
    /// It has another name.
    #[error("it is not valid for this name")]
    WrongName,
    /// None was presented.
    #[error("it is missing")]
    Missing,
    /// Another reason.
    #[error("{0}")]
    Other(String),
}

/// Why a link or an endpoint failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// Plain text is allowed on loopback addresses and Unix sockets only.
    #[error("{address} is not a loopback address, and there are no certificates for TLS")]
    PlainText {
        /// The address.
        address: Address,
    },
    /// A TLS listener would accept every peer.
    #[error(
        "{address} would accept any peer: neither an authority for certificates of peers nor a token is set"
    )]
    Unauthenticated {
        /// The address.
        address: Address,
    },
    /// The token is too short to be safe.
    #[error("the token has {bytes} bytes; at least {min} are needed")]
    TokenLength {
        /// Bytes of the token.
        bytes: usize,
        /// Minimum.
        min: usize,
    },
    /// A certificate, a key or an authority cannot be used.
    #[error("the {what} cannot be used: {reason}")]
    TlsFile {
        /// What was read.
        what: &'static str,
        /// Reason given by the reader.
        reason: String,
    },
    /// The address is in use.
    #[error("{address} is in use")]
    AddressInUse {
        /// The address.
        address: Address,
    },
    /// The operating system refused an operation.
    #[error("{what}: {reason}")]
    Io {
        /// The operation.
        what: String,
        /// Kind of the error.
        kind: io::ErrorKind,
        /// Reason given by the system.
        reason: String,
    },
    /// The token of one side is missing or wrong.
    #[error("{side} token is {}", if *.missing { "missing" } else { "wrong" })]
    Token {
        /// Whose token.
        side: Side,
        /// Whether it is missing.
        missing: bool,
    },
    /// A certificate was refused.
    #[error("{side} certificate was refused: {problem}")]
    Certificate {
        /// Whose certificate.
        side: Side,
        /// Why.
        problem: CertificateProblem,
    },
    /// Only the peer uses TLS.
    #[error("the peer expects TLS, and this node speaks plain text")]
    PeerExpectsTls,
    /// Only this node uses TLS.
    #[error("the peer speaks plain text, and this node expects TLS")]
    PeerSpeaksPlainText,
    /// TLS failed for another reason.
    #[error("TLS failed: {reason}")]
    Tls {
        /// Reason given by the TLS library.
        reason: String,
    },
    /// The process at the other end of a Unix socket belongs to another user.
    #[error("the process at the other end belongs to user {theirs}, and this one to {ours}")]
    OtherUser {
        /// User of this process.
        ours: u32,
        /// User of the peer's process.
        theirs: u32,
    },
    /// Received bytes are invalid.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// No version of the messages is common to both sides.
    #[error("the peer speaks version {theirs} of the messages, and this node {ours}")]
    Versions {
        /// Versions of this node.
        ours: Versions,
        /// Versions of the peer.
        theirs: Versions,
    },
    /// The peer refuses the link.
    #[error("the peer refused the link: {0}")]
    Denied(Denial),
    /// Another node answered.
    #[error("expected peer {expected}, and {got} answered")]
    OtherPeer {
        /// The configured name.
        expected: String,
        /// The name received.
        got: String,
    },
    /// The peer is this node itself, or has its name.
    #[error("{name} is this node's own name")]
    OwnName {
        /// The name.
        name: String,
    },
    /// The peer missed a deadline.
    #[error("the peer did not {what} within {waited_ms} ms")]
    Slow {
        /// What was expected.
        what: &'static str,
        /// Time waited in milliseconds.
        waited_ms: u64,
    },
    /// The connection was closed by the peer.
    #[error("the peer closed the connection")]
    Ended,
    /// The link was closed by this side.
    #[error("the link is closed")]
    Closed,
    /// Too many connections are open.
    #[error("{what}: the limit of {max} is reached")]
    Limit {
        /// What is limited.
        what: &'static str,
        /// The limit.
        max: usize,
    },
}

impl LinkError {
    /// Wraps an error of the operating system, or of TLS inside of it.
    pub(super) fn io(what: &str, error: io::Error) -> Self {
        if let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
            return tls_error(tls);
        }
        match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe => Self::Ended,
            kind => Self::Io { what: what.into(), kind, reason: error.to_string() },
        }
    }
}

pub(super) fn tls_error(error: &Error) -> LinkError {
    use AlertDescription as Alert;
    let refused = |side, problem| LinkError::Certificate { side, problem };
    match error {
        Error::InvalidCertificate(error) => refused(Side::Theirs, problem(error)),
        Error::NoCertificatesPresented => refused(Side::Theirs, CertificateProblem::Missing),
        Error::AlertReceived(Alert::CertificateExpired) => refused(Side::Ours, CertificateProblem::Expired),
        // The second is the answer if the foreign authority has the name of a trusted one.
        Error::AlertReceived(Alert::UnknownCA | Alert::DecryptError) => {
            refused(Side::Ours, CertificateProblem::Foreign)
        }
        Error::AlertReceived(Alert::CertificateRequired) => refused(Side::Ours, CertificateProblem::Missing),
        Error::AlertReceived(
            alert @ (Alert::BadCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateUnknown
            | Alert::UnsupportedCertificate),
        ) => refused(Side::Ours, CertificateProblem::Other(format!("the peer answered {alert:?}"))),
        // The first byte is that of no record.
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => LinkError::PeerSpeaksPlainText,
        error => LinkError::Tls { reason: error.to_string() },
    }
}

fn problem(error: &CertificateError) -> CertificateProblem {
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => CertificateProblem::Expired,
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            CertificateProblem::NotYetValid
        }
        // A foreign authority may have the name of a trusted one; then the signature is wrong.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => CertificateProblem::Foreign,
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            CertificateProblem::WrongName
        }
        error => CertificateProblem::Other(error.to_string()),
    }
}
