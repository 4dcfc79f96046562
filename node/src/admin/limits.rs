//! Limits of what callers may take.

use std::time::Duration;

/// Limits of an admin interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Connections at a time; others wait in the system's queue.
    pub connections: usize,
    /// Bytes of a header; at least 8192, the minimum of the HTTP library.
    pub header_bytes: usize,
    /// Time for a header, also between two requests of a connection.
    pub header: Duration,
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Time for a body.
    pub body: Duration,
    /// Time for an answer, including the body's.
    pub answer: Duration,
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
        }
    }
}
