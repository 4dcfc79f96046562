//! Bounds on lengths, counts and times.

use std::time::Duration;

/// Bounds that a node sets for its peers.
///
/// Both sides apply their own. Times bound the waits of this side; a peer that exceeds one is cut.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Time from the first byte of a connection to an established link.
    pub handshake: Duration,
    /// Time between heartbeats on an idle control stream.
    pub heartbeat: Duration,
    /// Time without any byte on the control stream after which a peer is cut.
    pub silence: Duration,
    /// Time in which a data item, its acknowledgement, or a control frame must be complete once it
    /// has begun.
    pub item: Duration,
    /// Bytes of a message on the control stream.
    pub message_bytes: usize,
    /// Bytes of a data item; an item has at least one frame even if the frame is larger.
    pub item_bytes: usize,
    /// Data items per stream that may be unacknowledged.
    pub window: usize,
    /// Data streams that this side asks for when it connects.
    pub streams: u16,
    /// Data streams that a peer may have per link.
    pub streams_max: u16,
    /// Messages that wait to be sent, and messages that wait to be received, per link.
    pub queued_messages: usize,
    /// Bytes of messages that wait to be sent, and of those that wait to be handled, per link; one
    /// message of any permitted length always fits.
    pub queued_bytes: usize,
    /// Connections that have not said who they are, and links whose data streams have not arrived.
    ///
    /// Above it, the oldest one gives way; of connections, the oldest of the host that has most.
    pub handshakes: usize,
    /// Established links.
    pub links: usize,
    /// Established links per peer.
    pub links_per_peer: usize,
    /// Grants per peer.
    pub grants_per_peer: usize,
    /// Bytes of granted frames per peer.
    pub granted_bytes_per_peer: u64,
    /// Transfers to a peer that are not over.
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
