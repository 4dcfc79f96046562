/// Why received bytes are refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The peer does not speak this protocol.
    #[error("the peer does not speak kvpool's protocol: it began with {got:02x?}")]
    Magic {
        /// The first bytes received.
        got: [u8; 8],
    },
    /// The peer's header has another form.
    #[error("the peer speaks version {theirs} of the wire protocol, and this node version {ours}")]
    Version {
        /// This node's version.
        ours: u16,
        /// The peer's version.
        theirs: u16,
    },
    /// A length or a count is above its limit.
    #[error("{what} of {got} is above the limit of {max}")]
    TooLarge {
        /// What was announced.
        what: &'static str,
        /// The number received.
        got: u64,
        /// The limit.
        max: u64,
    },
    /// A field has a value that no encoder produces.
    #[error("{what} has the invalid value {got}")]
    Invalid {
        /// The field.
        what: &'static str,
        /// The value received.
        got: u64,
    },
    /// A message cannot be decoded.
    #[error("{what} cannot be decoded: {reason}")]
    Malformed {
        /// The message.
        what: &'static str,
        /// Error of the decoder.
        reason: String,
    },
}
