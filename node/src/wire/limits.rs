use std::time::Duration;

/// Limits that a node sets for its peers.
///
/// Each side applies its own. Times bound the waits of this side, which disconnects a peer that
/// exceeds one.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Time from the first byte of a connection to an established link.
    pub handshake: Duration,
    /// Time between heartbeats on an idle control stream.
    pub heartbeat: Duration,
    /// Time without any byte on the control stream after which a peer is disconnected.
    pub silence: Duration,
    /// Time from the begin to the end of a data item, its acknowledgement, or a control frame.
    pub item: Duration,
    /// Bytes of a message on the control stream.
    pub message_bytes: usize,
    /// Bytes of a data item, which always has at least one frame.
    pub item_bytes: usize,
    /// Unacknowledged data items per stream.
    pub window: usize,
    /// Data streams that this side requests when it connects.
    pub streams: u16,
    /// Data streams that a peer may have per link.
    pub streams_max: u16,
    /// Messages queued to be sent, and those queued to be received, per link.
    pub queued_messages: usize,
    /// Bytes of queued messages per link and direction; one permitted message always fits.
    pub queued_bytes: usize,
    /// Unauthenticated connections, and links that wait for data streams.
    ///
    /// A further one displaces the oldest; of connections, the oldest of the host that has most.
    pub handshakes: usize,
    /// Established links.
    pub links: usize,
    /// Established links per peer.
    pub links_per_peer: usize,
    /// Grants per peer.
    pub grants_per_peer: usize,
    /// Bytes of granted frames per peer.
    pub granted_bytes_per_peer: u64,
    /// Transfers to a peer in progress.
    pub transfers_per_peer: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            heartbeat: Duration::from_secs(1),
            silence: Duration::from_secs(6),
            item: Duration::from_secs(30),
            message_bytes: 4 << 20,
            item_bytes: 16 << 20,
            window: 4,
            streams: 4,
            streams_max: 16,
            queued_messages: 256,
            queued_bytes: 16 << 20,
            handshakes: 64,
            links: 256,
            links_per_peer: 4,
            grants_per_peer: 1024,
            granted_bytes_per_peer: 64 << 30,
            transfers_per_peer: 1024,
        }
    }
}
