use std::net::SocketAddr;
use std::time::Duration;

use kvpool::PrefixError;

use crate::settings;

/// Form of block hashes in events.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum HashForm {
    /// The lower 64 bits of the key as an integer: vLLM's default. Two of 2^32 blocks may collide.
    #[default]
    Integer,
    /// Key and check, 24 bytes, as [`BlockHash::to_bytes`](kvpool::prefix::BlockHash::to_bytes).
    Bytes,
}

/// Settings of a [`KvEventPublisher`](super::KvEventPublisher).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KvEventSettings {
    /// Address of the PUB socket.
    pub listen: SocketAddr,
    /// Address of the ROUTER socket for replays, if any.
    pub replay: Option<SocketAddr>,
    /// Topic of all batches, at most 255 bytes.
    pub topic: String,
    /// Data-parallel rank in each batch.
    pub rank: u32,
    /// Form of hashes.
    pub hashes: HashForm,
    /// Medium in each event; by default `GPU`, or `CPU` for a pool in host memory.
    pub medium: Option<String>,
    /// Number of batches kept for replays.
    pub history_batches: usize,
    /// Bytes kept for replays. The newest batch is always kept.
    pub history_bytes: usize,
    /// Connections per socket that have subscribed, or greeted for replays. As many others have 10
    /// s to do so; a new one displaces the oldest of the host that has most.
    pub connections: usize,
    /// Time after which a connection is closed whose peer reads nothing. Default 60 s.
    pub patience: Duration,
}

impl KvEventSettings {
    /// Creates settings with 10,000 batches and 64 MiB of history.
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            listen,
            replay: None,
            topic: String::new(),
            rank: 0,
            hashes: HashForm::default(),
            medium: None,
            history_batches: 10_000,
            history_bytes: 64 << 20,
            connections: 64,
            patience: Duration::from_secs(60),
        }
    }

    /// Parses the address of a socket: `tcp://IP:PORT`, or `tcp://*:PORT` for all interfaces.
    ///
    /// # Errors
    /// [`KvEventError::Address`].
    pub fn address(text: &str) -> Result<SocketAddr, KvEventError> {
        settings::socket(text).map_err(|_| KvEventError::Address { text: text.to_owned() })
    }
}

/// Why a publisher does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvEventError {
    /// The text is not an address of a socket.
    #[error("{text:?} is not tcp://IP:PORT or tcp://*:PORT")]
    Address {
        /// The text.
        text: String,
    },
    /// The topic is too long.
    #[error("a topic has at most 255 bytes, not {bytes}")]
    Topic {
        /// Its length.
        bytes: usize,
    },
    /// The address cannot be used.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        error: std::io::Error,
    },
    /// The pool was built without a prefix cache.
    #[error("the pool has no prefix cache, and so no events")]
    NoCache,
    /// The pool refuses a subscription.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_zeromq() {
        let parse = |text| KvEventSettings::address(text).map(|address| address.to_string());
        assert_eq!(parse("tcp://127.0.0.1:5557").unwrap(), "127.0.0.1:5557");
        assert_eq!(parse("tcp://*:5557").unwrap(), "0.0.0.0:5557");
        assert_eq!(parse("tcp://[::1]:5557").unwrap(), "[::1]:5557");
        for text in
            ["127.0.0.1:5557", "tcp://host:5557", "tcp://127.0.0.1", "tcp://*", "tcp://*:x", "ipc://x"]
        {
            assert!(parse(text).unwrap_err().to_string().contains(text), "{text}");
        }
    }
}
