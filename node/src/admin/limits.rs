use std::time::Duration;

/// Limits of an admin interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Concurrent connections. A further one displaces the oldest without a request; if there is
    /// none, it gets 503.
    pub connections: usize,
    /// Bytes of a header; at least 8192, the minimum of the HTTP library.
    pub header_bytes: usize,
    /// Time for a header, from the start of the connection.
    pub header: Duration,
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Time for the body.
    pub body: Duration,
    /// Time for an answer, including reading the body.
    pub answer: Duration,
    /// Time for the caller to read the answer.
    pub write: Duration,
    /// Callers that follow the [events](super::Notice); further ones are refused.
    pub followers: usize,
    /// Time between two events.
    pub event_period: Duration,
}

impl Limits {
    /// Sets the number of connections; a quarter of them, at most 16, may follow the events.
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
