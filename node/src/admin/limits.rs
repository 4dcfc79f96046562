//! Limits of what callers may take.

use std::time::Duration;

/// Limits of an admin interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Connections at a time. For a further one, the oldest without a request is cut; if there is
    /// none, it gets 503.
    pub connections: usize,
    /// Bytes of a header; at least 8192, the minimum of the HTTP library.
    pub header_bytes: usize,
    /// Time for a header, from the beginning of the connection.
    pub header: Duration,
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Time for a body.
    pub body: Duration,
    /// Time for an answer, including the body's.
    pub answer: Duration,
    /// Time in which the caller must have read the answer.
    pub write: Duration,
    /// Callers that follow the [events](super::Notice) at a time; others are refused.
    pub followers: usize,
    /// Time between two events.
    pub event_period: Duration,
}

impl Limits {
    /// Sets the number of connections, of which a quarter, and at most 16, may follow the events.
    #[must_use]
    pub fn connections(self, connections: usize) -> Self {
        Self { connections, followers: (connections / 4).clamp(1, 16), ..self }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 64,
            header_bytes: 16 << 10,
            header: Duration::from_secs(10),
            body_bytes: 64 << 10,
            body: Duration::from_secs(10),
            answer: Duration::from_secs(120),
            write: Duration::from_secs(10),
            followers: 16,
            event_period: Duration::from_secs(1),
        }
    }
}
